"""Parquet: splits are runs of row groups; only the columns a job needs are read, in small batches."""

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import Document, Split
from batchgen.errors import InputError
from batchgen.job.config import Input
from batchgen.sources.base import NO_SPLIT, Fetched, FileFacts, Measure, Reader, gathered, numbers
from batchgen.text import one_line

_BATCH_ROWS = 32
_BATCH_BYTES = 4 << 20
_BUFFER = 1 << 20


class ParquetSource:
    def __init__(self, item: Input, number: int, path: str, prompt_fields: frozenset[str]) -> None:
        self._item = item
        self._number = number
        self._path = Path(path)
        self._reader = Reader(item, path, prompt_fields)
        self._wanted = [name for name in (item.text_field, item.id_field, *item.keep) if name is not None]

    def _open(self) -> pq.ParquetFile:
        try:
            # Pre-buffering holds whole row groups in memory, and so does reading without a buffer.
            return pq.ParquetFile(self._path, pre_buffer=False, buffer_size=_BUFFER)
        except (OSError, pa.ArrowException) as e:
            raise InputError(f"{self._path}: no readable Parquet file: {_first_line(e)}") from e

    def facts(self) -> FileFacts:
        with self._open() as file:
            schema = file.schema_arrow
            for wanted in self._wanted:
                column = wanted if wanted in schema.names else wanted.split(".")[0]
                if schema.names.count(column) > 1:
                    raise InputError(f"{self._path}: has two columns {column!r}; nobody knows which is meant")
            for what, name in (("text_field", self._item.text_field), ("id_field", self._item.id_field)):
                if name is not None and type_of(schema, name) is None:
                    columns = one_line(", ".join(schema.names))
                    raise InputError(f"{self._path}: has no column {name!r} ({what}); it has: {columns}")
            kept = {ours: kind for theirs, ours in self._item.keep.items() if (kind := type_of(schema, theirs))}
            stat = self._path.stat()
            rows = file.metadata.num_rows
        return FileFacts(str(self._path), self._number, stat.st_size, stat.st_mtime_ns, rows, exact=True, kept=kept)

    def cut(self, *, begin: int, target_bytes: int) -> list[tuple[int, int]]:
        with self._open() as file:
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        return gathered(sizes, begin=begin, target_bytes=target_bytes)

    def measure(self, cuts: Sequence[tuple[int, int]]) -> list[Measure]:
        with self._open() as file:
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            first = [0, *itertools.accumulate(group.num_rows for group in groups)]
            return [Measure(sum(one.total_byte_size for one in groups[start:end]), first[start]) for start, end in cuts]

    def read(self, split: Split) -> Iterator[Document]:
        with self._open() as file:
            row = sum(file.metadata.row_group(group).num_rows for group in range(split.start))
            # Group by group: a batch over two groups would lose whole rows to a broken one behind them.
            for group in range(split.start, split.end):
                for batch in self._batches(file, group, row):
                    for record in _records(batch):
                        yield self._fetched(record, row, split.index).document
                        row += 1

    def where(self, document: Document) -> str:
        return f"{self._path}, {document.place}"

    def fetch(self, places: Collection[str]) -> Iterator[Fetched]:
        wanted = [row for (row,) in numbers(places, r"row (\d+)")]
        with self._open() as file:
            begin = 0
            for group in range(file.metadata.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                inside = wanted[bisect_left(wanted, begin) : bisect_left(wanted, end)]
                row = begin
                for batch in self._batches(file, group, begin) if inside else ():
                    for at in inside[bisect_left(inside, row) : bisect_left(inside, row + batch.num_rows)]:
                        yield self._fetched(next(_records(batch.slice(at - row, 1))), at, NO_SPLIT)
                    row += batch.num_rows
                    if row > inside[-1]:
                        break
                begin = end

    def _batches(self, file: pq.ParquetFile, group: int, row: int) -> Iterator[pa.RecordBatch]:
        """A row group in small batches; `row` is the number of its first row."""
        columns = sorted({name for name in self._wanted if type_of(file.schema_arrow, name) is not None})
        rows = _batch_rows(file.metadata.row_group(group), columns)
        try:
            # One thread: decoding costs little, and more of them hold more of the file.
            for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                yield batch
                row += batch.num_rows
        except (OSError, pa.ArrowException) as e:
            raise InputError(f"{self._path}: row {row}: cannot be read: {_first_line(e)}") from e

    def _fetched(self, record: dict[str, Any] | Exception, row: int, split: int) -> Fetched:
        place = f"row {row}"
        if isinstance(record, Exception):
            error = ("bad_value", f"{place}: {_first_line(record)}")
            return Fetched(self._reader.broken(place, split, error, b""), None)
        return Fetched(self._reader.document(record, place, split), record)


def _batch_rows(group: pq.RowGroupMetaData, columns: list[str]) -> int:
    """How many rows to decode at once: few where they are large."""
    chunks = (group.column(n) for n in range(group.num_columns))
    wanted = [f"{name}." for name in columns]
    size: int = sum(c.total_uncompressed_size for c in chunks if f"{c.path_in_schema}.".startswith(tuple(wanted)))
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES * group.num_rows // max(1, size))))


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Exception]:
    """The rows; for one with a value that Python cannot hold (text that is no UTF-8, the year 300000) the error."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for n in range(batch.num_rows):
            try:
                yield from batch.slice(n, 1).to_pylist()
            except (ValueError, OverflowError) as e:
                yield e


def type_of(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column, or of a field inside a struct column; None where there is none."""
    if name in schema.names:
        return schema.field(name).type
    first, *steps = name.split(".")
    if first not in schema.names:
        return None
    kind = schema.field(first).type
    for step in steps:
        if not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return None
        kind = kind.field(step).type
    return kind


def _first_line(e: Exception) -> str:
    return str(e).splitlines()[0] if str(e) else type(e).__name__
