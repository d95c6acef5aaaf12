"""What is done, read from the parts; and the commit of what has just been finished.

Committed parts are the only truth. Of two rows with one key the one in the later part holds: a row for an edited
document is committed in a new part first, then the old part is rewritten without the old row. A start finishes what
was cut short in between.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen import fsio, plan
from batchgen.config import Job
from batchgen.data import Record
from batchgen.errors import OutputError
from batchgen.index import DoneIndex
from batchgen.rundir import RunDirectory
from batchgen.sinks.base import DamagedPartError, PartKeys, Sink
from batchgen.sources.base import FileFacts


@dataclass(frozen=True, slots=True)
class Loaded:
    """index: of all committed rows. whole: rows of files that need not be opened. damaged: parts set aside, and why."""

    index: DoneIndex
    whole: Mapping[str, int]
    damaged: tuple[str, ...]


def load(job: Job, files: Sequence[FileFacts], run: RunDirectory, sink: Sink) -> Loaded:
    """Read all parts; set damaged ones aside, and take superseded rows out of old ones."""
    parts, damaged = _read_parts(run, sink)
    newest, superseded = newest_rows(parts)
    if broken := _take_out(run, sink, superseded):
        again = load(job, files, run, sink)
        return Loaded(again.index, again.whole, damaged + broken + again.damaged)
    whole = _whole(job, files, [held for _, held in parts], newest)
    if not parts:
        return Loaded(DoneIndex.empty(), whole, damaged)
    keys = np.concatenate([held.keys for _, held in parts])[newest]
    content = np.concatenate([held.content for _, held in parts])[newest]
    known = pa.array(sorted(whole), pa.string())
    seen = np.concatenate(
        [np.asarray(pc.is_in(held.sources, value_set=known).to_numpy(), dtype=np.bool_) for _, held in parts]
    )[newest]
    return Loaded(DoneIndex(keys, content, seen), whole, damaged)


def _read_parts(run: RunDirectory, sink: Sink) -> tuple[list[tuple[Path, PartKeys]], tuple[str, ...]]:
    parts, damaged = [], []
    for path in run.parts(sink.suffix):
        try:
            parts.append((path, sink.read_keys(path)))
        except DamagedPartError as e:
            damaged.append(_set_aside(run, path, e))
    return parts, tuple(damaged)


def _set_aside(run: RunDirectory, path: Path, damage: DamagedPartError) -> str:
    """Move a damaged part out of the way; the sentence about it."""
    try:
        run.damaged.mkdir(exist_ok=True)
        path.rename(run.damaged / path.name)
    except OSError as e:
        raise fsio.output_error(path, e) from e
    return f"{path.name}: {damage}; moved to {run.damaged.name}/, its documents are done again"


def _take_out(run: RunDirectory, sink: Sink, superseded: Mapping[Path, set[str]]) -> tuple[str, ...]:
    """Rewrite parts without these rows; a part whose damage shows only now is set aside, and told."""
    damaged = []
    for path, keys in sorted(superseded.items()):
        try:
            sink.drop(path, keys, to=None)
        except DamagedPartError as e:
            damaged.append(_set_aside(run, path, e))
    return tuple(damaged)


def newest_rows(parts: Sequence[tuple[Path, PartKeys]]) -> tuple[Any, dict[Path, set[str]]]:
    """(which of all rows are the newest of their key, as a mask; the other rows' keys (hex) by part)."""
    if not parts:
        return np.empty(0, np.bool_), {}
    keys = np.ascontiguousarray(np.concatenate([held.keys for _, held in parts]))
    halves = keys.view(">u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: rows of one key stay in the order of their parts
    same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
    old = order[:-1][same]
    newest = np.ones(len(keys), np.bool_)
    newest[old] = False
    edges = np.cumsum([len(held.keys) for _, held in parts])
    superseded: dict[Path, set[str]] = defaultdict(set)
    for row in old:
        superseded[parts[int(np.searchsorted(edges, row, side="right"))][0]].add(keys[row].tobytes().hex())
    return newest, superseded


def _whole(job: Job, files: Sequence[FileFacts], parts: Sequence[PartKeys], newest: Any) -> dict[str, int]:
    """Files that some part calls whole, that are unchanged since, and whose rows are all in the parts."""
    told: dict[str, Mapping[str, Any]] = {}
    for held in parts:
        told |= held.footer.get("files", {})
    counts: dict[str, int] = defaultdict(int)
    begin = 0
    for held in parts:
        mask = newest[begin : begin + len(held.keys)]
        begin += len(held.keys)
        for pair in held.sources.filter(pa.array(mask)).value_counts().to_pylist():
            counts[pair["values"]] += pair["counts"]
    return {
        file.source: entry["rows"]
        for file in files
        if (entry := told.get(file.source))
        and plan.state(job, file).items() <= entry.items()
        and counts[file.source] == entry["rows"]
    }


@dataclass(slots=True)
class _Pass:
    """How far one file is in this pass: documents on their way, and whether its last was read."""

    waiting: int = 0
    rows: int = 0
    ended: bool = False


@dataclass(slots=True)
class Committer:
    """Gathers records and writes them as parts: at `rows` records, or `interval_s` after the first of them.

    The reader's thread calls `read` and `ended`, the engine's all others: ints and bools, each with one writer.
    """

    job: Job
    run: RunDirectory
    sink: Sink
    fingerprint: str
    attempt: int
    files: Mapping[str, FileFacts]
    parts: int = 0
    rows: int = 0
    seconds: float = 0.0
    _records: list[Record] = field(default_factory=list)
    _since: float = 0.0
    _passes: dict[str, _Pass] = field(default_factory=lambda: defaultdict(_Pass))
    _committed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _told: set[str] = field(default_factory=set)

    def read(self, source: str, *, waiting: bool) -> None:
        """A row of this file was read; `waiting`: a record of it is still to come."""
        at = self._passes[source]
        at.rows += 1
        at.waiting += waiting

    def ended(self, source: str) -> None:
        """All rows of this file were read."""
        self._passes[source].ended = True

    def add(self, records: Iterable[Record]) -> None:
        if not self._records:
            self._since = time.monotonic()
        self._records += records

    @property
    def due(self) -> bool:
        """Whether a part should be written now."""
        waited = time.monotonic() - self._since
        return bool(self._records) and (
            len(self._records) >= self.job.checkpoint.rows or waited >= self.job.checkpoint.interval_s
        )

    def commit(self) -> int:
        """Write what was gathered as one part; the number of its rows. When this returns, they are on disk."""
        if not self._records:
            return 0
        begin = time.monotonic()
        records, self._records = self._records, []
        for record in records:
            self._committed[record.document.source] += 1
        whole = {source: self._facts(source) for source in list(self._passes) if self._is_whole(source)}
        footer = {
            "version": 1,
            "attempt": self.attempt,
            "splits": sorted({record.document.split for record in records}),
            "files": whole,
        }
        path = self.run.part(self.attempt, self.parts + 1, self.sink.suffix)
        self.sink.write_part(path, records, fingerprint=self.fingerprint, footer=footer)
        self._told |= set(whole)
        self.parts += 1
        self.rows += len(records)
        self.seconds += time.monotonic() - begin
        return len(records)

    def _is_whole(self, source: str) -> bool:
        at = self._passes[source]
        return at.ended and source not in self._told and self._committed[source] == at.waiting

    def _facts(self, source: str) -> dict[str, Any]:
        return plan.state(self.job, self.files[source]) | {"rows": self._passes[source].rows}


def settle(run: RunDirectory, sink: Sink, orphans: set[str]) -> None:
    """Take superseded rows out of old parts, and move the rows of documents that are gone to orphans/."""
    parts, damaged = _read_parts(run, sink)
    if damaged:
        raise OutputError("\n".join(damaged) + "; start the same command again")
    _, superseded = newest_rows(parts)
    for path, held in parts:
        gone = {key.tobytes().hex() for key in held.keys} & orphans
        try:
            if old := superseded.get(path):
                sink.drop(path, old, to=None)
            if gone and path.exists():
                sink.drop(path, gone, to=run.orphans / path.name)
        except DamagedPartError as e:
            raise OutputError(f"{_set_aside(run, path, e)}; start the same command again") from e
