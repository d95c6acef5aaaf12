"""Documents that failed are not paid for again at every start, and have one row whatever is tried.

NousResearch/hermes-agent#93653: rejected items left no trace, so each resume ran all of them again.
"""

import json

import pytest
from helpers_run import by_id, command, rows, write_job, write_jsonl

MINUTES = (
    "The harbour board of {0} met on Tuesday. It agreed to replace {1} metres of quay wall, to be paid for over three "
    "years. The case number is {0} {1}."
)
GOOD = ["Quillfort", "Marrowby", "Ostenvale", "Pellam", "Drosk"]
FLAKY = "--set=engine.fake.fail_on=Tarn Ello"


@pytest.fixture
def job(tmp_path):
    documents = [{"id": f"g{n}", "text": MINUTES.format(name, 4400 + 17 * n)} for n, name in enumerate(GOOD)]
    documents.append({"id": "long", "heading": "x " * 60_000, "text": "A document whose heading alone is too long."})
    documents.append({"id": "empty", "text": ""})
    documents.append({"id": "flaky", "text": MINUTES.format("Tarn Ello", 4519)})
    item = {"path": str(write_jsonl(tmp_path / "docs.jsonl", documents)), "id_field": "id", "keep": ["heading"]}
    return write_job(tmp_path, [item], prompt={"user": "{{ heading }}\n{{ text }}"}, checkpoint={"rows": 2})


def outcome(job, *words):
    done = command(*words[:1], job, *words[1:], "--json")
    return done.returncode, json.loads(done.stdout)["attempt"]["requests"]


def reasons(out):
    return {row["id"]: (row["status"], row["error_type"]) for row in by_id(out).values()}


def test_what_failed_is_tried_again_on_request_only_and_replaces_its_row(job, out):
    assert outcome(job, "run", FLAKY) == (3, 6)
    first = reasons(out)
    assert first == {
        **{f"g{n}": ("ok", None) for n in range(5)},
        "long": ("failed", "prompt_too_long"),
        "empty": ("skipped", "empty"),
        "flaky": ("failed", "request_failed"),
    }
    before = rows(out)
    assert len(before) == 8
    # Each further run does no engine work, for none of them, whether the engine is well by now or not.
    for words in (["run", FLAKY], ["run"]):
        assert outcome(job, *words) == (3, 0)
        assert rows(out) == before
    # Only the one that a second try can change is tried again, here in vain.
    assert outcome(job, "retry-failed", FLAKY) == (3, 1)
    assert reasons(out) == first
    assert len(rows(out)) == 8
    assert outcome(job, "retry-failed") == (3, 1)
    assert reasons(out) == first | {"flaky": ("ok", None)}
    assert len(rows(out)) == 8
    assert [json.loads(line)["id"] for line in (out / "failed.jsonl").read_text().splitlines()] == ["long"]
    for command_ in ("retry-failed", "run"):
        assert outcome(job, command_) == (3, 0)
