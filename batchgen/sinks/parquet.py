"""Parts as Parquet files: one row a document, the footer's key-value metadata tells what a resume needs."""

import errno
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen import fsio
from batchgen.data import Record
from batchgen.errors import OutputError
from batchgen.sinks.base import DamagedPartError, PartKeys

KEPT_FIELD_UNFIT = "kept_field_unfit"  # flag: a kept value did not fit its column's type and is null
_FOOTER = b"batchgen"
_TEXT, _COUNT = pa.string(), pa.int32()
_UNFIT = object()
# (column, type, value of a record); kept fields stand between id_type and summary.
_Column = tuple[str, pa.DataType, Callable[[Record], Any]]
_LEADING: tuple[_Column, ...] = (
    ("id", _TEXT, lambda r: r.document.id),
    ("id_type", _TEXT, lambda r: r.document.id_type),
)
_FOLLOWING: tuple[_Column, ...] = (
    ("summary", _TEXT, lambda r: r.summary),
    ("status", _TEXT, lambda r: r.status),
    ("error_type", _TEXT, lambda r: r.error_type),
    ("error", _TEXT, lambda r: r.error),
    ("finish_reason", _TEXT, lambda r: r.finish_reason),
    ("flags", pa.list_(_TEXT), lambda r: list(r.flags)),
    ("prompt_tokens", _COUNT, lambda r: r.prompt_tokens),
    ("cached_tokens", _COUNT, lambda r: r.cached_tokens),
    ("completion_tokens", _COUNT, lambda r: r.completion_tokens),
    ("requests", _COUNT, lambda r: r.requests),
    ("attempts", _COUNT, lambda r: r.attempts),
    ("source", _TEXT, lambda r: r.document.source),
    ("place", _TEXT, lambda r: r.document.place),
    ("doc_key", _TEXT, lambda r: r.document.key.hex()),
    ("content_hash", _TEXT, lambda r: r.document.content.hex()),
)
_LAST: tuple[_Column, ...] = (("finished_at", pa.timestamp("us", tz="UTC"), lambda r: r.finished_at),)


class ParquetSink:
    suffix = ".parquet"

    def __init__(self, kept: Mapping[str, pa.DataType], *, owner: str) -> None:
        """kept: kept fields and their types. owner: see fsio.write_atomic."""
        self._kept = kept
        self._owner = owner

    def write_part(self, path: Path, records: Sequence[Record], *, fingerprint: str, footer: Mapping[str, Any]) -> None:
        arrays: dict[str, pa.Array] = {
            name: pa.array([value(record) for record in records], kind) for name, kind, value in _LEADING
        }
        unfit: set[int] = set()
        for name, kind in self._kept.items():
            arrays[name] = _kept_array([record.document.keep.get(name) for record in records], kind, unfit)
        for name, kind, value in _FOLLOWING:
            arrays[name] = pa.array([value(record) for record in records], kind)
        if unfit:
            flags = [[*r.flags, KEPT_FIELD_UNFIT] if n in unfit else list(r.flags) for n, r in enumerate(records)]
            arrays["flags"] = pa.array(flags, pa.list_(_TEXT))
        arrays["fingerprint"] = pa.array([fingerprint] * len(records), _TEXT)
        for name, kind, value in _LAST:
            arrays[name] = pa.array([value(record) for record in records], kind)
        self._write(path, pa.table(arrays), footer)

    def _write(self, path: Path, table: pa.Table, footer: Mapping[str, Any]) -> None:
        table = table.replace_schema_metadata({_FOOTER: json.dumps(footer, sort_keys=True)})
        stream = pa.BufferOutputStream()
        pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
        fsio.write_atomic(path, memoryview(stream.getvalue()), owner=self._owner)

    def read(self, path: Path, columns: Sequence[str]) -> pa.Table:
        table = _read(path, list(columns))
        if missing := [name for name in columns if name not in table.column_names]:
            raise DamagedPartError(f"it has no column {missing[0]!r}")
        return table

    def read_keys(self, path: Path) -> PartKeys:
        table = self.read(path, ["doc_key", "content_hash", "source"])
        keys, content = _unhex(table.column("doc_key"), 16), _unhex(table.column("content_hash"), 8)
        return PartKeys(keys, content, table.column("source"), _footer(table))

    def drop(self, path: Path, keys: Collection[str], *, to: Path | None) -> None:
        table = _read(path)
        footer = _footer(table)
        mask = pc.is_in(table.column("doc_key"), value_set=pa.array(sorted(keys), _TEXT))
        if to is not None:
            self._add(to, table.filter(mask), footer)
        rest = table.filter(pc.invert(mask))
        if rest.num_rows:
            self._write(path, rest, footer)
        else:
            fsio.remove(path)

    def _add(self, path: Path, rows: pa.Table, footer: Mapping[str, Any]) -> None:
        """Add rows to a part, each key once: a start that was cut short adds the same rows again."""
        if path.exists():
            try:
                old = _read(path)
            except DamagedPartError as e:
                raise OutputError(f"{path}: cannot be read: {e}; move it away and start the same command again") from e
            known = pc.is_in(rows.column("doc_key"), value_set=old.column("doc_key").combine_chunks())
            rows = pa.concat_tables([old, rows.filter(pc.invert(known))], promote_options="permissive")
        self._write(path, rows, footer)


