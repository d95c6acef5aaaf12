"""What is done, read from the parts; and the commit of what has just been finished.

Committed parts are the only truth. Of two rows with one key the one in the later part holds: a row for an edited
document is committed in a new part first, then the old part is rewritten without the old row. A start finishes what
was cut short in between.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen import plan
from batchgen.data import Document, Record
from batchgen.errors import OutputError
from batchgen.job.config import Job
from batchgen.sinks.base import DamagedPartError, PartKeys, Sink
from batchgen.sources.base import NO_SPLIT, FileFacts
from batchgen.storage.index import DoneIndex, IndexBuilder, KeySet
from batchgen.storage.layout import Layout
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Tally:
    """Some rows: how many, and a sum over their keys and contents. Where both agree, they are the same rows."""

    rows: int = 0
    sum: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.rows + other.rows, (self.sum + other.sum) & _WORD)


@dataclass(frozen=True, slots=True)
class Loaded:
    """index: of all committed rows. whole: files that need not be opened. damaged: parts set aside, and why.

    twins: for a shard, the keys by place of documents whose id stood in an earlier row.
    """

    index: DoneIndex
    whole: Mapping[str, Tally]
    damaged: tuple[str, ...]
    twins: frozenset[bytes] = frozenset()


def load(job: Job, files: Sequence[FileFacts], view: View) -> Loaded:
    """Read all parts of the view; set damaged ones aside, and take superseded rows out of old ones."""
    damaged: tuple[str, ...] = ()
    while True:
        held = _read_parts(view)
        repeated = held.builder.repeated()
        damaged += held.damaged
        if not len(repeated):
            break
        damaged += _take_out(view, repeated)
    whole = _whole(job, files, held, view.layout)
    index = held.builder.index([source in whole for source in held.rows])
    return Loaded(index, whole, damaged, held.twins)


@dataclass(frozen=True, slots=True)
class _Held:
    """What all parts hold. rows: of each source, in the order of their numbers.

    told: by source, what parts say of the rows of some or all of its splits, the oldest first.
    """

    builder: IndexBuilder
    rows: Mapping[str, Tally]
    told: Mapping[str, list[Mapping[str, Any]]]
    damaged: tuple[str, ...]
    twins: frozenset[bytes]


def _read_parts(view: View) -> _Held:
    builder = IndexBuilder()
    numbers: dict[str, int] = {}
    rows: dict[str, Tally] = defaultdict(Tally)
    told: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    damaged: list[str] = []
    twins: set[bytes] = set()
    for path in view.parts():
        try:
            part = view.read_keys(path)
        except DamagedPartError as e:
            damaged += _set_aside(view, path, e)
            continue
        twins |= part.twins
        for source, entry in part.footer.get("files", {}).items():
            told[source].append(entry)
        named = part.sources.combine_chunks().dictionary_encode()
        names, at = named.dictionary.to_pylist(), named.indices.to_numpy()
        for name, count, total in zip(names, np.bincount(at).tolist(), _sums(part, at).tolist(), strict=True):
            rows[name] += Tally(count, total)
        known = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.uint32)
        builder.add(part.keys, part.content, known[at] if names else np.empty(0, np.uint32))
    return _Held(builder, rows, told, tuple(damaged), frozenset(twins))


def _sums(part: PartKeys, at: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """By source the sum of a tally. at: (n,), the number of each row's source in this part."""
    keys = np.ascontiguousarray(part.keys).view(">u8").astype(np.uint64)
    content = np.ascontiguousarray(part.content).view(">u8").astype(np.uint64)
    sums = np.zeros(at.max(initial=-1) + 1, np.uint64)
    np.add.at(sums, at, keys[:, 1] + (keys[:, 0] | np.uint64(1)) * (content[:, 0] | np.uint64(1)))
    return sums


def _sum(key: bytes, content: bytes) -> int:
    """What one row adds to the sum of a tally."""
    high, low, hashed = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big"), int.from_bytes(content, "big")
    return (low + (high | 1) * (hashed | 1)) & _WORD


def repeated_keys(view: View) -> KeySet:
    """Keys with rows in several parts: edited documents whose old row still stands. Changes nothing."""
    builder = IndexBuilder()
    for path in view.parts():
        with contextlib.suppress(DamagedPartError):
            part = view.read_keys(path)
            builder.add(part.keys, part.content, np.zeros(len(part.keys), np.uint32))
    return builder.repeated()


def superseded(view: View, repeated: KeySet) -> dict[Path, set[str]]:
    """By part the keys (hex) of rows that have a newer one in a later part."""
    found: dict[Path, set[str]] = {}
    newer = np.zeros(len(repeated), np.bool_)
    for path in reversed(view.parts() if len(repeated) else []):
        try:
            keys = view.read_keys(path).keys
        except DamagedPartError:
            continue
        at = repeated.places(keys)
        keys, at = keys[at >= 0], at[at >= 0]
        if newer[at].any():
            found[path] = {key.tobytes().hex() for key in keys[newer[at]]}
        newer[at] = True
    return found


def _set_aside(view: View, path: Path, damage: DamagedPartError) -> tuple[str, ...]:
    """Move a damaged part out of the way; the sentence about it.

    None where another shard has removed the part meanwhile, or is to look after it.
    """
    with view.run.alone():
        if not path.exists() or not view.is_ours(path):
            return ()
        view.sink.move(path, view.run.damaged)
    return (f"{path.name}: {damage}; moved to {view.run.damaged.name}/, its documents are done again",)


