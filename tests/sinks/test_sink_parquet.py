"""Parts as Parquet: every column, kept values that do not fit, footers, damage, and what other tools see."""

import datetime as dt
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers_data import document, hexes, placed, record

from batchgen.data import Record
from batchgen.job.config import COLUMNS
from batchgen.sinks.base import DamagedPartError
from batchgen.sinks.columns import KEPT_FIELD_UNFIT
from batchgen.sinks.parquet import ParquetSink, settled_types


@pytest.fixture
def part(tmp_path):
    return tmp_path / "part-00001-00000-000001.parquet"


def write(path, *records, kept=None, footer=None, fingerprint="f00d"):
    sink = ParquetSink(kept or {}, owner="00000")
    sink.write_part(path, records, fingerprint=fingerprint, footer=footer or {"version": 1})
    return sink


def rows(path):
    with pq.ParquetFile(path) as file:
        return file.read().to_pylist()


def test_every_column_holds_what_the_record_tells(part):
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
    full = Record(
        document(7, source="data/ä.jsonl", place="byte 70", keep={"title": "T", "year": 1999}, whole_chars=321),
        "ok",
        summary="A summary,\nof two lines: 𝄞 \u2028",
        error_type="a type",
        error="a sentence",
        finish_reason="length",
        flags=("summary_cut", "copied"),
        prompt_tokens=1,
        cached_tokens=2,
        completion_tokens=3,
        reasoning_tokens=6,
        dropped_tokens=7,
        pack_size=8,
        pack_fallback="missing",
        requests=4,
        pieces=9,
        depth=10,
        attempts=5,
        finished_at=at,
    )
    write(part, full, kept={"title": pa.string(), "year": pa.int64()}, fingerprint="0123456789abcdef")
    assert rows(part) == [
        {
            "id": "d7", "id_type": "str", "title": "T", "year": 1999, "summary": "A summary,\nof two lines: 𝄞 \u2028",
            "status": "ok", "error_type": "a type", "error": "a sentence", "finish_reason": "length",
            "flags": ["summary_cut", "copied"], "document_chars": 321,
            "prompt_tokens": 1, "cached_tokens": 2, "completion_tokens": 3,
            "reasoning_tokens": 6, "dropped_tokens": 7, "pack_size": 8, "pack_fallback": "missing",
            "requests": 4, "pieces": 9, "depth": 10, "attempts": 5,
            "source": "data/ä.jsonl", "place": "byte 70", "doc_key": full.document.key.hex(),
            "content_hash": full.document.content.hex(), "fingerprint": "0123456789abcdef", "finished_at": at,
        }
    ]  # fmt: skip


def test_the_columns_are_those_the_job_file_keeps_for_us_with_kept_fields_after_the_id(part):
    write(part, record(0), kept={"title": pa.string()})
    names = pq.read_schema(part).names
    assert names[:3] == ["id", "id_type", "title"]
    # Columns that later versions fill are reserved, none of ours is missing there.
    assert set(names) - {"title"} <= set(COLUMNS)


def test_a_document_without_an_id_and_a_record_without_a_summary_have_nulls(part):
    at = placed(document(1, id=None, id_type=None))
    write(part, record(at, "failed", error_type="bad_json", error="line 2"), kept={"title": pa.string()})
    (row,) = rows(part)
    assert [row[name] for name in ("id", "id_type", "title", "summary", "finish_reason")] == [None] * 5
    assert row["flags"] == []


def test_columns_of_nothing_but_nulls_have_their_type(part):
    bare = record(document(0, id=None, id_type=None), "skipped")
    write(part, bare, kept={"title": pa.string(), "year": pa.int32()})
    schema = pq.read_schema(part)
    assert not any(pa.types.is_null(kind) for kind in schema.types)
    assert schema.field("summary").type == schema.field("error").type == pa.string()
    assert schema.field("flags").type == pa.list_(pa.string())
    assert schema.field("year").type == pa.int32()
    assert schema.field("finished_at").type == pa.timestamp("us", tz="UTC")


