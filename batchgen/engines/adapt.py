"""`engine.adapt`: a start that failed for lack of memory is tried again with less, step by step.

Every step lowers what only costs speed, so the texts stay the same: docs/job.md has the table of the steps.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.engines.base import Engine
from batchgen.engines.start_faults import Fault, StartError

STARTS = 8  # of one engine at most
_SHARES = (0.85, 0.75)
_LEAST_SHARE = 0.1
_HALVINGS = 3
# What vLLM takes on most devices where a job says nothing, and what is not lowered any further.
_DEFAULTS: Mapping[str, Any] = {"gpu_memory_utilization": 0.92, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
_LEAST = {"max_num_seqs": 16, "max_num_batched_tokens": 1024}
_FOR_LACK_OF_MEMORY = ("kv_cache", "no_cache", "gpu_taken", "memory")
log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Change:
    """An argument that was changed after a start had failed. before: None where vLLM's default held."""

    argument: str
    before: Any
    after: Any
    why: str

    def __str__(self) -> str:
        before = "default" if self.before is None else _plain(self.before)
        return f"{self.argument} {before} → {_plain(self.after)}"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def short(changes: Iterable[Change]) -> str:
    """Each argument once, from what the job has to what is used: `max_num_seqs 64 → 16, enforce_eager false → true`."""
    first: dict[str, Change] = {}
    last: dict[str, Change] = {}
    for change in changes:
        first.setdefault(change.argument, change)
        last[change.argument] = change
    return ", ".join(str(Change(name, first[name].before, last[name].after, "")) for name in first)


class Adaptation:
    """The arguments of a run's engines, and what was changed in them so far.

    need: tokens of context that the longest document needs; it may take long, and is asked at most once.
    enabled: otherwise a start that fails is the end of it. changes: those of earlier attempts.
    """

    def __init__(
        self, args: Mapping[str, Any], *, need: Callable[[], int], enabled: bool, changes: Iterable[Change] = ()
    ) -> None:
        self._args = args
        self._need = need
        self._needed: int | None = None
        self._enabled = enabled
        self.changes = list(changes)

    @property
    def args(self) -> dict[str, Any]:
        return {**self._args, **{change.argument: change.after for change in self.changes}}

    def start(self, start: Callable[[dict[str, Any]], Engine]) -> Engine:
        """An engine that started. Raises the StartError of the last try where no step is left."""
        begun = len(self.changes)
        for number in range(1, STARTS + 1):
            try:
                return start(self.args)
            except StartError as e:
                fault = e.fault
                if fault is None or fault.kind not in _FOR_LACK_OF_MEMORY or fault.place == "weights":
                    raise
                if not self._enabled:
                    raise StartError(f"{e}; engine.adapt: true tries such values by itself", fault) from e
                steps = self._steps(fault) if number < STARTS else []
                if not steps:
                    tried = short(self.changes[begun:])
                    raise StartError(f"{e}{self._no_way_out()}" + (f"; tried: {tried}" if tried else ""), fault) from e
                self.changes += steps
                log.warning(
                    "the engine did not start: %s; engine.adapt: trying %s", steps[0].why, ", ".join(map(str, steps))
                )
        raise AssertionError

    def _no_way_out(self) -> str:
        return "" if self._needed is None else f"; the documents need a context of {self._needed:,} tokens"

    def _steps(self, fault: Fault) -> list[Change]:
        """What to change now: the first of the ways for this fault that still leads somewhere."""
        share, batch, eager = self._share, self._batch, self._eager
        by_place = {
            "batch": (batch, share, eager),
            "sequences": (batch, share, eager),
            "graphs": (share, eager),
            None: (share, batch, eager),
        }
        by_kind = {"kv_cache": (self._context,), "no_cache": (batch, eager), "gpu_taken": (self._what_is_free,)}
        ways = by_kind.get(fault.kind) or by_place[fault.place]
        return next((steps for way in ways if (steps := way(fault))), [])

    def _now(self, name: str) -> Any:
        value = self.args.get(name)
        return _DEFAULTS.get(name) if value is None else value

    def _change(self, name: str, after: Any, why: str) -> Change:
        return Change(name, self.args.get(name), after, why)

    def _context(self, fault: Fault) -> list[Change]:
        """Down to what the documents need; where that does not fit either, more room for it is made."""
        if self._needed is None:
            self._needed = self._need()
        needed, fits = self._needed, int(fault.numbers.get("fits", 0))
        why = f"the KV cache holds {fits:,} tokens, the documents need {needed:,}" if fits else fault.what
        lower = [self._change("max_model_len", needed, why)] if needed < self.args["max_model_len"] else []
        if lower and needed <= fits:
            return lower
        if self.args.get("kv_cache_memory_bytes"):  # the cache has this size whatever else is lowered
            return []
        room = self._batch(fault) or self._eager(fault)
        return lower + room if room else []

    def _what_is_free(self, fault: Fault) -> list[Change]:
        name, free = "gpu_memory_utilization", fault.numbers["share"]
        return [self._change(name, free, fault.what)] if _LEAST_SHARE <= free < self._now(name) else []

    def _share(self, fault: Fault) -> list[Change]:
        name = "gpu_memory_utilization"
        if self.args.get("kv_cache_memory_bytes"):  # vLLM then looks at no share
            return []
        lower = [share for share in _SHARES if share < self._now(name)]
        return [self._change(name, lower[0], fault.what)] if lower else []

    def _batch(self, fault: Fault) -> list[Change]:
        """Half the requests and half the tokens of a batch."""
        found = []
        for name, least in _LEAST.items():
            if name == "max_num_batched_tokens" and self.args.get("enable_chunked_prefill") is False:
                least = max(least, self.args["max_model_len"])  # noqa: PLW2901  a prompt must fit into one batch
            half = max(least, self._now(name) // 2)
            if half < self._now(name) and sum(one.argument == name for one in self.changes) < _HALVINGS:
                found.append(self._change(name, half, fault.what))
        return found

    def _eager(self, fault: Fault) -> list[Change]:
        """No CUDA graphs: slower, and without the memory they take."""
        return [] if self.args.get("enforce_eager") else [self._change("enforce_eager", True, fault.what)]
