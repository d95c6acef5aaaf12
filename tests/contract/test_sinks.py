"""What every Sink promises, tried on each: parts whole or not at all, rows as they were written, rows taken out."""

import errno
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import PROPERTY, document, hexes, placed, record
from hypothesis import given
from hypothesis import strategies as st

from batchgen.errors import OutputError
from batchgen.sinks import columns
from batchgen.sinks.base import DamagedPartError
from batchgen.sinks.jsonl import JsonlSink
from batchgen.sinks.parquet import ParquetSink

FOOTER = {"version": 1, "attempt": 3, "splits": [0, 4], "files": {"ä.jsonl": {"rows": 2, "size": 2**40}}}


# Any text of which the lone surrogates were cleaned away, control characters and line separators included.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('\0\n\r\x0b\x1c\x7f\x85\u2028\u2029\ufeff"\\,')
)
IDS = st.tuples(TEXT, st.just("str")) | st.tuples(
    (st.integers() | st.integers(-(10**400), 10**400)).map(str), st.just("int")
) | st.just((None, None))  # fmt: skip


@st.composite
def st_records(draw):
    id_text, id_type = draw(IDS)
    at = document(
        draw(st.integers(0, 1 << 60)),
        id=id_text,
        id_type=id_type,
        source=draw(TEXT),
        keep={"k": draw(TEXT | st.none())},
    )
    flags = draw(st.lists(st.sampled_from(["copied", "summary_cut"]), max_size=2))
    return record(at, summary=draw(TEXT | st.none()), error=draw(TEXT | st.none()), flags=tuple(flags))


SINKS = {"parquet": ParquetSink, "jsonl": JsonlSink}
KEPT = {"title": pa.string(), "year": pa.int64()}


@pytest.fixture(params=SINKS)
def sink(request):
    return SINKS[request.param](KEPT, owner="00000")


@pytest.fixture
def part(tmp_path, sink):
    return tmp_path / "summaries" / f"part-00001-00000-000001{sink.suffix}"


def write(sink, path, *records, footer=FOOTER):
    sink.write_part(path, records, fingerprint="f00d", footer=footer)


def ids(sink, path):
    return sink.read(path, ["id"]).column("id").to_pylist()


