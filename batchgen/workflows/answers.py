"""What an answer of the model amounts to: a summary, or the reason why it is none."""

import re
from dataclasses import dataclass

from batchgen.data import Completion
from batchgen.text import is_blank


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion and the summary in it, or the `error`, (type, sentence), that there is in its place."""

    completion: Completion
    summary: str | None = None
    error: tuple[str, str] | None = None

    @property
    def cut(self) -> bool:
        """Whether it ends because it reached max_tokens."""
        return self.completion.error is None and self.completion.finish_reason == "length"

    @property
    def merit(self) -> tuple[bool, bool, int]:
        """Of two answers to one document, the one with more is kept: a summary, one that is whole, the longer one."""
        return self.summary is not None, not self.cut, len(self.summary or "")


def read(completion: Completion, *, reasoning_end: str | None) -> Answer:
    """reasoning_end: the tag behind the model's reasoning, None where the model does not reason."""
    if completion.error is not None:
        return Answer(completion, error=("request_failed", completion.error))
    reason = f"finish_reason {completion.finish_reason}"
    text: str | None = completion.text
    if reasoning_end is not None:
        text = without_reasoning(completion.text, reasoning_end)
    if text is None:
        if completion.finish_reason == "length":
            return Answer(completion, error=("reasoning_cut", f"max_tokens was reached before {reasoning_end}"))
        return Answer(completion, error=("no_answer", f"the model stopped before {reasoning_end} ({reason})"))
    summary = text.strip()
    if is_blank(summary):
        return Answer(completion, error=("empty_output", f"the model answered with nothing ({reason})"))
    return Answer(completion, summary)


def without_reasoning(text: str, end: str) -> str | None:
    """What stands outside of the reasoning; None where that is not over at the end of the text.

    The text begins inside of it: many chat templates open the first block in the prompt. The tag without its slash
    opens further ones. An `end` outside of a block tells that all before it was reasoning, an earlier `end` only
    spoken of there.
    """
    begin = end.replace("/", "", 1)
    tags = [end] if begin == end else [end, begin]
    kept: list[str] = []
    inside = True
    for n, piece in enumerate(re.split(f"({'|'.join(map(re.escape, tags))})", text)):
        if n % 2 == 0:
            kept += [] if inside else [piece]
        elif piece == end:
            kept = kept if inside else []
            inside = False
        else:
            inside = True
    return None if inside else "".join(kept)
