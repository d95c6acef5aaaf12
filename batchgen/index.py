"""The done index: which documents have a committed row, and which were seen in this pass.

About 26 bytes a document: keys and content hashes in sorted arrays, in 256 buckets by the key's first byte, so that
taking in new keys copies a 256th of the whole. Each bucket has a small dict of new keys before it is merged.
"""

from collections.abc import Iterator
from enum import Enum

import numpy as np
from numpy.typing import NDArray

_MERGE_AT = 256
_MERGE_SHARE = 32  # a bucket merges when its new keys are a 32nd of the old


class Visit(Enum):
    """What a document is to the index when the reader comes to it."""

    NEW = "new"
    DONE = "done"
    EDITED = "edited"  # known key, other content, first time in this pass
    DUPLICATE = "duplicate"  # key seen before in this pass


class _Bucket:
    __slots__ = ("content", "fresh", "hi", "lo", "seen")

    def __init__(self, hi: NDArray[np.uint64], lo: NDArray[np.uint64], content: NDArray[np.uint64]) -> None:
        self.hi, self.lo, self.content = hi, lo, content
        self.seen = np.zeros(len(hi), dtype=np.bool_)
        self.fresh: dict[bytes, bytes] = {}

    def find(self, key: bytes) -> int:
        """Where the key stands in the arrays, or -1."""
        hi, lo = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
        at = int(np.searchsorted(self.hi, np.uint64(hi)))
        while at < len(self.hi) and self.hi[at] == hi:
            if self.lo[at] == lo:
                return at
            at += 1
        return -1

    def merge(self) -> None:
        keys = np.frombuffer(b"".join(self.fresh), dtype=">u8").reshape(-1, 2).astype(np.uint64)
        content = np.frombuffer(b"".join(self.fresh.values()), dtype=">u8").astype(np.uint64)
        hi = np.concatenate([self.hi, keys[:, 0]])
        order = np.argsort(hi, kind="stable")
        self.hi = hi[order]
        self.lo = np.concatenate([self.lo, keys[:, 1]])[order]
        self.content = np.concatenate([self.content, content])[order]
        self.seen = np.concatenate([self.seen, np.ones(len(keys), dtype=np.bool_)])[order]
        self.fresh = {}


class DoneIndex:
    """Not safe for several threads: the reader owns it during a pass."""

    def __init__(self, keys: NDArray[np.uint8], content: NDArray[np.uint8], seen: NDArray[np.bool_]) -> None:
        """Committed rows. keys: (n, 16) bytes, each once. content: (n, 8) bytes. seen: (n,), true where the row's
        file is known whole and unchanged, so that nobody will come by.
        """
        hi_lo = np.ascontiguousarray(keys).reshape(-1).view(">u8").reshape(-1, 2)
        hashes = np.ascontiguousarray(content).reshape(-1).view(">u8").astype(np.uint64)
        hi, lo = hi_lo[:, 0].astype(np.uint64), hi_lo[:, 1].astype(np.uint64)
        order = np.argsort(hi, kind="stable")
        hi, lo, hashes, seen = hi[order], lo[order], hashes[order], seen[order]
        edges = np.searchsorted(hi, np.arange(1, 256, dtype=np.uint64) << np.uint64(56))
        self._buckets = []
        for part in range(256):
            begin = int(edges[part - 1]) if part else 0
            end = int(edges[part]) if part < 255 else len(hi)
            bucket = _Bucket(hi[begin:end].copy(), lo[begin:end].copy(), hashes[begin:end].copy())
            bucket.seen = seen[begin:end].copy()
            self._buckets.append(bucket)
        self.done = len(hi)

    @classmethod
    def empty(cls) -> "DoneIndex":
        return cls(np.empty((0, 16), np.uint8), np.empty((0, 8), np.uint8), np.empty(0, np.bool_))

    def visit(self, key: bytes, content: bytes) -> Visit:
        """Mark the key as seen, and say what it was before. key: 16 bytes; content: 8 bytes."""
        bucket = self._buckets[key[0]]
        if key in bucket.fresh:
            return Visit.DUPLICATE
        at = bucket.find(key)
        if at < 0:
            bucket.fresh[key] = content
            if len(bucket.fresh) >= max(_MERGE_AT, len(bucket.hi) // _MERGE_SHARE):
                bucket.merge()
            return Visit.NEW
        if bucket.seen[at]:
            return Visit.DUPLICATE
        bucket.seen[at] = True
        return Visit.DONE if int(bucket.content[at]) == int.from_bytes(content, "big") else Visit.EDITED

    def unseen(self) -> Iterator[bytes]:
        """Keys with a committed row that no document of this pass had: after a complete pass, the orphans."""
        for bucket in self._buckets:
            for at in np.flatnonzero(~bucket.seen):
                yield int(bucket.hi[at]).to_bytes(8, "big") + int(bucket.lo[at]).to_bytes(8, "big")
