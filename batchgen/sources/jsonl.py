"""JSON Lines: one record a line, lines end at LF only, splits are byte ranges."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from batchgen.config import Input
from batchgen.data import Document, Split
from batchgen.errors import InputError
from batchgen.sources.base import FileFacts, Reader

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{\0")  # a byte order mark, or the first brace without one
_COUNT_BYTES = 1 << 28  # files up to here are counted, larger ones estimated from their beginning
_SAMPLE_BYTES = 1 << 20
_BUFFER = 1 << 20


class JsonlSource:
    def __init__(self, item: Input, number: int, path: str, prompt_fields: frozenset[str]) -> None:
        self._item = item
        self._number = number
        self._path = Path(path)
        self._reader = Reader(item, path, prompt_fields)
        self._counted = (0, 1)  # a byte where a line begins, and that line's number

    def facts(self) -> FileFacts:
        try:
            stat = self._path.stat()
            with self._path.open("rb") as stream:
                if stream.read(3).startswith(_UTF16):
                    raise InputError(f"{self._path}: is UTF-16; JSON Lines are UTF-8: iconv -f UTF-16 -t UTF-8")
                stream.seek(0)
                rows = _rows(stream, stat.st_size)
        except OSError as e:
            raise self._unreadable(e) from e
        # JSON has no schema to read beforehand: kept values are text, or JSON text where they are something else.
        kept = dict.fromkeys(self._item.keep.values(), pa.string())
        exact = stat.st_size <= _COUNT_BYTES
        return FileFacts(str(self._path), self._number, stat.st_size, stat.st_mtime_ns, rows, exact, kept)

    def _unreadable(self, e: OSError) -> InputError:
        return InputError(f"{self._path}: cannot be read: {e.strerror or e}")

    def cut(self, *, begin: int, target_bytes: int) -> list[tuple[int, int]]:
        try:
            size = self._path.stat().st_size
        except OSError as e:
            raise self._unreadable(e) from e
        count = max(1, round((size - begin) / target_bytes)) if size > begin else 0
        edges = [begin + (size - begin) * n // count for n in range(count)] + [size] if count else []
        return list(itertools.pairwise(edges))

    def read(self, split: Split) -> Iterator[Document]:
        """A line belongs to the split that holds its first byte, and is read to its end."""
        try:
            with self._path.open("rb", buffering=_BUFFER) as stream:
                at = 0
                if split.start:
                    stream.seek(split.start - 1)
                    at = split.start - 1 + len(stream.readline())
                while at < split.end and (line := stream.readline()):
                    document = self._document(line, at, split.index)
                    if document is not None:
                        yield document
                    at += len(line)
        except OSError as e:
            raise self._unreadable(e) from e

    def _document(self, line: bytes, at: int, split: int) -> Document | None:
        """The document in a line; None for a blank one, which is no record."""
        raw = _bare(line)
        if not raw:
            return None
        place = f"byte {at}"
        try:
            record = json.loads(raw)
            if isinstance(record, dict):
                return self._reader.document(record, place, split)
            fault = f"the line is no object but {type(record).__name__}"
        except json.JSONDecodeError as e:
            fault = f"{e.msg} (at character {e.pos})"  # its own line number is always 1
        except (ValueError, RecursionError) as e:
            fault = str(e)
        return self._reader.broken(place, split, ("bad_json", f"line {self._line_number(at)}: {fault}"), raw)

    def _line_number(self, at: int) -> int:
        """The line, from 1, that begins at byte `at`: counted only when a fault is told, each byte once."""
        begin, count = self._counted if self._counted[0] <= at else (0, 1)
        with self._path.open("rb", buffering=0) as stream:
            stream.seek(begin)
            left = at - begin
            while left > 0 and (block := stream.read(min(left, _BUFFER))):
                count += block.count(b"\n")
                left -= len(block)
        self._counted = (at, count)
        return count


def _bare(line: bytes) -> bytes:
    """The line without BOM and white space of JSON; empty where it is no record."""
    return line.removeprefix(_BOM).strip(b" \t\r\n")


def _rows(stream: BinaryIO, size: int) -> int:
    """Lines that are records, counted or estimated."""
    if size <= _COUNT_BYTES:
        return sum(1 for line in stream if _bare(line))
    sample = stream.read(_SAMPLE_BYTES)
    return max(1, round(size * sample.count(b"\n") / len(sample)))
