"""Documents in pieces: what is asked when, what becomes of answers that are none, and what the row tells."""

import pytest
from helpers_config import prepared

from batchgen.data import MAP_REDUCED, PIECE_CUT, SUMMARY_CUT, Completion
from batchgen.workflows.long import Bounds
from batchgen.workflows.map_reduce import MapReduceWorkflow
from batchgen.workflows.refine import RefineWorkflow
from batchgen.workflows.single import Rules

RULES = {"max_tokens": 8, "max_model_len": 40, "count": len}


def in_pieces(n=3):
    return prepared(pieces=tuple([70 + i] * 3 for i in range(n)), flags=(MAP_REDUCED,))


def map_reduce(*, fit=9, at_once=9, requests=99, max_depth=4, store=None, **rules):
    """`fit` texts fit into a prompt; its ids are the lengths of these texts."""

    def join(document, texts):
        groups = [texts[n : n + fit] for n in range(0, len(texts), fit)]
        return [(len(one), [] if len(one) == 1 and len(groups) > 1 else [*map(len, one)]) for one in groups]

    return MapReduceWorkflow(
        prefix="0-1",
        rules=Rules(**RULES | rules),
        bounds=Bounds(at_once, requests),
        join=join,
        max_depth=max_depth,
        store=store,
    )


def refine(*, requests=99, **rules):
    return RefineWorkflow(
        prefix="0-1",
        rules=Rules(**RULES | rules),
        bounds=Bounds(9, requests),
        refine=lambda document, summary, piece: None if len(summary) > 20 else [len(summary), *piece],
    )


def answer(workflow, request, text="Fine.", **more):
    values = {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 5} | more
    return workflow.complete(Completion(request.custom_id, text, **values))


def ids(requests):
    return [list(one.prompt_ids) for one in requests]


def test_all_pieces_are_asked_at_once_and_put_together_in_their_order():
    workflow = map_reduce()
    first, second, third = workflow.admit(in_pieces())
    assert ids([first, second, third]) == [[70] * 3, [71] * 3, [72] * 3]
    assert answer(workflow, third, "ccc") == ([], [])
    assert answer(workflow, first, "a") == ([], [])
    records, (last,) = answer(workflow, second, "bb")
    assert (records, last.prompt_ids) == ([], [1, 2, 3])
    (record,), more = answer(workflow, last, "The whole.")
    assert more == []
    assert (record.status, record.summary, record.flags) == ("ok", "The whole.", (MAP_REDUCED,))
    assert (record.requests, record.pieces, record.depth, record.attempts) == (4, 3, 1, 1)
    assert (record.prompt_tokens, record.completion_tokens, record.dropped_tokens) == (12, 20, 0)


def test_a_document_has_no_more_requests_in_flight_than_it_may():
    workflow = map_reduce(at_once=2)
    open_requests = workflow.admit(in_pieces(5))
    assert len(open_requests) == 2
    for left in (2, 2, 2, 1):
        _, more = answer(workflow, open_requests.pop(0))
        open_requests += more
        assert len(open_requests) == left


def test_rounds_follow_until_one_is_left_and_a_text_alone_waits():
    workflow = map_reduce(fit=2)
    asked, rounds = workflow.admit(in_pieces(5)), []
    while asked:
        rounds.append(len(asked))
        found = [answer(workflow, one, "x" * 9) for one in asked]
        asked = [one for _, more in found for one in more]
    assert rounds == [5, 2, 1, 1]  # of five two pairs, then one pair beside the fifth, then the last two
    (record,) = found[-1][0]
    assert (record.requests, record.depth) == (9, 3)


def test_refine_asks_one_piece_after_the_other():
    workflow = refine()
    (one,) = workflow.admit(in_pieces())
    _, (two,) = answer(workflow, one, "a")
    _, (three,) = answer(workflow, two, "bb")
    assert ids([one, two, three]) == [[70] * 3, [1] + [71] * 3, [2] + [72] * 3]
    (record,), more = answer(workflow, three, "ccc")
    assert (record.summary, record.requests, record.pieces, record.depth, more) == ("ccc", 3, 3, 2, [])


