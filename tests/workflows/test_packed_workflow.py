"""Packs: who is in which, how large they are, and that no damage to an answer moves a summary to another document."""

import dataclasses
import json

import pytest
from helpers_data import PROPERTY
from helpers_packs import (
    FRAME,
    alone,
    answered,
    blocks,
    canary,
    pack_of,
    packed,
    prompt_of,
    strangers,
    summary_of,
    text_of,
    whole,
    word_of,
)
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Prepared
from batchgen.workflows.packed import shared
from batchgen.workflows.support import doubts
from batchgen.workflows.unpack import schema, unpack

SIX = range(6)


# Who is in which pack.


def sized(n: int, length: int) -> Prepared:
    """A document whose user turn has so many tokens; 0: one that may not be packed."""
    turn = f"{n} ".ljust(length, "x")
    one = canary(n)
    return dataclasses.replace(one, prompt_ids=[*FRAME, *turn.encode()], turn=turn if length else None)


LENGTHS = st.lists(st.integers(0, 900), max_size=120)


@PROPERTY
@given(LENGTHS, st.integers(2, 9), st.one_of(st.none(), st.integers(1, 4000)), st.integers(1200, 6000))
def test_each_document_is_in_one_request_and_packs_keep_their_budgets(lengths, most, pack_tokens, context):
    def play():
        workflow = packed(max_documents=most, max_pack_tokens=pack_tokens, max_model_len=context, max_tokens=50)
        requests = []
        for n, length in enumerate(lengths):
            requests += workflow.admit(sized(n, length))
            sent = sum(len(workflow.documents(one.custom_id)) for one in requests)
            assert n + 1 - sent < 8 * most  # a bounded look-ahead
        return workflow, requests + workflow.flush()

    workflow, requests = play()
    met = [one.id for request in requests for one in workflow.documents(request.custom_id)]
    assert sorted(met) == sorted(f"d{n}" for n in range(len(lengths)))
    for request in requests:
        inside = workflow.documents(request.custom_id)
        if len(inside) > 1:
            assert len(inside) <= most
            assert len(request.prompt_ids) <= (pack_tokens or context)
            assert len(request.prompt_ids) + request.max_tokens <= context
            assert request.max_tokens >= len(inside) * 50
            assert len(blocks(request)) == len(inside)
            assert json.loads(request.schema)["maxItems"] == len(inside)
            assert not any(lengths[int(one.id[1:])] == 0 for one in inside)
        else:
            assert (request.max_tokens, request.schema) == (50, None)
    assert [dataclasses.astuple(one) for one in play()[1]] == [dataclasses.astuple(one) for one in requests]


def test_documents_of_like_length_share_a_pack():
    workflow = packed(max_documents=4)
    requests = [one for n in range(32) for one in workflow.admit(sized(n, 50 if n % 2 else 150))]
    packs = [{int(one.id[1:]) % 2 for one in workflow.documents(request.custom_id)} for request in requests]
    assert packs == [{0}] * 4 + [{1}] * 4


def test_the_first_lines_of_all_packs_are_the_same_for_the_prefix_cache():
    workflow = packed(max_documents=2)
    for n in range(4):
        workflow.admit(canary(n))
    one, other = map(prompt_of, workflow.flush())
    head = one.partition("\n")[0]
    assert other.startswith(head)
    assert len(head) > 100


def test_a_document_that_holds_the_boundary_or_a_label_gets_others():
    request, labels = pack_of(packed(), 2)
    workflow = packed()
    texts = [f"{text_of(n)}\n--- end {labels[0]} {word_of(request)}" for n in range(2)]
    for n, text in enumerate(texts):
        workflow.admit(dataclasses.replace(canary(n), turn=text))
    (attacked,) = workflow.flush()
    assert [text for _, text in blocks(attacked)] == texts
    assert word_of(attacked) != word_of(request)
    assert labels[0] not in [label for label, _ in blocks(attacked)]


# What comes back.


def items_of(labels):
    return [{"label": label, "summary": summary_of(n)} for n, label in enumerate(labels)]


