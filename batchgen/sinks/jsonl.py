"""Parts as JSON Lines: one object a line, ASCII only, so that a record ends at LF and nowhere else.

What a resume can use besides the rows is in a hidden file beside the part, `.<part>.footer.json`, with the part's
SHA-256. The part is the truth: it is renamed into place first, and the footer is written after it and removed before
the part changes. So a kill leaves a part without footer, which is taken for what its lines say, and never a part with
the footer of another. A part whose footer has another SHA-256 was damaged since.
"""

import hashlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Never

import jsonlines
import pyarrow as pa
import pyarrow.json as pj

from batchgen import fsio
from batchgen.data import Record
from batchgen.errors import OutputError
from batchgen.sinks import columns, kept
from batchgen.sinks.base import DamagedPartError, PartKeys, unhex

_dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


class JsonlSink:
    suffix = ".jsonl"

    def __init__(self, types: Mapping[str, pa.DataType], *, owner: str) -> None:
        """types: its keys are the kept fields; JSON needs no types. owner: see fsio.write_atomic."""
        self._kept = tuple(types)
        self._owner = owner

    def write_part(self, path: Path, records: Sequence[Record], *, fingerprint: str, footer: Mapping[str, Any]) -> None:
        rows = (columns.row(record, self._kept, fingerprint=fingerprint) for record in records)
        self._write(path, lines_of(rows, self._kept), footer)

    def _write(self, path: Path, data: bytes, footer: Mapping[str, Any]) -> None:
        beside = _footer_file(path)
        if beside.exists():  # of the part's old content, or left by a part of this name that somebody removed
            fsio.remove(beside)
        fsio.write_atomic(path, data, owner=self._owner)
        told = {"sha256": hashlib.sha256(data).hexdigest(), "footer": footer}
        fsio.write_atomic(beside, json.dumps(told, sort_keys=True).encode(), owner=self._owner)

    def read(self, path: Path, names: Sequence[str]) -> pa.Table:
        return _table(_load(path)[0], names)

    def read_keys(self, path: Path) -> PartKeys:
        data, footer = _load(path)
        table = _table(data, ["doc_key", "content_hash", "source"])
        keys, content = unhex(table.column("doc_key"), 16), unhex(table.column("content_hash"), 8)
        return PartKeys(keys, content, table.column("source"), footer)

    def footer(self, path: Path) -> Mapping[str, Any]:
        told = _footer(path)
        return {} if told is None else dict(told["footer"])

    def rows(self, path: Path) -> list[dict[str, Any]]:
        return _rows(_load(path)[0])

    def kept_types(self, parts: Sequence[Path]) -> dict[str, pa.DataType]:
        kinds: dict[str, kept.Kinds] = defaultdict(kept.Kinds)
        for path in parts:
            for row in _parse(_load(path)[0]):
                for name, value in row.items():
                    if name not in columns.TYPES:
                        kinds[name].meet(value)
        return {name: kind.common for name, kind in kinds.items()}

    def drop(self, path: Path, keys: Collection[str], *, to: Path | None) -> None:
        data, footer = _load(path)
        lines = _keyed(data)
        gone = {key: line for key, line in lines.items() if key in keys}
        if to is not None:
            self._add(to, gone, footer)
        if len(gone) < len(lines):
            self._write(path, b"".join(line for key, line in lines.items() if key not in gone), footer)
        else:
            fsio.remove(_footer_file(path))
            fsio.remove(path)

    def _add(self, path: Path, lines: Mapping[str, bytes], footer: Mapping[str, Any]) -> None:
        """Add rows to a part, each key once: a start that was cut short adds the same rows again."""
        old: dict[str, bytes] = {}
        if path.exists():
            try:
                old = _keyed(_load(path)[0])
            except DamagedPartError as e:
                raise OutputError(f"{path}: cannot be read: {e}; move it away and start the same command again") from e
        self._write(path, b"".join({**old, **lines}.values()), footer)

    def move(self, path: Path, folder: Path) -> None:
        fsio.move(path, folder)
        fsio.move(_footer_file(path), folder)


