"""Hostile documents, tags that the tokenizer holds for special, and second requests, on real vLLM."""

import pytest
from helpers_hostile import FAILED, MARKS, SENT, write_hostile
from helpers_real import ON_SHARED, real_engine
from helpers_run import rows, start, write_job

pytestmark = ON_SHARED
SEPARATOR = 5  # <file_sep>, a special token of the demo model


def job(tmp_path, model, **sections):
    path = write_hostile(tmp_path / "a.jsonl", big=1_000_000)
    item = {"path": str(path), "id_field": "id", "keep": ["title", "nested"]}
    return write_job(tmp_path, [item], engine=real_engine(model), failures={"max": 99}, **sections)


def found(out):
    return {row["id"].split(" ")[0]: row for row in rows(out) if row["id"]}


@pytest.mark.long
def test_hostile_documents_are_summarized_like_others(tmp_path, out, model_folder, lent):
    assert start(job(tmp_path, model_folder, sampling={"max_tokens": 12})).exit_status == 0
    assert {name for name, row in found(out).items() if row["status"] == "ok"} == {*SENT, "big"}
    assert len(rows(out)) == len(SENT) + 1 + FAILED
    for name in SENT:
        assert (found(out)[name]["title"], found(out)[name]["requests"]) == (f"T {MARKS[name]}", 1)


def test_a_special_token_that_ends_the_reasoning_is_seen_and_a_cut_answer_is_asked_for_again(
    tmp_path, out, model_folder, lent
):
    """The engine may answer with that token only: behind the last of them stands nothing."""
    answers = {"reasoning_end": "<file_sep>", "retry_max_tokens": 5}
    sampling = {"max_tokens": 2, "allowed_token_ids": [SEPARATOR]}
    assert start(job(tmp_path, model_folder, answers=answers, sampling=sampling)).exit_status == 0
    for name in SENT:
        row = found(out)[name]
        assert (row["error_type"], row["finish_reason"], row["requests"]) == ("empty_output", "length", 2)
        assert (row["completion_tokens"], row["reasoning_tokens"], row["dropped_tokens"]) == (7, 7, 2)
