"""One document, one request, one record, whatever the completion is; a cut one is asked for once more."""

import dataclasses

import pytest
from helpers_config import document, prepared
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import COPIED, DOCUMENT_TRUNCATED, SUMMARY_CUT, Completion
from batchgen.workflows.single import Rules, SingleWorkflow, unsent

TEXT = "The harbour board met on Monday.\nIt agreed to repair the quay."


def single(prefix="0-3", **rules):
    return SingleWorkflow(prefix=prefix, rules=Rules(**{"max_tokens": 48, "max_model_len": 200, "count": len} | rules))


@pytest.fixture
def workflow():
    return single()


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
    other_attempt = single("0-4")
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
    workflow = single("p")
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


@pytest.mark.parametrize("text", ["", "  ", "\n\t\u3000", "\u200b\ufeff\u00ad", " \x00\x1b "])
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
        ((), "", "length", ()),
    ],
)
def test_flags(workflow, given_flags, text, finish_reason, flags):
    record = record_of(workflow, prepared(TEXT, flags=given_flags), text=text, finish_reason=finish_reason)
    assert record.flags == flags


def second_of(workflow, one, **first):
    """The request that follows when the first answer to this document has these values."""
    (request,) = workflow.admit(one)
    records, (second,) = workflow.complete(Completion(request.custom_id, **{"finish_reason": "length"} | first))
    assert records == []
    assert second.custom_id != request.custom_id
    assert second.prompt_ids == request.prompt_ids
    return second


def test_a_cut_answer_is_asked_for_once_more_with_more_room():
    workflow = single(retry_max_tokens=100)
    first = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 48}
    second = second_of(workflow, prepared(TEXT), text="A repair was agreed by", **first)
    assert second.max_tokens == 100
    answer = Completion(second.custom_id, "A repair was agreed.", "stop", 3, 2, 60)
    (record,), more = workflow.complete(answer)
    assert more == []
    assert (record.status, record.summary, record.flags) == ("ok", "A repair was agreed.", ())
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (6, 2, 108)
    assert (record.dropped_tokens, record.reasoning_tokens, record.requests, record.attempts) == (48, 0, 2, 1)


@pytest.mark.parametrize(
    ("second", "summary", "flags", "dropped"),
    [
        ({"text": "A repair was agreed and", "finish_reason": "length"}, "A repair was agreed and", (SUMMARY_CUT,), 48),
        ({"text": "Short", "finish_reason": "length"}, "A repair was agr", (SUMMARY_CUT,), 60),
        ({"text": "Short.", "finish_reason": "stop"}, "Short.", (), 48),
        ({"text": " ", "finish_reason": "stop"}, "A repair was agr", (SUMMARY_CUT,), 60),
        ({"error": "refused"}, "A repair was agr", (SUMMARY_CUT,), 60),
    ],
)  # fmt: skip
def test_the_better_answer_is_kept(second, summary, flags, dropped):
    workflow = single(retry_max_tokens=100)
    request = second_of(workflow, prepared(TEXT), text="A repair was agr", completion_tokens=48)
    (record,), more = workflow.complete(Completion(request.custom_id, completion_tokens=60, **second))
    assert more == []
    assert (record.status, record.error_type, record.summary, record.flags) == ("ok", None, summary, flags)
    assert (record.completion_tokens, record.dropped_tokens, record.requests) == (108, dropped, 2)


@pytest.mark.parametrize(
    ("prompt", "room"), [(3, 150), (50, 150), (120, 80), (150, 50), (151, 49), (152, None), (199, None)]
)
def test_the_second_answer_has_what_the_context_leaves(prompt, room):
    workflow = single(retry_max_tokens=150)
    one = dataclasses.replace(prepared(), prompt_ids=[65] * prompt)
    if room is not None:
        assert second_of(workflow, one, text="x").max_tokens == room
    else:
        assert record_of(workflow, one, text="x", finish_reason="length").flags == (SUMMARY_CUT,)


@pytest.mark.parametrize("first", [{"text": "x", "finish_reason": "stop"}, {"finish_reason": "stop"}, {"error": "no"}])
def test_only_a_cut_answer_is_asked_for_again(first):
    assert record_of(single(retry_max_tokens=100), prepared(), **first).requests == 1


def test_a_second_request_that_is_sent_again_is_still_the_second():
    workflow = single(retry_max_tokens=100)
    second = second_of(workflow, prepared(), text="half")
    third = workflow.again(second.custom_id)
    assert third.max_tokens == 100
    (record,), more = workflow.complete(Completion(third.custom_id, text="half an", finish_reason="length"))
    assert more == []
    assert (record.summary, record.requests, record.attempts) == ("half an", 2, 2)


def test_what_was_answered_holds_when_the_second_request_is_given_up():
    workflow = single(retry_max_tokens=100, reasoning_end="</t>")
    died = ("engine_died", "tried alone: it died")
    (record,) = workflow.give_up(second_of(workflow, prepared(), text="a</t>half").custom_id, died)
    assert (record.status, record.summary, record.error, record.flags) == ("ok", "half", None, (SUMMARY_CUT,))
    (record,) = workflow.give_up(second_of(workflow, prepared(), text="a", completion_tokens=48).custom_id, died)
    assert (record.status, record.summary, record.error_type, record.requests) == ("failed", None, "engine_died", 1)
    assert (record.completion_tokens, record.finish_reason) == (48, "length")


def test_reasoning_is_what_is_generated_besides_the_summary():
    workflow = single(reasoning_end="</t>", retry_max_tokens=100)
    record = record_of(workflow, prepared(), text="abc</t> four", finish_reason="stop", completion_tokens=30)
    assert (record.summary, record.completion_tokens, record.reasoning_tokens) == ("four", 30, 26)
    record = record_of(workflow, prepared(), text="abc", finish_reason="stop", completion_tokens=30)
    assert (record.error_type, record.reasoning_tokens) == ("no_answer", 30)
    second = second_of(workflow, prepared(), text="abc", completion_tokens=48)
    answer = Completion(second.custom_id, text="abcabc</t>four", finish_reason="stop", completion_tokens=60)
    (record,), _ = workflow.complete(answer)
    assert (record.completion_tokens, record.reasoning_tokens, record.dropped_tokens) == (108, 104, 48)
    assert record_of(single(), prepared(), text="a</t>b", completion_tokens=9).reasoning_tokens == 0
    assert record_of(workflow, prepared(), error="no", completion_tokens=9).reasoning_tokens == 0


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
    record = record_of(single("p"), prepared(n=9), text="y")
    assert record.document.key == kept.key
    assert record.finished_at.tzinfo is not None
