"""The formats of `export`: rows of a run, chunk by chunk, into one stream."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.sinks import columns
from batchgen.sinks.jsonl import lines_of, plain
from batchgen.sinks.parquet import table_of

Format = Literal["parquet", "jsonl", "csv"]
Rows = Sequence[Mapping[str, Any]]


class Writer(Protocol):
    """Contract: rows as `Sink.rows` gives them, written in the order in which they come; `close` ends the file."""

    def write(self, rows: Rows) -> None: ...

    def close(self) -> None: ...


def open_writer(name: Format, stream: BinaryIO, kept: Mapping[str, pa.DataType], *, ids_fit: bool) -> Writer:
    """kept: the kept fields and their types. ids_fit: every id was an integer of 64 bits. `stream` stays open."""
    if name == "parquet":
        return _ParquetWriter(stream, kept, ids_fit=ids_fit)
    return (_JsonlWriter if name == "jsonl" else _CsvWriter)(stream, list(kept))


class _JsonlWriter:
    def __init__(self, stream: BinaryIO, kept: Sequence[str]) -> None:
        self._stream, self._kept = stream, kept

    def write(self, rows: Rows) -> None:
        self._stream.write(lines_of(rows, self._kept))

    def close(self) -> None:
        pass


class _CsvWriter:
    """RFC 4180 in UTF-8 with a head line. Null and empty text are both nothing; lists and objects are their JSON."""

    def __init__(self, stream: BinaryIO, kept: Sequence[str]) -> None:
        self._text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
        self._kept = kept
        self._writer = csv.writer(self._text)
        self._writer.writerow(columns.order(kept))

    def write(self, rows: Rows) -> None:
        for row in rows:
            self._writer.writerow([_cell(value) for value in plain(row, self._kept).values()])

    def close(self) -> None:
        self._text.detach()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _ParquetWriter:
    """Columns and types of the parts; ids are integers where all of them are."""

    def __init__(self, stream: BinaryIO, kept: Mapping[str, pa.DataType], *, ids_fit: bool) -> None:
        self._kept = kept
        self._schema = columns.schema(kept)
        if ids_fit:
            self._schema = self._schema.set(0, pa.field("id", pa.int64()))
        self._writer = pq.ParquetWriter(stream, self._schema, compression="zstd")

    def write(self, rows: Rows) -> None:
        self._writer.write_table(table_of(rows, self._kept).cast(self._schema))

    def close(self) -> None:
        self._writer.close()