def kept(path, values, kind):
    """(values, flags) of a kept column after a round trip."""
    write(
        path,
        *[record(document(n, keep={"k": value}), flags=("copied",)) for n, value in enumerate(values)],
        kept={"k": kind},
    )
    assert pq.read_schema(path).field("k").type == kind
    found = rows(path)
    assert all(row["flags"][0] == "copied" for row in found)
    return [row["k"] for row in found], [KEPT_FIELD_UNFIT in row["flags"] for row in found]


DATE, MOMENT = dt.date(2020, 2, 29), dt.datetime(2020, 2, 29, 12, 30)  # noqa: DTZ001  a column may have no zone


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", "", None, "𝄞\u2028\x00"], pa.string()),
        ([1, -(2**63), None, 2**63 - 1], pa.int64()),
        ([1.0, None, 2.0], pa.int64()),
        ([1.5, None, -0.0, float("inf"), 3], pa.float64()),
        ([1.5, float("inf"), None, 3, -0.25], pa.float32()),
        ([True, None, False], pa.bool_()),
        ([[1, 2], [], None], pa.list_(pa.int64())),
        ([{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])),
        ([b"\x00\xff", None], pa.binary()),
        ([DATE, None], pa.date32()),
        ([MOMENT, None], pa.timestamp("us")),
        ([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
    ],
)
def test_kept_values_come_back_as_they_were(part, values, kind):
    assert kept(part, values, kind) == (values, [False] * len(values))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_in_a_text_column_other_values_are_their_json(part, kind):
    values = [7, 1.5, True, ["a", 1], {"b": None}, "7", None]
    found, flags = kept(part, values, kind)
    assert found == ["7", "1.5", "true", '["a", 1]', '{"b": null}', "7", None]
    assert not any(flags)
    dates, _ = kept(part, [[DATE, MOMENT, b"\x00"]], kind)
    assert json.loads(dates[0]) == ["2020-02-29", "2020-02-29T12:30:00", "AA=="]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, "a", 3], pa.int64()),
        ([1, 2**63, 3], pa.int64()),
        ([1, 1.5, 3], pa.int64()),
        ([1, 1e30, 3], pa.int64()),
        ([1, float("nan"), 3], pa.int64()),
        ([1, [2], 3], pa.int64()),
        ([1, 300, 3], pa.int8()),
        ([1, -1, 3], pa.uint8()),
        ([1, True, 3], pa.int64()),
        ([1.0, 2**53 + 1, 3.0], pa.float64()),
        ([True, 1, False], pa.bool_()),
        ([DATE, 5, DATE], pa.date32()),
        ([DATE, MOMENT, DATE], pa.date32()),
        ([MOMENT, 5, MOMENT], pa.timestamp("us")),
        ([MOMENT, 5.5, MOMENT], pa.timestamp("us")),
        ([MOMENT, "2020", MOMENT], pa.timestamp("us")),
        ([["a"], "ab", []], pa.list_(pa.string())),
        ([[1], [2, 1.5], []], pa.list_(pa.int64())),
        ([[1], [1.5], [2]], pa.list_(pa.int64(), 1)),
        ([[1], [2, None, True], []], pa.list_(pa.int64())),
        ([[{"a": 1}], [{"a": 1.5}], []], pa.list_(pa.struct([("a", pa.int64())]))),
        ([{"a": 1}, {"a": "x"}, {"a": 2}], pa.struct([("a", pa.int64())])),
        ([{"a": 1}, {"a": 1, "z": 2}, {"a": 2}], pa.struct([("a", pa.int64())])),
        ([b"a", 5, b"b"], pa.binary()),
        ([1.5, 1e300, -0.5], pa.float32()),
        ([1.5, 0.1, -0.5], pa.float32()),
        ([1.0, 2**24 + 1, 2.0], pa.float32()),
        ([1.0, 10**400, 2.0], pa.float32()),
        ([1.5, 70000, 2.0], pa.float16()),
        ([[1.5], [1e300], []], pa.list_(pa.float32())),
    ],
)
def test_a_kept_value_that_does_not_fit_is_null_and_flagged_and_the_others_stay(part, values, kind):
    found, flags = kept(part, values, kind)
    assert found == [values[0], None, values[2]]
    assert flags == [False, True, False]


