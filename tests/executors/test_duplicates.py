"""Ids that stand twice are found over all inputs, with both places; memory is bounded, nothing else is read."""

import pyarrow as pa
import pytest
from helpers_data import job, row, write_groups, write_lines

from batchgen import plan
from batchgen.errors import InputError
from batchgen.executors import duplicates


def find(at, **more):
    return duplicates.find(at, plan.discover(at), among=set(range(len(at.input))), **more)


def pairs(found):
    return [(one.id, one.first.rpartition("/")[2], one.second.rpartition("/")[2]) for one in found.shown]


def test_both_places_are_told_in_every_format_and_over_inputs(tmp_path):
    write_lines(tmp_path / "a.jsonl", row(1), b"", row(2), row(1))
    write_lines(tmp_path / "b.jsonl", row(3), row(2))
    write_groups(tmp_path / "c.parquet", pa.table({"key": ["d3", "d9"], "text": ["x", "y"]}),
                 pa.table({"key": ["d9"], "text": ["z"]}))  # fmt: skip
    parquet = {"path": str(tmp_path / "c.parquet"), "id_field": "key"}
    found = find(job(tmp_path, tmp_path / "*.jsonl", parquet))
    assert pairs(found) == [
        ("d1", "a.jsonl, line 1", "a.jsonl, line 4"),
        ("d2", "a.jsonl, line 3", "b.jsonl, line 2"),
        ("d3", "b.jsonl, line 1", "c.parquet, row 0"),
        ("d9", "c.parquet, row 1", "c.parquet, row 2"),
    ]
    assert (found.read, found.counts) == (8, {0: 2, 1: 2})


def test_numbers_and_texts_are_different_ids_and_records_without_one_are_no_duplicates(tmp_path):
    write_lines(tmp_path / "a.jsonl", row(1, id=1), row(2, id="1"), row(3, id=None), row(4, id=None), b"{", b"{")
    unusable = []
    found = find(job(tmp_path), unusable=lambda document, source: unusable.append(source.where(document)))
    assert (found.read, pairs(found)) == (2, [])
    assert [place.rpartition(" ")[2] for place in unusable] == ["3", "4", "5", "6"]


def test_inputs_without_ids_are_not_opened(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", row(1), row(1))
    at = job(tmp_path, {"path": str(path)})
    files = plan.discover(at)
    monkeypatch.setattr(duplicates, "open_source", None)
    assert duplicates.find(at, files, among={0}).read == 0


def test_only_the_ids_column_of_a_parquet_file_is_read(tmp_path, monkeypatch):
    write_groups(tmp_path / "c.parquet", pa.table({"id": ["a", "a"], "text": ["x", "y"], "title": ["s", "t"]}))
    read = []
    import pyarrow.parquet as pq

    def columns(self, *args, original=pq.ParquetFile.iter_batches, **more):
        read.append(more["columns"])
        return original(self, *args, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", columns)
    at = job(tmp_path, {"path": str(tmp_path / "c.parquet"), "id_field": "id", "keep": ["title"]})
    assert len(find(at).shown) == 1
    assert {name for names in read for name in names} == {"id"}


def test_of_many_the_first_are_shown_and_the_others_counted(tmp_path):
    write_lines(tmp_path / "a.jsonl", *[row(n % 50) for n in range(500)])
    found = find(job(tmp_path))
    assert found.counts == {0: 450}
    assert len(found.shown) == duplicates.SHOWN
    refusing = job(tmp_path, {"path": str(tmp_path / "a.jsonl"), "id_field": "id", "on_duplicate": "refuse"})
    with pytest.raises(InputError) as caught:
        duplicates.refuse(refusing, plan.discover(refusing))
    assert "a.jsonl, line 51: 'd0' stood in " in str(caught.value)
    assert f"and {450 - duplicates.SHOWN} more" in str(caught.value)


def test_the_input_of_the_later_row_decides(tmp_path):
    one, two = (write_lines(tmp_path / f"{name}.jsonl", row(1)) for name in "ab")
    strict = {"id_field": "id", "on_duplicate": "refuse"}
    loose = {"id_field": "id"}
    fine = job(tmp_path, {"path": str(one)} | strict, {"path": str(two)} | loose)
    duplicates.refuse(fine, plan.discover(fine))
    refused = job(tmp_path, {"path": str(one)} | loose, {"path": str(two)} | strict)
    with pytest.raises(InputError, match=r"b\.jsonl, line 1: 'd1' stood in .*a\.jsonl, line 1"):
        duplicates.refuse(refused, plan.discover(refused))


def test_a_file_that_breaks_off_is_told_and_the_others_are_read(tmp_path):
    write_lines(tmp_path / "a.jsonl", row(1))
    write_lines(tmp_path / "b.jsonl", row(1))
    at = job(tmp_path)
    files = plan.discover(at)
    (tmp_path / "a.jsonl").unlink()
    found = duplicates.find(at, files, among={0})
    assert (found.read, len(found.errors)) == (1, 1)
    assert "a.jsonl" in str(found.errors[0])
