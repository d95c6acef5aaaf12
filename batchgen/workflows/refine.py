"""A long document piece after piece: each answer is the summary of all so far, and goes into the next prompt."""

from collections.abc import Callable, Sequence

from batchgen.data import Document, Prepared
from batchgen.workflows.base import AnswerStore
from batchgen.workflows.long import Ask, Bounds, Error, LongWorkflow
from batchgen.workflows.single import Rules

# The summary so far and the ids of the next piece to a prompt, None where it does not fit; as LongPrompts.refine.
Refine = Callable[[Document, str, Sequence[int]], Sequence[int] | None]


class RefineCourse:
    def __init__(self, prepared: Prepared, *, refine: Refine) -> None:
        self.depth = 0
        self._document = prepared.document
        self._pieces = prepared.pieces
        self._refine = refine
        self._next: Ask | None = self._ask(prepared.pieces[0])

    def _ask(self, ids: Sequence[int]) -> Ask:
        number, pieces = self.depth, len(self._pieces)
        return Ask(f"piece {number + 1} of {pieces}", number, ids, last=number + 1 == pieces)

    def next(self) -> Ask | None:
        ask, self._next = self._next, None
        return ask

    def take(self, ask: Ask, summary: str) -> Error | None:
        ids = self._refine(self._document, summary, self._pieces[ask.number + 1])
        self.depth += 1
        if ids is None:
            return "not_reduced", f"{ask.name}: its summary leaves no room for the next piece"
        self._next = self._ask(ids)
        return None


class RefineWorkflow(LongWorkflow):
    """refine: makes the prompt for a further piece."""

    def __init__(
        self, *, prefix: str, rules: Rules, bounds: Bounds, refine: Refine, store: AnswerStore | None = None
    ) -> None:
        def begin(prepared: Prepared) -> RefineCourse:
            return RefineCourse(prepared, refine=refine)

        super().__init__(prefix=prefix, rules=rules, bounds=bounds, begin=begin, store=store)
