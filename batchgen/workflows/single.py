"""One document, one request, one record."""

import dataclasses
from dataclasses import dataclass

from batchgen.data import COPIED, SUMMARY_CUT, Completion, Document, Prepared, Record, Request


class SingleWorkflow:
    """prefix: begins every custom_id, and is new for every attempt of a run; a used id never comes again."""

    def __init__(self, *, prefix: str, max_tokens: int) -> None:
        self._prefix = prefix
        self._max_tokens = max_tokens
        self._count = 0
        self._open: dict[str, _Open] = {}

    def _request(self, waiting: "_Open") -> Request:
        self._count += 1
        custom_id = f"{self._prefix}-{self._count}"
        self._open[custom_id] = waiting
        return Request(custom_id, waiting.prepared.prompt_ids, self._max_tokens)

    def admit(self, prepared: Prepared) -> list[Request]:
        return [self._request(_Open(prepared))]

    def flush(self) -> list[Request]:
        return []

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        return [_record(self._open.pop(completion.custom_id), completion)], []

    def documents(self, custom_id: str) -> list[Document]:
        return [self._open[custom_id].prepared.document]

    def again(self, custom_id: str) -> Request:
        waiting = self._open.pop(custom_id)
        return self._request(dataclasses.replace(waiting, attempts=waiting.attempts + 1))

    def give_up(self, custom_id: str, error: tuple[str, str]) -> list[Record]:
        waiting = self._open.pop(custom_id)
        document = waiting.prepared.document
        return [Record(document, "failed", error_type=error[0], error=error[1], attempts=waiting.attempts)]


@dataclass(frozen=True, slots=True)
class _Open:
    """A document whose request is with the engine; attempts: how often it was sent."""

    prepared: Prepared
    attempts: int = 1


def unsent(prepared: Prepared) -> Record | None:
    """The record of a document that is not sent at all; None where it is to be sent."""
    if prepared.error is not None:
        return Record(prepared.document, "failed", error_type=prepared.error[0], error=prepared.error[1])
    if prepared.skip is not None:
        return Record(prepared.document, "skipped", error_type=prepared.skip[0], error=prepared.skip[1])
    return None


def _record(waiting: _Open, completion: Completion) -> Record:
    prepared = waiting.prepared
    summary = completion.text.strip()
    error = None
    if completion.error is not None:
        error = ("request_failed", completion.error)
    elif not summary:
        error = ("empty_output", f"the model answered with nothing (finish_reason {completion.finish_reason})")
    flags = list(prepared.flags)
    if completion.finish_reason == "length":
        flags.append(SUMMARY_CUT)
    if summary and _plain(prepared.document.text).startswith(_plain(summary)):
        flags.append(COPIED)
    return Record(
        prepared.document,
        "failed" if error else "ok",
        summary=None if error else summary,
        error_type=error[0] if error else None,
        error=error[1] if error else None,
        finish_reason=completion.finish_reason,
        flags=tuple(flags),
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        completion_tokens=completion.completion_tokens,
        requests=1,
        attempts=waiting.attempts,
    )


def _plain(text: str) -> str:
    """For comparing: white space of any kind and length is one space."""
    return " ".join(text.split())
