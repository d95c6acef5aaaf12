"""How the starts of a run ended: of one shard, and of all of them together."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.errors import BUG, OK, TOO_MANY_FAILED, EngineError, InputError, Interrupted, OutputError
from batchgen.reporting.stats import Counts, counts_from, last_told
from batchgen.storage.rundir import RunDirectory

NOTES = (
    "damaged parts", "orphans", "engine deaths", "input files with errors", "edited documents", "duplicate ids",
    "failed documents",
)  # fmt: skip
# Where several hold, the first of these is told.
_WORST = (BUG, *(e.exit_status for e in (OutputError, EngineError, Interrupted, InputError)), TOO_MANY_FAILED, OK)


@dataclass(frozen=True, slots=True)
class End:
    """How the latest start ended; exit_status is None where it goes on, was killed, or none has done anything."""

    exit_status: int | None
    reason: str
    notes: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(NOTES))
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What a shard says of its latest start.

    attempt, telemetry, counts: of the latest attempt that did something; 0, None and zeros where there is none.
    done: documents that were met and have a row. total: its documents; None where it has not counted them.
    """

    run: RunDirectory
    end: End
    attempt: int
    counts: Counts
    telemetry: Path | None
    done: int
    total: int | None = None

    @property
    def docs_per_s(self) -> float | None:
        seconds = self.counts.steady_s + self.counts.drain_s
        return self.counts.ok / seconds if seconds > 0 else None


def shares(run: RunDirectory) -> list[Share]:
    """What each shard says of itself, by number; the run itself where it is not divided."""
    known = run.read_run() or {}
    return [_share(one) for one in run.every_shard(known.get("shards", 1))]


def _share(run: RunDirectory) -> Share:
    paths = run.telemetries()
    telemetry = paths[-1] if paths else None
    attempt = attempt_of(telemetry) if telemetry else 0
    counts, told = last_told(telemetry) if telemetry else (Counts(), None)
    written = _written(run)
    done, total = _done(counts), None
    if written is not None and written["attempt"]["number"] >= attempt:
        total = written["documents"]["total"] if written["documents"]["total_is_exact"] else None
    if written is not None and written["attempt"]["number"] > attempt:  # it had nothing to do, and left no telemetry
        end = End(written["exit_status"], written["reason"], written["notes"])
        done = _done(counts_from(written["attempt"]["documents"]))
    elif telemetry is None:
        end = End(None, "nothing was sent or written yet")
    elif told is None:
        end, total = End(None, "killed"), None
    else:
        end = End(told["exit_status"], told["reason"], told["notes"], told["edited_pending"])
    if run.is_held():
        end, total = End(None, "running"), None
    return Share(run, end, attempt, counts, telemetry, done, total)


def _done(counts: Counts) -> int:
    return counts.done_before + counts.ok + counts.failed + counts.skipped


def _written(run: RunDirectory) -> dict[str, Any] | None:
    """The report that the latest end wrote; None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        written: dict[str, Any] = json.loads(run.report_json.read_text(encoding="utf-8"))
        if int(written["attempt"]["number"]) >= 0 and {"exit_status", "reason", "notes", "documents"} <= {*written}:
            return written
    return None


def attempt_of(telemetry: Path) -> int:
    return int(telemetry.stem.rpartition("-")[2])


def together(every: Sequence[Share]) -> End:
    """The end of all shards as one: none while one of them has none, else the worst."""
    if len(every) == 1:
        return every[0].end
    notes, stale = _added([one.end.notes for one in every]), sum(one.end.stale for one in every)
    running = sum(one.end.reason == "running" for one in every)
    if running:
        return End(None, f"running: {running} of {len(every)} shards", notes, stale)
    if open_ends := [one for one in every if one.end.exit_status is None]:
        first = open_ends[0]
        return End(None, f"{len(open_ends)} of {len(every)} shards have no end; {_said(first)}", notes, stale)
    worst = min(every, key=lambda one: _WORST.index(one.end.exit_status) if one.end.exit_status in _WORST else 0)
    alike = len({one.end.reason for one in every}) == 1
    return End(worst.end.exit_status, worst.end.reason if alike else _said(worst), notes, stale)


def _said(share: Share) -> str:
    return f"{share.run.shard}: {share.end.reason}"


def _added(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Notes of all shards as those of one: numbers are added, lists joined, sentences listed."""
    found: dict[str, Any] = dict.fromkeys(NOTES)
    for notes in every:
        for name, value in notes.items():
            if value is None:
                continue
            if isinstance(value, str):
                value = [value]  # noqa: PLW2901
            found[name] = value if found.get(name) is None else found[name] + value
    return found
