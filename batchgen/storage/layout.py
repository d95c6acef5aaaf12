"""Where all splits of a run lie: which are this shard's, and in which of them a place is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.shards import WHOLE, Shard, shares

_NUMBER = r"^\D+(?P<number>\d+)"  # `byte 70`, `row 3`, `shard 2 row 5`: what tells the split comes first


@dataclass(frozen=True, slots=True)
class _File:
    """The splits of a file as it is now, by the number with which the places in each begin: ascending."""

    first: NDArray[np.int64]
    index: NDArray[np.int64]
    mine: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Layout:
    """plan: which plan the splits are numbered by. remade: there were parts before that plan.

    gaps: the source of each split that no file has any more.
    """

    plan: str = ""
    remade: bool = False
    shard: Shard = WHOLE
    gaps: Mapping[int, str] = field(default_factory=dict)
    _files: Mapping[str, _File] = field(default_factory=dict)
    _ours: frozenset[int] = frozenset()

    @classmethod
    def of(cls, known: Mapping[str, Any], current: Mapping[str, Sequence[int]], shard: Shard) -> "Layout":
        """known: plan.json's value. current: the splits of the files that there are now."""
        splits = known["splits"]
        owner = shares([split[3] for split in splits], shard.count)
        files = {}
        for source, indices in current.items():
            ordered = sorted(indices, key=lambda index: splits[index][4])
            files[source] = _File(
                np.array([splits[index][4] for index in ordered], np.int64),
                np.array(ordered, np.int64),
                np.array([owner[index] == shard.number for index in ordered], np.bool_),
            )
        live = {index for indices in current.values() for index in indices}
        gaps = {index: split[0] for index, split in enumerate(splits) if index not in live}
        ours = frozenset(index for index in live if owner[index] == shard.number)
        return cls(known["id"], known["remade"], shard, gaps, files, ours)

    def mine(self, source: str) -> list[int]:
        """The shard's splits of a file, in the order in which they are read."""
        found = self._files.get(source)
        return [] if found is None else found.index[found.mine].tolist()

    def holds(self, source: str) -> bool:
        """Whether all splits of a file are the shard's."""
        found = self._files.get(source)
        return found is not None and bool(found.mine.all())

    def split_at(self, source: str, place: str) -> tuple[int | None, bool]:
        """(the split of a place, whether it is the shard's); None where no file has it now."""
        found, number = self._files.get(source), re.match(_NUMBER, place)
        if found is None or number is None or not len(found.first):
            return None, False
        at = int(np.searchsorted(found.first, int(number[1]), side="right")) - 1
        return int(found.index[at]), bool(found.mine[at])

    def concern(self, footer: Mapping[str, Any]) -> bool:
        """Whether a part with this footer can hold rows of the shard, or rows that are in nobody's split any more."""
        if footer.get("plan") != self.plan:
            return True
        return any(index in self._ours or index in self.gaps for index in footer.get("splits", ()))

    def rows(self, sources: pa.ChunkedArray, places: pa.ChunkedArray, footer: Mapping[str, Any]) -> NDArray[np.bool_]:
        """(n,): which rows of a part are the shard's: those in its splits, and those that are in nobody's any more."""
        stray = {self.gaps[index] for index in footer.get("splits", ()) if index in self.gaps}
        named = sources.combine_chunks().dictionary_encode()
        at = named.indices.to_numpy()
        found = np.zeros(len(at), np.bool_)
        for number, source in enumerate(named.dictionary.to_pylist()):
            rows = np.flatnonzero(at == number)
            file = self._files.get(source)
            if file is None or not len(file.first) or source in stray or footer.get("plan") != self.plan:
                found[rows] = True
                continue
            numbers = pc.extract_regex(places.take(pa.array(rows)), _NUMBER).combine_chunks().field("number")
            first = numbers.cast(pa.int64()).to_numpy(zero_copy_only=False)
            found[rows] = file.mine[np.searchsorted(file.first, first, side="right") - 1]
        return found
