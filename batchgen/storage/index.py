"""The done index: which documents have a committed row, and which were seen in this pass.

25 bytes a committed row: keys, content hashes and a seen mark in sorted arrays, in 256 buckets by the key's first byte,
so that sorting and taking in new keys copies a 256th of the whole. 16 bytes a key that is new in this pass: nobody asks
for its content again. New keys go into a small set a bucket first, and are merged now and then.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MERGE_AT = 256
_MERGE_SHARE = 64  # a bucket merges when its new keys are a 64th of the old
_GATHER = 1 << 16  # rows taken into the buckets at once
_BLOCK = 1 << 10

Keys = NDArray[np.uint8]  # (n, 16)


class Visit(Enum):
    """What a document is to the index when the reader comes to it."""

    NEW = "new"
    DONE = "done"
    EDITED = "edited"  # known key, other content, first time in this pass
    DUPLICATE = "duplicate"  # key seen before in this pass


class KeySet:
    """Some keys, 16 bytes each; asked part by part."""

    def __init__(self, keys: Keys) -> None:
        self._keys = np.sort(_texts(keys))

    @classmethod
    def empty(cls) -> "KeySet":
        return cls(np.empty((0, 16), np.uint8))

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(key).ljust(16, b"\0") for key in self._keys)

    def places(self, keys: Keys) -> NDArray[np.intp]:
        """(n,): where each of these stands in the set, from 0 to len - 1; -1 where it does not."""
        if not len(self._keys) or not len(keys):
            return np.full(len(keys), -1, np.intp)
        asked = _texts(keys)
        at = np.minimum(np.searchsorted(self._keys, asked), len(self._keys) - 1)
        return np.where(self._keys[at] == asked, at, -1)


def _texts(keys: Keys) -> NDArray[np.bytes_]:
    """(n,) of 16-byte texts, which NumPy compares byte by byte."""
    return np.ascontiguousarray(keys).reshape(-1).view("S16")


def _find(hi: NDArray[np.uint64], lo: NDArray[np.uint64], key: bytes) -> int:
    """Where the key stands in arrays of its halves, sorted by the first; -1 where it does not."""
    if not len(hi):
        return -1
    high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
    at = int(hi.searchsorted(np.uint64(high)))
    while at < len(hi) and hi[at] == high:
        if lo[at] == low:
            return at
        at += 1
    return -1


class _Bucket:
    """Committed rows (`hi`, `lo`, `content`, `seen`), and keys met in this pass that had none (`new_*`, `fresh`)."""

    __slots__ = ("content", "fresh", "hi", "lo", "new_hi", "new_lo", "seen")

    def __init__(self, hi: NDArray[np.uint64], lo: NDArray[np.uint64], content: NDArray[np.uint64]) -> None:
        self.hi, self.lo, self.content = hi, lo, content
        self.seen = np.zeros(len(hi), dtype=np.bool_)
        self.new_hi, self.new_lo = np.empty(0, np.uint64), np.empty(0, np.uint64)
        self.fresh: set[bytes] = set()

    def is_new(self, key: bytes) -> bool:
        """Whether a key without committed row was met before in this pass."""
        return key in self.fresh or _find(self.new_hi, self.new_lo, key) >= 0

    def meet(self, key: bytes) -> None:
        self.fresh.add(key)
        if len(self.fresh) >= max(_MERGE_AT, len(self.new_hi) // _MERGE_SHARE):
            keys = np.frombuffer(b"".join(self.fresh), dtype=">u8").reshape(-1, 2).astype(np.uint64)
            hi = np.concatenate([self.new_hi, keys[:, 0]])
            order = np.argsort(hi, kind="stable")
            self.new_hi = hi[order]
            self.new_lo = np.concatenate([self.new_lo, keys[:, 1]])[order]
            self.fresh = set()


class DoneIndex:
    """Not safe for several threads: the reader owns it during a pass."""

    def __init__(self, buckets: list[_Bucket]) -> None:
        """buckets: 256, sorted; IndexBuilder makes them."""
        self._buckets = buckets
        self.done = sum(len(bucket.hi) for bucket in buckets)

    @classmethod
    def empty(cls) -> "DoneIndex":
        return IndexBuilder().index([])

    def visit(self, key: bytes, content: bytes) -> Visit:
        """Mark the key as seen, and say what it was before. key: 16 bytes; content: 8 bytes."""
        bucket = self._buckets[key[0]]
        if bucket.is_new(key):
            return Visit.DUPLICATE
        at = _find(bucket.hi, bucket.lo, key)
        if at < 0:
            bucket.meet(key)
            return Visit.NEW
        if bucket.seen[at]:
            return Visit.DUPLICATE
        bucket.seen[at] = True
        return Visit.DONE if int(bucket.content[at]) == int.from_bytes(content, "big") else Visit.EDITED

    def unseen(self) -> KeySet:
        """Keys with a committed row that no document of this pass had: after a complete pass, the orphans."""
        return KeySet(np.concatenate([_key_bytes(bucket, ~bucket.seen) for bucket in self._buckets]))

    def clear(self) -> None:
        """Forget all, where the memory is wanted for something else."""
        self._buckets = []


def _key_bytes(bucket: Any, mask: NDArray[np.bool_]) -> Keys:
    """(m, 16): the keys of a bucket under a mask."""
    halves = np.stack([bucket.hi[mask], bucket.lo[mask]], axis=1).astype(">u8")
    return halves.view(np.uint8).reshape(-1, 16)


_ROW = (("hi", np.uint64), ("lo", np.uint64), ("content", np.uint64), ("source", np.uint32))


class _Gathered:
    """Rows of one bucket on their way into the index, with the number of their source: in blocks, none copied twice."""

    __slots__ = ("blocks", "free")

    def __init__(self) -> None:
        self.blocks: list[tuple[NDArray[Any], ...]] = []
        self.free = 0  # rows that still fit into the last block

    def add(self, columns: tuple[NDArray[Any], ...]) -> None:
        """columns: those of _ROW, of one length."""
        while len(columns[0]):
            if not self.free:
                self.blocks.append(tuple(np.empty(_BLOCK, kind) for _, kind in _ROW))
                self.free = _BLOCK
            begin, count = _BLOCK - self.free, min(self.free, len(columns[0]))
            for block, column in zip(self.blocks[-1], columns, strict=True):
                block[begin : begin + count] = column[:count]
            self.free -= count
            columns = tuple(column[count:] for column in columns)

    def column(self, name: str) -> NDArray[Any]:
        number = next(n for n, (known, _) in enumerate(_ROW) if known == name)
        blocks = [block[number] for block in self.blocks]
        if self.free:
            blocks[-1] = blocks[-1][: _BLOCK - self.free]
        return np.concatenate(blocks) if blocks else np.empty(0, _ROW[number][1])


class IndexBuilder:
    """Takes the rows of committed parts, part by part, and makes the index of them."""

    def __init__(self) -> None:
        self._buckets = [_Gathered() for _ in range(256)]
        self._waiting: list[tuple[Keys, NDArray[np.uint8], NDArray[np.uint32]]] = []
        self._rows = 0

    def add(self, keys: Keys, content: NDArray[np.uint8], sources: NDArray[np.uint32]) -> None:
        """keys: (n, 16) bytes. content: (n, 8) bytes. sources: (n,), a number for the source of each row."""
        self._waiting.append((keys, content, sources))
        self._rows += len(keys)
        if self._rows >= _GATHER:
            self._distribute()

    def _distribute(self) -> None:
        if not self._waiting:
            return
        keys, content, sources = (np.concatenate(columns) for columns in zip(*self._waiting, strict=True))
        self._waiting, self._rows = [], 0
        order = np.argsort(keys[:, 0], kind="stable")
        keys = np.ascontiguousarray(keys[order])
        halves = keys.view(">u8").astype(np.uint64)
        hashes = np.ascontiguousarray(content[order]).view(">u8").reshape(-1).astype(np.uint64)
        columns = (halves[:, 0], halves[:, 1], hashes, sources[order])
        edges = [0, *np.searchsorted(keys[:, 0], np.arange(1, 256)), len(keys)]
        for bucket, begin, end in zip(self._buckets, edges[:-1], edges[1:], strict=True):
            bucket.add(tuple(column[begin:end] for column in columns))

    def repeated(self) -> KeySet:
        """Keys with more than one row: all but the newest row of each are superseded."""
        self._distribute()
        found = []
        for bucket in self._buckets:
            hi, lo = bucket.column("hi"), bucket.column("lo")
            order = np.lexsort((lo, hi))
            halves = np.stack([hi[order], lo[order]], axis=1).astype(">u8")
            same = (halves[1:] == halves[:-1]).all(axis=1)
            found.append(halves[1:][same].view(np.uint8).reshape(-1, 16))
        return KeySet(np.unique(np.concatenate(found), axis=0))

    def index(self, seen: "list[bool]") -> DoneIndex:
        """The index; `seen`: for the number of each source, whether its rows count as seen from the beginning.

        The builder is empty afterwards: what it held is in the index.
        """
        self._distribute()
        counted = np.array([*seen, False], np.bool_)
        buckets = []
        for number, old in enumerate(self._buckets):
            hi = old.column("hi")
            order = np.argsort(hi, kind="stable")
            bucket = _Bucket(hi[order], old.column("lo")[order], old.column("content")[order])
            bucket.seen = counted[old.column("source")[order]]
            buckets.append(bucket)
            self._buckets[number] = _Gathered()
        return DoneIndex(buckets)
