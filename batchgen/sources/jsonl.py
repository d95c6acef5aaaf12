"""JSON Lines: one record a line, lines end at LF only, splits are byte ranges.

A packed file is one split, since nobody can read from its middle; bytes and places in it are those of its content.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from batchgen.data import Document, Split
from batchgen.errors import InputError
from batchgen.job.config import Input
from batchgen.sources import streams
from batchgen.sources.base import NO_SPLIT, Fetched, FileFacts, Measure, Reader, numbers
from batchgen.sources.streams import (
    DamagedStreamError,
    LongLine,
    Stream,
    format_ending,
    is_packed,
    open_stream,
    position,
    read_line,
)

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{\0")  # a byte order mark, or the first brace without one
_COUNT_BYTES = 256 << 20  # files up to here are counted, larger ones estimated from their beginning
_COUNT_PACKED_BYTES = 8 << 20
_SAMPLE_BYTES = 4 << 20
_PIECE_BYTES = 1 << 16
_Item = TypeVar("_Item")


class JsonlSource:
    def __init__(self, item: Input, number: int, path: str, prompt_fields: frozenset[str]) -> None:
        self._item = item
        self._number = number
        self._path = Path(path)
        self._reader = Reader(item, path, prompt_fields)
        self._paths = [name for name in (item.text_field, item.id_field, *item.keep) if name is not None]
        self._counted = (0, 0)  # a byte where a line begins, and how many lines come before it

    def facts(self) -> FileFacts:
        try:
            stat = self._path.stat()
            with open_stream(self._path) as stream:
                packed = is_packed(stream)
                self._check_head(stream)
                rows, exact = _rows(stream, stat.st_size, _COUNT_PACKED_BYTES if packed else _COUNT_BYTES)
        except OSError as e:
            raise self._unreadable(e) from e
        # JSON has no schema to read beforehand: kept values are text, or JSON text where they are something else.
        kept = dict.fromkeys(self._item.keep.values(), pa.string())
        return FileFacts(
            str(self._path), self._number, stat.st_size, stat.st_mtime_ns, rows, exact, kept, appendable=not packed
        )

    def _check_head(self, stream: Stream) -> None:
        """Refuse what would end in one error a line."""
        try:
            head = stream.peek(_PIECE_BYTES)[:_PIECE_BYTES]
        except DamagedStreamError:
            return  # told when it is read, after the records before the damage
        if head.startswith(_UTF16):
            raise InputError(f"{self._path}: is UTF-16; JSON Lines are UTF-8: iconv -f UTF-16 -t UTF-8")
        if format_ending(self._path.name) != ".json":
            return  # the name promises one record a line: a first line that is none is one failed record
        first, lf, _ = head.removeprefix(_BOM).lstrip(b" \t\r\n").partition(b"\n")
        way_out = f"makes JSON Lines of it; or narrow input.{self._number}.path"
        if first.startswith(b"["):
            raise InputError(f"{self._path}: is one JSON array, not one record a line: jq -c '.[]' {way_out}")
        if lf and first.startswith(b"{") and first.rstrip().endswith((b"{", b"[", b",")):
            raise InputError(f"{self._path}: holds JSON over several lines, not one record a line: jq -c . {way_out}")

    def _unreadable(self, e: OSError) -> InputError:
        return InputError(f"{self._path}: cannot be read: {e.strerror or e}")

    def cut(self, *, begin: int, target_bytes: int) -> list[tuple[int, int]]:
        try:
            size = self._path.stat().st_size
            with open_stream(self._path) as stream:
                pieces = 1 if is_packed(stream) else max(1, -(-(size - begin) // target_bytes))
        except OSError as e:
            raise self._unreadable(e) from e
        count = pieces if size > begin else 0
        edges = [begin + (size - begin) * n // count for n in range(count)] + [size] if count else []
        return list(itertools.pairwise(edges))

    def measure(self, cuts: Sequence[tuple[int, int]]) -> list[Measure]:
        """A packed file counts with its packed bytes."""
        return [Measure(end - start, start) for start, end in cuts]

    def read(self, split: Split) -> Iterator[Document]:
        """A line belongs to the split that holds its first byte, and is read to its end."""
        return self._told(lambda stream: self._documents(stream, split), most=split.end - split.start)

    def fetch(self, places: Collection[str]) -> Iterator[Fetched]:
        wanted = [at for (at,) in numbers(places, r"byte (\d+)")]
        return self._told(lambda stream: self._fetch(stream, wanted))

    def _told(self, read: Callable[[Stream], Iterator[_Item]], *, most: int | None = None) -> Iterator[_Item]:
        """What is read of the file, about `most` bytes; its faults as errors that name it."""
        count = 0
        try:
            with open_stream(self._path, most=most) as stream:
                for one in read(stream):
                    yield one
                    count += 1
        except OSError as e:
            raise self._unreadable(e) from e
        except DamagedStreamError as e:
            raise InputError(
                f"{self._path}: {e} after {count:,} records: put a whole file in its place; these are kept"
            ) from e

    def _fetch(self, stream: Stream, wanted: list[int]) -> Iterator[Fetched]:
        for at, line in (_lines_of_packed if is_packed(stream) else _lines)(stream, wanted):
            if raw := line if isinstance(line, LongLine) else _bare(line):
                yield self._fetched(raw, f"byte {at}", NO_SPLIT)

    def where(self, document: Document) -> str:
        return f"{self._path}, line {self._lines_before(int(document.place.removeprefix('byte '))) + 1}"

    def _documents(self, stream: Stream, split: Split) -> Iterator[Document]:
        at = 0
        if split.start:
            if is_packed(stream):
                return  # cut when it was a plain file: the next start cuts it anew
            stream.seek(split.start - 1)
            at = split.start - 1
            # No further than the split: of a line that is longer than many splits, each would read all that is left.
            while at < split.end and (piece := stream.readline(min(_PIECE_BYTES, split.end - at))):
                at += len(piece)
                if piece.endswith(b"\n"):
                    break
            else:
                return
        begin, lines = at, 0
        while (at < split.end or is_packed(stream)) and (line := read_line(stream)):
            raw = line if isinstance(line, LongLine) else _bare(line)
            lines += 1
            if raw:
                document = self._fetched(raw, f"byte {at}", split.index).document
                if document.error is not None:
                    kind, sentence = document.error
                    number = self._lines_before(begin) + lines
                    document = dataclasses.replace(document, error=(kind, f"line {number}: {sentence}"))
                yield document
            at += len(line)

    def _fetched(self, raw: bytes | LongLine, place: str, split: int) -> Fetched:
        if isinstance(raw, LongLine):
            sentence = f"the line has {len(raw):,} bytes, more than {streams.MAX_LINE_BYTES:,}"
            return Fetched(self._reader.broken(place, split, ("record_too_large", sentence), raw.digest), None)
        try:
            # Halves of characters (lone surrogates) pass here, and are U+FFFD in what is made of the record.
            record = _decode(raw.decode("utf-8", "surrogatepass"))
            if isinstance(record, dict):
                if (key := self._key_that_is_twice(record)) is None:
                    return Fetched(self._reader.document(record, place, split), record)
                fault = f"key {key!r} stands twice"
            else:
                fault = f"the line is no object but {type(record).__name__}"
        except json.JSONDecodeError as e:
            fault = f"{e.msg} (at character {e.pos})"  # its own line number is always 1
        except (ValueError, RecursionError) as e:
            fault = str(e)
        return Fetched(self._reader.broken(place, split, ("bad_json", fault), raw), None, raw)

    def _key_that_is_twice(self, record: dict[str, Any]) -> str | None:
        """A key on the way to a field that the job reads; others may stand as often as they like."""
        return next((key for path in self._paths if (key := _twice(record, path)) is not None), None)

    def _lines_before(self, at: int) -> int:
        """Lines before the one that begins at byte `at`: counted only when a fault is told, each byte once."""
        begin, count = self._counted if self._counted[0] <= at else (0, 0)
        if at > begin:
            with open_stream(self._path) as stream:
                if is_packed(stream):
                    begin, count = 0, 0
                else:
                    stream.seek(begin)
                left = at - begin
                while left > 0 and (block := stream.read(min(left, _SAMPLE_BYTES))):
                    count += block.count(b"\n")
                    left -= len(block)
            self._counted = (at, count)
        return count


class _Doubled(dict[str, Any]):
    """An object in which some keys stand more than once; of these the last value is in it."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        met: set[str] = set()
        self.twice = {key for key, _ in pairs if key in met or met.add(key)}  # type: ignore[func-returns-value]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    return record if len(record) == len(pairs) else _Doubled(pairs)


