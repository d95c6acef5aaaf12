"""Lengths of documents, prompts and answers: quantiles and histograms, added up part by part."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.reporting.buckets import edges

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Lengths:
    """How often each length was met: sorted lengths, and the number of each. It grows with lengths, not with rows."""

    values: NDArray[np.int64] = field(default_factory=_none)
    counts: NDArray[np.int64] = field(default_factory=_none)

    def add(self, lengths: NDArray[Any]) -> None:
        more, counts = np.unique(lengths.astype(np.int64), return_counts=True)
        self.values, where = np.unique(np.concatenate([self.values, more]), return_inverse=True)
        summed = np.zeros(len(self.values), np.int64)
        np.add.at(summed, where, np.concatenate([self.counts, counts]))
        self.counts = summed

    def quantiles(self) -> dict[str, int | None]:
        """The smallest length that at least the share of all reaches; None where there is none."""
        if not len(self.values):
            return dict.fromkeys(_QUANTILES)
        up_to = self.counts.cumsum()
        return {name: int(self.values[np.searchsorted(up_to, share * up_to[-1])]) for name, share in _QUANTILES.items()}

    def histogram(self) -> dict[str, list[int]]:
        """`counts[n]` of them are at least `edges[n]` and below `edges[n + 1]`; both are empty where there is none."""
        if not len(self.values):
            return {"edges": [], "counts": []}
        at = edges(int(self.values[0]), int(self.values[-1]))
        found = np.zeros(len(at) - 1, np.int64)
        np.add.at(found, np.searchsorted(at, self.values, side="right") - 1, self.counts)
        return {"edges": at, "counts": found.tolist()}