@pytest.mark.parametrize("make", [map_reduce, refine])
@pytest.mark.parametrize(
    ("faulty", "kind"),
    [({"error": "refused"}, "request_failed"), ({"text": " "}, "empty_output")],
    ids=["refused", "empty"],
)
def test_a_piece_without_a_summary_is_asked_once_more_and_then_fails_the_document(make, faulty, kind):
    for second_try in (True, False):
        workflow = make()
        first, *others = workflow.admit(in_pieces(2))
        assert answer(workflow, others[0]) == ([], []) if others else True
        records, (again,) = answer(workflow, first, **faulty)
        assert (records, again.prompt_ids, again.max_tokens) == ([], first.prompt_ids, 8)
        assert again.custom_id != first.custom_id
        if second_try:
            _, (last,) = answer(workflow, again)
            (record,), _ = answer(workflow, last)
            assert (record.status, record.requests, record.dropped_tokens) == ("ok", 4 if others else 3, 5)
        else:
            (record,), more = answer(workflow, again, **faulty)
            assert (record.status, record.error_type, record.summary, more) == ("failed", kind, None, [])
            assert record.error.startswith("piece 1 of 2: ")


def test_a_document_that_failed_waits_for_what_is_still_with_the_engine():
    """Their tokens belong into its row, and nothing more is asked."""
    workflow = map_reduce(at_once=2)
    first, second = workflow.admit(in_pieces(5))
    _, (again,) = answer(workflow, first, error="refused")
    assert answer(workflow, again, error="refused") == ([], [])
    (record,), more = answer(workflow, second, error="refused")
    assert (record.status, record.requests, record.prompt_tokens, more) == ("failed", 3, 9, [])
    assert record.error.startswith("piece 1 of 5")


def test_a_cut_answer_to_a_piece_is_told_by_a_flag():
    workflow = map_reduce()
    first, second = workflow.admit(in_pieces(2))
    answer(workflow, first, finish_reason="length")
    _, (last,) = answer(workflow, second)
    (record,), _ = answer(workflow, last)
    assert record.flags == (MAP_REDUCED, PIECE_CUT)
    workflow = map_reduce()
    first, second = workflow.admit(in_pieces(2))
    answer(workflow, first)
    _, (last,) = answer(workflow, second)
    (record,), _ = answer(workflow, last, finish_reason="length")
    assert record.flags == (MAP_REDUCED, SUMMARY_CUT)


@pytest.mark.parametrize("make", [map_reduce, refine])
def test_a_cut_answer_to_a_piece_has_more_room_where_the_job_gives_it(make):
    workflow = make(retry_max_tokens=30)
    first, *_ = workflow.admit(in_pieces(2))
    _, (again,) = answer(workflow, first, "A beginning", finish_reason="length")
    assert (again.max_tokens, again.prompt_ids) == (30, first.prompt_ids)


def test_reasoning_of_a_piece_goes_nowhere():
    workflow = map_reduce(reasoning_end="</think>")
    first, second = workflow.admit(in_pieces(2))
    answer(workflow, first, "Hm.</think>a", completion_tokens=9)
    _, (last,) = answer(workflow, second, "Hm.</think>bb", completion_tokens=9)
    assert last.prompt_ids == [1, 2]
    (record,), _ = answer(workflow, last, "</think>ccc", completion_tokens=9)
    assert (record.summary, record.reasoning_tokens) == ("ccc", 27 - 6)


@pytest.mark.parametrize("make", [map_reduce, refine])
def test_requests_have_a_bound_that_second_tries_count_against(make):
    workflow = make(requests=3)
    open_requests, asked, records = workflow.admit(in_pieces(3)), 0, []
    while open_requests:
        asked += 1
        found, more = answer(workflow, open_requests.pop(0), text=" " if asked == 1 else "Fine.")
        records += found
        open_requests += more
    assert asked == 3
    (record,) = records
    assert (record.status, record.requests) == ("failed", 3)


