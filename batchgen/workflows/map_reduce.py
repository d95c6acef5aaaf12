"""A long document in pieces: each has its summary, and these are put together, in rounds where they are many."""

from collections.abc import Callable, Sequence

from batchgen.data import Document, Prepared
from batchgen.workflows.base import AnswerStore
from batchgen.workflows.long import Ask, Bounds, Error, LongWorkflow
from batchgen.workflows.single import Rules

# Texts to prompts that put them together: how many each takes, and its ids; as LongPrompts.join.
Join = Callable[[Document, Sequence[str]], Sequence[tuple[int, Sequence[int]]]]


class MapReduceCourse:
    """All pieces at once, then all prompts of a round at once."""

    def __init__(self, prepared: Prepared, *, join: Join, max_depth: int) -> None:
        self.depth = 0
        self._document = prepared.document
        self._join = join
        self._max_depth = max_depth
        self._begin([(2, ids) for ids in prepared.pieces], [], "piece")

    def _begin(self, prompts: Sequence[tuple[int, Sequence[int]]], texts: Sequence[str], what: str) -> None:
        """A round. A prompt that takes one text is none: the text waits for the next round."""
        self._found: list[str | None] = [None] * len(prompts)
        asks = []
        at = 0
        for n, (count, ids) in enumerate(prompts):
            if count == 1:
                self._found[n] = texts[at]
            else:
                asks.append(Ask(f"{what} {n + 1} of {len(prompts)}", n, ids, last=len(prompts) == 1))
            at += count
        self._left = len(asks)
        self._asks = iter(asks)

    def next(self) -> Ask | None:
        return next(self._asks, None)

    def take(self, ask: Ask, summary: str) -> Error | None:
        self._found[ask.number] = summary
        self._left -= 1
        return None if self._left else self._reduce()

    def _reduce(self) -> Error | None:
        texts = [text for text in self._found if text is not None]
        if self.depth == self._max_depth:
            sentence = f"{len(texts)} summaries are left after {self.depth} rounds (long_documents.max_depth)"
            return "not_reduced", sentence
        prompts = self._join(self._document, texts)
        if len(prompts) == len(texts):
            return "not_reduced", f"of {len(texts)} summaries no two fit into a prompt together"
        self.depth += 1
        self._begin(prompts, texts, f"round {self.depth}, prompt")
        return None


class MapReduceWorkflow(LongWorkflow):
    """join: makes prompts of answers. max_depth: rounds at most."""

    def __init__(
        self,
        *,
        prefix: str,
        rules: Rules,
        bounds: Bounds,
        join: Join,
        max_depth: int,
        store: AnswerStore | None = None,
    ) -> None:
        def begin(prepared: Prepared) -> MapReduceCourse:
            return MapReduceCourse(prepared, join=join, max_depth=max_depth)

        super().__init__(prefix=prefix, rules=rules, bounds=bounds, begin=begin, store=store)
