"""Documents that take several requests. Which ones is up to a course; those that fit are sent as they are.

An answer without a summary is asked for once more, one that was cut too where there is more room for it. A piece that
has no summary then fails its document: no summary misses a part of its document without telling.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batchgen.data import PIECE_CUT, Completion, Document, Prepared, Record, Request
from batchgen.workflows.answers import Answer, read
from batchgen.workflows.base import AnswerStore
from batchgen.workflows.single import Rules, SingleWorkflow, best_of, flags_of, reasoning_tokens

Error = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a document. name: for an error's sentence. last: its answer is the document's summary."""

    name: str
    number: int
    prompt_ids: Sequence[int]
    last: bool


class Course(Protocol):
    """In which order a document's prompts are asked.

    depth: how often answers were put together so far.
    """

    depth: int

    def next(self) -> Ask | None:
        """A prompt that can be asked now; None while there is none."""
        ...

    def take(self, ask: Ask, summary: str) -> Error | None:
        """The answer to one that is not the last; why it cannot go on, where it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """For one document. at_once: its requests in flight; requests: all that are sent, those sent twice included."""

    at_once: int
    requests: int


@dataclass(slots=True, eq=False)
class _Work:
    """A document on its way; answers: of each prompt, all that came; open: requests with the engine."""

    prepared: Prepared
    course: Course
    answers: list[Sequence[Answer]] = field(default_factory=list)
    requests: int = 0
    open: int = 0
    attempts: int = 1
    cut: bool = False
    best: Answer | None = None  # the summary, or the answer that ended it
    error: Error | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None or self.best is not None


@dataclass(frozen=True, slots=True)
class _Open:
    work: _Work
    ask: Ask
    max_tokens: int
    attempts: int = 1
    answers: tuple[Answer, ...] = ()


class LongWorkflow:
    """begin: the course of a document in pieces. The others are a SingleWorkflow's."""

    gathers = False
    full = False

    def __init__(
        self,
        *,
        prefix: str,
        rules: Rules,
        bounds: Bounds,
        begin: Callable[[Prepared], Course],
        store: AnswerStore | None = None,
    ) -> None:
        self._single = SingleWorkflow(prefix=prefix, rules=rules)
        self._prefix = f"{prefix}-piece"
        self._rules = rules
        self._bounds = bounds
        self._begin = begin
        self._store = store
        self._count = 0
        self._open: dict[str, _Open] = {}

    def admit(self, prepared: Prepared) -> list[Request]:
        if not prepared.pieces:
            return self._single.admit(prepared)
        requests = self._go_on(_Work(prepared, self._begin(prepared)), kept=True)
        # What was kept never holds the last answer, so something is left to ask. Should nothing be: from the start.
        return requests or self._go_on(_Work(prepared, self._begin(prepared)), kept=False)

    def flush(self) -> list[Request]:
        return self._single.flush()

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        if completion.custom_id not in self._open:
            return self._single.complete(completion)
        asked = self._open.pop(completion.custom_id)
        work = asked.work
        work.open -= 1
        answers = (*asked.answers, read(completion, reasoning_end=self._rules.reasoning_end))
        room = self._room_again(asked, answers)
        if room:
            return [], [self._request(_Open(work, asked.ask, room, asked.attempts, answers))]
        self._take(work, asked.ask, answers)
        requests = self._go_on(work, kept=True)
        return self._records(work), requests

    def _room_again(self, asked: _Open, answers: Sequence[Answer]) -> int:
        """Tokens for a second answer to the same prompt, 0 where there is none."""
        work, answer = asked.work, answers[-1]
        if len(answers) > 1 or work.ended or work.requests >= self._bounds.requests:
            return 0
        more = self._rules.retry_max_tokens
        if answer.cut and more is not None:
            room = min(more, self._rules.max_model_len - len(asked.ask.prompt_ids))
            return room if room > asked.max_tokens else 0
        return asked.max_tokens if answer.error is not None else 0

    def _take(self, work: _Work, ask: Ask, answers: Sequence[Answer]) -> None:
        """All answers to one prompt are there."""
        work.answers.append(answers)
        best = best_of(answers)
        assert best is not None
        if work.ended:
            return
        if best.summary is None:
            assert best.error is not None
            work.best, work.error = best, _of(ask, best.error)
        elif ask.last:
            work.best = best
        else:
            work.cut |= best.cut
            if self._store is not None:
                self._store.keep(work.prepared.document, _digest(ask), [one.completion for one in answers])
            work.error = work.course.take(ask, best.summary)

    def _go_on(self, work: _Work, *, kept: bool) -> list[Request]:
        """Requests that can be sent now. kept: answers of an earlier attempt are taken."""
        requests: list[Request] = []
        while not work.ended and work.open < self._bounds.at_once and (ask := work.course.next()) is not None:
            found = self._store.find(work.prepared.document, _digest(ask)) if self._store and kept else ()
            if found and not ask.last:
                work.requests += len(found)
                self._take(work, ask, [read(one, reasoning_end=self._rules.reasoning_end) for one in found])
            elif work.requests >= self._bounds.requests:
                sentence = f"it takes more than {self._bounds.requests} requests (long_documents.max_requests)"
                work.error = _of(ask, ("not_reduced", sentence))
            else:
                requests.append(self._request(_Open(work, ask, self._rules.max_tokens)))
        return requests

    def _request(self, asked: _Open, *, again: bool = False) -> Request:
        asked.work.open += 1
        asked.work.requests += not again
        self._count += 1
        custom_id = f"{self._prefix}-{self._count}"
        self._open[custom_id] = asked
        return Request(custom_id, asked.ask.prompt_ids, asked.max_tokens)

    def documents(self, custom_id: str) -> Sequence[Document]:
        if custom_id in self._open:
            return [self._open[custom_id].work.prepared.document]
        return self._single.documents(custom_id)

    def apart(self, custom_id: str) -> list[str]:
        return [custom_id] if custom_id in self._open else self._single.apart(custom_id)

    def again(self, custom_id: str) -> Request:
        if custom_id not in self._open:
            return self._single.again(custom_id)
        asked = self._open.pop(custom_id)
        asked.work.open -= 1
        attempts = asked.attempts + 1
        asked.work.attempts = max(asked.work.attempts, attempts)
        return self._request(_Open(asked.work, asked.ask, asked.max_tokens, attempts, asked.answers), again=True)

    def give_up(self, custom_id: str, error: Error) -> list[Record]:
        if custom_id not in self._open:
            return self._single.give_up(custom_id, error)
        asked = self._open[custom_id]
        work = asked.work
        for one in [one for one, other in self._open.items() if other.work is work]:
            work.answers.append(self._open.pop(one).answers)
        work.open = 0
        best = best_of(asked.answers)
        if not work.ended and asked.ask.last and best is not None and best.summary is not None:
            work.best = best
        else:
            work.error = work.error or _of(asked.ask, error)
        return self._records(work)

    def _records(self, work: _Work) -> list[Record]:
        """The record of a document of which nothing is with the engine any more."""
        if work.open:
            return []
        assert work.ended
        prepared, best, error = work.prepared, work.best, work.error
        if self._store is not None:
            self._store.forget(prepared.document)
        answers = [one for some in work.answers for one in some]
        completions = [one.completion for one in answers]
        kept = [found.completion for some in work.answers if (found := best_of(some)) is not None]
        total = sum(one.completion_tokens for one in completions)
        flags = flags_of(prepared, None if error else best)
        return [Record(
            prepared.document,
            "failed" if error else "ok",
            summary=None if error or best is None else best.summary,
            error_type=error[0] if error else None,
            error=error[1] if error else None,
            finish_reason=best.completion.finish_reason if best else None,
            flags=(*flags, PIECE_CUT) if work.cut else flags,
            prompt_tokens=sum(one.prompt_tokens for one in completions),
            cached_tokens=sum(one.cached_tokens for one in completions),
            completion_tokens=total,
            reasoning_tokens=sum(reasoning_tokens(self._rules, one) for one in answers),
            dropped_tokens=total - sum(one.completion_tokens for one in kept),
            requests=len(completions),
            pieces=len(prepared.pieces),
            depth=work.course.depth,
            attempts=work.attempts,
        )]  # fmt: skip


def _of(ask: Ask, error: Error) -> Error:
    return error[0], f"{ask.name}: {error[1]}"


def _digest(ask: Ask) -> bytes:
    return hashlib.blake2b(array("i", ask.prompt_ids).tobytes(), digest_size=16).digest()
