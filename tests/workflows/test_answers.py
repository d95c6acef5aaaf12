"""What an answer amounts to: reasoning taken out only by the job's word, and no thought ever taken for a summary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Completion
from batchgen.workflows.answers import read, without_reasoning

TAGS = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<seed:think>", "</seed:think>")]
# Thoughts and summaries are of letters of their own, so that one in the other's place is seen.
THOUGHT = st.text("ABC ", max_size=6)
SAID = st.text("xyz ", max_size=6)

each_tag = pytest.mark.parametrize(("begin", "end"), TAGS, ids=[end for _, end in TAGS])


@each_tag
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("(A B)\n\nx y", "\n\nx y"),
        ("A B)x", "x"),  # the chat template opened it in the prompt
        ("()x", "x"),
        ("(A)", ""),
        ("(A)x(B)", "x"),
        ("A)x(B)", "x"),
        ("(A)x(B)y", "xy"),
        ("(A ( B)x", "x"),  # it thinks about the tag that opens
        ("(A ( B ) C)x", "x"),  # and about both
        ("A ) B)x", "x"),
        ("(A", None),
        ("A", None),
        ("(A)x(B", None),
        ("", None),
    ],
)
def test_what_stands_outside_of_the_reasoning(begin, end, text, kept):
    shown = text.replace("(", "\0").replace(")", end).replace("\0", begin)
    assert without_reasoning(shown, end) == kept


def test_a_tag_without_a_slash_ends_the_reasoning_and_none_opens_it_again():
    end = "<|channel|>final<|message|>"
    assert without_reasoning(f"A B{end}x", end) == "x"
    assert without_reasoning(f"A{end}B{end}x", end) == "x"
    assert without_reasoning("A B", end) is None


@each_tag
@given(data=st.data())
def test_of_any_blocks_in_any_order_all_that_was_said_is_kept_and_no_thought(begin, end, data):
    blocks = data.draw(st.lists(st.tuples(THOUGHT, SAID), min_size=1, max_size=5))
    in_prompt = data.draw(st.booleans())
    text = "".join(f"{begin}{thought}{end}{said}" for thought, said in blocks)
    text = text.removeprefix(begin) if in_prompt else text
    assert without_reasoning(text, end) == "".join(said for _, said in blocks)


@each_tag
@given(data=st.data())
def test_a_block_that_is_cut_anywhere_gives_no_summary(begin, end, data):
    whole = data.draw(st.lists(st.tuples(THOUGHT, SAID), max_size=3))
    text = "".join(f"{begin}{thought}{end}{said}" for thought, said in whole) + begin + data.draw(THOUGHT)
    assert without_reasoning(text + end[: data.draw(st.integers(0, len(end) - 1))], end) is None


@each_tag
@given(pieces=st.lists(st.sampled_from(["B", "E", "x", " ", "A"]), max_size=12))
def test_whatever_comes_the_rest_holds_no_tag_and_nothing_that_stands_before_the_first(begin, end, pieces):
    text = "".join({"B": begin, "E": end}.get(one, one) for one in pieces)
    kept = without_reasoning(text, end)
    if kept is not None:
        assert begin not in kept
        assert end not in kept
        assert len(kept) <= len(text.partition(end)[2])
        assert text.rpartition(end)[2] == "" or kept.endswith(text.rpartition(end)[2].rpartition(begin)[2])
    if end not in text:
        assert kept is None


def read_text(text, finish_reason="stop", *, end="</think>", **more):
    return read(Completion("r", text=text, finish_reason=finish_reason, **more), reasoning_end=end)


@pytest.mark.parametrize(
    ("text", "finish_reason", "error_type", "words"),
    [
        ("<think>A plan", "length", "reasoning_cut", "max_tokens was reached before </think>"),
        ("Okay, first I", "length", "reasoning_cut", "max_tokens"),
        ("<think>A plan. x", "stop", "no_answer", "stopped before </think> (finish_reason stop)"),
        ("", "stop", "no_answer", "stopped"),
        ("<think>done</think>", "stop", "empty_output", "finish_reason stop"),
        ("<think>done</think> \n", "length", "empty_output", "finish_reason length"),
        ("<think>done</think>\u200b\u2060", "stop", "empty_output", "nothing"),
    ],
)
def test_without_a_summary_behind_the_reasoning_there_is_none(text, finish_reason, error_type, words):
    answer = read_text(text, finish_reason)
    assert answer.summary is None
    assert answer.error[0] == error_type
    assert words in answer.error[1]


def test_a_model_that_is_not_said_to_reason_keeps_its_text_whole():
    text = "The note explains that <think> opens a hidden part and </think> closes it."
    assert read_text(text, end=None).summary == text


@pytest.mark.parametrize(
    "text", ["```make```", "{a} {{b}} ]}", "<b>bold</b> & more", '"[{\\"n\\": 1}]"', "a\u202eb\x00c"]
)
def test_signs_inside_of_a_summary_stay_as_they_are(text):
    assert read_text(f"<think>A</think>\n{text}\n").summary == text
    assert read_text(f"\n{text} ", end=None).summary == text


def test_an_error_of_the_request_goes_before_all_else():
    answer = read_text("<think>A</think>x", "length", error="refused")
    assert (answer.error, answer.summary, answer.cut) == (("request_failed", "refused"), None, False)


def test_of_two_answers_the_better_one():
    whole, short = read_text("A</think>xy"), read_text("A</think>xyz", "length")
    longer = read_text("A</think>xyz x", "length")
    none, failed = read_text("A", "length"), read_text("", error="refused")
    assert whole.merit > longer.merit > short.merit > max(none.merit, failed.merit)
