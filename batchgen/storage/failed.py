"""Failed documents: their rows, and failed.jsonl, which holds them whole.

The list is made of the parts and the input at each end, is whole or not there, and is nobody's truth.
"""

import contextlib
import itertools
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonlines
import pyarrow.compute as pc

from batchgen import fsio
from batchgen.data import Document
from batchgen.errors import BatchgenError, InputError, OutputError
from batchgen.job.config import COLUMNS, Job
from batchgen.lifecycle import Stop
from batchgen.sinks.base import DamagedPartError
from batchgen.sources import open_source
from batchgen.sources.base import Fetched, place_key
from batchgen.storage.view import View

# So many failed documents are fetched together: a packed file is read forward once for them.
AT_ONCE = 50_000
HURRY_S = 1.5  # a run that was told to stop takes no longer for the list
_LEAVE_S = 0.2
_READ = ["status", "source", "place", "doc_key", "content_hash", "error_type", "error", "fingerprint"]
_NOT_THERE = "it is not at its place any more: its input has changed or is gone; this is what its row has"


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A committed row of a failed document; key and content in hex, as in the columns."""

    part: Path
    source: str
    place: str
    key: str
    content: str
    error_type: str
    error: str
    fingerprint: str

    def is_of(self, document: Document) -> bool:
        """Whether this is the row of that document, as it is: same identity, same content."""
        keys = {document.key.hex(), place_key(document.source, document.place).hex()}
        return self.key in keys and self.content == document.content.hex()


def failed_rows(view: View, parts: Iterable[Path], old: Mapping[Path, Collection[str]]) -> Iterator[list[FailedRow]]:
    """The failed rows of these parts, at most AT_ONCE together; old: by part the keys of rows that no longer hold.

    A part that is damaged is left out: the next start finds it and does its documents again.
    """
    rows = itertools.chain.from_iterable(_failed_of(view, path, old.get(path, ())) for path in parts)
    while chunk := list(itertools.islice(rows, AT_ONCE)):
        yield chunk


def _failed_of(view: View, path: Path, old: Collection[str]) -> Iterator[FailedRow]:
    try:
        table = view.read(path, _READ)
    except DamagedPartError:
        return
    for row in table.filter(pc.equal(table.column("status"), "failed")).to_pylist():
        if row["doc_key"] not in old:
            yield FailedRow(
                part=path,
                source=row["source"],
                place=row["place"],
                key=row["doc_key"],
                content=row["content_hash"],
                error_type=row["error_type"],
                error=row["error"],
                fingerprint=row["fingerprint"],
            )


def by_source(rows: Iterable[FailedRow]) -> dict[str, dict[str, list[FailedRow]]]:
    """The rows by source and place; a place has two where a document moved and another came there."""
    found: dict[str, dict[str, list[FailedRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row.source][row.place].append(row)
    return found


@dataclass(frozen=True, slots=True)
class FailedList:
    """Makes failed.jsonl. inputs: for each source of the job now, the place of its input in the job.

    old: see failed_rows.
    """

    job: Job
    view: View
    inputs: Mapping[str, int]
    old: Mapping[Path, Collection[str]]

    def renew(self, parts: Sequence[Path], stop: Stop, failure: BatchgenError | None) -> str | None:
        """Make the list of these parts, which have failed rows, where it is not that already.

        What to tell about it: its path, why there is none, None where nobody failed. failure: what the run ends of.
        A run that was told to stop waits for HURRY_S only, and then goes without a list: an input can hang. Raises
        OutputError.
        """
        path = self.view.run.failed_jsonl
        if not parts:
            if path.exists():
                fsio.remove(path)
            return None
        if isinstance(failure, OutputError):
            return "not listed, since the output cannot be written: the next end lists them"
        if _is_newer(path, self.view.run.summaries):
            return str(path)
        if self._is_written_in_time(parts, stop):
            return str(path)
        fsio.remove(path)  # it would tell of an earlier end
        return "not listed, there was no time for it: the next end lists them"

    def _is_written_in_time(self, parts: Sequence[Path], stop: Stop) -> bool:
        begin = time.monotonic()
        given_up = threading.Event()
        faults: list[BaseException] = []

        def look() -> None:
            if given_up.is_set():
                raise _TimeIsOver

        def make() -> None:
            try:
                self._write(parts, look)
            except BaseException as e:  # noqa: BLE001  raised again where it is waited for
                faults.append(e)

        thread = threading.Thread(target=make, name="failed-list", daemon=True)
        thread.start()
        while thread.is_alive() and not given_up.is_set():
            thread.join(0.05)
            if stop.at is not None and time.monotonic() - max(begin, stop.at) > HURRY_S:
                given_up.set()
        thread.join(_LEAVE_S)
        if faults and not isinstance(faults[0], _TimeIsOver):
            raise faults[0]
        return not faults and not thread.is_alive()

    def _write(self, parts: Sequence[Path], look: Callable[[], None]) -> None:
        """look: raises what is to end this; called for each line, and before the list is put in place."""
        with fsio.atomic(self.view.run.failed_jsonl, owner=self.view.run.owner) as stream:
            with jsonlines.Writer(stream, dumps=_dumps) as writer:
                for rows in failed_rows(self.view, parts, self.old):
                    for line in self._lines(rows):
                        look()
                        writer.write(line)
            look()

    def _lines(self, rows: Sequence[FailedRow]) -> Iterator[dict[str, Any]]:
        lost: dict[Path, dict[str, FailedRow]] = defaultdict(dict)
        for source, wanted in sorted(by_source(rows).items()):
            met = set()
            for one in self._fetch(source, wanted):
                for row in wanted[one.document.place]:
                    if row.is_of(one.document):
                        met.add(row.key)
                        yield _line(row, one)
            for row in itertools.chain.from_iterable(wanted.values()):
                if row.key not in met:
                    lost[row.part][row.key] = row
        for part, by_key in sorted(lost.items()):
            for values in self.view.sink.rows(part):
                if (found := by_key.get(values["doc_key"])) is not None:
                    yield self._known(values) | {"batchgen": _told(found) | {"note": _NOT_THERE}}

    def _fetch(self, source: str, wanted: Collection[str]) -> Iterator[Fetched]:
        if source in self.inputs:
            with contextlib.suppress(InputError):  # their lines tell that they are not there
                yield from open_source(self.job, self.inputs[source], source).fetch(wanted)

    def _known(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The id and the kept fields of a row, under the names they have in the input."""
        number = self.inputs.get(row["source"], 0 if len(self.job.input) == 1 else None)
        if number is None:
            names = {name: name for name in row if name not in COLUMNS}
            id_field: str | None = "id"
        else:
            item = self.job.input[number]
            names, id_field = item.keep, item.id_field
        record = {theirs: row[ours] for theirs, ours in names.items() if ours in row}
        if id_field is not None and row["id"] is not None:
            record = {id_field: int(row["id"]) if row["id_type"] == "int" else row["id"], **record}
        return record


