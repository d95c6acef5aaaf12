"""Packed or not: both ways in turn on the first documents of a run, and then the faster one.

In a turn the engine gets a set number of documents, and nothing else before the last of them has its record. What is
compared are accepted summaries per second, with all that packs cost besides: what is refused is sent again in its turn.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchgen.data import Completion, Document, Prepared, Record, Request
from batchgen.workflows.packed import PackedWorkflow

WARM_UP = 16  # documents before the first turn: the engine starts, the prefix cache gets the instruction


@dataclass(slots=True)
class Turn:
    """One way, as it went. Times are of time.monotonic, rates summaries a second."""

    packing: bool
    wanted: int
    admitted: int = 0
    done: int = 0
    ok: int = 0
    begin: float = 0.0
    seconds: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.ok / self.seconds if self.seconds > 0 else 0.0


class AutoWorkflow:
    """size: documents of a turn, asked for when the engine has started; 0 where there are too few to compare.

    decided: gets the single and the packed turn when both are over, and says whether packs go on; no call where nothing
    is decided.
    """

    def __init__(
        self, packed: PackedWorkflow, *, size: Callable[[], int], decided: Callable[[Turn, Turn], bool]
    ) -> None:
        self._packed = packed
        self._size = size
        self._decided = decided
        self._turns: list[Turn] = [Turn(packing=False, wanted=WARM_UP)]  # the last one goes on
        self._probing = True
        packed.packing = False

    @property
    def gathers(self) -> bool:
        return self._probing or self._packed.gathers

    @property
    def full(self) -> bool:
        return self._probing and self._turn.admitted == self._turn.wanted

    @property
    def _turn(self) -> Turn:
        return self._turns[-1]

    def admit(self, prepared: Prepared) -> list[Request]:
        if not self._probing:
            return self._packed.admit(prepared)
        turn = self._turn
        turn.begin = turn.begin or time.monotonic()
        turn.admitted += 1
        requests = self._packed.admit(prepared)
        return requests + self._packed.flush() if turn.admitted == turn.wanted else requests

    def flush(self) -> list[Request]:
        return self._packed.flush()

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        records, requests = self._packed.complete(completion)
        self._count(records)
        return records, requests

    def _count(self, records: list[Record]) -> None:
        if not self._probing:
            return
        turn = self._turn
        turn.done += len(records)
        turn.ok += sum(record.status == "ok" for record in records)
        turn.fallbacks.update(record.pack_fallback for record in records if record.pack_fallback)
        if turn.done == turn.wanted:
            turn.seconds = time.monotonic() - turn.begin
            self._next()

    def _next(self) -> None:
        if len(self._turns) < 3:
            wanted = self._size() if len(self._turns) == 1 else self._turn.wanted
            if wanted:
                self._turns.append(Turn(packing=len(self._turns) == 2, wanted=wanted))
                self._packed.packing = self._turn.packing
                return
            self._end(packing=False)
            return
        _, single, packed = self._turns
        self._end(packing=self._decided(single, packed))

    def _end(self, *, packing: bool) -> None:
        self._probing = False
        self._packed.packing = packing

    def documents(self, custom_id: str) -> Sequence[Document]:
        return self._packed.documents(custom_id)

    def apart(self, custom_id: str) -> list[str]:
        """An engine has died: what a turn takes now says nothing, and this attempt packs no more."""
        if self._probing:
            self._end(packing=False)
        return self._packed.apart(custom_id)

    def again(self, custom_id: str) -> Request:
        return self._packed.again(custom_id)

    def give_up(self, custom_id: str, error: tuple[str, str]) -> list[Record]:
        return self._packed.give_up(custom_id, error)
