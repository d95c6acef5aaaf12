"""Parquet: which columns are read, where a row stands, and what a broken value or page costs."""

import datetime as dt
import itertools
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import ALL, PROPERTY, documents, read, row, source, write_groups, write_lines
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Split
from batchgen.errors import InputError
from batchgen.sources import parquet


def table(*rows):
    return pa.Table.from_pylist(list(rows))


def write(path, *rows):
    return write_groups(path, table(*rows))


@PROPERTY
@given(
    sizes=st.lists(st.integers(0, 9) | st.just(300), min_size=1, max_size=5),
    target=st.one_of(st.integers(1, 4000), st.just(ALL)),
)
def test_any_row_groups_and_any_target_cover_every_row_once(sizes, target):
    edges = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    groups = [
        pa.table(
            {"id": pa.array(range(begin, end), pa.int64()), "text": pa.array(map(str, range(begin, end)), pa.string())}
        )
        for begin, end in itertools.pairwise(edges)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = write_groups(Path(folder) / "a.parquet", *groups)
        at = source(path, id_field="id")
        cuts = at.cut(begin=0, target_bytes=target)
        found = read(at, path, cuts)
        number = pq.read_metadata(path).num_row_groups
        assert at.facts().rows == edges[-1]
    assert [document.place for document in found] == [f"row {n}" for n in range(edges[-1])]
    assert [(document.id, document.text) for document in found] == [(str(n), str(n)) for n in range(edges[-1])]
    assert [group for start, end in cuts for group in range(start, end)] == list(range(number))


def test_splits_are_no_larger_than_the_target_but_for_one_row_group(tmp_path):
    groups = [table(*[row(n, text="x" * 50 + str(n)) for n in range(begin, begin + 100)]) for begin in (0, 100, 200)]
    path = write_groups(tmp_path / "a.parquet", *groups)
    first, second, third = (pq.read_metadata(path).row_group(group).total_byte_size for group in range(3))
    at = source(path)
    assert at.cut(begin=0, target_bytes=1) == at.cut(begin=0, target_bytes=third) == [(0, 1), (1, 2), (2, 3)]
    assert at.cut(begin=0, target_bytes=first + second) == [(0, 2), (2, 3)]
    assert at.cut(begin=0, target_bytes=ALL) == [(0, 3)]


def test_only_the_columns_of_the_job_are_read(tmp_path):
    never = pa.array([2**40], pa.timestamp("s"))  # the year 36812: Python has no such date
    path = write_groups(tmp_path / "a.parquet", pa.table({"text": ["x"], "k": ["kept"], "never": never}))
    (document,) = documents(path, keep=["k"])
    assert (document.text, document.keep, document.error) == ("x", {"k": "kept"}, None)


def test_columns_are_found_by_name_whatever_their_order(tmp_path):
    one = documents(write(tmp_path / "a.parquet", {"id": "a", "text": "x", "k": 1}), id_field="id", keep=["k"])[0]
    other = documents(write(tmp_path / "b.parquet", {"k": 1, "text": "x", "id": "a"}), id_field="id", keep=["k"])[0]
    assert (one.key, one.content, one.keep) == (other.key, other.content, other.keep)


@pytest.mark.parametrize("what", ["text_field", "id_field"])
def test_a_file_without_a_column_the_job_needs_is_refused_with_the_columns_it_has(tmp_path, what):
    path = write(tmp_path / "a.parquet", {"id": "a", "text": "x", "other": 1})
    item = {"id_field": "id", "text_field": "text"} | {what: "body"}
    with pytest.raises(InputError, match=rf"a\.parquet: has no column 'body' \({what}\); it has: id, text, other"):
        source(path, **item).facts()


@pytest.mark.parametrize("item", [{"keep": ["k"]}, {"keep": ["k.b"]}, {"text_field": "k"}, {"id_field": "k"}])
def test_a_column_that_is_there_twice_is_refused_where_the_job_needs_it(tmp_path, item):
    columns = [pa.array(["x"]), pa.array(["y"]), pa.array([{"b": "z"}])]
    path = write_groups(tmp_path / "a.parquet", pa.table(columns, names=["text", "k", "k"]))
    with pytest.raises(InputError, match=r"a\.parquet: has two columns 'k'"):
        source(path, **item).facts()
    assert source(path).facts().rows == 1
    assert documents(path)[0].text == "x"


def test_a_column_named_with_dots_is_there_twice_on_its_own_account(tmp_path):
    columns = [pa.array(["x"]), pa.array(["y"]), pa.array(["z"])]
    once = write_groups(tmp_path / "a.parquet", pa.table(columns, names=["k.b", "k", "k"]))
    assert source(once, text_field="k.b").facts().rows == 1
    twice = write_groups(tmp_path / "b.parquet", pa.table(columns, names=["k.b", "k.b", "k"]))
    with pytest.raises(InputError, match=r"has two columns 'k\.b'"):
        source(twice, text_field="k.b").facts()


def test_a_kept_column_that_is_missing_is_null(tmp_path):
    path = write(tmp_path / "a.parquet", {"text": "x", "k": 1})
    assert documents(path, keep=["k", "absent"])[0].keep == {"k": 1, "absent": None}
    assert source(path, keep={"k": "ours", "absent": "none"}).facts().kept == {"ours": pa.int64()}


def nested():
    kind = pa.struct([("b", pa.string()), ("c", pa.struct([("d", pa.int32())]))])
    return pa.array([{"b": "in", "c": {"d": 5}}, None, {"b": None, "c": None}], kind)


def test_names_with_dots_reach_into_struct_columns(tmp_path):
    path = write_groups(tmp_path / "a.parquet", pa.table({"a": nested(), "id": [1, 2, 3]}))
    item = {"id_field": "id", "text_field": "a.b", "keep": {"a.c.d": "deep", "a.c": "whole", "a.x": "none"}}
    assert source(path, **item).facts().kept == {"deep": pa.int32(), "whole": pa.struct([("d", pa.int32())])}
    found = documents(path, **item)
    assert [document.text for document in found] == ["in", "", ""]
    assert [document.keep["deep"] for document in found] == [5, None, None]
    assert [document.keep["whole"] for document in found] == [{"d": 5}, None, None]
    # A record that is null has no such field; a field that is null is an empty text, as in JSONL.
    assert [document.error and document.error[0] for document in found] == [None, "missing_text", None]


def test_of_a_struct_column_only_the_fields_of_the_job_are_read(tmp_path):
    columns = {"a": pa.array([{"b": f"in {n}", "junk": "x" * 50 + str(n)} for n in range(200)])}
    path = write_groups(tmp_path / "a.parquet", pa.table(columns))
    group = pq.read_metadata(path).row_group(0)
    junk = next(group.column(n) for n in range(2) if group.column(n).path_in_schema == "a.junk")
    data = bytearray(path.read_bytes())
    begin = junk.dictionary_page_offset or junk.data_page_offset
    data[begin : begin + junk.total_compressed_size] = b"\xff" * junk.total_compressed_size
    path.write_bytes(data)
    assert [document.text for document in documents(path, text_field="a.b")] == [f"in {n}" for n in range(200)]
    with pytest.raises(InputError, match="cannot be read"):
        documents(path, text_field="a.junk")


def test_large_rows_are_decoded_few_at_once(tmp_path, monkeypatch):
    sizes = []
    original = parquet._records
    monkeypatch.setattr(parquet, "_records", lambda batch: sizes.append(batch.num_rows) or original(batch))
    small = [row(n) for n in range(100)]
    large = [row(n, text=f"{n}" * (1 << 20)) for n in range(10, 20)]
    path = write_groups(tmp_path / "a.parquet", table(*small), table(*large))
    assert len(documents(path, id_field="id")) == 110
    assert max(sizes[:4]) == 32
    assert max(sizes[4:]) <= 4


def test_a_column_that_is_named_with_dots_comes_before_the_way_into_a_struct(tmp_path):
    columns = {"a": nested(), "a.b": ["one", "two", "three"]}
    path = write_groups(tmp_path / "a.parquet", pa.table(columns))
    assert [document.text for document in documents(path, text_field="a.b")] == ["one", "two", "three"]
    only = write_groups(tmp_path / "b.parquet", pa.table({"a.b": ["one"]}))
    assert source(only, text_field="a.b", keep={"a.b": "k"}).facts().kept == {"k": pa.string()}
    assert documents(only, text_field="a.b")[0].text == "one"


def test_a_way_through_a_column_that_is_no_struct_leads_nowhere(tmp_path):
    path = write(tmp_path / "a.parquet", {"text": "x", "flat": "y"})
    with pytest.raises(InputError, match="has no column 'flat\\.b'"):
        source(path, text_field="flat.b").facts()


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.uint16(), pa.int64(), pa.uint64()])
def test_an_integer_id_is_the_same_in_every_width_and_format(tmp_path, kind):
    path = write_groups(tmp_path / "a.parquet", pa.table({"id": pa.array([7], kind), "text": ["x"]}))
    json = write_lines(tmp_path / "a.jsonl", {"id": 7, "text": "x"})
    assert documents(path, id_field="id")[0].key == documents(json, id_field="id")[0].key


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_columns_of_every_kind_are_text(tmp_path, kind):
    path = write_groups(tmp_path / "a.parquet", pa.table({"id": pa.array(["a"], kind), "text": pa.array(["x"], kind)}))
    (document,) = documents(path, id_field="id")
    assert (document.id, document.id_type, document.text, document.error) == ("a", "str", "x", None)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (pa.array([1.0]), "id_type"), (pa.array([True]), "id_type"), (pa.array([b"a"]), "id_type"),
        (pa.array([None], pa.string()), "missing_id"), (pa.array([None], pa.int64()), "missing_id"),
        (pa.array([""]), "missing_id"), (pa.array([dt.date(2020, 1, 1)]), "id_type"), (pa.array([["a"]]), "id_type"),
    ],
)  # fmt: skip
def test_columns_that_hold_no_ids_are_told_row_by_row(tmp_path, values, error):
    path = write_groups(tmp_path / "a.parquet", pa.table({"id": values, "text": ["x"]}))
    assert documents(path, id_field="id")[0].error[0] == error


