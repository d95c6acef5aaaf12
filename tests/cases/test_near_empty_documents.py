"""What holds nothing to summarize is never sent (vllm-project/vllm#7283, jswest/bartleby#80)."""

import pytest
from helpers_run import SENTENCE, by_id, start, watch_requests, write_job, write_jsonl

EMPTY = {
    "empty": "", "spaces": "   ", "form feeds": "\n\f\n\f", "zero width": "\u200b\u200b\ufeff",
    "no-break": "\u00a0\u00a0", "fillers": "\u3164\u2800",
}  # fmt: skip
SHORT = {
    "dot": ".", "page mark": "Page 3 of 7", "pages": "Page 1\n\fPage 2", "title": "# Harbour board", "rule": "-----",
    "word": "Quay",
}  # fmt: skip
LONG_ENOUGH = {"boilerplate": "Copyright. All rights reserved.", "rules": "-" * 20, "good": SENTENCE.format(n=1)}


@pytest.fixture
def found(tmp_path, out, monkeypatch):
    """Rows by id, texts that were sent, and the report."""

    def run(**item):
        texts = EMPTY | SHORT | LONG_ENOUGH
        docs = write_jsonl(tmp_path / "in/a.jsonl", [{"id": name, "text": text} for name, text in texts.items()])
        sent = watch_requests(monkeypatch)
        job = write_job(tmp_path, [{"path": str(docs), "id_field": "id"} | item], prompt={"user": "{{ text }}"})
        report = start(job).report
        rows = {name: row for (_, name), row in by_id(out).items()}
        return rows, {bytes(i for i in one.prompt_ids if i < 256).decode() for one in sent}, report

    return run


def test_by_default_20_visible_characters_are_wanted(found):
    rows, sent, report = found()
    for name in EMPTY:
        assert (rows[name]["status"], rows[name]["error_type"], rows[name]["summary"]) == ("skipped", "empty", None)
    for name in SHORT:
        assert (rows[name]["status"], rows[name]["error_type"], rows[name]["summary"]) == ("skipped", "short", None)
        assert rows[name]["error"].endswith("visible characters, min_chars is 20")
    assert {rows[name]["status"] for name in LONG_ENOUGH} == {"ok"}
    assert sent == set(LONG_ENOUGH.values())
    counts = report["documents"]
    assert (counts["ok"], counts["skipped"], counts["failed"]) == (len(LONG_ENOUGH), len(EMPTY) + len(SHORT), 0)
    assert counts["total"] == len(rows) == len(EMPTY | SHORT | LONG_ENOUGH)


def test_a_job_that_wants_one_character_sends_all_but_the_empty(found):
    rows, sent, _ = found(min_chars=1)
    assert {rows[name]["error_type"] for name in EMPTY} == {"empty"}
    assert sent == set((SHORT | LONG_ENOUGH).values())


def test_a_job_that_wants_more_leaves_boilerplate_out(found):
    rows, sent, _ = found(min_chars=40)
    assert {rows[name]["error_type"] for name in SHORT | LONG_ENOUGH} == {"short", None}
    assert sent == {LONG_ENOUGH["good"]}
