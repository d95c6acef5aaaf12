"""What the telemetry of all attempts and shards tells over time, on one clock that stands still between attempts."""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.reporting.buckets import Buckets
from batchgen.reporting.stats import Counts, counts_from, read_telemetry
from batchgen.shards import WHOLE, of_label
from batchgen.storage.rundir import RunDirectory

BINS = 120
BIN_S = 2.5  # a bin is at least so long
LEAST_S = 10.0  # a shorter run has nothing to show over time
_FINE = 2000  # places at which phases are looked for
_SUMS = ("ok", "prompt_tokens", "output_tokens", "preemptions")
# Gauges of a sample: those of several shards add up, or are averaged.
_ADDED = ("running", "waiting", "gpu_power_w")
_AVERAGED = ("kv_cache_usage", "gpu_utilization", "gpu_least_utilization", "gpu_memory_bytes")
_GAUGES = _ADDED + _AVERAGED
_TIMES = ("ttft_s", "tpot_s")
_SLOTS = 2000

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Track:
    """One attempt of one shard (`1/4`). begin: seconds since 1970; all other times are seconds since then.

    t: of its samples, ascending. sums: what was counted up to each of them. gauges: what each told, nan for nothing.
    times: of the requests that finished then, by when. marks: (when, `engine` or `engine_died`). counts: its last ones.
    end: its last event, None where a kill left none.
    """

    shard: str
    attempt: int
    begin: float
    t: Values
    sums: Mapping[str, Values]
    gauges: Mapping[str, Values]
    times: Mapping[float, Mapping[str, Buckets]]
    marks: tuple[tuple[float, str], ...]
    counts: Counts
    end: Mapping[str, Any] | None

    @property
    def seconds(self) -> float:
        return float(self.t[-1])

    @property
    def ready(self) -> float:
        """When its first engine had started; its end where none has."""
        return next((at for at, kind in self.marks if kind == "engine"), self.seconds)

    @property
    def last_input(self) -> float:
        """When no more documents came; its end where they still did."""
        return self.seconds - self.counts.drain_s if self.counts.drain_s else self.seconds


def read_tracks(run: RunDirectory, now: Mapping[Path, Counts] | None = None) -> list[Track]:
    """All attempts of all shards that told something, in the order in which they began.

    now: the counts of attempts that have not told their end yet, by their telemetry.
    """
    found = (_track(path, (now or {}).get(path)) for path in run.telemetries())
    return sorted((one for one in found if one is not None), key=lambda one: (one.begin, one.shard))


def _track(path: Path, now: Counts | None) -> Track | None:
    samples: list[tuple[float | None, ...]] = []
    marks: list[tuple[float, str]] = []
    times = _Slots()
    begin = first = latest = 0.0
    told: Mapping[str, Any] = {}
    event: dict[str, Any] = {}
    for event in read_telemetry(path):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # a line of another version
            latest = datetime.fromisoformat(event["at"]).timestamp()
            first = first or latest
            if event["event"] in ("engine", "engine_died"):
                marks.append((latest, event["event"]))
            if "counts" in event:
                told = event["counts"]
                begin = begin or latest - float(told["total_s"])
                samples.append(_sample(told, event))
                times.add(told["total_s"], event)
    if not event:
        return None
    begin = begin or first
    counts = now or (counts_from(told) if told else Counts(total_s=latest - begin))
    if now is not None or not told:
        samples.append(_sample(dataclasses.asdict(counts), {}))
    # Nothing was there at the beginning, and nothing when the first engine had started: its start tells no gauges.
    ready = [max(0.0, at - begin) for at, kind in marks[:1] if kind == "engine"]
    zeros = [(at, *(0.0 for _ in _SUMS), *(None for _ in _GAUGES)) for at in (0.0, *ready)]
    columns = np.array([*zeros, *samples], np.float64).T
    return Track(
        shard=shard_of(path),
        attempt=int(path.stem.rpartition("-")[2]),
        begin=begin,
        t=np.maximum.accumulate(columns[0]),
        sums=dict(zip(_SUMS, columns[1:], strict=False)),
        gauges=dict(zip(_GAUGES, columns[1 + len(_SUMS) :], strict=True)),
        times=times.found,
        marks=tuple((at - begin, kind) for at, kind in marks),
        counts=counts,
        end=event if event.get("event") == "end" else None,
    )


def shard_of(telemetry: Path) -> str:
    """The shard of an attempt, as `1/4`."""
    shard = of_label(telemetry.stem.split("-")[1]) or WHOLE
    return f"{shard.number}/{shard.count}"