@pytest.mark.parametrize("values", [pa.array([1]), pa.array([["x"]]), pa.array([{"a": "x"}])])
def test_a_text_column_that_is_no_text_is_told_row_by_row(tmp_path, values):
    path = write_groups(tmp_path / "a.parquet", pa.table({"text": values}))
    assert documents(path)[0].error[0] == "text_type"


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
def test_a_column_of_bytes_is_text_where_it_is_utf8(tmp_path, kind):
    values = pa.array(["day é 𝄞".encode(), b"\xff", None, b""]).cast(kind)
    path = write_groups(tmp_path / "a.parquet", pa.table({"id": ["a", "b", "c", "d"], "text": values}))
    found = documents(path, id_field="id")
    assert [document.text for document in found] == ["day é 𝄞", "", "", ""]
    assert [document.error for document in found] == [
        None, ("text_type", "field 'text' is no text but bytes that are no UTF-8"), None, None,
    ]  # fmt: skip
    assert [document.id for document in found] == ["a", "b", "c", "d"]


def test_a_null_column_is_empty_text(tmp_path):
    path = write_groups(tmp_path / "a.parquet", pa.table({"text": pa.nulls(2)}))
    assert [(document.text, document.error) for document in documents(path)] == [("", None), ("", None)]


def raw_texts(*values):
    """A text column of any bytes, as writers that do not check leave it."""
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("text", raw_texts(b"one", b"t\xff", b"three")),
        ("k", raw_texts(b"one", b"\xc3", b"three")),
        ("k", pa.array([0, 2**40, 1], pa.timestamp("s"))),
        ("k", pa.array([0, 2**30, 1], pa.date32())),
    ],
)
def test_a_value_that_python_cannot_hold_harms_its_own_row_only(tmp_path, name, values):
    columns = {"text": pa.array(["one", "two", "three"])} | {name: values}
    path = write_groups(tmp_path / "a.parquet", pa.table(columns))
    first, broken, last = documents(path, keep=["k"])
    assert (first.text, first.error, last.text, last.error) == ("one", None, "three", None)
    assert (broken.error[0], broken.place) == ("bad_value", "row 1")
    assert broken.error[1].startswith("row 1: ")


