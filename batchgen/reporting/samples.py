"""Rows of a run to look at, with their documents: some summaries, and examples of what was not summarized."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen import plan
from batchgen.data import Document
from batchgen.job.config import Job
from batchgen.sinks.base import DamagedPartError, Sink
from batchgen.sources import open_source
from batchgen.sources.base import place_key
from batchgen.sources.dataset import is_on_hub
from batchgen.storage.rundir import RunDirectory, attempt_of
from batchgen.storage.view import View
from batchgen.text import harmless

SUMMARIES = 8
_OF_A_REASON = 3
_REASONS = 12
_CHARS = 900  # of a text that are shown
_READ = [
    "id", "doc_key", "content_hash", "source", "place", "status", "error_type", "error", "summary", "flags",
    "prompt_tokens", "completion_tokens",
]  # fmt: skip


_NOT_THERE = "its document is not found at its place: the input is not here, or it has changed"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text to be shown: its beginning, and how many characters there are more."""

    text: str
    more: int = 0

    @classmethod
    def of(cls, text: str) -> "Excerpt":
        text = text.strip()
        return cls(harmless(text[:_CHARS].rstrip()), max(0, len(text) - _CHARS))


@dataclass(slots=True)
class Sample:
    """A committed row. document: its text; None with the reason in `missing` where nobody could find it."""

    row: Mapping[str, Any]
    document: Excerpt | None = None
    missing: str = "its document was not looked up in time"

    @property
    def name(self) -> str:
        """What a person calls the document."""
        return harmless(str(self.row["id"] or f"{self.row['source']}, {self.row['place']}"))

    @property
    def reason(self) -> str:
        return f"{self.row['status']}: {self.row['error_type']}"

    @property
    def summary(self) -> Excerpt:
        return Excerpt.of(self.row["summary"] or "")

    def is_of(self, document: Document) -> bool:
        """Whether this is the row of that document, as it is: same identity, same content."""
        keys = {document.key.hex(), place_key(document.source, document.place).hex()}
        return self.row["doc_key"] in keys and self.row["content_hash"] == document.content.hex()


def pick(view: View, old: Mapping[Path, Collection[str]], known: Collection[str] | None = None) -> list[Sample]:
    """Some ok rows, of the latest attempt if it has so many: keys are hashes, and those with the least are taken.

    old: by part the keys of rows that no longer hold. known: the inputs whose rows come first; None: all are alike.
    """
    parts: list[Path] = []
    by_attempt = itertools.groupby(reversed(view.parts()), attempt_of)
    for _, group in by_attempt:
        of_it, room = list(group), SUMMARIES - len(parts)
        step = max(1.0, len(of_it) / room)
        parts += [of_it[int(n * step)] for n in range(min(len(of_it), room))]
        if len(parts) == SUMMARIES:
            break
    found = []
    for path in parts:
        table = _rows(view, path, old)
        ok = table.filter(pc.equal(table.column("status"), "ok"))
        found.append([Sample(row) for row in ok.sort_by("doc_key").slice(0, SUMMARIES).to_pylist()])
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*found))
    some = [one for one in in_turn if one is not None]
    return sorted(some, key=lambda one: known is not None and one.row["source"] not in known)[:SUMMARIES]


def examples(
    view: View, parts: Mapping[str, Sequence[Path]], counts: Mapping[str, int], old: Mapping[Path, Collection[str]]
) -> dict[str, list[Sample]]:
    """Rows of the most frequent reasons, by `status: error_type`. parts: some that hold rows of a reason."""
    wanted = sorted(parts, key=lambda reason: (-counts.get(reason, 0), reason))[:_REASONS]
    found: dict[str, list[Sample]] = {reason: [] for reason in wanted}
    for path in sorted({path for reason in wanted for path in parts[reason]}):
        table = _rows(view, path, old)
        names = pc.binary_join_element_wise(table.column("status"), table.column("error_type"), ": ")
        for reason in wanted:
            if path in parts[reason] and (more := _OF_A_REASON - len(found[reason])):
                some = table.filter(pc.equal(names, reason)).slice(0, more)
                found[reason] += [Sample(row) for row in some.to_pylist()]
    return found


def read_places(sink: Sink, places: Sequence[tuple[Path, int]]) -> list[Sample]:
    """The rows that stand at these places, each a part and the number of the row in it."""
    return [Sample(sink.read(part, _READ).slice(row, 1).to_pylist()[0]) for part, row in places]


def _rows(view: View, path: Path, old: Mapping[Path, Collection[str]]) -> pa.Table:
    try:
        table = view.read(path, _READ)
    except DamagedPartError:  # or gone: what else tells of the run tells of that
        return pa.table({name: pa.array([], pa.string()) for name in _READ})
    gone = pa.array(sorted(old.get(path, ())), pa.string())
    return table.filter(pc.invert(pc.is_in(table.column("doc_key"), value_set=gone)))


def look_ups(
    run: RunDirectory, job: Job, samples: Sequence[Sample], may_open: Collection[str] | None
) -> list[Callable[[], None]]:
    """What finds the documents of these rows, one call a file; each raises BatchgenError where the file is not here.

    may_open: the inputs that may be opened; None: all. Nothing is asked of the Hub.
    """
    inputs = plan.known_inputs(run)
    wanted: dict[str, list[Sample]] = defaultdict(list)
    for one in samples:
        wanted[one.row["source"]].append(one)
    found: list[Callable[[], None]] = []
    for source, some in sorted(wanted.items()):
        number = inputs.get(source, len(job.input))
        dataset = job.input[number].dataset if number < len(job.input) else None
        if number >= len(job.input):
            _tell(some, _NOT_THERE)
        elif dataset is not None and is_on_hub(dataset):
            _tell(some, "its document is in a data set on the Hub, which is not asked for this")
        elif may_open is not None and source not in may_open:
            _tell(some, "its document is in an input that the latest start had no need to open")
        else:
            found.append(partial(_fetch, job, number, source, some))
    return found


def _tell(samples: Sequence[Sample], missing: str) -> None:
    for one in samples:
        one.missing = missing


def _fetch(job: Job, number: int, source: str, samples: Sequence[Sample]) -> None:
    _tell(samples, _NOT_THERE)
    for one in open_source(job, number, source).fetch({sample.row["place"] for sample in samples}):
        for sample in samples:
            if sample.row["place"] == one.document.place and sample.is_of(one.document):
                raw = b"" if one.raw is None else one.raw
                sample.document = Excerpt.of(one.document.text or raw.decode("utf-8", "backslashreplace"))