_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def _twice(record: dict[str, Any], path: str) -> str | None:
    """The key on the way to this field that stands twice in its object."""
    at: Any = record
    for step in [path] if path in record else path.split("."):
        if isinstance(at, _Doubled) and step in at.twice:
            return step
        at = at.get(step) if isinstance(at, dict) else None
    return None


def _lines(stream: Stream, wanted: list[int]) -> Iterator[tuple[int, bytes | LongLine]]:
    """(byte, line) of the lines that begin at these bytes; nothing for one in the middle of a line."""
    for at in wanted:
        stream.seek(max(0, at - 1))
        if not at or stream.read(1) == b"\n":
            yield at, read_line(stream)


def _lines_of_packed(stream: Stream, wanted: list[int]) -> Iterator[tuple[int, bytes | LongLine]]:
    """The same, all read forward up to the last."""
    at, left = 0, set(wanted)
    while left and (line := read_line(stream)):
        if at in left:
            yield at, line
        left.discard(at)
        at += len(line)
        if at > wanted[-1]:
            return


def _bare(line: bytes) -> bytes:
    """The line without BOM and white space of JSON; empty where it is no record."""
    return line.removeprefix(_BOM).strip(b" \t\r\n")


def _rows(stream: Stream, size: int, count_bytes: int) -> tuple[int, bool]:
    """Lines that are records, and whether they were counted or estimated."""
    rows = at = 0
    continued = False
    try:
        while piece := stream.readline(_PIECE_BYTES):
            whole = len(piece) < _PIECE_BYTES or piece.endswith(b"\n")
            rows += not continued and (not whole or bool(_bare(piece)))
            continued = not whole
            at += len(piece)
            if size > count_bytes and (sample := position(stream) if is_packed(stream) else at) >= _SAMPLE_BYTES:
                return max(1, round(rows * size / sample)), False
    except DamagedStreamError:
        return rows, False
    return rows, True
