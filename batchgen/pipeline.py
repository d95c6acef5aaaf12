"""The loop. Read this first.

A thread reads documents, looks each up in the done index, and turns those that are left into token ids. The loop
keeps the engine full of requests, makes records of its completions, and commits them as parts:

    splits ─ read_documents ─→ Document ─ PromptBuilder ─→ Prepared ─ queue ─→ run_pass
    run_pass:  Prepared ─ workflow ─→ Request ─ engine ─→ Completion ─ workflow ─→ Record ─ committer ─→ part
"""

import dataclasses
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from batchgen.checkpoint import Committer
from batchgen.config import Job
from batchgen.data import Document, Prepared, Request, Split
from batchgen.engines.base import Engine, EngineInfo
from batchgen.errors import EngineError, InputError, Interrupted
from batchgen.index import DoneIndex, Visit
from batchgen.lifecycle import Stop
from batchgen.plan import Plan
from batchgen.progress import Progress
from batchgen.prompts import PromptBuilder
from batchgen.sources import open_source
from batchgen.sources.base import place_key
from batchgen.stats import Stats, Telemetry
from batchgen.workflows.base import Workflow
from batchgen.workflows.single import unsent

_BATCH = 64  # documents encoded in one call
_BATCH_CHARS = 1 << 20  # or fewer: those of megabytes go one by one
_BATCHES_AHEAD = 16
_KEPT_CHARS = 32  # of a document's text a token of its summary: enough to see that one is copied from its beginning


@dataclass(slots=True)
class Reading:
    """What the reader found in a pass. `complete`: every row of every file was seen."""

    edited: int = 0
    duplicates: int = 0
    admitted: int = 0
    file_errors: list[str] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """What one pass works with; `prompts` and `engine` are made when the first document needs them."""

    job: Job
    plan: Plan
    whole: Mapping[str, int]
    index: DoneIndex
    prompts: Callable[[], PromptBuilder]
    engine: Callable[[], Engine]
    workflow: Workflow
    committer: Committer
    stats: Stats
    telemetry: Telemetry
    progress: Progress
    stop: Stop
    engine_ready: Callable[[EngineInfo], None]
    limit: int | None = None


def read_documents(line: Line, reading: Reading) -> Iterator[Document]:
    """Documents that have no committed row yet, in the order of the plan."""
    for source, splits in _by_source(line.plan.splits):
        if source in line.whole:
            line.stats.counts.read += line.whole[source]
            line.stats.counts.done_before += line.whole[source]
            continue
        try:
            opened = open_source(line.job, splits[0].input, source)
            for split in splits:
                for document in opened.read(split):
                    if line.limit is not None and reading.admitted >= line.limit:
                        return
                    todo = _visit(line, reading, document)
                    line.committer.read(source, waiting=todo is not None)
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
    if visit is Visit.DUPLICATE:
        reading.duplicates += 1
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


class ReadAhead:
    """Reads, looks up and encodes in a thread of its own, a bounded number of batches ahead of the loop."""

    def __init__(self, line: Line, reading: Reading) -> None:
        self._queue: queue.Queue[list[Prepared] | BaseException | None] = queue.Queue(_BATCHES_AHEAD)
        self._left = threading.Event()
        self._batch: list[Prepared] = []
        self._thread = threading.Thread(target=self._run, args=(line, reading), name="read-ahead", daemon=True)
        self.ended = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _run(self, line: Line, reading: Reading) -> None:
        try:
            prompts: PromptBuilder | None = None
            keep_chars = _KEPT_CHARS * line.job.sampling.max_tokens
            for documents in _batched(read_documents(line, reading)):
                prompts = prompts or line.prompts()
                inputs = [line.committer.files[document.source].input for document in documents]
                prepared = prompts.prepare(list(zip(documents, inputs, strict=True)))
                if not self._put([_light(one, keep_chars) for one in prepared]):
                    return
            self._put(None)
        except BaseException as e:  # noqa: BLE001  raised again where the loop takes it
            self._put(e)

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
        if not self._batch and not self.ended:
            try:
                item = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except queue.Empty:
                return None
            if isinstance(item, BaseException):
                raise item
            self.ended = item is None
            self._batch = list(reversed(item or []))
        return self._batch.pop() if self._batch else None


