"""The reader's side of the loop: documents that are not done yet, as token ids, a bounded way ahead of the engine."""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Self

from batchgen.data import Document, Prepared, Split
from batchgen.engines.settings import FEW_DOCUMENTS
from batchgen.errors import InputError
from batchgen.feeding.line import Line, Reading
from batchgen.feeding.order import WINDOW, ordered
from batchgen.prompting.prompts import PromptBuilder
from batchgen.sources import open_source
from batchgen.sources.base import place_key
from batchgen.storage.index import Visit

_BATCH = 64  # documents encoded in one call
_BATCH_CHARS = 1 << 20  # or fewer: those of megabytes go one by one
_BATCH_S = 0.5  # a slow source does not keep a document for longer than until its next
_BATCHES_AHEAD = WINDOW // _BATCH  # a whole window is ready when the loop comes back
# So many documents are read before the first is encoded: an engine for fewer starts in less time. What is found slowly,
# or is of megabytes, is not waited for.
_COUNTED = FEW_DOCUMENTS + 1
_COUNTED_CHARS = 16 << 20
_COUNTED_S = 1.0
_KEPT_CHARS = 32  # of a document's text a token of its summary: enough to see that one is copied from its beginning
_JOIN_S = 2.0


def read_documents(line: Line, reading: Reading) -> Iterator[Document]:
    """Documents that have no committed row yet, in the order of the plan."""
    for source, splits in _by_source(line.plan.splits):
        if source in line.whole:
            line.stats.counts.read += line.whole[source].rows
            line.stats.counts.done_before += line.whole[source].rows
            continue
        try:
            opened = open_source(line.job, splits[0].input, source)
            for split in splits:
                for document in opened.read(split):
                    if line.limit is not None and reading.admitted >= line.limit:
                        return
                    todo = _visit(line, reading, document)
                    line.committer.read(document, waiting=todo is not None)
                    if todo is not None:
                        reading.admitted += 1
                        yield todo
        except InputError as e:
            reading.file_errors.append(str(e))
            continue
        line.committer.ended(source)
    reading.complete = not reading.file_errors


def _by_source(splits: Iterable[Split]) -> Iterator[tuple[str, list[Split]]]:
    found: dict[str, list[Split]] = {}
    for split in splits:
        found.setdefault(split.source, []).append(split)
    yield from found.items()


def _visit(line: Line, reading: Reading, document: Document) -> Document | None:
    """The document as it is to be done, or None where its row is committed."""
    line.stats.counts.read += 1
    visit = line.index.visit(document.key, document.content)
    # The row before it can be in the share of another shard: who has seen both has said that this is the later one.
    if visit is Visit.DUPLICATE or (visit is Visit.NEW and _is_twin(line, document)):
        reading.duplicates += 1
        line.committer.duplicate(document.source)
        sentence = f"the id {document.id!r} stood in an earlier row; this row is known by its place"
        document = dataclasses.replace(
            document, key=place_key(document.source, document.place), error=("duplicate_id", sentence)
        )
        visit = line.index.visit(document.key, document.content)
    if visit is Visit.DONE:
        line.stats.counts.done_before += 1
        return None
    reading.edited += visit is Visit.EDITED
    return document


def _is_twin(line: Line, document: Document) -> bool:
    return bool(line.twins) and place_key(document.source, document.place) in line.twins


