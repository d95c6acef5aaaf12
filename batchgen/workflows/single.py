"""One document, one request, one record; an answer that was cut can be asked for once more, with more room."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchgen.data import COPIED, SUMMARY_CUT, Completion, Document, Prepared, Record, Request
from batchgen.workflows.answers import Answer, read


@dataclass(frozen=True, slots=True)
class Rules:
    """What is asked for, and how answers are read. Lengths are in tokens.

    retry_max_tokens: room of the second request where the first answer was cut, None for no second request; prompt
    and answer together fit into max_model_len. reasoning_end: see `answers.read`. count: tokens of a text.
    """

    max_tokens: int
    max_model_len: int
    count: Callable[[str], int]
    retry_max_tokens: int | None = None
    reasoning_end: str | None = None


class SingleWorkflow:
    """prefix: begins every custom_id, and is new for every attempt of a run; a used id never comes again."""

    gathers = False
    full = False

    def __init__(self, *, prefix: str, rules: Rules) -> None:
        self._prefix = prefix
        self._rules = rules
        self._count = 0
        self._open: dict[str, _Open] = {}

    def _request(self, waiting: "_Open") -> Request:
        self._count += 1
        custom_id = f"{self._prefix}-{self._count}"
        self._open[custom_id] = waiting
        return Request(custom_id, waiting.prepared.prompt_ids, waiting.max_tokens)

    def admit(self, prepared: Prepared) -> list[Request]:
        return [self._request(_Open(prepared, self._rules.max_tokens))]

    def flush(self) -> list[Request]:
        return []

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        waiting = self._open.pop(completion.custom_id)
        answer = read(completion, reasoning_end=self._rules.reasoning_end)
        waiting = dataclasses.replace(waiting, answers=(*waiting.answers, answer))
        room = self._more_room(waiting)
        if answer.cut and room > waiting.max_tokens:
            return [], [self._request(dataclasses.replace(waiting, max_tokens=room))]
        return [self._record(waiting)], []

    def _more_room(self, waiting: "_Open") -> int:
        """Tokens a second answer may have, 0 where there is none."""
        if self._rules.retry_max_tokens is None or len(waiting.answers) > 1:
            return 0
        return min(self._rules.retry_max_tokens, self._rules.max_model_len - len(waiting.prepared.prompt_ids))

    def documents(self, custom_id: str) -> list[Document]:
        return [self._open[custom_id].prepared.document]

    def apart(self, custom_id: str) -> list[str]:
        if custom_id not in self._open:
            raise KeyError(custom_id)
        return [custom_id]

    def again(self, custom_id: str) -> Request:
        waiting = self._open.pop(custom_id)
        return self._request(dataclasses.replace(waiting, attempts=waiting.attempts + 1))

    def give_up(self, custom_id: str, error: tuple[str, str]) -> list[Record]:
        return [self._record(self._open.pop(custom_id), error)]

    def _record(self, waiting: "_Open", error: tuple[str, str] | None = None) -> Record:
        """The record of the best answer; `error` is why there is none of the last request."""
        prepared = waiting.prepared
        completions = [answer.completion for answer in waiting.answers]
        best = best_of(waiting.answers)
        if best is not None and (error is None or best.summary is not None):
            error = best.error
        summary = None if best is None else best.summary
        total = sum(one.completion_tokens for one in completions)
        return Record(
            prepared.document,
            "ok" if error is None else "failed",
            summary=summary,
            error_type=error[0] if error else None,
            error=error[1] if error else None,
            finish_reason=best.completion.finish_reason if best else None,
            flags=flags_of(prepared, best),
            prompt_tokens=sum(one.prompt_tokens for one in completions),
            cached_tokens=sum(one.cached_tokens for one in completions),
            completion_tokens=total,
            reasoning_tokens=sum(reasoning_tokens(self._rules, answer) for answer in waiting.answers),
            dropped_tokens=total - best.completion.completion_tokens if best else 0,
            requests=len(completions),
            attempts=waiting.attempts,
        )


@dataclass(frozen=True, slots=True)
class _Open:
    """A document whose request is with the engine; attempts: how often it was sent; answers: those before it."""

    prepared: Prepared
    max_tokens: int
    attempts: int = 1
    answers: tuple[Answer, ...] = ()


def unsent(prepared: Prepared) -> Record | None:
    """The record of a document that is not sent at all; None where it is to be sent."""
    if prepared.error is not None:
        return Record(prepared.document, "failed", error_type=prepared.error[0], error=prepared.error[1])
    if prepared.skip is not None:
        return Record(prepared.document, "skipped", error_type=prepared.skip[0], error=prepared.skip[1])
    return None


def best_of(answers: Sequence[Answer]) -> Answer | None:
    """The answer that is kept, None where there is none."""
    # Of two that are worth the same the later one: its error is the news.
    return max(reversed(answers), key=lambda answer: answer.merit, default=None)


def reasoning_tokens(rules: Rules, answer: Answer) -> int:
    """What was generated besides the summary; where there is none, all of it."""
    if rules.reasoning_end is None or answer.completion.error is not None:
        return 0
    spent = 0 if answer.summary is None else rules.count(answer.summary)
    return max(0, answer.completion.completion_tokens - spent)


def flags_of(prepared: Prepared, answer: Answer | None) -> tuple[str, ...]:
    """The flags of a row that holds this answer."""
    found = list(prepared.flags)
    if answer is not None and answer.summary is not None:
        if answer.cut:
            found.append(SUMMARY_CUT)
        if _is_copied(answer.summary, prepared.document.text):
            found.append(COPIED)
    return tuple(found)


def _is_copied(summary: str, text: str) -> bool:
    """Whether the text begins with the summary; white space of any kind and length is one space."""
    words = summary.split()
    # The last word may be cut in the middle: a word more than the summary has decides.
    return " ".join(text.split(maxsplit=len(words))[: len(words)]).startswith(" ".join(words))
