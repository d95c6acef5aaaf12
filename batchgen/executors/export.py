"""`export`: the rows of a run as one file, in any format, in the order of the input if wanted.

Two passes over the parts: the first notes where the newest row of each document is, 24 bytes a row, the second
reads the rows chunk by chunk. Nothing is locked. A part that the run rewrites or removes meanwhile shows by its file;
then all is begun again, so what is written was the run's at one moment.
"""

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen import fsio, plan
from batchgen.errors import ConfigError, OutputError
from batchgen.executors.inspection import open_run
from batchgen.executors.writers import Format, open_writer
from batchgen.sinks.base import DamagedPartError, Sink, unhex
from batchgen.storage import checkpoint
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View

_CHUNK = 8192  # rows in memory
_CACHED = 4  # parts in memory
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Wish:
    """out: None is stdout. in_order: rows stand as their documents do in the input. failed: only failed rows."""

    out: Path | None
    format: Format
    in_order: bool = False
    failed: bool = False
    force: bool = False


class _ChangedError(Exception):
    """The run rewrote or removed a part since it was looked at."""


def format_of(out: Path | None) -> Format:
    """The format that a name means; None is stdout. Raises ConfigError."""
    ending = "jsonl" if out is None else out.suffix.removeprefix(".")
    for name in get_args(Format):
        if name == ending:
            found: Format = name
            return found
    raise ConfigError(f"{out}: its ending is none of {', '.join(get_args(Format))}; tell the format by --format")


def export(path: Path, wish: Wish) -> dict[str, Any]:
    """Write the rows; what was written. Raises ConfigError, and OutputError where that is not possible."""
    run, known, sink = open_run(path)
    if wish.out is not None:
        _refuse(run, wish.out, force=wish.force)
    elif wish.format == "parquet":
        raise ConfigError("Parquet needs a file: on stdout name jsonl or csv")
    for number in range(_TRIES):
        try:
            rows, size = _written(wish.out, lambda stream: _write(run, known, sink, wish, stream))
        except _ChangedError:
            time.sleep(0.05 * 2**number)
            continue
        out = None if wish.out is None else str(wish.out)
        return {"run_dir": str(path), "path": out, "format": wish.format, "rows": rows, "bytes": size}
    raise OutputError(f"{path}: the run is rewriting its parts; start the same command again in a minute")


def _refuse(run: RunDirectory, out: Path, *, force: bool) -> None:
    if run.summaries.resolve() in out.resolve().parents:
        raise ConfigError(f"{out}: lies among the parts of the run, and readers would take it for one; name another")
    if out.exists() and not out.is_file():
        raise ConfigError(f"{out}: is no plain file; for stdout name `-`")
    if out.exists() and not force:
        raise ConfigError(f"{out}: is there already; --force replaces it")


