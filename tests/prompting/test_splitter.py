"""Pieces of a text: together they are the text, each fits, and they end where the text breaks."""

import pytest
from helpers_config import real_tokenizer
from helpers_data import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from batchgen.models.tokenizer import BytesTokenizer
from batchgen.prompting.splitter import first_break, last_break, split
from batchgen.text import is_blank

BITS = [
    "# Head\n", "A heading\n=====\n", "A sentence. ", "word ", "\n\n", "\r\n\r\n", "\n", " ", "\u4e16\u754c\u3002",
    "e\u0301", "\ufdfa", "\U0001f469\u200d\U0001f680", "....", "x" * 30, "\u200b", "\x00",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=400), st.lists(st.sampled_from(BITS), max_size=80).map("".join))


def pieces_of(text, tokenizer, *, room, overlap=0, at_most=10_000, around=("<", ">")):
    def encode(start, end):
        return tokenizer.encode_batch([around[0] + text[start:end] + around[1]])[0]

    return split(text, encode, room=room, overlap=overlap, at_most=at_most)


def check(text, tokenizer, *, room, overlap):
    around = len(tokenizer.encode_batch(["<>"])[0])
    pieces = pieces_of(text, tokenizer, room=room, overlap=overlap)
    assert "".join(text[one.begin : one.end] for one in pieces) == text
    assert [one.begin for one in pieces[1:]] == [one.end for one in pieces[:-1]]
    for one in pieces:
        assert one.begin < one.end
        assert one.ids == tokenizer.encode_batch([f"<{text[one.start : one.end]}>"])[0]
        assert len(one.ids) <= room
        assert len(tokenizer.encode_batch([f"<{text[one.start : one.begin]}>"])[0]) - around <= overlap
    return pieces


@PROPERTY
@given(text=TEXTS, room=st.integers(40, 120), overlap=st.integers(0, 20))
def test_pieces_are_the_text_again_and_each_fits(text, room, overlap):
    check(text, BytesTokenizer(), room=room, overlap=overlap)


@PROPERTY
@given(text=TEXTS, room=st.integers(60, 120), overlap=st.integers(0, 20))
def test_it_holds_for_tokens_of_a_model(text, room, overlap):
    check(text, real_tokenizer(), room=room, overlap=overlap)


@PROPERTY
@given(text=st.text(st.characters(), max_size=200))
def test_also_of_half_characters(text):
    """Nothing is encoded on the way: places in a text are all that counts."""
    pieces = split(text, lambda start, end: range(end - start), room=7, overlap=2, at_most=10_000)
    assert "".join(text[one.begin : one.end] for one in pieces) == text


WORDS = "The board met. It agreed to repair the wall. "


@pytest.mark.parametrize(
    ("mark", "begin"),
    [("\n\n## Costs\n\n", "## Costs"), ("\n\nCosts\n-----\n\n", "Costs\n-----"), ("\n\n", "The board")],
    ids=["marked", "underlined", "paragraph"],
)
def test_a_piece_begins_where_the_text_breaks_best(mark, begin):
    text = WORDS * 3 + mark + WORDS * 3
    first, second = pieces_of(text, BytesTokenizer(), room=200)
    assert text[second.begin :].startswith(begin)
    assert text[: first.end].strip() == (WORDS * 3).strip()


def test_a_sentence_is_not_torn():
    text = WORDS * 20
    for one in pieces_of(text, BytesTokenizer(), room=150)[:-1]:
        assert text[: one.end].endswith(". ")


def test_a_word_without_end_is_cut_anyway():
    sizes = [one.end - one.begin for one in pieces_of("x" * 1000, BytesTokenizer(), room=102)]
    assert (sum(sizes), max(sizes) <= 100) == (1000, True)
    assert min(sizes[:-1]) >= 95  # nearer to the border nobody looks


def test_pieces_are_about_of_one_size():
    """A last piece of a few words has a summary that weighs as much as the others."""
    text = WORDS * 23  # 1035 characters
    sizes = [one.end - one.begin for one in pieces_of(text, BytesTokenizer(), room=1002)]
    assert len(sizes) == 2
    assert min(sizes) > 400


def test_the_overlap_begins_with_a_whole_sentence():
    text = WORDS * 20
    for one in pieces_of(text, BytesTokenizer(), room=200, overlap=50)[1:]:
        assert 0 < one.begin - one.start <= 50
        assert text[one.start :].startswith(("The board", "It agreed"))


def test_it_gives_up_where_too_many_are_needed_without_looking_at_the_rest():
    seen = []

    def encode(start, end):
        seen.append(end)
        return range(end - start)

    assert split("word " * 100_000, encode, room=100, overlap=0, at_most=3) is None
    assert max(seen) < 2_000
    assert split("word " * 50, encode, room=100, overlap=0, at_most=3) is not None


def test_a_character_that_does_not_fit_has_no_piece():
    assert pieces_of("abc \ufdfa" * 9, BytesTokenizer(), room=4) is None


def test_an_overlap_that_fills_the_piece_is_left_out():
    text = "\U0001f680" * 10
    pieces = pieces_of(text, BytesTokenizer(), room=6, overlap=4)
    assert "".join(text[one.begin : one.end] for one in pieces) == text


@pytest.mark.parametrize("text", ["." * 300_000, "\n" * 300_000, " " * 300_000, "'\")" * 100_000, "#" * 300_000])
@pytest.mark.timeout(30)
def test_no_text_takes_long(text):
    pieces = split(text, lambda start, end: range(end - start), room=4000, overlap=100, at_most=1000)
    assert pieces[-1].end == len(text)


def test_breaks():
    text = "One two. Three four. Five"
    assert text[: last_break(text, 4, 24)] == "One two. Three four. "
    assert text[first_break(text, 3, 20) :] == "Three four. Five"
    assert last_break("xxxxxxxx", 2, 6) == 6
    assert first_break("xxxxxxxx", 2, 6) == 2
    assert is_blank(text[len(text) :])