class ReadAhead:
    """Reads, looks up and encodes in a thread of its own, a bounded number of batches ahead of the loop.

    What is ready when the loop has taken all it had is put in order, a window at most: a slow source is never waited
    for. Once the last document was read, all that are left are put in order as the last window.
    A workflow that gathers gets them as they were read: what it puts together must not depend on the moment.
    """

    def __init__(self, line: Line, reading: Reading) -> None:
        self._queue: queue.Queue[list[Prepared] | BaseException | None] = queue.Queue(_BATCHES_AHEAD)
        self._left = threading.Event()
        self._read = threading.Event()  # the reader met the end
        self._workflow = line.workflow
        self._window: deque[Prepared] = deque()
        self._failure: BaseException | None = None  # of the reader, raised behind what it read before
        self._over = False  # nothing comes out of the queue any more
        self._thread = threading.Thread(target=self._run, args=(line, reading), name="read-ahead", daemon=True)
        self.found: int | None = None  # all documents there are for the engine, where they are few; known by the first

    @property
    def ended(self) -> bool:
        """Whether all documents were taken."""
        return self._over and not self._window and self._failure is None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        # It can sit in a read that hangs (a mount, a network); what it would still read, nobody wants.
        self._thread.join(_JOIN_S)

    def _run(self, line: Line, reading: Reading) -> None:
        try:
            prompts: PromptBuilder | None = None
            keep_chars = _KEPT_CHARS * (line.job.answers.retry_max_tokens or line.job.sampling.max_tokens)
            for documents in batched(self._count(line.documents(line, reading))):
                prompts = prompts or line.prompts()
                inputs = [line.committer.files[document.source].input for document in documents]
                begin = time.monotonic()
                prepared = prompts.prepare(list(zip(documents, inputs, strict=True)))
                light = [_light(one, keep_chars) for one in prepared]
                line.stats.shared.add(one.prompt_ids for one in light if not one.pieces)
                line.stats.counts.encode_s += time.monotonic() - begin
                if not self._put(light):
                    return
            self._read.set()
            self._put(None)
        except BaseException as e:  # noqa: BLE001  raised again where the loop takes it
            self._put(e)

    def _count(self, documents: Iterator[Document]) -> Iterator[Document]:
        """The same documents, after the first of them were counted."""
        first: list[Document] = []
        chars, begin = 0, 0.0
        for document in documents:
            first.append(document)
            chars += len(document.text)
            begin = begin or time.monotonic()
            if len(first) >= _COUNTED or chars >= _COUNTED_CHARS or time.monotonic() - begin > _COUNTED_S:
                break
        else:
            self.found = sum(one.error is None for one in first)
        return itertools.chain(first, documents)

    def _put(self, item: list[Prepared] | BaseException | None) -> bool:
        while not self._left.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def take(self, *, wait_s: float) -> Prepared | None:
        """The next document; None where none comes within `wait_s`, or (`ended`) ever."""
        if not self._over and (not self._window or self._read.is_set()):
            self._refill(wait_s)
        if self._window:
            return self._window.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def _refill(self, wait_s: float) -> None:
        """Put in order what is ready, with what the loop still has; wait where there is nothing."""
        ready = list(self._window)
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=wait_s) if wait_s and not ready else self._queue.get_nowait()
            while isinstance(item, list):
                ready += item
                if sum(max(1, len(one.pieces)) for one in ready) >= WINDOW and not self._read.is_set():
                    break
                item = self._queue.get_nowait()
            else:
                self._failure, self._over = item, True
        self._window = deque(ready if self._workflow.gathers else ordered(ready, last=self._over))


def batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars, begin = 0, time.monotonic()
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if len(batch) >= _BATCH or chars >= _BATCH_CHARS or time.monotonic() - begin >= _BATCH_S:
            yield batch
            batch, chars, begin = [], 0, time.monotonic()
    if batch:
        yield batch


def _light(prepared: Prepared, keep_chars: int) -> Prepared:
    """What waits in queues and with the engine, without what is no longer needed: thousands of them do."""
    document = prepared.document
    if len(document.text) > keep_chars:
        document = dataclasses.replace(document, text=document.text[:keep_chars], whole_chars=document.chars)
    pieces = tuple(array("i", piece) for piece in prepared.pieces)
    first = pieces[0] if pieces else array("i", prepared.prompt_ids)
    return dataclasses.replace(prepared, document=document, prompt_ids=first, pieces=pieces)
