"""What every Sink promises, tried on each: parts whole or not at all, rows as they were written, rows taken out."""

import errno
import os

import pyarrow as pa
import pytest
from helpers_data import document, hexes, record

from batchgen.errors import OutputError
from batchgen.sinks.base import DamagedPartError
from batchgen.sinks.parquet import ParquetSink

FOOTER = {"version": 1, "attempt": 3, "splits": [0, 4], "files": {"ä.jsonl": {"rows": 2, "size": 2**40}}}


@pytest.fixture(params=[ParquetSink], ids=["parquet"])
def sink(request):
    return request.param({"title": pa.string(), "year": pa.int64()}, owner="00000")


@pytest.fixture
def part(tmp_path, sink):
    return tmp_path / "summaries" / f"part-00001-00000-000001{sink.suffix}"


def write(sink, path, *records, footer=FOOTER):
    sink.write_part(path, records, fingerprint="f00d", footer=footer)


def ids(sink, path):
    return sink.read(path, ["id"]).column("id").to_pylist()


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


def test_a_column_that_no_part_has_is_damage(sink, part):
    write(sink, part, record(0))
    with pytest.raises(DamagedPartError, match="nonsense"):
        sink.read(part, ["id", "nonsense"])


def test_the_folder_holds_the_part_and_nothing_else(sink, part):
    write(sink, part, record(0))
    assert [path.name for path in part.parent.iterdir()] == [part.name]


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


def test_dropped_rows_are_gone_and_the_others_stay_as_they_were(sink, part):
    write(sink, part, *[record(document(n, keep={"title": f"t{n}", "year": n})) for n in range(6)])
    columns = ["id", "title", "year", "summary", "doc_key", "finished_at", "fingerprint"]
    before = sink.read(part, columns).to_pylist()
    sink.drop(part, hexes(1, 4, 99), to=None)
    assert sink.read(part, columns).to_pylist() == [before[n] for n in (0, 2, 3, 5)]
    assert sink.read_keys(part).footer == FOOTER
    assert [path.name for path in part.parent.iterdir()] == [part.name]


def test_a_part_without_rows_is_removed(sink, part):
    write(sink, part, record(0), record(1))
    sink.drop(part, hexes(0, 1), to=None)
    assert not part.exists()


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


def test_a_move_that_was_cut_short_after_its_first_step_is_finished_without_a_double(sink, part, monkeypatch):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, *map(record, range(4)))
    whole = part.read_bytes()
    sink.drop(part, hexes(1, 3), to=other)
    part.write_bytes(whole)  # the rows have moved, the part still holds them
    sink.drop(part, hexes(1, 3), to=other)
    assert (ids(sink, part), ids(sink, other)) == (["d0", "d2"], ["d1", "d3"])


def test_a_move_whose_second_step_fails_loses_no_row(sink, part, monkeypatch):
    other = part.parent.parent / "orphans" / part.name
    write(sink, part, *map(record, range(4)))
    replace, calls = os.replace, []

    def fail_second(*names, **more):
        calls.append(names)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        replace(*names, **more)

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


def test_a_part_that_is_not_there_is_damaged(sink, part):
    with pytest.raises(DamagedPartError):
        sink.read_keys(part)
