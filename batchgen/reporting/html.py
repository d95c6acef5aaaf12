"""report.html: the report as one file for a person, with plots over time and documents beside their summaries.

It asks nothing of the network and runs no script. What it tells beyond report.json comes from telemetry, parts and
inputs.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchgen import fsio
from batchgen.errors import BatchgenError, OutputError
from batchgen.job.config import Job, Prompt
from batchgen.lifecycle import Stop
from batchgen.reporting import figures, page, samples
from batchgen.reporting.figures import Wanted
from batchgen.reporting.plots import Plot
from batchgen.reporting.rows import Rows
from batchgen.reporting.samples import Sample
from batchgen.reporting.series import Track, read_tracks
from batchgen.reporting.stats import Counts
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View
from batchgen.text import one_line

HURRY_S = 0.8  # a run that was told to stop waits no longer for plots and documents
PATIENCE_S = 10.0
_LOOK_S = 0.02
_ATTEMPTS = 40  # shown one by one
_HEAD = 1024  # bytes in which the mark stands
log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Shown:
    """A run to be shown. report: as report.json has it. now: counts of attempts that have not told their end yet.

    may_open: the inputs that may be opened for documents, None for all: the end of a run opens only what it has read.
    """

    view: View
    report: Mapping[str, Any]
    rows: Rows
    now: Mapping[Path, Counts] = field(default_factory=dict)
    may_open: Collection[str] | None = None

    @property
    def run(self) -> RunDirectory:
        return self.view.run


def renew(shown: Shown, stop: Stop | None = None) -> None:
    """Write report.html, where it does not show all that already. Raises OutputError.

    It takes a second or so; after a request to stop not longer than HURRY_S, and what was not made by then is left out.
    """
    path, mark = shown.run.report_html, _mark(shown.report)
    if _has(path, mark):
        return
    begin = time.monotonic()

    def is_over() -> bool:
        asked = None if stop is None else stop.at
        return time.monotonic() - max(begin, asked or 0.0) > (PATIENCE_S if asked is None else HURRY_S)

    try:
        data = make(shown, is_over, mark=mark)
    except OutputError:
        raise
    except Exception:  # the run has its rows and its report: it does not fail for a page
        log.exception("report.html could not be made; this is a bug in batchgen, please report it with these lines")
        return
    fsio.write_atomic(path, data, owner=shown.run.owner)


def _mark(report: Mapping[str, Any]) -> str:
    """What changes when the page has something else to show: not with a start that found nothing to do.

    `why` is left out: it tells of seconds up to the report's end.
    """
    every = {name: value for name, value in report.items() if name not in ("at", "attempt", "run", "why")}
    of_run = {name: report["run"][name] for name in ("requests", "tokens", "rates")}
    return hashlib.blake2b(json.dumps([every, of_run], sort_keys=True).encode(), digest_size=16).hexdigest()


def _has(path: Path, mark: str) -> bool:
    """Whether the page that is there was made for the same and is whole in what it shows."""
    try:
        with path.open("rb") as stream:
            return f'content="whole {mark}"'.encode() in stream.read(_HEAD)
    except OSError:
        return False


def make(shown: Shown, is_over: Callable[[], bool] = lambda: False, *, mark: str = "") -> bytes:
    """The page. is_over: when to go without the plots and documents that are still missing."""
    known = shown.run.read_run() or {}
    tracks = read_tracks(shown.run, shown.now)
    some = samples.pick(shown.view, shown.rows.old, shown.may_open)
    failed = samples.examples(shown.view, shown.rows.examples, shown.rows.reasons, shown.rows.old)
    wanted = figures.wanted(tracks, shown.rows, shown.report, known)
    drawn: dict[str, list[Plot]] = {}
    every = [*some, *(one for rows in failed.values() for one in rows)]
    steps: list[Callable[[], None]] = [
        *(partial(_draw, one, drawn) for one in wanted),
        *look_ups(shown.run, known, every, shown.may_open),
    ]
    whole = _in_time(steps, is_over)
    return page.render(
        "report.html",
        report=shown.report,
        known=known,
        mark=f"{'whole' if whole else 'part'} {mark}",
        whole=whole,
        plots={section: list(drawn.get(section, ())) for section in figures.SECTIONS},
        marks=_marks(tracks),
        tokens=figures.tokens(shown.report),
        times=figures.times(shown.report, tracks),
        attempts=[_attempt(one, shown, tracks) for one in tracks[-_ATTEMPTS:]],
        more_attempts=max(0, len(tracks) - _ATTEMPTS),
        shards=len({one.shard for one in tracks}),
        samples=some,
        failed=failed,
    )


def _draw(wanted: Wanted, drawn: dict[str, list[Plot]]) -> None:
    plot = wanted.draw()
    drawn.setdefault(wanted.section, []).append(plot)


def look_ups(
    run: RunDirectory, known: Mapping[str, Any], every: Sequence[Sample], may_open: Collection[str] | None = None
) -> list[Callable[[], None]]:
    """What finds the documents of these rows, see samples.look_ups. known: run.json."""
    try:
        written = dict(known["job"])
        written["prompt"] = {name: value for name, value in written["prompt"].items() if name in Prompt.model_fields}
        job = Job.model_validate(written)
    except (KeyError, ValidationError):  # another version's
        return []
    return samples.look_ups(run, job, every, may_open)


def _in_time(steps: Sequence[Callable[[], None]], is_over: Callable[[], bool]) -> bool:
    """Take the steps, in a thread that can be left behind; whether all were taken before it was over."""
    given_up = threading.Event()

    def take() -> None:
        for step in steps:
            try:
                step()
            except BatchgenError:  # an input is not here: its documents are told as missing
                pass
            except Exception as e:  # noqa: BLE001  the run has its rows, and the page its tables
                log.warning("report.html lacks something: %s", one_line(f"{type(e).__name__}: {e}"))
            if given_up.is_set():
                return

    thread = threading.Thread(target=take, name="report-html", daemon=True)
    thread.start()
    while thread.is_alive() and not given_up.is_set():
        thread.join(_LOOK_S)
        if is_over():
            given_up.set()
    return not given_up.is_set()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A line of the table of attempts. ended: how, as a sentence."""

    shard: str
    number: int
    began: str
    seconds: float
    counts: Counts
    ended: str

    @property
    def docs_per_s(self) -> float | None:
        working = self.counts.steady_s + self.counts.drain_s
        return self.counts.ok / working if working > 0 else None


