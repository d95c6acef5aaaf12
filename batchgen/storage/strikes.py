"""Which documents were in an engine that died: kept over starts, so that one of them cannot kill every run."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from batchgen import fsio


class Strikes:
    """Counts by document key, in a file of the run directory that is there only while somebody has one.

    It is advice: a document with a committed row is never asked about, and without the file all begin anew.
    """

    def __init__(self, path: Path, *, limit: int, owner: str, others: Iterable[Path] = ()) -> None:
        """limit: a document with so many is tried alone. owner: see fsio.write_atomic.

        others: files of shards of another number, whose documents can be ours now; a run that is not divided, which
        has all of them, removes them in the end.
        """
        self._path = path
        self._limit = limit
        self._owner = owner
        self._others = tuple(others)
        self._counts: Counter[bytes] = Counter()
        for one in (*self._others, path):
            self._counts |= _read(one)

    def add(self, keys: Iterable[bytes]) -> None:
        """One more for each of these. Raises OutputError."""
        self._counts.update(keys)
        data = json.dumps({key.hex(): count for key, count in self._counts.items()}, indent=0)
        fsio.write_atomic(self._path, data.encode(), owner=self._owner)

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def suspects(self, keys: Iterable[bytes]) -> bool:
        """Whether one of these has so many that it is to be tried alone."""
        return bool(self._counts) and any(self._counts[key] >= self._limit for key in keys)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """Take the strikes of these away; of all after a whole pass, when nobody is suspected. Raises OutputError."""
        for key in list(self._counts) if keys is None else keys:
            del self._counts[key]
        if self._counts:
            self.add(())
        elif self._path.exists():
            fsio.remove(self._path)

    def forget_others(self) -> None:
        """Remove the files of shards of another number. Raises OutputError."""
        for path in self._others:
            fsio.remove(path)


def _read(path: Path) -> Counter[bytes]:
    try:
        return Counter({bytes.fromhex(key): int(n) for key, n in json.loads(path.read_bytes()).items()})
    except (OSError, ValueError, AttributeError, TypeError):
        return Counter()
