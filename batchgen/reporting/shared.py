"""What all prompts of an attempt have in common: tokens at their beginning, which a prefix cache keeps, and at the end.

What stands behind the document is read anew for each of them.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile


class Shared:
    """Tokens that all prompts seen so far begin and end with. Written by one thread; any may read the two numbers."""

    __slots__ = ("_begin", "_end", "seen")

    def __init__(self) -> None:
        self._begin: Sequence[int] = ()
        self._end: Sequence[int] = ()
        self.seen = 0

    def add(self, prompts: Iterable[Sequence[int]]) -> None:
        for ids in prompts:
            if not ids:
                continue
            if not self.seen:
                self._begin = self._end = array("i", ids)
            else:
                # Mostly equal: comparing arrays is fast, looking for the first difference is not.
                if ids[: len(self._begin)] != self._begin:
                    self._begin = self._begin[: _alike(self._begin, ids)]
                if len(self._end) and ids[-len(self._end) :] != self._end:
                    alike = _alike(reversed(self._end), reversed(ids))
                    self._end = self._end[len(self._end) - alike :]
            self.seen += 1

    def told(self) -> dict[str, int] | None:
        """`prefix_tokens` and `suffix_tokens`; None where there are no two prompts to compare."""
        if self.seen < 2:
            return None
        return {"prefix_tokens": len(self._begin), "suffix_tokens": len(self._end)}


def _alike(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