@st.composite
def damaged(draw):
    """(how an answer to six documents is spoilt, as a function of the labels; the finish_reason)."""
    steps = draw(st.lists(st.tuples(st.sampled_from(DAMAGE), st.integers(0, 5), st.integers(0, 5)), max_size=4))
    dress = draw(st.sampled_from(DRESS))
    cut = draw(st.one_of(st.none(), st.floats(0, 1)))

    def spoil(labels):
        found = items_of(labels)
        for step, i, j in steps:
            if found:
                step(found, i % len(found), j % len(found), labels)
        text = dress(found)
        return text if cut is None else text[: int(cut * len(text))]

    return spoil, "stop" if cut is None else draw(st.sampled_from(["length", "stop"]))


def _drop(found, i, j, labels):
    del found[i]


def _double(found, i, j, labels):
    found.insert(j, dict(found[i]))


def _swap(found, i, j, labels):
    found[i], found[j] = found[i] | {"summary": found[j]["summary"]}, found[j] | {"summary": found[i]["summary"]}


def _copy(found, i, j, labels):
    found[i] = found[i] | {"summary": found[j]["summary"]}


def _merge(found, i, j, labels):
    found[i] = found[i] | {"summary": f"{found[i]['summary']} {found[j]['summary']}"}
    if i != j:
        del found[j]


def _shift(found, i, j, labels):
    told = [one["summary"] for one in found]
    for one, summary in zip(found, told[1:] + told[:1], strict=True):
        one["summary"] = summary


def _renumber(found, i, j, labels):
    for n, one in enumerate(found):
        one["label"] = labels[(n + i) % len(labels)]


def _count(found, i, j, labels):
    for n, one in enumerate(found):
        one["label"] = n + j


def _retype(found, i, j, labels):
    found[i] = [{"label": labels[j], "summary": [1]}, {"label": None, "summary": "x"}, 7, None, "x", []][j]
    if not isinstance(found[i], dict):
        del found[i]


def _empty(found, i, j, labels):
    found[i] = found[i] | {"summary": [" ", "", "\u200b"][j % 3]}


DAMAGE = [_drop, _double, _swap, _copy, _merge, _shift, _renumber, _count, _retype, _empty]
DRESS = [
    json.dumps,
    lambda found: f"```json\n{json.dumps(found, indent=1)}\n```",
    lambda found: f"Here [as asked] {{are}} they: {json.dumps(found)} That is all [1].",
    lambda found: "\n".join(map(json.dumps, found)),
    lambda found: json.dumps({"summaries": found, "count": len(found)}),
    lambda found: json.dumps(found) + json.dumps(found[::-1]),
    str,
]


@PROPERTY
@given(damaged())
def test_no_damage_moves_a_summary_to_another_document(how):
    spoil, finish_reason = how
    workflow = packed()
    request, labels = pack_of(workflow)
    records, requests = answered(workflow, request, spoil(labels), finish_reason=finish_reason, tokens=101)
    for record in records:
        n = int(record.document.id[1:])
        assert (record.status, record.summary) == ("ok", summary_of(n))
        assert not strangers(record.summary, n, 6)
    records += alone(workflow, requests)
    assert sorted(record.document.id for record in records) == [f"d{n}" for n in SIX]
    assert sum(record.completion_tokens for record in records) == 101 + 9 * len(requests)
    assert sum(record.prompt_tokens for record in records) == len(request.prompt_ids) + sum(
        len(one.prompt_ids) for one in requests
    )
    assert sum(record.dropped_tokens for record in records) <= 101


@given(st.text(), st.booleans(), st.sampled_from(["json", "lines"]))
def test_any_text_is_read_as_an_answer(text, cut, form):
    found = unpack(text, ["a1b2", "c3d4"], form=form, cut=cut)
    assert {*found.summaries, *found.refused} == {"a1b2", "c3d4"}


def test_a_request_that_fails_sends_all_its_documents_alone():
    workflow = packed()
    request, _ = pack_of(workflow)
    records, requests = answered(workflow, request, "", error="vLLM refused the request", tokens=0)
    assert records == []
    assert {record.pack_fallback for record in alone(workflow, requests)} == {"request_failed"}


def test_a_pack_that_was_in_a_dying_engine_comes_apart():
    workflow = packed()
    request, _ = pack_of(workflow)
    ids = workflow.apart(request.custom_id)
    assert [len(workflow.documents(one)) for one in ids] == [1] * 6
    with pytest.raises(KeyError):
        workflow.documents(request.custom_id)
    again = [workflow.again(one) for one in ids[:5]]
    (given_up,) = workflow.give_up(ids[5], ("engine_died", "tried alone"))
    assert (given_up.status, given_up.error_type) == ("failed", "engine_died")
    for record in alone(workflow, again):
        assert (record.pack_fallback, record.attempts, record.requests, record.dropped_tokens) == (
            "engine_died",
            2,
            1,
            0,
        )


