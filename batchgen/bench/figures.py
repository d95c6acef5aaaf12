"""What turns measured: equal work or none, medians, and ratios of turns of one round."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.errors import EngineError

OURS = "batchgen"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """One contestant doing all the work once. Times are seconds, from its first request to its last durable row.

    first_s: to the first durable row. peak_bytes: memory of the process that feeds the engine, None where the system
    does not tell. Only of batchgen: commits, before_s and after_s (what its run takes before the first request and
    after the last durable row), starved (share of `seconds` that it waited for documents). start_s: of a process
    of its own, until its engine was ready.
    """

    contestant: str
    round: int
    seconds: float
    documents: int
    prompt_tokens: int
    output_tokens: int
    first_s: float
    peak_bytes: int | None = None
    commits: int | None = None
    before_s: float | None = None
    after_s: float | None = None
    starved: float | None = None
    start_s: float | None = None

    @property
    def docs_per_s(self) -> float:
        return self.documents / self.seconds


class UnequalWorkError(EngineError):
    """Contestants of one round did not do the same."""


def refuse_unequal(turns: Sequence[Turn], *, fixed: bool) -> None:
    """Raise UnequalWorkError where turns of one round differ. fixed: answers have a given length, so they count too."""
    first = turns[0]
    for other in turns[1:]:
        for name, counts in (("documents", True), ("prompt_tokens", True), ("output_tokens", fixed)):
            one, two = getattr(first, name), getattr(other, name)
            if counts and one != two:
                raise UnequalWorkError(
                    f"unequal work in round {first.round}: {first.contestant} did {one:,} {name.replace('_', ' ')}, "
                    f"{other.contestant} {two:,}; such times are not compared"
                )


def told(turns: Sequence[Turn], conditions: Mapping[str, Any], not_run: Mapping[str, str]) -> dict[str, Any]:
    """All figures, as plain values."""
    names = list(dict.fromkeys(turn.contestant for turn in turns))
    return {
        "conditions": dict(conditions),
        "contestants": {name: _medians([turn for turn in turns if turn.contestant == name]) for name in names},
        "ratios": {name: _ratios(turns, name) for name in names if name != OURS},
        "not_run": dict(not_run),
        "turns": [dataclasses.asdict(turn) for turn in turns],
    }


def _medians(turns: Sequence[Turn]) -> dict[str, Any]:
    def median(of: Callable[[Turn], float | None]) -> float | None:
        known = [value for turn in turns if (value := of(turn)) is not None]
        return statistics.median(known) if known else None

    return {
        "docs_per_s": median(lambda turn: turn.docs_per_s),
        "prompt_tokens_per_s": median(lambda turn: turn.prompt_tokens / turn.seconds),
        "output_tokens_per_s": median(lambda turn: turn.output_tokens / turn.seconds),
        "output_tokens": median(lambda turn: turn.output_tokens),
        "first_s": median(lambda turn: turn.first_s),
        "peak_bytes": median(lambda turn: turn.peak_bytes),
        "commits": median(lambda turn: turn.commits),
        "before_s": median(lambda turn: turn.before_s),
        "after_s": median(lambda turn: turn.after_s),
        "starved": median(lambda turn: turn.starved),
        "start_s": median(lambda turn: turn.start_s),
    }


def _ratios(turns: Sequence[Turn], other: str) -> dict[str, Any]:
    """Documents a second of batchgen over those of another, round by round."""
    ours = {turn.round: turn.docs_per_s for turn in turns if turn.contestant == OURS}
    found = [ours[turn.round] / turn.docs_per_s for turn in turns if turn.contestant == other]
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "rounds": found}


def table(figures: Mapping[str, Any]) -> str:
    """The conditions, a line a contestant, and what the table does not show by itself."""
    head = ["", "docs/s", "in tok/s", "out tok/s", "first durable s", "peak MiB", "commits", "batchgen/other"]
    lines = [head]
    for name, one in figures["contestants"].items():
        ratio = figures["ratios"].get(name)
        peak = None if one["peak_bytes"] is None else one["peak_bytes"] / _MIB
        lines.append([
            name,
            _number(one["docs_per_s"], 2),
            _number(one["prompt_tokens_per_s"]),
            _number(one["output_tokens_per_s"]),
            _number(one["first_s"], 2),
            _number(peak),
            _number(one["commits"]),
            f"{ratio['median']:.3f} [{ratio['min']:.3f}–{ratio['max']:.3f}]" if ratio else "-",
        ])  # fmt: skip
    conditions = [[name.replace("_", " "), _shown(value)] for name, value in figures["conditions"].items()]
    return "\n".join([*_aligned(conditions, "<<"), "", *_aligned(lines, "<>>>>>>>"), "", *_notes(figures)])


def _notes(figures: Mapping[str, Any]) -> Iterable[str]:
    yield "Medians of all rounds; ratios are of turns of one round: median [lowest–highest]."
    ours = figures["contestants"].get(OURS)
    if ours:
        yield (
            f"Not in the times of batchgen: {ours['before_s']:.2f} s of its run before the first request, "
            f"{ours['after_s']:.2f} s after the last durable row. It waited for documents {ours['starved']:.2%} of "
            "the time."
        )
    if alone := [name for name, one in figures["contestants"].items() if one["start_s"] is not None]:
        yield f"After the others, with an engine of its own in each round: {', '.join(alone)}."
    for name, why in figures["not_run"].items():
        yield f"{name} is not in the table: {why}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return "none" if value is None else str(value)


def _aligned(lines: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    ]
