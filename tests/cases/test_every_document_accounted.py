"""No document is dropped without a word, and the exit status tells (code-dot-org/code-dot-org#61573)."""

import dataclasses

import pytest
from helpers_run import by_id, command, record, start, write_job, write_jsonl

from batchgen.engines.fake import FakeEngine

HALF = "The harbour board met and agreed to"
ANSWERS = {
    "d0": {"text": "The board repairs the quay."},
    "d1": {"text": ""},
    "d2": {"text": "   "},
    "d3": {"error": "the engine gave up on it"},
    "d4": {"text": HALF, "finish_reason": "length"},
    "d5": {"text": record(5)["text"]},
}


@pytest.fixture
def scripted(monkeypatch):
    """The fake engine gives these answers, each to the document of that id."""
    texts = {}
    submit, poll = FakeEngine.submit, FakeEngine.poll

    def watched(self, request):
        texts[request.custom_id] = bytes(i for i in request.prompt_ids if i < 256).decode()
        submit(self, request)

    def answer(completion):
        n = next(n for n in range(6) if record(n)["text"] in texts[completion.custom_id])
        return dataclasses.replace(completion, **{"finish_reason": "stop"} | ANSWERS[f"d{n}"])

    monkeypatch.setattr(FakeEngine, "submit", watched)
    monkeypatch.setattr(FakeEngine, "poll", lambda self: [answer(one) for one in poll(self)])


def test_all_kinds_of_answers_are_told_apart(tmp_path, out, scripted):
    outcome = start(write_job(tmp_path, [write_jsonl(tmp_path / "in/a.jsonl", map(record, range(6)))]))
    found = {name: row for (_, name), row in by_id(out).items()}
    told = {name: (row["status"], row["error_type"], row["flags"]) for name, row in found.items()}
    assert told == {
        "d0": ("ok", None, []),
        "d1": ("failed", "empty_output", []),
        "d2": ("failed", "empty_output", []),
        "d3": ("failed", "request_failed", []),
        "d4": ("ok", None, ["summary_cut"]),
        "d5": ("ok", None, ["copied"]),
    }
    assert found["d4"]["summary"] == HALF
    counts = outcome.report["documents"]
    assert counts["ok"] + counts["failed"] + counts["skipped"] == counts["total"] == 6
    assert counts["flags"] == {"copied": 1, "summary_cut": 1}
    assert outcome.exit_status == 3


@pytest.mark.parametrize(
    ("texts", "sets", "status"),
    [
        ([record(0)["text"], ""], [], 0),
        ([record(0)["text"]] * 3, ["engine.fake.fail_every=2"], 3),
        ([record(0)["text"]] * 3, ["engine.fake.fail_every=1"], 3),
        ([record(0)["text"]] * 3, ["engine.fake.die_after=0"], 69),
        ([], ["input.0.path=nowhere/*.jsonl"], 65),
    ],
    ids=["all or skipped", "some failed", "all failed", "engine dead", "could not start"],
)
def test_the_exit_status_and_the_last_line_tell(tmp_path, texts, sets, status):
    docs = write_jsonl(tmp_path / "in/a.jsonl", [record(n, text=text) for n, text in enumerate(texts)])
    job = write_job(tmp_path, [docs])
    done = command("run", job, *(word for one in sets for word in ("--set", one)))
    assert done.returncode == status
    last = done.stderr.splitlines()[-1]
    if status == 3:
        failed = {"engine.fake.fail_every=2": 1, "engine.fake.fail_every=1": 3}[sets[0]]
        assert f"{failed} failed" in last
        assert f"failed documents: {tmp_path / 'out'}/failed.jsonl" in last
    elif status == 0:
        assert "0 failed, 1 skipped" in last
