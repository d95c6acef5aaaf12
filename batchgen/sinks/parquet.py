"""Parts as Parquet files: one row a document, the footer's key-value metadata tells what a resume needs."""

import errno
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen import fsio
from batchgen.data import Record
from batchgen.errors import OutputError
from batchgen.sinks import columns, kept
from batchgen.sinks.base import DamagedPartError, PartKeys, unhex

_FOOTER = b"batchgen"


class ParquetSink:
    suffix = ".parquet"

    def __init__(self, types: Mapping[str, pa.DataType], *, owner: str) -> None:
        """types: of the kept fields. owner: see fsio.write_atomic."""
        self._types = types
        self._owner = owner

    def write_part(self, path: Path, records: Sequence[Record], *, fingerprint: str, footer: Mapping[str, Any]) -> None:
        rows = [columns.row(record, self._types, fingerprint=fingerprint) for record in records]
        self._write(path, table_of(rows, self._types), footer)

    def _write(self, path: Path, table: pa.Table, footer: Mapping[str, Any]) -> None:
        table = table.replace_schema_metadata({_FOOTER: json.dumps(footer, sort_keys=True)})
        stream = pa.BufferOutputStream()
        pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
        fsio.write_atomic(path, memoryview(stream.getvalue()), owner=self._owner)

    def read(self, path: Path, names: Sequence[str]) -> pa.Table:
        table = _read(path, list(names))
        if missing := [name for name in names if name not in table.column_names]:
            raise DamagedPartError(f"it has no column {missing[0]!r}")
        for name in columns.TYPES.keys() & set(names):  # types stand in the footer, which has no checksum
            if (found := table.schema.field(name).type) != columns.TYPES[name]:
                raise DamagedPartError(f"its column {name!r} is {found}")
        return table

    def read_keys(self, path: Path) -> PartKeys:
        table = self.read(path, ["doc_key", "content_hash", "source"])
        keys, content = unhex(table.column("doc_key"), 16), unhex(table.column("content_hash"), 8)
        return PartKeys(keys, content, table.column("source"), _footer(table))

    def footer(self, path: Path) -> Mapping[str, Any]:
        return dict(_footer(_read(path, [])))

    def rows(self, path: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = _read(path).to_pylist()
        return found

    def kept_types(self, parts: Sequence[Path]) -> dict[str, pa.DataType]:
        """Types only ever widen, so those of the newest part that can be read hold the values of all."""
        for path in reversed(parts):
            try:
                schema = pq.read_schema(path)
            except (OSError, pa.ArrowException):
                continue  # damaged: found and set aside when the parts are loaded
            return {field.name: field.type for field in schema if field.name not in columns.TYPES}
        return {}

    def drop(self, path: Path, keys: Collection[str], *, to: Path | None) -> None:
        table = _read(path)
        footer = _footer(table)
        mask = pc.is_in(table.column("doc_key"), value_set=pa.array(sorted(keys), pa.string()))
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

    def move(self, path: Path, folder: Path) -> None:
        fsio.move(path, folder)


def table_of(rows: Sequence[Mapping[str, Any]], types: Mapping[str, pa.DataType]) -> pa.Table:
    """Rows of `columns.row` as a table; a kept value that does not fit its type is null, and its row flagged."""
    unfit: set[int] = set()
    fields = columns.schema(types)
    arrays = {name: kept.array([row[name] for row in rows], types[name], unfit) for name in types}
    for name in columns.TYPES:
        values = [row[name] for row in rows]
        if name == "flags" and unfit:
            values = [columns.flagged(flags) if n in unfit else flags for n, flags in enumerate(values)]
        arrays[name] = pa.array(values, fields.field(name).type)
    return pa.table([arrays[name] for name in fields.names], schema=fields)


def settled_types(parts: Sequence[Path], wanted: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Types of the kept columns for the parts to come: the wider of those of the parts there and of those wanted.

    A part is never rewritten for a type. So a wider one is taken only where pyarrow.dataset reads every older part as
    it; else the older one stays, and values that do not fit are flagged.
    """
    there = ParquetSink({}, owner="").kept_types(parts)
    return {name: _settled(parts, name, there[name], kind) if name in there else kind for name, kind in wanted.items()}


def _settled(parts: Sequence[Path], name: str, old: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    wide = kept.common_type([old, wanted])
    return wide if wide == old or _reads_as(parts, name, wide) else old


def _reads_as(parts: Sequence[Path], name: str, kind: pa.DataType) -> bool:
    import pyarrow.dataset as ds

    try:
        files = ds.dataset([str(path) for path in parts], schema=pa.schema([(name, kind)]), format="parquet")
        for batch in files.to_batches():
            batch.validate(full=True)
    except (OSError, pa.ArrowException):
        return False
    return True


def _read(path: Path, names: list[str] | None = None) -> pa.Table:
    try:
        # ParquetFile, not read_table: a folder of the path such as `a=b` must not become a column.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read(columns=names)
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