def plain(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A row of `columns.row`, with these kept fields, as JSON values; an id that was an integer is one."""
    found = dict(row)
    if row["id_type"] == "int":
        found["id"] = int(row["id"])
    for name in names:
        found[name], unfit = kept.json_value(row[name])
        if unfit:
            found["flags"] = columns.flagged(found["flags"])
    found["finished_at"] = row["finished_at"].isoformat(timespec="microseconds")
    return found


def lines_of(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> bytes:
    stream = io.BytesIO()
    with jsonlines.Writer(stream, dumps=_dumps) as writer:
        writer.write_all(plain(row, names) for row in rows)
    return stream.getvalue()


def _footer_file(path: Path) -> Path:
    return path.with_name(f".{path.stem}.footer.json")


def _load(path: Path) -> tuple[bytes, Mapping[str, Any]]:
    """The lines of a part, known to be whole, and its footer."""
    while True:
        try:
            with path.open("rb") as stream:
                inode, data = os.fstat(stream.fileno()).st_ino, stream.read()
            told = _footer(path)
            if told is None:
                _check(data)
                return data, {}
            if hashlib.sha256(data).hexdigest() == told["sha256"]:
                return data, told["footer"]
            if path.stat().st_ino == inode:  # else it was rewritten while we looked
                _check(data)
                raise DamagedPartError("its SHA-256 is not the one it was written with")
        except FileNotFoundError as e:
            raise DamagedPartError("it is not there") from e
        except OSError as e:
            # The disk or the mount is at fault, not the part: nobody is to do its documents again for that.
            raise OutputError(f"{path}: a committed part cannot be read: {e.strerror}; the same command goes on") from e


def _footer(path: Path) -> dict[str, Any] | None:
    """None where there is no footer, or none that can be read: it only saves work."""
    try:
        told = json.loads(_footer_file(path).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    fits = isinstance(told, dict) and isinstance(told.get("footer"), dict) and "sha256" in told
    return told if fits else None


def _check(data: bytes) -> None:
    """Raise DamagedPartError unless these are whole lines, each with every column of batchgen's own."""
    if not data.endswith(b"\n"):
        at = data.rfind(b"\n") + 1
        raise DamagedPartError(f"its last line, at byte {at}, is torn" if data else "it is empty")
    _slow_table(data, list(columns.TYPES))


def _parse(data: bytes) -> list[dict[str, Any]]:
    lines = data.split(b"\n")[:-1]
    try:
        # json's own: faster parsers that jsonlines would take make floats of long integers.
        with jsonlines.Reader(lines, loads=_loads) as reader:
            return list(reader.iter(type=dict))
    except jsonlines.InvalidLineError as e:
        at = sum(len(line) + 1 for line in lines[: e.lineno - 1])
        raise DamagedPartError(f"its line {e.lineno}, at byte {at}, is no JSON object") from e
    except RecursionError as e:
        raise DamagedPartError("it has a line that nests too deep") from e


def _constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_constant)


def _loads(line: str | bytes) -> Any:
    return _decoder.decode(line.decode() if isinstance(line, bytes) else line)


def _table(data: bytes, names: Sequence[str]) -> pa.Table:
    """These columns of batchgen's own."""
    if unknown := [name for name in names if name not in columns.TYPES]:
        raise DamagedPartError(f"it has no column {unknown[0]!r}")
    if "id" not in names:  # it has two types, which no column of Arrow's JSON reader can have
        try:
            return _read_columns(data, names)
        except pa.ArrowException:
            pass  # it refuses integers of 309 digits, also in columns that nobody asked for
    return _slow_table(data, names)


def _slow_table(data: bytes, names: Sequence[str]) -> pa.Table:
    rows = _rows(data)
    try:
        return pa.table({name: pa.array([row[name] for row in rows], columns.TYPES[name]) for name in names})
    except KeyError as e:
        raise DamagedPartError(f"it has a line without {e}") from e
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise DamagedPartError(f"a value is not of its column's type: {str(e).splitlines()[0]}") from e


def _read_columns(data: bytes, names: Sequence[str]) -> pa.Table:
    """Four times as fast as the standard library."""
    types = {name: pa.string() if name == "finished_at" else columns.TYPES[name] for name in names}
    table = pj.read_json(
        pa.BufferReader(data),
        pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pj.ParseOptions(explicit_schema=pa.schema(types), unexpected_field_behavior="ignore"),
    )
    return pa.table({name: table.column(name).cast(columns.TYPES[name]) for name in names})


def _rows(data: bytes) -> list[dict[str, Any]]:
    """All rows, with id and time as `columns.row` has them."""
    rows = _parse(data)
    try:
        for row in rows:
            row["id"] = None if row["id"] is None else str(row["id"])
            row["finished_at"] = datetime.fromisoformat(row["finished_at"])
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedPartError(f"it has a line that is no row: {e}") from e
    return rows


def _keyed(data: bytes) -> dict[str, bytes]:
    """The lines with their ends, by doc_key."""
    keys = _table(data, ["doc_key"]).column("doc_key").to_pylist()
    return dict(zip(keys, io.BytesIO(data), strict=True))
