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
    """What a part holds. keys: (n, 16) and content: (n, 8) bytes; sources: one text a row; footer: as written."""

    keys: NDArray[np.uint8]
    content: NDArray[np.uint8]
    sources: pa.ChunkedArray
    footer: Mapping[str, Any]


class Sink(Protocol):
    """Contract: a part exists whole or not at all, and gives back what was written.

    Writing raises OutputError; reading raises DamagedPartError.
    """

    suffix: str

    def write_part(
        self, path: Path, records: Sequence[Record], *, fingerprint: str, footer: Mapping[str, Any]
    ) -> None: ...

    def read_keys(self, path: Path) -> PartKeys: ...

    def read(self, path: Path, columns: Sequence[str]) -> pa.Table: ...

    def drop(self, path: Path, keys: Collection[str], *, to: Path | None) -> None:
        """Rewrite the part under its own name without the rows of these doc_keys (hex).

        With `to`, those rows are first added to the part of that name. A part without rows is removed.
        """
        ...
