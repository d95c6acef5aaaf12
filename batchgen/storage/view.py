"""The committed rows that concern a shard.

A shard looks at the rows in its own splits, and at stray ones: those that are in nobody's split any more, since their
file has changed or is gone; their documents can be anywhere now. Rows in splits of others are the others'. So a
document has one row as long as its id stands in the splits of one shard; what else there is (ids that stand twice in
the input, rows of documents that are gone) is seen by a start that is not divided, which looks at all rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.sinks.base import DamagedPartError, PartKeys, Sink, unhex
from batchgen.storage.layout import Layout
from batchgen.storage.rundir import RunDirectory, shard_of


class View:
    """The parts of a run, with the rows that concern its shard. What it finds in a footer holds for its life."""

    def __init__(self, run: RunDirectory, sink: Sink, layout: Layout | None = None) -> None:
        """layout: of the splits; None, or one of a run that is not divided: all rows."""
        self.run = run
        self.sink = sink
        self.layout = layout
        self._layout = None if layout is None or layout.shard.is_whole else layout
        self._footers: dict[str, Mapping[str, Any] | None] = {}  # of parts of others; None: no row concerns us

    def parts(self) -> list[Path]:
        """Committed parts that can hold such rows, oldest first."""
        every = self.run.parts(self.sink.suffix)
        if self._layout is None:
            return every
        return [path for path in every if self._is_own(path) or self._footer(path) is not None]

    @property
    def others(self) -> int:
        """How many parts of other shards have to be looked through."""
        return sum(footer is not None for footer in self._footers.values())

    def _is_own(self, path: Path) -> bool:
        return shard_of(path) == self.run.shard

    def is_ours(self, path: Path) -> bool:
        """Whether it is ours to say that a part is damaged: no other shard of this run can."""
        shard = shard_of(path)
        return self._layout is None or shard is None or shard.count != self.run.shard.count or self._is_own(path)

    def _footer(self, path: Path) -> Mapping[str, Any] | None:
        if path.name not in self._footers:
            self._footers[path.name] = self._look(path)
        return self._footers[path.name]

    def _look(self, path: Path) -> Mapping[str, Any] | None:
        assert self._layout is not None
        is_divided_so = not self.is_ours(path)
        if is_divided_so and not self._layout.gaps and not self._layout.remade:
            return None  # the other shard's rows are in its splits, which all have their places
        try:
            footer = self.sink.footer(path)
        except DamagedPartError:
            return None if is_divided_so or not path.exists() else {}
        return footer if self._layout.concern(footer) else None

    def read_keys(self, path: Path) -> PartKeys:
        """As of Sink.read_keys, of these rows alone."""
        if self._layout is None:
            return self.sink.read_keys(path)
        footer = self.sink.footer(path) if self._is_own(path) else self._footer(path) or {}
        table = self.read(path, ["doc_key", "content_hash", "source", "error_type"])
        keys, content = unhex(table.column("doc_key"), 16), unhex(table.column("content_hash"), 8)
        twice = pc.fill_null(pc.equal(table.column("error_type"), "duplicate_id"), fill_value=False)
        twins = frozenset(map(bytes.fromhex, table.column("doc_key").filter(twice).to_pylist()))
        return PartKeys(keys, content, table.column("source"), footer, twins)

    def read(self, path: Path, names: Sequence[str]) -> pa.Table:
        """As of Sink.read, of these rows alone."""
        if self._layout is None or self._is_own(path):
            return self.sink.read(path, names)
        table = self.sink.read(path, list(dict.fromkeys([*names, "source", "place"])))
        ours = self._layout.rows(table.column("source"), table.column("place"), self._footer(path) or {})
        return table.filter(pa.array(ours)).select(list(names))

    def split_at(self, source: str, place: str) -> tuple[int | None, bool]:
        """(the split of a place, whether it is ours); None where no file has it now."""
        return (None, True) if self.layout is None else self.layout.split_at(source, place)