def test_a_text_with_a_lone_surrogate_inside_a_kept_list_is_null_and_flagged(part):
    assert kept(part, [["a\udc80"], ["b"]], pa.list_(pa.string())) == ([None, ["b"]], [True, False])


def test_a_kept_value_that_nests_too_deep_for_json_is_null_and_flagged(part):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    try:
        assert kept(part, ["a", deep, "c"], pa.string()) == (["a", None, "c"], [False, True, False])
    finally:
        while deep:  # unwound by hand: the interpreter would do it recursively
            (deep,) = deep


def test_two_kept_values_that_do_not_fit_flag_their_row_once(part):
    at = document(0, keep={"a": "x", "b": "y"})
    write(part, record(at), kept={"a": pa.int64(), "b": pa.int64()})
    assert rows(part)[0]["flags"] == [KEPT_FIELD_UNFIT]


def test_kept_fields_the_sink_does_not_know_are_left_out_and_those_a_record_lacks_are_null(part):
    write(part, record(document(0, keep={"other": 1})), kept={"k": pa.int64()})
    assert rows(part)[0]["k"] is None
    assert "other" not in rows(part)[0]


def parts_of(folder, *columns):
    """A part for each array, with the array as kept column `k`."""
    paths = []
    for number, values in enumerate(columns):
        path = folder / f"part-{number}.parquet"
        records = [record(document(n, keep={"k": value})) for n, value in enumerate(values.to_pylist())]
        write(path, *records, kept={"k": values.type})
        paths.append(path)
    return paths


def test_without_parts_the_types_are_those_of_the_input():
    assert settled_types([], {"k": pa.int32()}) == {"k": pa.int32()}


@pytest.mark.parametrize(
    ("old", "wanted", "settled"),
    [
        (pa.array([1], pa.int64()), pa.int64(), pa.int64()),
        (pa.array([1], pa.int32()), pa.int64(), pa.int64()),
        (pa.array([1], pa.int64()), pa.int32(), pa.int64()),
        (pa.array([1], pa.int64()), pa.float64(), pa.float64()),
        (pa.array([2**53 + 1], pa.int64()), pa.float64(), pa.int64()),  # no float holds it
        (pa.array([1], pa.int64()), pa.string(), pa.string()),
        (pa.array(["a"]), pa.int64(), pa.string()),
        (pa.array([True]), pa.int64(), pa.string()),
        (pa.array([[1]], pa.list_(pa.int32())), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.array([[1]], pa.list_(pa.int32())), pa.string(), pa.list_(pa.int32())),  # no reader makes text of lists
        (pa.array([b"\xff"]), pa.string(), pa.binary()),
        (pa.array([0.1], pa.float32()), pa.float64(), pa.float64()),
        (pa.array([None], pa.int64()), pa.null(), pa.int64()),
    ],
)
def test_a_type_widens_only_where_the_parts_there_can_be_read_as_the_wider(tmp_path, old, wanted, settled):
    parts = parts_of(tmp_path, old)
    assert settled_types(parts, {"k": wanted}) == {"k": settled}
    # Whatever it is, pyarrow reads old and new parts as one table with the schema of the newest, and nothing is lost.
    write(tmp_path / "part-9.parquet", record(document(9, keep={"k": None})), kept={"k": settled})
    schema = pq.read_schema(tmp_path / "part-9.parquet")
    found = ds.dataset(tmp_path, schema=schema).to_table().column("k").to_pylist()
    asked = old.to_pylist() if not pa.types.is_string(settled) else old.cast(pa.string()).to_pylist()
    assert found == [*asked, None]