def _sample(counts: Mapping[str, Any], event: Mapping[str, Any]) -> tuple[float | None, ...]:
    """A sample as numbers: its time, sums and gauges."""
    sums = (_sum(counts, name) for name in _SUMS)
    return (float(counts["total_s"]), *sums, *(_gauge(event, name) for name in _GAUGES))


def _sum(counts: Mapping[str, float], name: str) -> float:
    if name == "output_tokens":
        return max(counts.get("generated_tokens", 0), counts.get("completion_tokens", 0))
    return counts.get(name, 0)


def _gauge(sample: Mapping[str, Any], name: str) -> float | None:
    value: float | None = sample.get(name)
    if not name.startswith("gpu_"):
        return value
    key = {"gpu_memory_bytes": "memory_used_bytes", "gpu_power_w": "power_w"}.get(name, "utilization")
    told: list[float] = [one[key] for one in sample.get("gpus") or () if one.get(key) is not None]
    if not told:
        return None
    if name == "gpu_power_w":
        return sum(told)
    return min(told) if name == "gpu_least_utilization" else sum(told) / len(told)


@dataclass(slots=True)
class _Slots:
    """Times of requests by when they were told, in slots that grow with the attempt: weeks of it fit."""

    found: dict[float, dict[str, Buckets]] = field(default_factory=dict)
    width: float = 1.0

    def add(self, at: float, sample: Mapping[str, Any]) -> None:
        told = sample.get("times") or {}
        for name in _TIMES:
            if buckets := (told.get(name) or {}).get("buckets"):
                self._put(at, name, Buckets.from_json(buckets))
        if len(self.found) > _SLOTS:
            before, self.found, self.width = self.found, {}, 2 * self.width
            for then, times in before.items():
                for name, some in times.items():
                    self._put(then, name, some)

    def _put(self, at: float, name: str, buckets: Buckets) -> None:
        slot = self.found.setdefault(at // self.width * self.width, {})
        slot.setdefault(name, Buckets()).__iadd__(buckets)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds in which some attempt went, counted from the first. Of each stretch: begin, end, and its begin here."""

    begin: Values
    end: Values
    at: Values

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> "Clock":
        stretches: list[list[float]] = []
        for one in tracks:  # by their begin
            if stretches and one.begin <= stretches[-1][1]:
                stretches[-1][1] = max(stretches[-1][1], one.begin + one.seconds)
            else:
                stretches.append([one.begin, one.begin + one.seconds])
        begin, end = np.array(stretches, np.float64).reshape(-1, 2).T
        return cls(begin, end, np.concatenate([[0.0], (end - begin).cumsum()]))

    @property
    def seconds(self) -> float:
        return float(self.at[-1])

    def place(self, moment: Values) -> Values:
        """Where moments, in seconds since 1970, are on this clock; between two stretches it stands still."""
        n = np.clip(np.searchsorted(self.begin, moment, "right") - 1, 0, None)
        placed: Values = self.at[n] + np.clip(moment - self.begin[n], 0, self.end[n] - self.begin[n])
        return placed


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run over time, in bins. edges: seconds of the clock, one more than bins.

    rates: of each bin, a second; counts of preemptions. gauges: means of each bin, nan where nobody told; quantiles:
    `ttft_s.p50` and the like, of the requests that finished in a bin. phases: (begin, end, `start` or `drain`), where
    no shard did anything else; restarts: where attempts after the first began; deaths: of engines.
    """

    edges: Values
    rates: Mapping[str, Values]
    gauges: Mapping[str, Values]
    quantiles: Mapping[str, Values]
    phases: tuple[tuple[float, float, str], ...]
    restarts: tuple[float, ...]
    deaths: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return float(self.edges[-1])

    def values(self, name: str) -> Values:
        """Of a rate, a gauge or a quantile."""
        return next(some[name] for some in (self.rates, self.gauges, self.quantiles) if name in some)

    def tells(self, name: str) -> bool:
        return bool(np.isfinite(self.values(name)).any())


def timeline(tracks: Sequence[Track], most: int = BINS) -> Timeline | None:
    """None where nothing was sampled for long enough to show it over time. most: bins."""
    tracks = [one for one in tracks if one.seconds > 0]
    if not tracks:
        return None
    clock = Clock.of(tracks)
    if clock.seconds < LEAST_S:
        return None
    # Not finer than the samples are: bins between two of them would tell of steps that nobody saw.
    samples = sum(len(one.t) - 1 for one in tracks) / len({one.shard for one in tracks})
    bins = int(np.clip(min(clock.seconds / BIN_S, samples), 2, most))
    edges = np.linspace(0.0, clock.seconds, bins + 1)
    placed = [clock.place(one.begin + one.t) for one in tracks]
    return Timeline(
        edges=edges,
        rates={name: _grown(tracks, placed, edges, name) / (edges[1] - edges[0]) for name in _SUMS[:-1]}
        | {"preemptions": _grown(tracks, placed, edges, "preemptions")},
        gauges={name: _mean(tracks, placed, edges, name) for name in _GAUGES},
        quantiles=_quantiles(tracks, clock, edges),
        phases=tuple(_phases(tracks, clock)),
        restarts=_restarts(tracks, clock),
        deaths=tuple(
            float(at) for one in tracks for when, kind in one.marks if kind == "engine_died"
            for at in clock.place(np.array([one.begin + when]))
        ),
    )  # fmt: skip


def _grown(tracks: Sequence[Track], placed: Sequence[Values], edges: Values, name: str) -> Values:
    """What was added to a sum in each bin, by all tracks."""
    each = [np.diff(np.interp(edges, at, one.sums[name])) for one, at in zip(tracks, placed, strict=True)]
    added: Values = np.sum(each, axis=0)
    return added


def _mean(tracks: Sequence[Track], placed: Sequence[Values], edges: Values, name: str) -> Values:
    """The mean of a gauge in each bin, over time; a value holds from the sample before to its own."""
    total, covered = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for one, at in zip(tracks, placed, strict=True):
        steps, values = np.diff(at), one.gauges[name][1:]
        told = ~np.isnan(values)
        total += np.diff(np.interp(edges, at, np.concatenate([[0.0], np.where(told, values * steps, 0).cumsum()])))
        covered += np.diff(np.interp(edges, at, np.concatenate([[0.0], np.where(told, steps, 0).cumsum()])))
    width = edges[1] - edges[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Values = total / (np.full_like(covered, width) if name in _ADDED else covered)
    mean[covered < width / 100] = np.nan
    return mean


def _quantiles(tracks: Sequence[Track], clock: Clock, edges: Values) -> dict[str, Values]:
    found = {f"{name}.{share}": np.full(len(edges) - 1, np.nan) for name in _TIMES for share in ("p50", "p95")}
    merged: dict[tuple[str, int], Buckets] = defaultdict(Buckets)
    for one in tracks:
        placed = clock.place(one.begin + np.array(list(one.times), np.float64))
        bins = np.clip(np.searchsorted(edges, placed, "right") - 1, 0, len(edges) - 2)
        for n, times in zip(bins, one.times.values(), strict=True):
            for name, buckets in times.items():
                merged[name, int(n)] += buckets
    for (name, n), buckets in merged.items():
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            value = buckets.quantile(share)
            found[f"{name}.{label}"][n] = np.nan if value is None else value
    return found


def _phases(tracks: Sequence[Track], clock: Clock) -> Iterator[tuple[float, float, str]]:
    """Stretches in which all that went were starting their first engine, or were draining."""
    fine = np.linspace(0.0, clock.seconds, _FINE + 1)
    middles = (fine[1:] + fine[:-1]) / 2
    going, starting, draining = (np.zeros(_FINE, np.int64) for _ in range(3))
    for one in tracks:
        edges = np.array([0.0, one.ready, one.last_input, one.seconds])
        begin, ready, last_input, end = clock.place(one.begin + edges)
        going += (middles >= begin) & (middles < end)
        starting += (middles >= begin) & (middles < min(ready, end))
        draining += (middles >= max(last_input, ready)) & (middles < end)
    for kind, some in (("start", starting), ("drain", draining)):
        inside = np.concatenate([[False], (some == going) & (going > 0), [False]])
        changes = np.flatnonzero(inside[1:] != inside[:-1])
        for begin, end in zip(changes[::2], changes[1::2], strict=True):
            yield float(fine[begin]), float(fine[end]), kind


def _restarts(tracks: Sequence[Track], clock: Clock) -> tuple[float, ...]:
    """Where attempts after the first one of their shard began."""
    seen: set[str] = set()
    moments = []
    for one in tracks:
        if one.shard in seen:
            moments.append(one.begin)
        seen.add(one.shard)
    return tuple(float(at) for at in clock.place(np.array(moments))) if moments else ()
