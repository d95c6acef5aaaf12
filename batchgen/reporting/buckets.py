"""How often which value was met, in buckets of fixed edges: those of attempts and shards add up."""

import math
from collections.abc import Mapping
from typing import Self

# Of times: a quantile is told within 2.2 %, half a bucket.
PER_DOUBLING = 16
_LEAST = 1e-6  # seconds; a shorter time is as good as none


class Buckets:
    """Times in seconds. Bucket n holds those from 2^(n/16) up to 2^((n+1)/16)."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def add(self, seconds: float) -> None:
        n = math.floor(math.log2(max(seconds, _LEAST)) * PER_DOUBLING)
        self.counts[n] = self.counts.get(n, 0) + 1

    def __iadd__(self, other: "Buckets") -> Self:
        for n, count in other.counts.items():
            self.counts[n] = self.counts.get(n, 0) + count
        return self

    def __len__(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """The middle of the bucket of the smallest value that this share of all reaches; None where there is none."""
        wanted, met = share * len(self), 0
        for n in sorted(self.counts):
            met += self.counts[n]
            if met >= wanted:
                return float(2 ** ((n + 0.5) / PER_DOUBLING))
        return None

    def about(self) -> float:
        """The sum of all values, each taken for the middle of its bucket."""
        return sum(count * 2 ** ((n + 0.5) / PER_DOUBLING) for n, count in self.counts.items())

    def told(self) -> dict[str, float | int | None]:
        """`count`, `p50_ms` and `p95_ms`."""
        shares = {"p50_ms": 0.5, "p95_ms": 0.95}
        found = {name: self.quantile(share) for name, share in shares.items()}
        return {"count": len(self)} | {
            name: None if value is None else float(f"{value * 1000:.4g}") for name, value in found.items()
        }

    def to_json(self) -> dict[str, int]:
        return {str(n): self.counts[n] for n in sorted(self.counts)}

    @classmethod
    def from_json(cls, value: Mapping[str, int]) -> Self:
        return cls({int(n): int(count) for n, count in value.items()})


def edges(least: int, most: int) -> list[int]:
    """Edges of a histogram of whole numbers from `least` to `most`: every number first, then 8 for each doubling.

    They are the same for every run, only as many as are needed; the last one is beyond `most`.
    """
    found = [0, *sorted({round(2 ** (n / 8)) for n in range(8 * 64) if 2 ** (n / 8) <= 4 * max(most, 1)})]
    first = max((n for n, edge in enumerate(found) if edge <= least), default=0)
    last = next(n for n, edge in enumerate(found) if edge > most)
    return found[first : last + 1]
