"""What telemetry tells of attempts beyond their counts: times of requests, and what the GPUs did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.reporting.buckets import Buckets
from batchgen.reporting.stats import TIMES, Counts, counts_from, read_telemetry


@dataclass(slots=True)
class Load:
    """What engines had to do while documents came: sums over seconds, between two samples the mean of both.

    tail_s: seconds in which no more came and less than half of what the engines can run was left.
    """

    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    running_s: float = 0.0
    usage_s: float = 0.0
    usage_max: float | None = None
    tail_s: float = 0.0
    before: tuple[float, float, float] | None = None  # running, waiting and usage of the sample before

    def add(self, other: "Load") -> None:
        for name in ("running", "waiting", "usage", "running_s", "usage_s", "tail_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.usage_max = max((one.usage_max for one in (self, other) if one.usage_max is not None), default=None)

    def told(self) -> dict[str, float | None]:
        return {
            "running": round(self.running / self.running_s, 2) if self.running_s else None,
            "waiting": round(self.waiting / self.running_s, 2) if self.running_s else None,
            "kv_cache_usage": round(self.usage / self.usage_s, 4) if self.usage_s else None,
            "kv_cache_usage_max": None if self.usage_max is None else round(self.usage_max, 4),
        }

    def sample(self, event: Mapping[str, Any], seconds: float, *, seats: int, draining: bool) -> None:
        """seats: requests that the engines can run at once. draining: no more documents came."""
        if event.get("running") is None:
            return
        usage = event.get("kv_cache_usage")
        now = (event["running"], event.get("waiting") or 0, usage or 0.0)
        running, waiting, used = (sum(pair) / 2 for pair in zip(self.before or now, now, strict=True))
        self.before = now
        if usage is not None:
            self.usage_max = max(self.usage_max or 0.0, usage)
        if draining:
            self.tail_s += seconds if 2 * running < seats else 0.0
            return
        self.running += running * seconds
        self.waiting += waiting * seconds
        self.running_s += seconds
        if usage is not None:
            self.usage += used * seconds
            self.usage_s += seconds


@dataclass(slots=True)
class Told:
    """Sums over samples of one attempt, or of several.

    gpus: those that engines worked on, by UUID, or by shard and name where nobody tells it. gpu_s: seconds of each
    attempt times its GPUs. busy_s, watched_s, joules: seconds in which GPUs computed, for which NVML told that, and
    what they took; summed over GPUs. powered_s: as watched_s, of joules. power_limit_w: the lowest that one may take.
    """

    counts: Counts = field(default_factory=Counts)
    end: Mapping[str, Any] | None = None
    times: dict[str, Buckets] = field(default_factory=lambda: {name: Buckets() for name in TIMES})
    gpus: set[str] = field(default_factory=set)
    gpu_s: float = 0.0
    busy_s: float = 0.0
    watched_s: float = 0.0
    joules: float = 0.0
    powered_s: float = 0.0
    power_limit_w: float | None = None
    memory_bytes: int = 0  # the most that one GPU had in use
    shared: dict[str, int] | None = None
    load: Load = field(default_factory=Load)

    def add(self, other: "Told") -> None:
        """Take in another attempt; of `memory_bytes` the highest, and no end."""
        self.counts += other.counts
        for name, buckets in self.times.items():
            buckets += other.times[name]  # noqa: PLW2901  it is the same object
        self.gpus |= other.gpus
        self.memory_bytes = max(self.memory_bytes, other.memory_bytes)
        self.power_limit_w = _least(self.power_limit_w, other.power_limit_w)
        self.load.add(other.load)
        if other.shared is not None:
            mine = self.shared or other.shared
            self.shared = {name: min(mine[name], tokens) for name, tokens in other.shared.items()}
        for name in ("gpu_s", "busy_s", "watched_s", "joules", "powered_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def latency(self) -> dict[str, dict[str, Any]]:
        return {name.removesuffix("_s"): buckets.told() for name, buckets in self.times.items()}

    def gpu(self) -> dict[str, Any]:
        return {
            "gpus": len(self.gpus),
            "gpu_seconds": round(self.gpu_s, 3),
            "utilization": round(self.busy_s / self.watched_s, 4) if self.watched_s else None,
            "memory_peak_bytes": self.memory_bytes or None,
            "power_w": round(self.joules / self.powered_s, 1) if self.powered_s else None,
            "power_limit_w": self.power_limit_w,
            "energy_wh": round(self.joules / 3600, 3) if self.powered_s else None,
        }


def told(path: Path, counts: Counts | None = None) -> Told:
    """What an attempt told. counts: those that hold where the attempt goes on; else the last it told."""
    found = Told()
    last: Mapping[str, Any] = {}
    seats = 0
    before: datetime | None = None  # the sample before, or the engine's start
    for event in read_telemetry(path) if path.exists() else ():
        last = event.get("counts", last)
        found.end = event if event.get("event") == "end" else None
        if event.get("event") == "engine":
            found.gpus |= _gpus(event, path.name.split("-")[1])
            found.power_limit_w = _least(*(one.get("power_limit_w") for one in event.get("nvml") or ()))
            seats = (event.get("max_num_seqs") or 0) * (event.get("replicas") or 1)
            before, found.load.before = _at(event), None
        elif event.get("event") == "sample":
            for name, buckets in found.times.items():
                told_of = (event.get("times") or {}).get(name) or {}
                buckets += Buckets.from_json(told_of.get("buckets") or {})  # noqa: PLW2901  it is the same object
            at = _at(event)
            seconds = (at - before).total_seconds() if at and before else 0.0
            before = at
            found.shared = event.get("shared") or found.shared
            found.load.sample(event, max(0.0, seconds), seats=seats, draining=counts_from(last).drain_s > 0)
            for gpu in event.get("gpus") or ():
                _add_gpu(found, gpu, max(0.0, seconds))
    found.counts = counts_from(last) if counts is None else counts
    found.gpu_s = len(found.gpus) * found.counts.total_s
    return found


def _gpus(engine: Mapping[str, Any], shard: str) -> set[str]:
    known = {one.get("gpu"): one.get("uuid") for one in engine.get("nvml") or ()}
    return {known.get(name) or f"{shard}: {name}" for name in engine.get("gpus") or ()}


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value), default=None)


def _add_gpu(found: Told, gpu: Mapping[str, Any], seconds: float) -> None:
    if (busy := gpu.get("utilization")) is not None:
        found.busy_s += busy * seconds
        found.watched_s += seconds
    if (watts := gpu.get("power_w")) is not None:
        found.joules += watts * seconds
        found.powered_s += seconds
    found.memory_bytes = max(found.memory_bytes, gpu.get("memory_used_bytes") or 0)


def _at(event: Mapping[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(event["at"])
    except (KeyError, TypeError, ValueError):
        return None
