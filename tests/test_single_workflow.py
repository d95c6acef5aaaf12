"""One document, one request, one record, whatever the completion is."""

import pytest
from helpers_config import document, prepared
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import COPIED, DOCUMENT_TRUNCATED, SUMMARY_CUT, Completion
from batchgen.workflows.single import SingleWorkflow, unsent

TEXT = "The harbour board met on Monday.\nIt agreed to repair the quay."


@pytest.fixture
def workflow():
    return SingleWorkflow(prefix="0-3", max_tokens=48)


def record_of(workflow, one, **completion):
    """The record of one document for a completion with these values."""
    (request,) = workflow.admit(one)
    (record,), more = workflow.complete(Completion(request.custom_id, **completion))
    assert more == []
    return record


def test_a_document_becomes_one_request(workflow):
    (request,) = workflow.admit(prepared())
    assert (request.custom_id, request.prompt_ids, request.max_tokens) == ("0-3-1", [65, 66, 67], 48)
    assert workflow.flush() == []


def test_no_id_comes_twice_not_even_for_the_same_document(workflow):
    one = prepared()
    ids = [workflow.admit(one)[0].custom_id for _ in range(3)]
    workflow.complete(Completion(ids[1], text="x"))
    ids.append(workflow.admit(one)[0].custom_id)
    assert len(set(ids)) == 4
    other_attempt = SingleWorkflow(prefix="0-4", max_tokens=48)
    assert other_attempt.admit(one)[0].custom_id not in ids


def test_a_completion_becomes_the_record_of_its_document(workflow):
    record = record_of(
        workflow, prepared(TEXT, n=5), text="  A repair was agreed.\n", finish_reason="stop",
        prompt_tokens=30, cached_tokens=16, completion_tokens=6,
    )  # fmt: skip
    assert record.document.id == "d5"
    assert (record.status, record.summary, record.error_type, record.error) == (
        "ok",
        "A repair was agreed.",
        None,
        None,
    )
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (30, 16, 6)
    assert (record.finish_reason, record.flags, record.requests) == ("stop", (), 1)


@given(st.permutations(range(6)))
def test_completions_find_their_documents_in_any_order(order):
    workflow = SingleWorkflow(prefix="p", max_tokens=1)
    ids = [workflow.admit(prepared(n=n))[0].custom_id for n in range(6)]
    for n in order:
        (record,), _ = workflow.complete(Completion(ids[n], text=f"summary {n}"))
        assert (record.document.id, record.summary) == (f"d{n}", f"summary {n}")


def test_an_unknown_or_answered_id_is_a_bug_and_no_record(workflow):
    (request,) = workflow.admit(prepared())
    with pytest.raises(KeyError):
        workflow.complete(Completion("0-3-2", text="x"))
    workflow.complete(Completion(request.custom_id, text="x"))
    with pytest.raises(KeyError):
        workflow.complete(Completion(request.custom_id, text="x"))


@pytest.mark.parametrize("text", ["", "half a summary"])
def test_a_failed_request_is_a_failed_document_without_summary(workflow, text):
    record = record_of(workflow, prepared(), text=text, error="the engine ended it", completion_tokens=3)
    assert (record.status, record.summary) == ("failed", None)
    assert (record.error_type, record.error) == ("request_failed", "the engine ended it")
    assert (record.completion_tokens, record.requests) == (3, 1)


@pytest.mark.parametrize("text", ["", "  ", "\n\t\u3000"])
def test_an_empty_answer_is_a_failed_document(workflow, text):
    record = record_of(workflow, prepared(), text=text, finish_reason="stop", completion_tokens=1)
    assert (record.status, record.summary, record.error_type) == ("failed", None, "empty_output")
    assert "finish_reason stop" in record.error


@pytest.mark.parametrize(
    ("given_flags", "text", "finish_reason", "flags"),
    [
        ((), "A repair.", "stop", ()),
        ((), "A repair", "length", (SUMMARY_CUT,)),
        ((DOCUMENT_TRUNCATED,), "A repair.", "stop", (DOCUMENT_TRUNCATED,)),
        ((DOCUMENT_TRUNCATED,), "A repair", "length", (DOCUMENT_TRUNCATED, SUMMARY_CUT)),
        ((), "The harbour board met on Monday.", "stop", (COPIED,)),
        ((), "The harbour\n board  met on Monday. It agreed", "stop", (COPIED,)),
        ((), TEXT, "length", (SUMMARY_CUT, COPIED)),
        ((), "It agreed to repair the quay.", "stop", ()),
        ((), "the harbour board met on Monday.", "stop", ()),
        ((), TEXT + " Then", "stop", ()),
        ((), "", "length", (SUMMARY_CUT,)),
    ],
)
def test_flags(workflow, given_flags, text, finish_reason, flags):
    record = record_of(workflow, prepared(TEXT, flags=given_flags), text=text, finish_reason=finish_reason)
    assert record.flags == flags


def test_what_is_not_sent_has_its_record_at_once():
    assert unsent(prepared()) is None
    failed = unsent(prepared(error=("bad_json", "line 3")))
    assert (failed.status, failed.error_type, failed.error, failed.requests) == ("failed", "bad_json", "line 3", 0)
    skipped = unsent(prepared(skip=("empty", "nothing to see")))
    assert (skipped.status, skipped.error_type, skipped.error) == ("skipped", "empty", "nothing to see")
    assert skipped.summary is None
    both = unsent(prepared(error=("bad_json", "line 3"), skip=("empty", "nothing to see")))
    assert both.status == "failed"


def test_records_carry_the_document_they_are_about():
    kept = document("x", n=9, title="Minutes")
    record = record_of(SingleWorkflow(prefix="p", max_tokens=1), prepared(n=9), text="y")
    assert record.document.key == kept.key
    assert record.finished_at.tzinfo is not None
