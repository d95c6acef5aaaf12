"""One document, one request, one record."""

from batchgen.data import COPIED, SUMMARY_CUT, Completion, Prepared, Record, Request


class SingleWorkflow:
    """prefix: begins every custom_id, and is new for every attempt of a run; a used id never comes again."""

    def __init__(self, *, prefix: str, max_tokens: int) -> None:
        self._prefix = prefix
        self._max_tokens = max_tokens
        self._count = 0
        self._waiting: dict[str, Prepared] = {}

    def admit(self, prepared: Prepared) -> list[Request]:
        self._count += 1
        custom_id = f"{self._prefix}-{self._count}"
        self._waiting[custom_id] = prepared
        return [Request(custom_id, prepared.prompt_ids, self._max_tokens)]

    def flush(self) -> list[Request]:
        return []

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        return [_record(self._waiting.pop(completion.custom_id), completion)], []


def unsent(prepared: Prepared) -> Record | None:
    """The record of a document that is not sent at all; None where it is to be sent."""
    if prepared.error is not None:
        return Record(prepared.document, "failed", error_type=prepared.error[0], error=prepared.error[1])
    if prepared.skip is not None:
        return Record(prepared.document, "skipped", error_type=prepared.skip[0], error=prepared.skip[1])
    return None


def _record(prepared: Prepared, completion: Completion) -> Record:
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
    )


def _plain(text: str) -> str:
    """For comparing: white space of any kind and length is one space."""
    return " ".join(text.split())