def test_a_damaged_part_decides_on_no_type(tmp_path):
    first, second = parts_of(tmp_path, pa.array([1], pa.int32()), pa.array([2], pa.int64()))
    assert settled_types([first, second], {"k": pa.int32()}) == {"k": pa.int64()}
    second.write_bytes(b"damaged")
    assert settled_types([first, second], {"k": pa.int32()}) == {"k": pa.int32()}


def test_pyarrow_reads_a_folder_of_parts_as_one_table(tmp_path):
    folder = tmp_path / "year=7" / "summaries"
    written = [record(document(n, keep={"year": n if n % 2 else None})) for n in range(30)]
    for begin in range(0, 30, 10):
        write(folder / f"part-{begin}.parquet", *written[begin : begin + 10], kept={"year": pa.int64()})
    ParquetSink({}, owner="00000").drop(folder / "part-10.parquet", hexes(*range(10, 15)), to=None)
    table = ds.dataset(folder).to_table().sort_by("id")
    left = sorted(f"d{n}" for n in range(30) if not 10 <= n < 15)
    assert table.column("id").to_pylist() == left
    assert table.column("summary").to_pylist() == [f"summary of {one}" for one in left]
    # A folder named like a partition does not change what batchgen itself reads.
    own = ParquetSink({}, owner="00000").read(folder / "part-0.parquet", ["year"]).column("year").to_pylist()
    assert own == [n if n % 2 else None for n in range(10)]


@pytest.mark.parametrize("metadata", [None, {b"batchgen": b"{"}, {b"other": b"{}"}])
def test_a_parquet_file_of_somebody_else_is_no_part(part, metadata):
    write(part, record(0))
    with pq.ParquetFile(part) as file:
        table = file.read().replace_schema_metadata(metadata)
    pq.write_table(table, part)
    with pytest.raises(DamagedPartError, match="footer"):
        ParquetSink({}, owner="00000").read_keys(part)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("doc_key", [None]),
        ("doc_key", ["zz" * 16]),
        ("doc_key", ["ab"]),
        ("content_hash", ["é" * 16]),
        ("doc_key", [7]),
    ],
)
def test_keys_that_are_none_are_damage(part, name, values):
    write(part, record(0))
    with pq.ParquetFile(part) as file:
        table = file.read()
    table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, part)
    with pytest.raises(DamagedPartError):
        ParquetSink({}, owner="00000").read_keys(part)


def test_no_flipped_byte_gives_other_keys(part):
    """Pages carry checksums: without them three of ten flips here gave other keys, and nobody would have known."""
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)  # the same bytes in every run
    sink = write(part, *[record(n, finished_at=at) for n in range(40)], footer={"version": 1, "files": {}})
    data, want = part.read_bytes(), sink.read_keys(part)
    damaged = 0
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 0x41
        part.write_bytes(flipped)
        try:
            held = sink.read_keys(part)
        except DamagedPartError:
            damaged += 1
        else:
            assert np.array_equal(held.keys, want.keys)
            assert np.array_equal(held.content, want.content)
            assert held.sources == want.sources
    assert damaged > len(data) // 7 // 4


def test_no_truncated_part_is_read(part):
    sink = write(part, *map(record, range(10)))
    data = part.read_bytes()
    for left in range(0, len(data), 53):
        part.write_bytes(data[:left])
        with pytest.raises(DamagedPartError):
            sink.read_keys(part)


def test_damage_in_a_column_that_a_resume_does_not_read_shows_when_the_part_is_rewritten(part):
    sink = write(part, *[record(document(n), summary=f"{n} summary " * 20) for n in range(50)])
    meta = pq.read_metadata(part).row_group(0)
    column = next(meta.column(n) for n in range(meta.num_columns) if meta.column(n).path_in_schema == "summary")
    data = bytearray(part.read_bytes())
    data[column.dictionary_page_offset + 60] ^= 0xFF
    part.write_bytes(data)
    assert len(sink.read_keys(part).keys) == 50
    with pytest.raises(DamagedPartError):
        sink.drop(part, hexes(0), to=None)
    assert part.read_bytes() == data
