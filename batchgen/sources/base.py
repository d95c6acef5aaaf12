"""The seam to input files, and how one record of any of them becomes a Document."""

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from batchgen.data import Document, Split
from batchgen.job.config import Input

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class State:
    """What tells whether an input changed. revision: of a data set, the Hub's commit or a digest over its files."""

    size: int
    mtime_ns: int
    revision: str = ""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a look at a file tells without reading it whole.

    rows: exact for Parquet, an estimate for large JSONL (`exact` says which); 0 and not exact where nothing is known.
    kept: Arrow types of the kept fields under their new names, as far as the file knows them.
    appendable: when the file is longer next time, its splits stay and its tail is cut; else it is cut anew.
    size, mtime_ns, revision: as of State.
    """

    source: str
    input: int
    size: int
    mtime_ns: int
    rows: int
    exact: bool
    kept: Mapping[str, pa.DataType]
    appendable: bool = False
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A document, and its record as it came: of columns those that the job reads.

    record: None where it is none; raw: its bytes then, as far as there are any to show.
    """

    document: Document
    record: Mapping[str, Any] | None
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """How large a split is, and where it begins: `first` is the number that leads the place of its first row."""

    size: int
    first: int


NO_SPLIT = -1  # of documents that were fetched by their place


class Source(Protocol):
    """Contract: the splits of a file cover each of its rows exactly once, whatever the target size.

    Raises InputError, with the path and the reason, where the file cannot be read.
    """

    def facts(self) -> FileFacts: ...

    def cut(self, *, begin: int, target_bytes: int) -> list[tuple[int, int]]:
        """(start, end) pairs from `begin` (0, or the end of an earlier cut) to the end of the file.

        None is larger than `target_bytes`, apart from what cannot be cut: a row group, a shard, a packed file.
        """
        ...

    def measure(self, cuts: Sequence[tuple[int, int]]) -> list[Measure]:
        """What each of these splits holds."""
        ...

    def read(self, split: Split) -> Iterator[Document]: ...

    def fetch(self, places: Collection[str]) -> Iterator[Fetched]:
        """What stands at these places (of documents that were read before) now, in the order of the file.

        A place where no record begins gives nothing. The file is not read whole where one can go to a place.
        """
        ...

    def where(self, document: Document) -> str:
        """The place of a document of this file as a person finds it: `a.jsonl, line 3` (from 1), `a.parquet, row 2`."""
        ...


def numbers(places: Collection[str], form: str) -> list[tuple[int, ...]]:
    r"""The numbers in places like `byte 7`, sorted; form is a pattern: `byte (\d+)`. Other places are left out."""
    found = (re.fullmatch(form, place) for place in places)
    return sorted(tuple(map(int, one.groups())) for one in found if one)


def reach(record: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """(found, value) of a field; a name with dots is looked up whole first, then step by step."""
    if path in record:
        return True, record[path]
    at: Any = record
    for step in path.split("."):
        if not isinstance(at, Mapping) or step not in at:
            return False, None
        at = at[step]
    return True, at


def place_key(source: str, place: str) -> bytes:
    """The 16-byte identity of a row that has no id of its own, or shares it."""
    return hashlib.blake2b(f"place\0{source}\0{place}".encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _id_key(id_text: str, id_type: str) -> bytes:
    return hashlib.blake2b(f"id\0{id_type}\0{id_text}".encode(), digest_size=16).digest()


def clean(text: str) -> str:
    """The text with lone surrogates, which no encoding can write, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _names(record: Mapping[str, Any]) -> str:
    """The record's own field names, for a message."""
    names = [clean(name) for name in itertools.islice(record, _NAMES_SHOWN)]
    return ", ".join(names) + (", …" if len(record) > _NAMES_SHOWN else "") if names else "no fields"


def _clean_value(value: Any) -> Any:
    return clean(value) if isinstance(value, str) else value


def _kind(value: Any) -> str:
    return "bytes that are no UTF-8" if isinstance(value, bytes) else type(value).__name__


class Reader:
    """Makes documents of the records of one file."""

    def __init__(self, item: Input, source: str, prompt_fields: frozenset[str]) -> None:
        self._item = item
        self._source = source
        self._prompt_fields = prompt_fields

    def document(self, record: Mapping[str, Any], place: str, split: int) -> Document:
        """The document in `record`. What is wrong with it alone is its `error`, with identity by place."""
        found, text = reach(record, self._item.text_field)
        if isinstance(text, bytes):  # how writers without a type for text leave it
            with contextlib.suppress(UnicodeDecodeError):
                text = text.decode()
        keep = {ours: _clean_value(reach(record, theirs)[1]) for theirs, ours in self._item.keep.items()}
        error = None
        if not found:
            error = ("missing_text", f"no field {self._item.text_field!r}; it has: {_names(record)}")
        elif text is not None and not isinstance(text, str):
            error = ("text_type", f"field {self._item.text_field!r} is no text but {_kind(text)}")
        text = clean(text) if isinstance(text, str) else ""
        key, identity, id_error = self._identity(record, place)
        return Document(
            key=key,
            content=self._content(text, keep),
            source=self._source,
            place=place,
            id=identity[0],
            id_type=identity[1],
            fields=keep,
            text=text,
            keep=keep,
            split=split,
            error=id_error or error,
        )

    def _content(self, text: str, keep: Mapping[str, Any]) -> bytes:
        """8 bytes that change when a field that reaches the prompt does."""
        fields = {name: value for name, value in keep.items() if name in self._prompt_fields}
        canonical = json.dumps([text, fields], sort_keys=True, default=str)
        return hashlib.blake2b(canonical.encode(), digest_size=8).digest()

    def _identity(
        self, record: Mapping[str, Any], place: str
    ) -> tuple[bytes, tuple[str | None, str | None], tuple[str, str] | None]:
        if self._item.id_field is None:
            return place_key(self._source, place), (None, None), None
        found, value = reach(record, self._item.id_field)
        fault = None
        if value is None or value == "":
            has = "" if found else f"; it has: {_names(record)}"
            fault = ("missing_id", f"no id in field {self._item.id_field!r}{has}")
        elif isinstance(value, bool) or not isinstance(value, str | int):
            fault = ("id_type", f"the id is neither text nor integer but {type(value).__name__}")
        elif isinstance(value, str) and clean(value) != value:
            fault = ("id_type", "the id holds a lone surrogate, which no file can hold")
        if fault is not None:
            return place_key(self._source, place), (None, None), fault
        id_text, id_type = str(value), "int" if isinstance(value, int) else "str"
        return _id_key(id_text, id_type), (id_text, id_type), None

    def broken(self, place: str, split: int, error: tuple[str, str], content: bytes) -> Document:
        """A record that cannot be read, known by its place; `content` are its raw bytes."""
        return Document(
            key=place_key(self._source, place),
            content=hashlib.blake2b(content, digest_size=8).digest(),
            source=self._source,
            place=place,
            id=None,
            id_type=None,
            fields={},
            text="",
            keep={},
            split=split,
            error=error,
        )


def gathered(sizes: Sequence[int], *, begin: int, target_bytes: int) -> list[tuple[int, int]]:
    """(start, end) pairs over what cannot be cut, from number `begin`: as many together as fit into `target_bytes`."""
    cuts, start, size = [], begin, 0
    for number in range(begin, len(sizes)):
        if number > start and size + sizes[number] > target_bytes:
            cuts.append((start, number))
            start, size = number, 0
        size += sizes[number]
    return [*cuts, (start, len(sizes))] if start < len(sizes) else cuts
