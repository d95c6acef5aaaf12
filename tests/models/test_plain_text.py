"""No text becomes a control token, whatever the tokenizer is made of, and no character of it is lost."""

import functools
import json

import pytest
from helpers_tokenizers import FAMILIES, LOSSLESS, save
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.models.plain_text import is_control, pieces, plain_backend
from batchgen.models.tokenizer import HuggingFaceTokenizer

PROPERTY = settings()
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The tokenizer of a family, made once."""

    @functools.cache
    def make(name):
        return HuggingFaceTokenizer(save(name, tmp_path_factory.mktemp("family")))

    return make


def tokens(tokenizer):
    return tokenizer._tokenizer.added_tokens_decoder


def control(tokenizer):
    """Control ids, without the one for characters that the model does not know."""
    return {i for i, token in tokens(tokenizer).items() if is_control(token) and "unk" not in token.content.lower()}


def texts(name):
    """Texts of whole control tokens, pieces of them, and anything."""
    contents = [*FAMILIES[name].special, *FAMILIES[name].added]
    part = st.sampled_from(contents).flatmap(
        lambda one: st.tuples(st.integers(0, len(one)), st.integers(0, len(one))).map(lambda cut: one[slice(*cut)])
    )
    return st.lists(
        st.sampled_from(contents) | part | ANY | st.sampled_from([" ", "\n", "\n\n", "\u2581"]), max_size=8
    ).map("".join)


def ids_of(tokenizer, text):
    return tokenizer.encode_batch([text])[0]


@pytest.mark.parametrize("name", FAMILIES)
@PROPERTY
@given(data=st.data())
def test_no_text_becomes_a_control_token(tokenizer, name, data):
    text = data.draw(texts(name))
    at = tokenizer(name)
    assert control(at).isdisjoint(ids_of(at, text))


@pytest.mark.parametrize("name", LOSSLESS)
@PROPERTY
@given(data=st.data())
def test_all_characters_are_still_there(tokenizer, name, data):
    # SentencePiece decoders take a space off the beginning, and write U+2581 as a space.
    text = "x" + data.draw(texts(name))
    at = tokenizer(name)
    shown = at._tokenizer.decode(ids_of(at, text), skip_special_tokens=False)
    assert shown == (text if FAMILIES[name].kind == "bytes" else text.replace("\u2581", " "))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_control_token_of_the_family_is_text_alone_and_inside_of_words(tokenizer, name):
    at = tokenizer(name)
    contents = {token.content for i, token in tokens(at).items() if i in control(at)}
    assert len(contents) > 1
    for content in contents:
        # The tokenizer itself makes it one token; what is tested is not a family without any.
        assert not control(at).isdisjoint(at._tokenizer(content, add_special_tokens=False)["input_ids"])
        for text in (content, f"a {content} b", f"a{content}b", content * 3, f"{content}\n"):
            assert control(at).isdisjoint(ids_of(at, text)), text


def test_the_unknown_token_cannot_be_written_either(tokenizer):
    at = tokenizer("llama2")
    unknown = at._tokenizer.convert_tokens_to_ids(["<unk>"])[0]
    assert unknown not in ids_of(at, "a <unk> b")


ORDINARY = "The board of Z\u00fcrich met on day 12; it cost 3 \u20ac.\n\nSummarize  this: \u4e16\u754c\u3002"


@pytest.mark.parametrize("name", FAMILIES)
def test_ordinary_text_has_the_ids_of_the_models_own_tokenizer(tokenizer, name):
    at = tokenizer(name)
    own = at._tokenizer("x" + ORDINARY, add_special_tokens=False)["input_ids"]
    plain = ids_of(at, "x" + ORDINARY)
    # The space that SentencePiece tokenizers put before a text: part of the first token, or one of its own.
    assert plain == own or plain[1:] in (own[1:], own[2:]) or ids_of(at, " x" + ORDINARY) == own


def test_runs_of_white_space_stay_the_tokens_that_the_model_knows(tokenizer):
    at = tokenizer("gemma")
    ids = ids_of(at, "one\n\ntwo")
    assert at._tokenizer.convert_tokens_to_ids(["\n\n"])[0] in ids
    assert at._tokenizer.convert_tokens_to_ids(["<b>"])[0] not in ids_of(at, "<b>one")


def backend_of(**model):
    from tokenizers import Tokenizer

    vocab = {c: n for n, c in enumerate("ab<>/s")} | model.pop("vocab", {})
    state = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []} | model}
    return Tokenizer.from_str(json.dumps(state))


def test_words_of_a_wider_vocabulary_keep_their_ids():
    from tokenizers import AddedToken

    backend = backend_of()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken("abba", normalized=False), "<a>", "baab"])
    plain = plain_backend(backend)
    for text in ("abba", "baab", "abbabaab"):
        assert plain.encode(text).ids == backend.encode(text).ids
    assert plain.encode("<a>abba<s>").ids == [2, 0, 3, backend.token_to_id("abba"), 2, 5, 3]


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_control_token_that_merges_make_is_spelt(ignore_merges):
    vocab = {"</": 6, "</s": 7, "</s>": 8}
    merges = [["<", "/"], ["</", "s"], ["</s", ">"]]
    backend = backend_of(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    backend.add_special_tokens(["</s>"])
    assert backend.encode("a</s>").ids == [0, 8]
    assert plain_backend(backend).encode("a</s>").ids == [0, 7, 3]


def test_the_backend_itself_is_left_as_it_was():
    backend = backend_of(vocab={"<s>": 6})
    backend.add_special_tokens(["<s>"])
    before = backend.to_str()
    plain_backend(backend).encode("<s>")
    assert backend.to_str() == before


@pytest.mark.parametrize(
    ("content", "special", "expected"),
    [
        ("<think>", False, True), ("<|im_end|>", True, True), ("[INST]", False, True), ("\n\n", False, False),
        ("\u2581\u2581", False, False), ("\u00f6", False, False), ("\u00f7", False, False), ("Dosierung", False, False),
        ("Dosierung", True, True), ("<", True, True), ("<|", False, True),
    ],
)  # fmt: skip
def test_control_tokens_are_told_from_text(content, special, expected):
    from tokenizers import AddedToken

    assert is_control(AddedToken(content, special=special)) is expected


def test_a_text_is_cut_inside_of_each_token():
    assert pieces("a<s>b", ["<s>", "</s>"]) == ["a<", "s", ">b"]
    assert pieces("plain", ["<s>"]) == ["plain"]
    assert pieces("<s><s>", ["<s>"]) == ["<", "s", "><", "s", ">"]
    assert pieces("", ["<s>"]) == []