def kept_types(parts: Sequence[Path], names: Collection[str]) -> dict[str, pa.DataType]:
    """Types of these columns in the newest committed part that can be read: later parts keep to them."""
    for path in reversed(parts):
        try:
            schema = pq.read_schema(path)
        except (OSError, pa.ArrowException):
            continue  # damaged: found and set aside when the parts are loaded
        return {name: schema.field(name).type for name in names if name in schema.names}
    return {}


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        # ParquetFile, not read_table: a folder of the path such as `a=b` must not become a column.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read(columns=columns)
    except (OSError, pa.ArrowException) as e:
        if isinstance(e, OSError) and e.errno not in (None, errno.ENOENT):
            # The disk or the mount is at fault, not the part: nobody is to do its documents again for that.
            raise OutputError(f"{path}: a committed part cannot be read: {e.strerror}; the same command goes on") from e
        raise DamagedPartError(str(e).splitlines()[0] if str(e) else type(e).__name__) from e


def _footer(table: pa.Table) -> Any:
    try:
        return json.loads((table.schema.metadata or {})[_FOOTER])
    except (KeyError, ValueError) as e:
        raise DamagedPartError("its footer is not one of batchgen's") from e


def _unhex(column: pa.ChunkedArray, size: int) -> Any:
    """(n, size) bytes of a column of hex texts."""
    try:
        data = np.frombuffer(bytes.fromhex("".join(column.to_pylist())), dtype=np.uint8)
        return data.reshape(len(column), size)
    except (TypeError, ValueError) as e:
        raise DamagedPartError(f"its keys cannot be read: {e}") from e


def _kept_array(values: list[Any], kind: pa.DataType, unfit: set[int]) -> pa.Array:
    """The values as the column's type; positions of those that do not fit, and are null, go into `unfit`."""
    if _is_text(kind):
        values = [_as_text(value) for value in values]
    else:
        values = [value if _fits(value, kind) else _UNFIT for value in values]
    unfit |= {n for n, value in enumerate(values) if value is _UNFIT}
    values = [None if value is _UNFIT else value for value in values]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        fitting = []
        for n, value in enumerate(values):
            try:
                fitting.append(pa.scalar(value, kind))
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                unfit.add(n)
                fitting.append(None)
        return pa.array([None if one is None else one.as_py() for one in fitting], kind)


def _fits(value: Any, kind: pa.DataType) -> bool:
    """False where pyarrow would change the value instead of refusing it: 1.5 to 1, 5 to 1970, "ab" to ["a", "b"]."""
    if isinstance(value, float):
        return not pa.types.is_temporal(kind) and (value.is_integer() or not pa.types.is_integer(kind))
    if isinstance(value, int):
        return not pa.types.is_temporal(kind)
    if isinstance(value, list) and _is_list(kind):
        return all(_fits(one, kind.value_type) for one in value)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        fields = {kind.field(n).name: kind.field(n).type for n in range(kind.num_fields)}
        return all(name in fields and _fits(one, fields[name]) for name, one in value.items())
    if isinstance(value, str | bytes):
        return not _is_list(kind)
    return not (isinstance(value, datetime) and pa.types.is_date(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _as_text(value: Any) -> Any:
    """The value itself where it is text or nothing, else its JSON; `_UNFIT` where it nests too deep for that."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except RecursionError:
        return _UNFIT