def _batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if len(batch) >= _BATCH or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _light(prepared: Prepared, keep_chars: int) -> Prepared:
    """What waits in queues and with the engine, without what is no longer needed: thousands of them do."""
    document = prepared.document
    if len(document.text) > keep_chars:
        document = dataclasses.replace(document, text=document.text[:keep_chars])
    return dataclasses.replace(prepared, document=document, prompt_ids=array("i", prepared.prompt_ids))


def run_pass(line: Line, reading: Reading) -> None:
    """Do every document that has no row yet, and tell in `reading` what was met.

    What has finished is committed, however this ends. Raises EngineError, OutputError, ConfigError, and Interrupted
    after a signal.
    """
    feed = Feed(line)
    try:
        with ReadAhead(line, reading) as ahead:
            while not line.stop.requested:
                feed.fill(ahead)
                if ahead.ended and not feed.in_flight:
                    break
                feed.collect()
        if line.stop.requested:
            raise Interrupted(f"stopped by {line.stop.requested}")
    except EngineError as e:
        feed.engine_died = True
        if line.stop.requested:  # the signal that stopped us reached the engine's processes too
            raise Interrupted(f"stopped by {line.stop.requested}") from e
        raise
    finally:
        feed.close()


class Feed:
    """The engine's side of the loop: requests in, records out."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._engine: Engine | None = None
        self._in_flight: set[str] = set()
        self.engine_died = False

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def fill(self, ahead: ReadAhead) -> None:
        """Put documents in until the engine has what it wants, or none is ready."""
        while not ahead.ended and (self._engine is None or self.in_flight < self._engine.limits.in_flight):
            patient = self._engine is None or not self.in_flight or self._engine.limits.fill_first
            begin = time.monotonic()
            prepared = ahead.take(wait_s=0.2 if patient else 0.0)
            if self._engine is not None:
                self._line.stats.counts.starved_s += time.monotonic() - begin
            if prepared is not None:
                self._admit(prepared)
            if self._line.committer.due:
                self.commit()
            if self._line.stop.requested or (prepared is None and not patient):
                return
        if ahead.ended:
            self._submit(self._line.workflow.flush())
            self._line.stats.no_more_documents()

    def _admit(self, prepared: Prepared) -> None:
        record = unsent(prepared)
        if record is None:
            self._submit(self._line.workflow.admit(prepared))
        else:
            self._line.stats.recorded(record)
            self._line.committer.add([record])

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            if self._engine is None:
                self._engine = self._start()
            self._engine.submit(request)
            self._in_flight.add(request.custom_id)

    def _start(self) -> Engine:
        begin = time.monotonic()
        engine = self._line.engine()
        self._line.stats.engine_started(time.monotonic() - begin)
        self._line.telemetry.event("engine", **dataclasses.asdict(engine.info))
        self._line.engine_ready(engine.info)
        return engine

    def collect(self) -> None:
        """Take finished requests out of the engine, and commit when it is time."""
        if self._engine is None:
            return
        for completion in self._engine.poll():
            self._in_flight.remove(completion.custom_id)
            self._line.stats.completed(completion)
            records, requests = self._line.workflow.complete(completion)
            for record in records:
                self._line.stats.recorded(record)
            self._line.committer.add(records)
            self._submit(requests)
        # A sample follows each part, so that what telemetry sums up is never behind the rows.
        if (self._line.committer.due and self.commit()) or self._line.telemetry.due:
            self._line.telemetry.sample(self._line.stats, self._engine.metrics())
        self._line.progress.update(self._line.stats)

    def commit(self) -> int:
        """Write what has gathered as a part; its rows."""
        rows = self._line.committer.commit()
        self._line.stats.counts.commit_s = self._line.committer.seconds
        if rows:
            self._line.telemetry.event("commit", rows=rows, total=self._line.committer.rows)
        return rows

    def close(self) -> None:
        """Commit what has finished, then free the engine."""
        engine, self._engine = self._engine, None
        try:
            self.commit()
            if engine is not None and not self.engine_died:
                self._line.telemetry.sample(self._line.stats, engine.metrics())
        finally:
            if engine is not None:
                engine.close()