class _TimeIsOver(Exception):  # noqa: N818  the name says what happened
    pass


def _is_newer(path: Path, folder: Path) -> bool:
    """Whether the file was written after every name in the folder."""
    try:
        return path.stat().st_mtime_ns > folder.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _line(row: FailedRow, one: Fetched) -> dict[str, Any]:
    if one.record is not None:
        return {**one.record, "batchgen": _told(row)}
    # The bytes of a record that is none, where there are any: a line of 300 MB is not repeated.
    raw = {} if one.raw is None else {"raw": one.raw.decode("utf-8", "backslashreplace")}
    return raw | {"batchgen": _told(row)}


def _told(row: FailedRow) -> dict[str, Any]:
    return {
        "error_type": row.error_type, "error": row.error, "source": row.source, "place": row.place,
        "doc_key": row.key,
    }  # fmt: skip


def _dumps(line: dict[str, Any]) -> str:
    try:
        return _encode(line)
    except (ValueError, RecursionError):  # a number that JSON has not, or a record that nests too deep
        return _encode(_finite(line, 0))


def _text_of(value: Any) -> str:
    """What JSON has no word for: text in columns of bytes, dates, decimals."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, default=_text_of).encode


def _finite(value: Any, depth: int) -> Any:
    """The value with null for what JSON cannot hold."""
    if isinstance(value, dict | list | tuple) and depth > _DEPTH:
        return None
    if isinstance(value, dict):
        return {name: _finite(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one, depth + 1) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_DEPTH = 100