def visible(folder):
    """Names in the folder that a reader of summaries sees."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def temporary(folder):
    return list(folder.glob(".tmp-*"))


def test_a_part_tells_its_keys_contents_sources_and_footer_in_order(sink, part):
    records = [record(document(n, source=f"s{n % 3}.jsonl", text=f"text {n}")) for n in range(50)]
    write(sink, part, *records)
    held = sink.read_keys(part)
    assert (held.keys.shape, held.content.shape) == ((50, 16), (50, 8))
    assert [key.tobytes() for key in held.keys] == [one.document.key for one in records]
    assert [content.tobytes() for content in held.content] == [one.document.content for one in records]
    assert held.sources.to_pylist() == [one.document.source for one in records]
    assert held.footer == FOOTER


def test_a_part_gives_back_the_columns_that_are_asked_for(sink, part):
    write(sink, part, record(0), record(1, "failed", error_type="bad_json", error="line 1"))
    table = sink.read(part, ["status", "summary"])
    assert table.to_pylist() == [{"status": "ok", "summary": "summary of d0"}, {"status": "failed", "summary": None}]
    assert table.column_names == ["status", "summary"]


def test_all_columns_come_back_with_their_types(sink, part):
    flagged = record(document(1, id="12345678901234567890", id_type="int"), flags=("copied",), prompt_tokens=7)
    bare = record(placed(document(2, id=None, id_type=None)), "failed", error_type="bad_json", error="line 3")
    records = [record(0), flagged, bare]
    write(sink, part, *records)
    names = list(columns.TYPES)
    table = sink.read(part, names)
    assert table.schema == pa.schema(columns.TYPES)
    want = [{name: columns.row(one, (), fingerprint="f00d")[name] for name in names} for one in records]
    assert table.to_pylist() == want


def test_rows_have_all_columns_in_order_with_kept_values_as_they_were(sink, part):
    records = [
        record(document(0, keep={"title": "T \u2028", "year": 1999})),
        record(document(1, id="-5", id_type="int", keep={"year": None})),
    ]
    write(sink, part, *records)
    found = sink.rows(part)
    assert found == [columns.row(one, KEPT, fingerprint="f00d") for one in records]
    assert [list(row) for row in found] == [columns.order(KEPT)] * 2


def test_types_of_the_kept_fields_hold_the_values_of_all_parts(sink, part):
    second = part.with_name(part.name.replace("000001", "000002"))
    write(sink, part, record(document(0, keep={"year": 1999})))
    write(sink, second, record(document(1, keep={"title": "T", "year": None})))
    assert sink.kept_types([part, second]) == KEPT
    assert sink.kept_types([]) == {}


def test_a_column_that_no_part_has_is_damage(sink, part):
    write(sink, part, record(0))
    with pytest.raises(DamagedPartError, match="nonsense"):
        sink.read(part, ["id", "nonsense"])


def test_readers_of_the_folder_see_the_part_and_nothing_else(sink, part):
    write(sink, part, record(0))
    assert visible(part.parent) == [part.name]
    assert temporary(part.parent) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_no_part_and_no_rest(sink, part, monkeypatch, call):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    part.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OutputError, match=rf"{part.name}: cannot be written: No space left on device"):
            write(sink, part, record(0))
    assert list(part.parent.iterdir()) == []


def test_the_footer_is_told_without_the_rows_and_stays_when_some_are_dropped(sink, part):
    write(sink, part, *map(record, range(6)))
    assert sink.footer(part) == FOOTER
    sink.drop(part, hexes(1, 4), to=None)
    assert sink.footer(part) == FOOTER


def test_dropped_rows_are_gone_and_the_others_stay_as_they_were(sink, part):
    write(sink, part, *[record(document(n, keep={"title": f"t{n}", "year": n})) for n in range(6)])
    before = sink.rows(part)
    sink.drop(part, hexes(1, 4, 99), to=None)
    assert sink.rows(part) == [before[n] for n in (0, 2, 3, 5)]
    assert sink.read_keys(part).footer == FOOTER
    assert visible(part.parent) == [part.name]
    assert temporary(part.parent) == []


def test_a_part_without_rows_is_removed(sink, part):
    write(sink, part, record(0), record(1))
    sink.drop(part, hexes(0, 1), to=None)
    assert list(part.parent.iterdir()) == []


def test_dropped_rows_move_to_another_part(sink, part):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, *map(record, range(4)))
    sink.drop(part, hexes(1, 3), to=other)
    assert (ids(sink, part), ids(sink, other)) == (["d0", "d2"], ["d1", "d3"])
    assert sink.read_keys(other).footer == FOOTER


def test_rows_that_move_later_join_those_that_moved_before(sink, part):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, *map(record, range(4)))
    sink.drop(part, hexes(3), to=other)
    sink.drop(part, hexes(0, 1, 2), to=other)
    assert not part.exists()
    assert ids(sink, other) == ["d3", "d0", "d1", "d2"]


def test_a_move_that_was_cut_short_after_its_first_step_is_finished_without_a_double(sink, part):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, *map(record, range(4)))
    before = {path: path.read_bytes() for path in part.parent.iterdir()}
    sink.drop(part, hexes(1, 3), to=other)
    for path, data in before.items():  # the rows have moved, the part still holds them
        path.write_bytes(data)
    sink.drop(part, hexes(1, 3), to=other)
    assert (ids(sink, part), ids(sink, other)) == (["d0", "d2"], ["d1", "d3"])


def test_a_move_whose_second_step_fails_loses_no_row(sink, part, monkeypatch):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, *map(record, range(4)))
    replace = os.replace

    def fail_second(aside, to, **more):
        if to == part:
            raise OSError(errno.EIO, "Input/output error")
        replace(aside, to, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_second)
        with pytest.raises(OutputError, match="Input/output error"):
            sink.drop(part, hexes(1, 3), to=other)
    assert ids(sink, part) == ["d0", "d1", "d2", "d3"]
    assert ids(sink, other) == ["d1", "d3"]
    sink.drop(part, hexes(1, 3), to=other)
    assert (ids(sink, part), ids(sink, other)) == (["d0", "d2"], ["d1", "d3"])


def test_a_move_into_a_part_that_cannot_be_read_is_refused_with_its_name_and_moves_nothing(sink, part):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, record(0), record(1))
    other.parent.mkdir()
    other.write_bytes(b"nothing")
    with pytest.raises(OutputError, match=rf"orphans/{part.name}: cannot be read"):
        sink.drop(part, hexes(0), to=other)
    assert ids(sink, part) == ["d0", "d1"]


@pytest.mark.parametrize("damage", [b"", b"not a part", None])
def test_what_is_no_part_is_damaged_whatever_is_asked_of_it(sink, part, damage):
    write(sink, part, *map(record, range(20)))
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2] if damage is None else damage)
    asks = [sink.read_keys, lambda path: sink.read(path, ["id"]), lambda path: sink.drop(path, hexes(0), to=None)]
    for ask in asks:
        with pytest.raises(DamagedPartError) as e:
            ask(part)
        assert str(e.value)
        assert "\n" not in str(e.value)


def test_a_part_moves_with_all_that_belongs_to_it(sink, part):
    write(sink, part, record(0))
    folder = part.parent.parent / "damaged"
    sink.move(part, folder)
    assert list(part.parent.iterdir()) == []
    assert sink.read_keys(folder / part.name).footer == FOOTER
    sink.move(part, folder)  # a start that was cut short does it again
    assert ids(sink, folder / part.name) == ["d0"]


def test_a_disk_that_does_not_answer_is_no_damage(sink, part, monkeypatch):
    write(sink, part, record(0))

    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetFile", broken)
        patch.setattr(type(part), "open", broken)
        with pytest.raises(OutputError, match="Input/output error"):
            sink.read_keys(part)


@pytest.mark.parametrize("kind", SINKS)
@PROPERTY
@given(records=st.lists(st_records(), min_size=1, max_size=6, unique_by=lambda one: one.document.key))
def test_a_sink_gives_back_what_it_was_given(kind, records):
    sink = SINKS[kind]({"k": pa.string()}, owner="00000")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"part-1{sink.suffix}"
        write(sink, path, *records)
        want = [columns.row(one, ["k"], fingerprint="f00d") for one in records]
        assert sink.rows(path) == want
        assert sink.read(path, ["id", "summary", "flags"]).to_pylist() == [
            {name: row[name] for name in ("id", "summary", "flags")} for row in want
        ]
        held = sink.read_keys(path)
        assert [key.tobytes() for key in held.keys] == [one.document.key for one in records]
        assert held.sources.to_pylist() == [one.document.source for one in records]


def test_a_part_that_is_not_there_is_damaged(sink, part):
    with pytest.raises(DamagedPartError):
        sink.read_keys(part)
