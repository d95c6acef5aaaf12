"""Documents with equal texts: each has its own row, also when only some were done before.

NousResearch/hermes-agent#86523 and #42096: what is done was known by its text, and equal ones vanished on resume.
"""

from pathlib import Path

import pytest
from helpers_kill import killed
from helpers_run import rows, start, write_job, write_jsonl

TEXTS = ["The pier is closed for repairs.", "The ferry leaves at nine.", "Nets may be dried on the quay."]
DOCUMENTS = [{"id": f"d{n}", "title": "Notice", "text": f"{TEXTS[n % 3]} {TEXTS[n % 3]}"} for n in range(9)]


@pytest.fixture(params=["ids", "places"])
def job(tmp_path, request, monkeypatch):
    """Known by their ids, or by their places; then a kept field tells them apart here."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), DOCUMENTS)
    item = {"path": "a.jsonl"} | ({"id_field": "id"} if request.param == "ids" else {"keep": {"id": "nr"}})
    return write_job(Path(), [item], prompt={"user": "{{ text }}"}, checkpoint={"rows": 2})


def check(before):
    """Each of the nine once, with the summary of its text; rows of earlier starts are as they were."""
    found = rows(Path("out"))
    texts = {row.get("nr") or row["id"]: row["summary"] for row in found}
    assert set(texts) == {f"d{n}" for n in range(9)}
    assert len(found) == len({row["doc_key"] for row in found}) == 9
    assert [row for row in found if row in before] == before
    assert len(set(texts.values())) == 3
    assert all(texts[f"d{n}"] == texts[f"d{n % 3}"] for n in range(9))


def test_after_a_limit_the_rest_is_done(job):
    start(job, limit=4)
    before = rows(Path("out"))
    assert len(before) == 4
    outcome = start(job)
    check(before)
    assert outcome.exit_status == 0
    # Documents are counted, not texts.
    assert outcome.report["attempt"]["documents"] | {"failed": 0, "skipped": 0} == {
        "read": 9, "done_before": 4, "ok": 5, "failed": 0, "skipped": 0,
    }  # fmt: skip


def test_after_a_kill_the_rest_is_done(job):
    assert killed("batchgen.storage.checkpoint:Committer.commit@after", 2)
    before = rows(Path("out"))
    assert len(before) >= 4
    assert start(job).report["attempt"]["documents"]["done_before"] == len(before) < 9
    check(before)
