"""How a record becomes a document: identity, text, kept fields, and what a change in one of them means."""

import json

import pytest
from helpers_data import documents, write_lines
from hypothesis import given
from hypothesis import strategies as st

from batchgen.sources.base import clean, place_key, reach


def of(tmp_path, *records, name="a.jsonl", **item):
    return documents(write_lines(tmp_path / name, *records), **{"id_field": "id"} | item)


def test_the_same_id_has_the_same_key_wherever_it_stands(tmp_path):
    first = of(tmp_path, {"id": "a", "text": "x"}, {"id": "b", "text": "x"}, name="one.jsonl")
    other = of(tmp_path, {"id": "b", "text": "y"}, {"id": "a", "text": "x"}, name="two/other.jsonl")
    assert [document.key for document in first] == [document.key for document in reversed(other)]
    assert first[0].place != other[1].place
    assert len(first[0].key) == 16


def test_text_and_integer_ids_are_different_documents(tmp_path):
    text, number = of(tmp_path, {"id": "7", "text": "x"}, {"id": 7, "text": "x"})
    assert text.key != number.key
    assert (text.id, text.id_type, number.id, number.id_type) == ("7", "str", "7", "int")
    assert text.error is number.error is None


@pytest.mark.parametrize("one", [0, -1, 2**63, 10**400, "0", " ", "a\nb", "\x00", "é", "𝄞", "\ud834\udd1e"])
def test_integers_and_texts_of_any_kind_are_ids(tmp_path, one):
    (document,) = of(tmp_path, json.dumps({"id": one, "text": "x"}).encode())
    assert document.error is None
    assert document.id == (str(one) if one != "\ud834\udd1e" else "𝄞")


def test_without_an_id_field_a_document_is_its_file_and_place(tmp_path):
    first, second = of(tmp_path, {"text": "x"}, {"text": "x"}, id_field=None)
    moved = of(tmp_path, {"text": "new"}, {"text": "x"}, id_field=None)
    elsewhere = of(tmp_path, {"text": "x"}, name="b.jsonl", id_field=None)[0]
    assert first.key == place_key(str(tmp_path / "a.jsonl"), "byte 0")
    assert len({first.key, second.key, elsewhere.key}) == 3
    assert moved[0].key == first.key
    assert moved[0].content != first.content
    assert moved[1].key not in (first.key, second.key)
    assert (first.id, first.id_type) == (None, None)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        ({}, "missing_id"), ({"id": None}, "missing_id"), ({"id": ""}, "missing_id"), ({"id": True}, "id_type"),
        ({"id": False}, "id_type"), ({"id": 1.0}, "id_type"), ({"id": 1e400}, "id_type"), ({"id": []}, "id_type"),
        ({"id": ["a"]}, "id_type"), ({"id": {}}, "id_type"), ({"id": "a\ud800"}, "id_type"),
    ],
)  # fmt: skip
def test_what_is_no_id_is_told_and_known_by_place(tmp_path, one, kind):
    line = json.dumps(one | {"text": "x"}).encode()
    found = of(tmp_path, line, line)
    assert [document.error[0] for document in found] == [kind, kind]
    assert "id" in found[0].error[1]
    assert found[0].key == place_key(str(tmp_path / "a.jsonl"), "byte 0")
    assert found[0].key != found[1].key
    assert (found[0].id, found[0].id_type, found[0].text) == (None, None, "x")


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        ({}, "missing_text"), ({"text": 7}, "text_type"), ({"text": 0}, "text_type"), ({"text": False}, "text_type"),
        ({"text": []}, "text_type"), ({"text": {"text": "x"}}, "text_type"), ({"text": 1.5}, "text_type"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_told_and_keeps_its_id(tmp_path, one, kind):
    (document,) = of(tmp_path, one | {"id": "a"})
    assert document.error[0] == kind
    assert "'text'" in document.error[1]
    assert (document.id, document.text) == ("a", "")
    assert document.key == of(tmp_path, {"id": "a", "text": "x"})[0].key


def test_a_null_text_is_an_empty_one(tmp_path):
    null, empty = of(tmp_path, {"id": "a", "text": None}, {"id": "b", "text": ""})
    assert (null.text, null.error) == (empty.text, empty.error) == ("", None)
    assert null.content == empty.content


def test_an_id_that_is_none_is_told_before_a_text_that_is_none(tmp_path):
    assert of(tmp_path, {"id": None})[0].error[0] == "missing_id"


def test_lone_surrogates_become_replacement_characters_and_pairs_characters(tmp_path):
    line = rb'{"id": "a", "text": "x\ud834y\ud834\udd1e\udc00", "k": "\udfff"}'
    (document,) = of(tmp_path, line, keep=["k"])
    assert document.text == "x\ufffdy𝄞\ufffd"
    assert document.keep == {"k": "\ufffd"}
    assert document.error is None


@given(st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=20))
def test_clean_text_can_be_written_and_loses_nothing_but_surrogates(text):
    found = clean(text)
    found.encode()
    surrogates = sum("\ud800" <= c <= "\udfff" for c in text)
    if not surrogates:
        assert found == text
    plain = "".join(c for c in text if c < "\ud800" or ("\ue000" <= c <= "\uffff" and c != "\ufffd"))
    assert "".join(c for c in found if c <= "\uffff" and c != "\ufffd") == plain
    assert len(text) - surrogates <= len(found) <= len(text)