def _written(out: Path | None, write: Callable[[BinaryIO], int]) -> tuple[int, int]:
    """(rows, bytes). Nothing is seen, under the name or on stdout, before all is written."""
    if out is not None:
        with fsio.atomic(out, owner=f"export-{token_hex(4)}") as stream:
            return write(stream), stream.tell()
    try:
        with tempfile.TemporaryFile() as stream:
            rows, size = write(stream), stream.tell()
            stream.seek(0)
            shutil.copyfileobj(stream, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        raise OutputError(f"stdout, by way of {tempfile.gettempdir()}: {e.strerror or e}") from e
    return rows, size


def _write(run: RunDirectory, known: Mapping[str, Any], sink: Sink, wish: Wish, stream: BinaryIO) -> int:
    parts = _Parts(run, sink)
    index = _index(run, sink, parts, wish)
    kept = parts.kept_types() or {name: pa.string() for name in known["fingerprint"]["columns"]}
    with contextlib.closing(open_writer(wish.format, stream, kept, ids_fit=index.ids_fit)) as writer:
        for begin in range(0, len(index.part), _CHUNK):
            part, row = (column[begin : begin + _CHUNK] for column in (index.part, index.row))
            writer.write(list(_chunk(parts, part, row)))
    return len(index.part)


def _chunk(parts: "_Parts", numbers: NDArray[np.uint32], rows: NDArray[np.uint32]) -> Iterator[dict[str, Any]]:
    """The rows at these places, in this order; each part is read once."""
    found: dict[int, dict[str, Any]] = {}
    for number in np.unique(numbers):
        held = parts.rows(int(number))
        found |= {int(at): held[rows[at]] for at in np.flatnonzero(numbers == number)}
    for at in range(len(numbers)):
        yield found[at]


class _Parts:
    """The parts as they are now. Reading one that has become another raises _ChangedError."""

    def __init__(self, run: RunDirectory, sink: Sink) -> None:
        self._sink = sink
        self.paths = run.parts(sink.suffix)
        self._marks = [_mark(path) for path in self.paths]
        self._cache: dict[int, list[dict[str, Any]]] = {}

    def columns(self, number: int, names: list[str]) -> pa.Table:
        return self._read(number, lambda path: self._sink.read(path, names))

    def rows(self, number: int) -> list[dict[str, Any]]:
        if number not in self._cache:
            if len(self._cache) >= _CACHED:
                del self._cache[next(iter(self._cache))]  # the one that was read first
            self._cache[number] = self._read(number, self._sink.rows)
        return self._cache[number]

    def kept_types(self) -> dict[str, pa.DataType]:
        try:
            return self._sink.kept_types(self.paths)
        except DamagedPartError as e:  # all of them could be read a moment ago
            raise _ChangedError from e

    def _read(self, number: int, look: Callable[[Path], Any]) -> Any:
        path = self.paths[number]
        try:
            found = look(path)
        except DamagedPartError as e:
            if _mark(path) != self._marks[number]:
                raise _ChangedError from e
            raise OutputError(
                f"{path}: a part is damaged: {e}. Start the run again: its documents are done again; then export"
            ) from e
        if _mark(path) != self._marks[number]:
            raise _ChangedError
        return found


def _mark(path: Path) -> tuple[int, int, int]:
    """What differs between two files that had one name, one after the other."""
    try:
        stat = path.stat()
    except FileNotFoundError as e:
        raise _ChangedError from e
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class _Index:
    """The rows to write: number of part and row in it. ids_fit: there are ids, all integers of 64 bits."""

    part: NDArray[np.uint32]
    row: NDArray[np.uint32]
    ids_fit: bool


def _index(run: RunDirectory, sink: Sink, parts: _Parts, wish: Wish) -> _Index:
    files = {source: at for at, source in enumerate(plan.reading_order(run))}
    names = ["doc_key", "status", "source", "place"] + (["id", "id_type"] if wish.format == "parquet" else [])
    repeated = checkpoint.repeated_keys(View(run, sink))
    newer = np.zeros(len(repeated), np.bool_)
    found: list[tuple[NDArray[np.uint32], ...]] = [(np.empty(0, np.uint32),) * 2]
    places: list[tuple[NDArray[np.int64], ...]] = [(np.empty(0, np.int64),) * 2]
    fit, some = wish.format == "parquet", False
    for number in reversed(range(len(parts.paths))):  # the newest first: of two rows with a key it is the one
        table = parts.columns(number, names)
        at = repeated.places(unhex(table.column("doc_key"), 16))
        again = np.flatnonzero(at >= 0)
        wanted = _failed(table) if wish.failed else np.ones(len(table), np.bool_)
        wanted[again] &= ~newer[at[again]]
        newer[at[again]] = True
        rows = np.flatnonzero(wanted).astype(np.uint32)
        found.append((np.full(len(rows), number, np.uint32), rows))
        if wish.in_order:
            places.append(_places(table.select(["source", "place"]).take(rows), files))
        if fit:
            fit = _fit(table)
            some = some or table.column("id").null_count < len(table)
    part, row = (np.concatenate(columns) for columns in zip(*reversed(found), strict=True))
    if wish.in_order:
        file, place = (np.concatenate(columns) for columns in zip(*reversed(places), strict=True))
        order = np.lexsort((place, file))
        part, row = part[order], row[order]
    return _Index(part, row, ids_fit=fit and some)


def _failed(table: pa.Table) -> NDArray[np.bool_]:
    return np.array(pc.equal(table.column("status"), "failed").to_pylist(), np.bool_)


def _places(table: pa.Table, files: dict[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(place of the file among all files, place in the file) of each row; files unknown so far come last."""
    sources, places = table.column("source").to_pylist(), table.column("place").to_pylist()
    file = np.array([files.setdefault(source, len(files)) for source in sources], np.int64)
    return file, np.array([_number(place) for place in places], np.int64)


def _fit(table: pa.Table) -> bool:
    if set(table.column("id_type").unique().to_pylist()) - {"int", None}:
        return False
    try:
        table.column("id").cast(pa.int64())
    except pa.ArrowException:
        return False
    return True


def _number(place: str) -> int:
    """The count in a place: 70 of `byte 70`."""
    found = re.search(r"\d+$", place)
    return int(found[0]) if found else 0