def _take_out(view: View, repeated: KeySet) -> tuple[str, ...]:
    """Rewrite parts without superseded rows; a part whose damage shows only now is set aside, and told."""
    damaged: list[str] = []
    with view.run.alone():  # what two shards take out of one part at once would come back with the second
        for path, keys in sorted(superseded(view, repeated).items()):
            try:
                view.sink.drop(path, keys, to=None)
            except DamagedPartError as e:
                if not view.is_ours(path):
                    raise OutputError(
                        f"{path}: {e}; start the shard that wrote it: it does these documents again"
                    ) from e
                damaged += _set_aside(view, path, e)
    return tuple(damaged)


def _whole(job: Job, files: Sequence[FileFacts], held: _Held, layout: Layout | None) -> dict[str, Tally]:
    """Files that parts call whole, that are unchanged since, and whose rows, these very ones, are in the parts.

    For a shard: whole as far as its splits go. A row keeps its source when its document moves. So a file can have as
    many rows as it has documents, and they are of others.
    """
    found = {}
    for file in files:
        mine = frozenset(layout.mine(file.source)) if layout else frozenset()
        wanted, rows = plan.state(job, file).items(), held.rows.get(file.source, Tally())
        entries = [entry for entry in held.told.get(file.source, ()) if wanted <= entry.items()]
        if entries and _put_together(entries, mine) == rows:
            found[file.source] = rows
    return found


def _put_together(entries: Sequence[Mapping[str, Any]], mine: frozenset[int]) -> Tally | None:
    """The rows of these splits of one file, told together or one by one, by shards of then; None where some lack."""
    left, rows = set(mine), Tally()
    for entry in reversed(entries):  # the newest first
        splits = set(entry["splits"])
        tally = Tally(entry["rows"], int(entry["sum"], 16))
        if splits == mine:
            return tally
        if splits and splits <= left:
            left -= splits
            rows += tally
    return None if left else rows


def _told(rows: Tally) -> dict[str, Any]:
    """A tally in a footer."""
    return {"rows": rows.rows, "sum": f"{rows.sum:016x}"}


@dataclass(slots=True)
class _Pass:
    """How far one file is in this pass: documents on their way, and whether its last was read."""

    waiting: int = 0
    rows: Tally = field(default_factory=Tally)
    duplicates: int = 0
    ended: bool = False


@dataclass(slots=True)
class Committer:
    """Gathers records and writes them as parts: at `rows` records, or `interval_s` after the first of them.

    The reader's thread calls `read`, `duplicate` and `ended`, the engine's all others: each value has one writer.
    whole: files that parts call whole: a new part with rows of theirs says it again, since the older can go.
    layout: of the splits; a file is told whole as far as those of the shard go.
    """

    job: Job
    run: RunDirectory
    sink: Sink
    fingerprint: str
    attempt: int
    files: Mapping[str, FileFacts]
    whole: Mapping[str, Tally] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)
    parts: int = 0
    rows: int = 0
    seconds: float = 0.0
    _records: list[Record] = field(default_factory=list)
    _since: float = 0.0
    _passes: dict[str, _Pass] = field(default_factory=lambda: defaultdict(_Pass))
    _committed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _told: set[str] = field(default_factory=set)

    def read(self, document: Document, *, waiting: bool) -> None:
        """A document was read; `waiting`: a record of it is still to come."""
        at = self._passes[document.source]
        at.rows += Tally(1, _sum(document.key, document.content))
        at.waiting += waiting

    def duplicate(self, source: str) -> None:
        """A row of this file has the id of another one. What it ends in depends on the other's file too."""
        self._passes[source].duplicates += 1

    def ended(self, source: str) -> None:
        """All rows of this file were read."""
        self._passes[source].ended = True

    @property
    def counted(self) -> dict[str, int]:
        """Rows of each file that was read to its end."""
        return {source: at.rows.rows for source, at in self._passes.items() if at.ended}

    @property
    def met(self) -> frozenset[str]:
        """Files that documents were read from, or have a new row."""
        return frozenset(self._passes) | frozenset(self._committed)

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
        self.run.still_ours()
        records, self._records = self._records, []
        for record in records:
            self._committed[record.document.source] += 1
        rows = {source: self._passes[source].rows for source in list(self._passes) if self._is_whole(source)}
        rows |= {one: self.whole[one] for one in {record.document.source for record in records} if one in self.whole}
        whole = {
            source: plan.state(self.job, self.files[source]) | {"splits": self.layout.mine(source)} | _told(tally)
            for source, tally in sorted(rows.items())
        }
        footer = {
            "version": 1,
            "plan": self.layout.plan,
            "attempt": self.attempt,
            "splits": sorted({record.document.split for record in records} - {NO_SPLIT}),
            "files": whole,
        }
        path = self.run.part(self.attempt, self.parts + 1, self.sink.suffix)
        self.sink.write_part(path, records, fingerprint=self.fingerprint, footer=footer)
        self._told |= set(rows)
        self.parts += 1
        self.rows += len(records)
        self.seconds += time.monotonic() - begin
        return len(records)

    def _is_whole(self, source: str) -> bool:
        at = self._passes[source]
        done = at.ended and source not in self._told and self._committed[source] == at.waiting
        return done and not at.duplicates


def settle(view: View, orphans: KeySet) -> None:
    """Take superseded rows out of old parts, and move the rows of documents that are gone to orphans/."""
    held = _read_parts(view)
    damaged = held.damaged or _take_out(view, held.builder.repeated())
    for path in view.parts() if len(orphans) and not damaged else []:
        try:
            keys = view.read_keys(path).keys
            if gone := {key.tobytes().hex() for key in keys[orphans.places(keys) >= 0]}:
                view.sink.drop(path, gone, to=view.run.orphans / path.name)
        except DamagedPartError as e:
            damaged += _set_aside(view, path, e)
    if damaged:
        raise OutputError("\n".join(damaged) + "; start the same command again")