def test_answers_that_cannot_be_put_together_are_told():
    workflow = map_reduce(fit=1)
    first, second = workflow.admit(in_pieces(2))
    answer(workflow, first)
    (record,), _ = answer(workflow, second)
    assert (record.error_type, record.error) == ("not_reduced", "of 2 summaries no two fit into a prompt together")
    workflow = refine()
    (first,) = workflow.admit(in_pieces(2))
    (record,), _ = answer(workflow, first, "A summary that is far too long.")
    assert record.error_type == "not_reduced"


def test_one_piece_is_the_whole():
    workflow = map_reduce()
    (only,) = workflow.admit(in_pieces(1))
    (record,), more = answer(workflow, only)
    assert (record.summary, record.pieces, record.depth, more) == ("Fine.", 1, 0, [])


def test_giving_up_one_piece_ends_its_document():
    workflow = map_reduce()
    first, second, third = workflow.admit(in_pieces())
    answer(workflow, first)
    again = workflow.again(second.custom_id)
    (record,) = workflow.give_up(again.custom_id, ("engine_died", "it died"))
    assert (record.status, record.error_type, record.error) == ("failed", "engine_died", "piece 2 of 3: it died")
    assert (record.requests, record.attempts, record.prompt_tokens) == (1, 2, 3)
    with pytest.raises(KeyError):
        workflow.documents(third.custom_id)


def test_giving_up_the_last_request_keeps_a_summary_that_was_cut():
    workflow = map_reduce(retry_max_tokens=30)
    first, second = workflow.admit(in_pieces(2))
    answer(workflow, first)
    _, (last,) = answer(workflow, second)
    _, (again,) = answer(workflow, last, "A beginning", finish_reason="length")
    (record,) = workflow.give_up(again.custom_id, ("engine_died", "it died"))
    assert (record.status, record.summary, record.flags) == ("ok", "A beginning", (MAP_REDUCED, SUMMARY_CUT))


class Store:
    def __init__(self):
        self.answers = {}

    def find(self, document, prompt):
        return self.answers.get(prompt, ())

    def keep(self, document, prompt, completions):
        self.answers[prompt] = tuple(completions)

    def forget(self, document):
        self.answers = {}


def test_what_was_kept_is_not_asked_again_and_the_row_is_the_same():
    calm, store = map_reduce(), Store()
    rows = []
    for workflow in (calm, map_reduce(store=store)):
        first, second, third = workflow.admit(in_pieces())
        answer(workflow, first, "a")
        answer(workflow, second, "bb")
        if workflow is calm:
            _, (last,) = answer(workflow, third, "ccc")
            rows += answer(workflow, last)[0]
    resumed = map_reduce(store=store)
    (third,) = resumed.admit(in_pieces())
    assert third.prompt_ids == [72] * 3
    _, (last,) = answer(resumed, third, "ccc")
    assert last.prompt_ids == [1, 2, 3]
    rows += answer(resumed, last)[0]
    assert rows[0].requests == rows[1].requests == 4
    assert (rows[0].prompt_tokens, rows[0].flags) == (rows[1].prompt_tokens, rows[1].flags)
    assert store.answers == {}


def test_a_store_that_holds_too_much_leaves_no_document_without_a_request():
    """Nothing writes such a file; a document must not be lost to one."""
    store = Store()
    workflow = map_reduce(fit=1, store=store)
    first, second = workflow.admit(in_pieces(2))
    answer(workflow, first)
    kept = dict(store.answers)
    answer(workflow, second)
    store.answers = kept
    other = map_reduce(fit=1, store=store)
    store.answers = {key: (Completion("", "x", "stop"),) for key in _digests(first, second)}
    assert len(other.admit(in_pieces(2))) == 2


def _digests(*requests):
    from batchgen.workflows.long import Ask, _digest

    return [_digest(Ask("", 0, one.prompt_ids, last=False)) for one in requests]
