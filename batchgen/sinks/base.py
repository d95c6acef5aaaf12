"""The seam to the output: parts that hold rows, and that tell what they hold."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.data import Record


class DamagedPartError(Exception):
    """A committed part cannot be read; `reason` is one line."""


@dataclass(frozen=True, slots=True)
class PartKeys:
    """What a part holds. keys: (n, 16) and content: (n, 8) bytes; sources: one text a row; footer: as written.

    The footer may be missing (`{}`) where the format cannot commit it together with the rows. twins: keys of documents
    that failed because their id stood in an earlier row, where somebody asked for them.
    """

    keys: NDArray[np.uint8]
    content: NDArray[np.uint8]
    sources: pa.ChunkedArray
    footer: Mapping[str, Any]
    twins: frozenset[bytes] = frozenset()


class Sink(Protocol):
    """Contract: a part exists whole or not at all, and gives back what was written.

    Writing raises OutputError; reading raises DamagedPartError, and OutputError where the disk is at fault.
    """

    suffix: str

    def write_part(
        self, path: Path, records: Sequence[Record], *, fingerprint: str, footer: Mapping[str, Any]
    ) -> None: ...

    def read_keys(self, path: Path) -> PartKeys: ...

    def footer(self, path: Path) -> Mapping[str, Any]:
        """The footer alone, as of PartKeys, without a look at the rows."""
        ...

    def read(self, path: Path, names: Sequence[str]) -> pa.Table:
        """Columns of batchgen's own, with their types."""
        ...

    def rows(self, path: Path) -> list[dict[str, Any]]:
        """All columns of all rows in their order; `id` is text, kept values are Python's."""
        ...

    def kept_types(self, parts: Sequence[Path]) -> dict[str, pa.DataType]:
        """The kept columns of these parts, oldest part first, each with a type that holds all its values."""
        ...

    def drop(self, path: Path, keys: Collection[str], *, to: Path | None) -> None:
        """Rewrite the part under its own name without the rows of these doc_keys (hex).

        With `to`, those rows are first added to the part of that name. A part without rows is removed.
        """
        ...

    def move(self, path: Path, folder: Path) -> None:
        """Move a part, readable or not, into a folder on the same disk."""
        ...


def unhex(column: pa.ChunkedArray, size: int) -> NDArray[np.uint8]:
    """(n, size) bytes of a column of hex texts."""
    try:
        data = np.frombuffer(bytes.fromhex("".join(column.to_pylist())), dtype=np.uint8)
        return data.reshape(len(column), size)
    except (TypeError, ValueError) as e:
        raise DamagedPartError(f"its keys cannot be read: {e}") from e