def _attempt(track: Track, shown: Shown, tracks: Sequence[Track]) -> Attempt:
    latest = max(one.attempt for one in tracks if one.shard == track.shard)
    going = shown.now or shown.report["reason"] == "running"
    # What each shard says of itself; of one that is alone the report tells that.
    reasons = {one["shard"]: one["reason"] for one in shown.report["shards"]}
    if track.end is not None:
        ended = f"{track.end.get('reason', '')} ({track.end.get('exit_status')})"
    elif track.attempt == latest:
        ended = str(reasons.get(track.shard, shown.report["reason"] if going else "killed"))
    else:
        ended = "killed"
    began = datetime.fromtimestamp(track.begin, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    return Attempt(track.shard.removesuffix("/1"), track.attempt, began, track.seconds, track.counts, ended)


def _marks(tracks: Sequence[Track]) -> dict[str, str]:
    """What plots over time are marked with, by the variable of its color."""
    deaths = any(kind == "engine_died" for one in tracks for _, kind in one.marks)
    restarts = len({one.shard for one in tracks}) < len(tracks)
    return {
        "start": "until the engine is ready",
        "drain": "drain: no more documents to send",
        **({"muted": "started again; the time between is left out"} if restarts else {}),
        **({"bad": "an engine died"} if deaths else {}),
    }
