"""Ids that stand twice in the inputs of a job, found before anything is sent.

One pass over the ids alone, with 26 bytes of memory for each; the first places of the duplicates that are shown are
looked up in a second one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from batchgen.data import Document, Split
from batchgen.errors import InputError
from batchgen.job.config import Input, Job
from batchgen.sources import open_source
from batchgen.sources.base import FileFacts, Source
from batchgen.storage.index import DoneIndex, Visit

SHOWN = 20  # of each input
WHOLE = 1 << 62  # a target size no file reaches


@dataclass(frozen=True, slots=True)
class Duplicate:
    """`second` holds an id that stood in `first`; both are places as a person finds them: `a.jsonl, line 3`."""

    id: str
    input: int
    first: str
    second: str


@dataclass(slots=True)
class Found:
    """read: records with an id. counts: rows whose id stood in an earlier row, by input; `shown` are the first of each.

    errors: files that could not be read to their end.
    """

    read: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    shown: list[Duplicate] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)


def refuse(job: Job, files: Sequence[FileFacts]) -> None:
    """Raise InputError where an id of an input with `on_duplicate: refuse` stood in an earlier row."""
    refusing = {number for number, item in enumerate(job.input) if item.on_duplicate == "refuse"}
    found = find(job, [file for file in files if file.input <= max(refusing)], among=refusing)
    if found.counts:
        left = found.counts.total() - len(found.shown)
        raise InputError("\n".join([
            "ids that stand twice (input.on_duplicate is refuse):",
            *(f"  {one.second}: {one.id!r} stood in {one.first}" for one in found.shown),
            *([f"  and {left:,} more"] if left else []),
            "Make the ids unique, or set on_duplicate: fail to have the later rows as failed; nothing was sent",
        ]))  # fmt: skip


def find(
    job: Job,
    files: Sequence[FileFacts],
    *,
    among: set[int],
    unusable: Callable[[Document, Source], None] = lambda *_: None,
) -> Found:
    """Read the ids of these files. among: the inputs whose rows count as duplicates when they come later.

    unusable: gets each record without a usable id, and where it comes from.
    """
    found = Found()
    index = DoneIndex.empty()
    later: list[tuple[Document, int, Source]] = []
    for document, number, source in _ids(job, files, found.errors):
        if document.id is None:
            unusable(document, source)
            continue
        found.read += 1
        if index.visit(document.key, document.content) is not Visit.NEW and number in among:
            found.counts[number] += 1
            if found.counts[number] <= SHOWN:
                later.append((document, number, source))
    del index
    first = _first_places(job, files, {document.key for document, *_ in later})
    found.shown = [
        Duplicate(str(document.id), number, first.get(document.key, "a row that is gone now"), source.where(document))
        for document, number, source in later
    ]
    return found


def _first_places(job: Job, files: Sequence[FileFacts], keys: set[bytes]) -> dict[bytes, str]:
    places: dict[bytes, str] = {}
    if keys:
        for document, _, source in _ids(job, files, []):
            if document.id is not None and document.key in keys and document.key not in places:
                places[document.key] = source.where(document)
                if len(places) == len(keys):
                    break
    return places


def _ids(job: Job, files: Sequence[FileFacts], errors: list[InputError]) -> Iterator[tuple[Document, int, Source]]:
    """Documents with nothing but their id, in reading order; files of inputs without an id field are left out."""
    job = job.model_copy(update={"input": [_id_alone(item) for item in job.input]})
    for file in files:
        if job.input[file.input].id_field is None:
            continue
        try:
            source = open_source(job, file.input, file.source)
            for start, end in source.cut(begin=0, target_bytes=WHOLE):
                for document in source.read(Split(0, file.input, file.source, start, end)):
                    yield document, file.input, source
        except InputError as e:
            errors.append(e)


def _id_alone(item: Input) -> Input:
    """The input as one whose text is its id: no other column of a Parquet file is read."""
    return item if item.id_field is None else item.model_copy(update={"text_field": item.id_field, "keep": {}})
