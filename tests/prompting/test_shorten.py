"""`truncate`: which part of a long document is kept, to the token."""

import pytest
from helpers_config import document, job, real_tokenizer
from helpers_data import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import DOCUMENT_TRUNCATED
from batchgen.models.tokenizer import BytesTokenizer
from batchgen.prompting.prompts import PromptBuilder
from batchgen.prompting.shorten import GAP, Shortener

KEEPS = ["head", "head_tail", "middle_out"]
TEXT = " ".join(f"This is sentence {n:03}." for n in range(200))


def encode(text):
    return list(text.encode())


def cut(text, keep, *, room=220, around=("<", ">")):
    lead, tail = map(encode, around)
    found = [
        Shortener(text, around, lead, tail, encode, whole).shortened(room=room, keep=keep)
        for whole in ((), encode(text.join(around)))
    ]
    assert found[0] == found[1]  # nothing depends on whether all of it was encoded before
    ids, is_cut = found[0]
    assert len(ids) <= room
    return bytes(ids).decode(errors="replace"), is_cut


def test_head_keeps_the_beginning():
    assert cut(TEXT, "head") == ("<" + TEXT[:218] + ">", True)


def test_head_tail_keeps_half_of_the_room_for_each_end():
    shown, is_cut = cut(TEXT, "head_tail")
    left = 220 - len(GAP.encode()) - 2
    assert is_cut
    assert shown == "<" + TEXT[: left - left // 2] + GAP + TEXT[-(left // 2) :] + ">"
    assert len(shown.encode()) == 220


def test_middle_out_keeps_whole_sentences_of_both_ends():
    shown, is_cut = cut(TEXT, "middle_out")
    assert is_cut
    head, _, foot = shown.partition(GAP)
    assert head.startswith("<This is sentence 000.")
    assert head.rstrip().endswith(".")
    assert foot.startswith("This is")
    assert foot.endswith("sentence 199.>")
    assert 2 < head.count("sentence") <= 5
    assert 2 < foot.count("sentence") <= 5


@pytest.mark.parametrize("keep", KEEPS)
def test_what_fits_is_left_whole(keep):
    assert cut(TEXT[:218], keep) == ("<" + TEXT[:218] + ">", False)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_room_without_space_for_a_gap_keeps_the_beginning(keep):
    assert cut(TEXT, keep, room=9) == ("<" + TEXT[:7] + ">", True)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("text", ["x" * 5000, "\U0001f680" * 900, " " * 5000 + "x", "\n" * 3000], ids=repr)
def test_texts_without_sentences(keep, text):
    assert cut(text, keep)[1]


@PROPERTY
@given(text=st.text(min_size=300, max_size=900), room=st.integers(60, 200), keep=st.sampled_from(KEEPS))
def test_no_text_is_more_than_fits(text, room, keep):
    long = {"policy": "truncate", "keep": keep}
    for tokenizer in (BytesTokenizer(), real_tokenizer()):
        prompts = PromptBuilder(
            job(long_documents=long, prompt={"user": "T: {{ text }} Now."}), tokenizer, max_prompt_tokens=room
        )
        found = prompts.prepare([(document(text + "visible"), 0)])[0]
        assert 0 < len(found.prompt_ids) <= room
        assert set(found.flags) <= {DOCUMENT_TRUNCATED}


def test_head_and_head_tail_fill_the_room_to_the_token():
    for keep in ("head", "head_tail"):
        prompts = PromptBuilder(job(long_documents={"keep": keep}), real_tokenizer(), max_prompt_tokens=300)
        assert len(prompts.prepare([(document(TEXT), 0)])[0].prompt_ids) == 300