def test_names_with_dots_reach_into_records(tmp_path):
    record = {"meta": {"id": "a", "deep": {"er": "kept"}}, "body": {"text": "x"}}
    item = {"id_field": "meta.id", "text_field": "body.text", "keep": {"meta.deep.er": "k", "meta.deep": "whole"}}
    (document,) = of(tmp_path, record, **item)
    assert (document.id, document.text, document.error) == ("a", "x", None)
    assert document.keep == {"k": "kept", "whole": {"er": "kept"}}


def test_a_field_that_is_named_with_dots_comes_before_the_way_into_a_record(tmp_path):
    (document,) = of(tmp_path, {"id": "a", "a.b": "literal", "a": {"b": "nested"}}, text_field="a.b")
    assert document.text == "literal"


@pytest.mark.parametrize("record", [{}, {"a": None}, {"a": "b"}, {"a": {"c": 1}}, {"a": [{"b": 1}]}, {"b": 1}])
def test_a_way_that_leads_nowhere_is_a_missing_field(tmp_path, record):
    assert reach(record, "a.b") == (False, None)
    assert of(tmp_path, record | {"id": "a"}, text_field="a.b")[0].error[0] == "missing_text"


def test_a_null_at_the_end_of_a_way_is_found():
    assert reach({"a": {"b": None}}, "a.b") == (True, None)


def test_kept_fields_have_their_new_names_and_their_values_as_they_are(tmp_path):
    values = {"n": 7, "x": 1.5, "yes": True, "none": None, "list": [1, "a"], "record": {"b": 1, "a": 2}}
    keep = {name: f"my_{name}" for name in (*values, "absent")}
    (document,) = of(tmp_path, values | {"id": "a", "text": "x"}, keep=keep)
    assert document.keep == {f"my_{name}": value for name, value in values.items()} | {"my_absent": None}
    assert document.fields == document.keep


def content(tmp_path, *, prompt=("text", "title"), **fields):
    record = {"id": "a", "text": "x", "title": "t", "year": 1900} | fields
    return of(tmp_path, record, prompt=prompt, keep={"title": "title", "year": "year"})[0].content


def test_the_content_changes_with_every_field_that_reaches_the_prompt_and_no_other(tmp_path):
    base = content(tmp_path)
    assert len(base) == 8
    assert content(tmp_path) == base
    assert content(tmp_path, text="y") != base
    assert content(tmp_path, title="u") != base
    assert content(tmp_path, title=None) != base
    assert content(tmp_path, year=2000) == base
    assert content(tmp_path, unread="new") == base
    assert content(tmp_path, id="b") == base


def test_the_same_kept_field_counts_once_the_prompt_reads_it(tmp_path):
    prompt = ("text", "year")
    assert content(tmp_path, prompt=prompt, year=1) != content(tmp_path, prompt=prompt, year=2)
    assert content(tmp_path, prompt=prompt, title="u") == content(tmp_path, prompt=prompt)


def test_the_content_tells_values_apart_that_print_alike(tmp_path):
    values = ["1", 1, 1.0, True, None, "None", [], {}, ""]
    assert len({content(tmp_path, title=value) for value in values}) == len(values)


def test_the_content_does_not_depend_on_the_order_of_keys_or_where_text_ends(tmp_path):
    assert content(tmp_path, title={"a": 1, "b": 2}) == content(tmp_path, title={"b": 2, "a": 1})
    assert content(tmp_path, text="xt", title="") != content(tmp_path, text="x", title="t")


def test_the_content_of_a_renamed_field_goes_by_the_name_the_prompt_reads(tmp_path):
    item = {"prompt": ("text", "ours"), "keep": {"theirs": "ours"}}
    one = of(tmp_path, {"id": "a", "text": "x", "theirs": "t"}, **item)[0].content
    assert of(tmp_path, {"id": "a", "text": "x", "theirs": "u"}, **item)[0].content != one
    assert of(tmp_path, {"id": "a", "text": "x", "theirs": "t", "ours": "u"}, **item)[0].content == one


def test_ids_that_run_into_their_type_or_place_do_not_collide():
    assert place_key("a", "b") != place_key("ab", "")
    assert place_key("a.jsonl", "byte 1") != place_key("a.jsonl", "row 1")
