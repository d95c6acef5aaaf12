"""What a run does now, from the ends of the telemetry files of those who work on it."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen.reporting.eta import clock
from batchgen.storage.rundir import RunDirectory

WINDOW_S = 60.0  # rates are of the last minute
_STALE_S = 60.0  # a sample comes every 5 seconds: who has told nothing for so long was killed, or hangs
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Live:
    """Sums over all engines. Rates are per second, None where there are no two samples to compare.

    kv_cache_usage and utilization are means, 0 to 1; watts are those of all GPUs. None where nobody tells.
    unwritten: documents that are done and in no part yet.
    """

    docs_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    utilization: float | None = None
    watts: float | None = None
    unwritten: int = 0

    def text(self) -> str:
        """`9.7 docs/s, 873 tok/s in, 234 tok/s out; 64 running, 70 waiting, KV cache 80%; GPU 98%, 640 W`."""
        speeds = [
            (self.docs_per_s, "{:,.1f} docs/s"),
            (self.prompt_tokens_per_s, "{:,.0f} tok/s in"),
            (self.output_tokens_per_s, "{:,.0f} tok/s out"),
        ]
        engine = [
            (self.running, "{:,.0f} running"),
            (self.waiting, "{:,.0f} waiting"),
            (self.kv_cache_usage, "KV cache {:.0%}"),
        ]
        gpus = [(self.utilization, "GPU {:.0%}"), (self.watts, "{:,.0f} W")]
        groups = (
            ", ".join(form.format(value) for value, form in one if value is not None) for one in (speeds, engine, gpus)
        )
        return "; ".join(one for one in groups if one)

    def left(self, pending: int | None) -> str:
        """When documents that are pending on disk will be done, or why nobody can say; nothing where none is left."""
        if pending is None:
            return "no end in sight: nobody knows how many documents there are"
        if pending <= self.unwritten:
            return ""
        if self.docs_per_s is None:
            return "no end in sight yet"
        if not self.docs_per_s:
            return "no end in sight: nothing has finished of late"
        return f"{clock((pending - self.unwritten) / self.docs_per_s)} left"


def live(run: RunDirectory, *, now: datetime | None = None) -> Live | None:
    """What is done now; None where nobody has told anything of late, as while an engine starts."""
    latest = {path.name.rpartition("-")[0]: path for path in run.telemetries()}  # of each shard the last attempt
    lately = [samples for path in latest.values() if (samples := _samples(path, now or datetime.now(UTC)))]
    if not lately:
        return None
    last = [samples[-1] for samples in lately]
    gpus = [gpu for one in last for gpu in one.get("gpus") or ()]
    return Live(
        docs_per_s=_sum(_rate(samples, "ok", "failed", "skipped") for samples in lately),
        prompt_tokens_per_s=_sum(_rate(samples, "prompt_tokens") for samples in lately),
        output_tokens_per_s=_sum(_rate(samples, "generated_tokens") for samples in lately),
        running=_sum(one.get("running") for one in last),
        waiting=_sum(one.get("waiting") for one in last),
        kv_cache_usage=_mean(one.get("kv_cache_usage") for one in last),
        utilization=_mean(gpu.get("utilization") for gpu in gpus),
        watts=_sum(gpu.get("power_w") for gpu in gpus),
        unwritten=sum(max(0, _done(one) - one["written"]) for one in last),
    )


def _samples(path: Path, now: datetime) -> list[Mapping[str, Any]]:
    """The last minute of samples; none where the attempt has ended, or has told nothing for long."""
    found: list[Mapping[str, Any]] = []
    written = 0  # rows of this attempt
    for event in _tail(path):
        if event.get("event") in {"end", "engine_died"}:  # another engine starts first
            found = []
        elif event.get("event") == "commit":
            written = event.get("total") or written
        elif event.get("event") == "sample" and event.get("at") and event.get("counts"):
            found.append(event | {"written": written})
    if not found or (now - _at(found[-1])).total_seconds() > _STALE_S:
        return []
    return [one for one in found if (_at(found[-1]) - _at(one)).total_seconds() <= WINDOW_S]


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """The events at the end of a file that may grow meanwhile; the first and the last line can be torn."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _at(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["at"])


def _done(sample: Mapping[str, Any]) -> int:
    return sum(sample["counts"].get(name, 0) for name in ("ok", "failed", "skipped"))


def _rate(samples: Sequence[Mapping[str, Any]], *names: str) -> float | None:
    seconds = (_at(samples[-1]) - _at(samples[0])).total_seconds()
    first, last = (sum(one["counts"].get(name, 0) for name in names) for one in (samples[0], samples[-1]))
    return (last - first) / seconds if seconds > 0 else None


def _sum(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) if told else None


def _mean(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else None
