"""One run done by several processes side by side: whose split is whose.

Shard K of N has a share of the splits of plan.json. The shares follow from the sizes of the splits alone, in the order
of plan.json: each split goes to the shard that has the fewest bytes so far. So no two shards differ by more than the
largest split, whatever the files are, and a split that is appended moves none of those before it.
"""

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 100_000  # names have room for five digits


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `number` of `count`, from 0. A run that is not divided is shard 0 of 1."""

    number: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def label(self) -> str:
        """What names of files have for it: `00000` where the run is not divided, else `00002of00004`."""
        return f"{self.number:05d}" if self.is_whole else f"{self.number:05d}of{self.count:05d}"

    def __str__(self) -> str:
        return f"shard {self.number}/{self.count}"


WHOLE = Shard()


def of_label(label: str) -> Shard | None:
    """The shard of a label; None where it is none."""
    found = re.fullmatch(r"(\d+)(?:of(\d+))?", label)
    return Shard(int(found[1]), int(found[2] or 1)) if found else None


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """For each split, by its index, the shard of `count` that does it. sizes: bytes."""
    if count == 1:
        return [0] * len(sizes)
    least = [(0, number) for number in range(count)]
    found = []
    for size in sizes:
        has, number = least[0]
        heapq.heapreplace(least, (has + size, number))
        found.append(number)
    return found