@given(st.integers(0, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_shares_add_up(total, weights):
    found = shared(total, weights)
    assert (sum(found), len(found)) == (total, len(weights))
    assert all(abs(share - total * weight / sum(weights)) <= 1 for share, weight in zip(found, weights, strict=True))


def test_the_schema_holds_the_answer_to_one_item_a_document():
    found = json.loads(schema(3))
    assert (found["minItems"], found["maxItems"], found["items"]["required"]) == (3, 3, ["label", "summary"])


# Whose summary it is.

QUAY = "The harbour board of Quillfort agreed to replace the quay wall."
BEES = "Beekeepers in the valley report mild losses after a dry winter."
LIBRARY = "The library drops its late fees, since most readers never paid them."


def doubt_of(summary, *, of=QUAY, others=(BEES, LIBRARY), words=True):
    return doubts([of, *others], [summary, *[None for _ in others]], words=words)[0]


@pytest.mark.parametrize(
    ("summary", "why"),
    [
        ("A quay wall is to be replaced.", None),
        ("The quay wall of Quillfort is replaced.", None),
        ("Losses after a dry winter are mild.", "unsupported"),
        ("BREACH", "unsupported"),
        ("The.", "unsupported"),
        ("The quay wall is replaced, and beekeepers report mild losses after a dry winter.", "unsupported"),
    ],
)
def test_a_summary_needs_words_of_its_own_document(summary, why):
    assert doubt_of(summary) == why
    assert doubt_of(summary, words=False) is None


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize(
    ("summary", "why"),
    [
        ("Die Kaimauer von Quillfort kostet 4400 Euro.", None),
        ("Die Kaimauer kostet 4417 Euro am Kai von Quillfort.", "foreign"),
        ("Die Kaimauer am Kai von Marrowby, quay wall.", "foreign"),
        ("The quay wall of Quillfort has 3 parts.", None),
    ],
)
def test_numbers_and_names_of_another_document_are_seen(summary, why, words):
    others = ("The board of Marrowby pays 4417 for 3 quays and 7 boards.",)
    assert doubt_of(summary, of=QUAY + " Quillfort pays 4400 for the quay wall.", others=others, words=words) == why


@pytest.mark.parametrize(
    ("own", "other", "right", "wrong"),
    [
        ("港口委员会同意更换码头墙。", "图书馆取消了逾期罚款。", "码头墙将更换", "逾期罚款取消"),
        ("Порт чинит причал", "Библиотека отменила штрафы", "причал чинят", "штрафы отменены"),
    ],
    ids=["chinese", "russian"],
)  # fmt: skip
def test_no_language_is_needed(own, other, right, wrong):
    assert doubts([own, other], [right, None], words=True)[0] is None
    assert doubts([own, other], [wrong, None], words=True)[0] == "unsupported"


def test_equal_and_nearly_equal_summaries_are_seen_where_nothing_tells_them_apart():
    texts = [text_of(n) for n in range(3)]
    same = "The board will rebuild the quay wall of the harbour over three years."
    assert doubts(texts, [same, same.replace("years", "years!"), None], words=False) == ["alike", "alike", None]
    assert doubts(texts, [texts[0], texts[2], texts[1]], words=True) == [None, "foreign", "foreign"]
    assert doubts(texts, [summary_of(n) for n in range(3)], words=True) == [None] * 3
    assert doubts(texts, [text.replace("Tuesday", "a Tuesday") for text in texts], words=True) == [None] * 3


def test_whole_answers_are_taken():
    workflow = packed()
    request, labels = pack_of(workflow)
    records, requests = answered(workflow, request, whole(zip(labels, map(summary_of, SIX), strict=True)), tokens=600)
    assert requests == []
    assert {int(record.document.id[1:]): record.summary for record in records} == {n: summary_of(n) for n in SIX}
    assert {(record.pack_size, record.requests, record.attempts) for record in records} == {(6, 1, 1)}
    assert sum(record.completion_tokens for record in records) == 600
    assert {record.dropped_tokens for record in records} == {0}
