"""Prompts of documents in pieces: what is asked of each piece, and what puts answers together."""

import pytest
from helpers_config import document, job, load_text, real_tokenizer
from helpers_data import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import ConfigError
from batchgen.models.tokenizer import BytesTokenizer
from batchgen.prompting.prompts import PromptBuilder, check_templates

TEXT = " ".join(f"This is sentence {n:03}." for n in range(60))
SHORT = {"piece": "P: {{ text }}", "reduce": "R: {{ text }}", "refine": "S: {{ summary }} T: {{ text }}"}


def builder(policy, *, limit=300, tokenizer=None, max_tokens=20, **long):
    made = job(
        long_documents={"policy": policy, "overlap_tokens": 0} | SHORT | long, sampling={"max_tokens": max_tokens}
    )
    return PromptBuilder(made, tokenizer or BytesTokenizer(), max_prompt_tokens=limit)


def one(prompts, text=TEXT, **fields):
    return prompts.prepare([(document(text, **fields), 0)])[0]


def shown(ids):
    return BytesTokenizer().decode_batch([ids])[0]


def test_each_piece_has_the_instruction_first():
    prepared = one(builder("map_reduce"))
    texts = [shown(ids) for ids in prepared.pieces]
    assert all(text.startswith("You write summaries.P: This is") for text in texts)
    assert "".join(text.removeprefix("You write summaries.P: ") for text in texts) == TEXT
    assert prepared.prompt_ids == prepared.pieces[0]
    assert prepared.flags == ("map_reduced",)


def test_refine_begins_with_a_prompt_and_goes_on_with_text():
    prepared = one(builder("refine"))
    first, *others = [shown(ids) for ids in prepared.pieces]
    assert first.startswith("You write summaries.P: This is")
    assert first.removeprefix("You write summaries.P: ") + "".join(others) == TEXT
    ids = builder("refine").long.refine(document(TEXT[:50]), "So far.", prepared.pieces[1])
    assert shown(ids) == f"You write summaries.S: So far. T: {others[0]}"


def test_pieces_leave_room_for_the_summary_so_far():
    prompts = builder("refine", max_tokens=40)
    prepared = one(prompts)
    for piece in prepared.pieces[1:]:
        assert len(prompts.long.refine(document("x"), "y" * 40, piece)) <= 300
    assert prompts.long.refine(document("x"), "y" * 280, prepared.pieces[1]) is None


def test_pieces_that_show_nothing_are_left_out():
    prepared = one(builder("map_reduce"), "Begin." + " " * 5000 + "End.")
    assert len(prepared.pieces) == 2


def test_kept_fields_stand_in_all_prompts():
    prompts = builder("map_reduce", piece="{{ title }}: {{ text }}", reduce="{{ title }}; {{ text }}")
    assert all("summaries.Quay: " in shown(ids) for ids in one(prompts, title="Quay").pieces)
    ((_, ids),) = prompts.long.join(document("x", title="Quay"), ["One.", "Two."])
    assert shown(ids) == "You write summaries.Quay; One.\n\nTwo."


def test_a_boundary_stands_in_no_answer():
    prompts = builder("map_reduce", reduce="<{{ boundary }}>{{ text }}")
    for answer in ("One.", "5eb1c7"):
        ((_, ids),) = prompts.long.join(document("x"), [answer, "Two."])
        word = shown(ids).partition("<")[2].partition(">")[0]
        assert (word == "5eb1c7") is (answer == "One.")
        assert shown(ids).count(word) == 1


@PROPERTY
@given(lengths=st.lists(st.integers(1, 150), min_size=2, max_size=30))
def test_groups_take_all_texts_in_order_and_fit(lengths):
    texts = [f"{n:02}" + "x" * length for n, length in enumerate(lengths)]
    groups = builder("map_reduce").long.join(document("x"), texts)
    assert sum(count for count, _ in groups) == len(texts)
    at = 0
    for count, ids in groups:
        assert len(ids) <= 300
        assert (ids == []) is (count == 1)
        if ids:
            assert shown(ids) == "You write summaries.R: " + "\n\n".join(texts[at : at + count])
        at += count


def test_groups_are_about_of_one_size():
    groups = builder("map_reduce").long.join(document("x"), ["x" * 50] * 6)  # five would fit together
    assert [count for count, _ in groups] == [3, 3]


def test_prompts_that_leave_no_room_for_text_are_told():
    error = one(builder("map_reduce", piece="word " * 60 + "{{ text }}")).error
    assert error[0] == "prompt_too_long"
    assert "leave" in error[1]
    error = one(builder("refine", max_tokens=250)).error
    assert error[0] == "prompt_too_long"


def test_a_template_that_fails_on_a_document_fails_it_before_anything_is_sent():
    prompts = builder("map_reduce", reduce="{{ 1 // title|length }}{{ text }}")
    assert one(prompts, title="T").error is None
    assert one(prompts, title="").error[0] == "template_failed"


@pytest.mark.parametrize("policy", ["map_reduce", "refine"])
def test_prompts_of_a_model_fit(policy):
    prompts = builder(policy, tokenizer=real_tokenizer(), limit=120, overlap_tokens=10)
    prepared = one(prompts, TEXT * 3)
    assert len(prepared.pieces) > 3
    assert max(map(len, prepared.pieces)) <= 120


FULL = """\
name: a
input: [{path: x, keep: [title, lang]}]
prompt: {user: '{{ title }} {{ text }}'}
output: {dir: o}
long_documents: {policy: map_reduce, %s}
"""


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("piece: 'none'", "long_documents.piece must hold {{ text }} exactly once"),
        ("reduce: '{{ text }}{{ text }}'", "long_documents.reduce must hold {{ text }} exactly once"),
        ("refine: '{{ text }}'", "long_documents.refine must hold {{ summary }} exactly once"),
        ("refine: '{{ text }}{{ summary|upper }}'", "long_documents.refine must hold {{ summary }} exactly once"),
        ("piece: '{{ text }}{{ summary }}'", "{{ summary }}, which prompt.user does not use"),
        ("piece: '{{ text }}{{ titel }}'", "does not use; did you mean 'title'?"),
        ("piece: '{{ text }}{{ lang }}'", "{{ lang }}, which prompt.user does not use"),
        ("piece: '{{ text }'", "long_documents.piece: "),
        ("reduce: '{{ boundary|upper }}{{ text }}'", "must print {{ boundary }} as it is"),
    ],
)
def test_mistakes_in_the_prompts_are_told_with_their_line(tmp_path, key, told):
    file = load_text(tmp_path, FULL % key)
    with pytest.raises(ConfigError) as caught:
        check_templates(file.job, file.origin)
    assert "line 5" in str(caught.value)
    assert told in str(caught.value)