def damaged(path, groups=2, rows=50):
    """A file whose last row group has bytes that are no pages."""
    tables = [table(*[row(n) for n in range(g * rows, (g + 1) * rows)]) for g in range(groups)]
    write_groups(path, *tables)
    columns = [pq.read_metadata(path).row_group(groups - 1).column(n) for n in range(2)]
    data = bytearray(path.read_bytes())
    for column in columns:
        begin = column.dictionary_page_offset or column.data_page_offset
        data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    return path


def test_a_broken_page_ends_the_file_with_its_row_after_the_whole_rows_before_it(tmp_path):
    path = damaged(tmp_path / "a.parquet")
    at = source(path, id_field="id")
    found = []
    with pytest.raises(InputError, match=r"a\.parquet: row 50: cannot be read: \S+") as e:
        found.extend(at.read(Split(0, 0, str(path), 0, 2)))
    assert [document.id for document in found] == [f"d{n}" for n in range(50)]
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_without_a_footer_is_named_with_the_reason(tmp_path, data):
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet: no readable Parquet file: \S+") as e:
        source(path).facts()
    assert "\n" not in str(e.value)


def test_a_truncated_file_is_refused_before_a_row_is_read(tmp_path):
    path = write(tmp_path / "a.parquet", *[row(n) for n in range(20)])
    data = path.read_bytes()
    for left in range(0, len(data), 97):
        path.write_bytes(data[:left])
        with pytest.raises(InputError):
            source(path).facts()


def test_a_file_without_rows_has_no_documents(tmp_path):
    path = write_groups(tmp_path / "a.parquet", table(row(0)).slice(0, 0))
    assert source(path).facts().rows == 0
    assert documents(path) == []


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    path = write(tmp_path / "k=7" / "a.parquet", row(0))
    assert documents(path, keep=["k"])[0].keep == {"k": None}


def test_only_the_row_groups_of_the_places_are_read(tmp_path):
    at = source(damaged(tmp_path / "a.parquet", groups=3), id_field="id")
    assert [one.document.id for one in at.fetch(["row 99", "row 0", "row 50"])] == ["d0", "d50", "d99"]
    with pytest.raises(InputError, match=r"row 100: cannot be read"):
        list(at.fetch(["row 120"]))


def test_a_row_that_cannot_be_held_is_fetched_without_a_record(tmp_path):
    path = write_groups(tmp_path / "a.parquet", pa.table({"text": raw_texts(b"one", b"t\xff", b"three")}))
    was = documents(path)
    found = list(source(path).fetch([document.place for document in was]))
    assert [one.record for one in found] == [{"text": "one"}, None, {"text": "three"}]
    assert [one.raw for one in found] == [None, None, None]
    assert [one.document.key for one in found] == [document.key for document in was]
