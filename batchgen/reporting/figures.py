"""What report.html shows: which plots there are something to draw for, and where tokens and time went."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from batchgen.reporting import page, plots
from batchgen.reporting.lengths import Lengths
from batchgen.reporting.plots import Bars, OverTime, Plot
from batchgen.reporting.rows import Rows
from batchgen.reporting.series import Timeline, Track, timeline

SECTIONS = ("speed", "engine", "gpu", "lengths")
_GIB = 1 << 30
_SECONDS = 5.0  # times of requests that take longer are told in seconds, others in milliseconds
_LATENCIES = {"ttft": "Time to first token (TTFT)", "tpot": "Time per output token (TPOT)"}
_TABLE = 12  # stretches in the table of a plot
_BARS = 24
_LEAST = 40  # of fewer lengths the quantiles tell more


@dataclass(frozen=True, slots=True)
class Wanted:
    """A plot to draw. section: where on the page it belongs."""

    section: str
    title: str
    draw: Callable[[], Plot]


def wanted(tracks: Sequence[Track], rows: Rows, report: Mapping[str, Any], known: Mapping[str, Any]) -> list[Wanted]:
    fine, coarse = timeline(tracks), timeline(tracks, _TABLE)
    found = []
    if fine is not None and coarse is not None:
        for section, some in (("speed", _speed(fine)), ("engine", _engine(fine)), ("gpu", _gpu(fine))):
            found += [
                Wanted(section, one.title, partial(plots.over_time, one, fine, coarse))
                for one in some
                if all(fine.tells(name) for name in one.lines)
            ]
    lengths = [
        Wanted("lengths", one.title, partial(plots.histogram, one)) for one in _lengths(rows, report, known) if one
    ]
    return found + lengths


def _speed(fine: Timeline) -> list[OverTime]:
    names = {"ok": ("Documents", "docs/s"), "prompt_tokens": ("Prompt tokens", "tok/s"),
             "output_tokens": ("Output tokens", "tok/s")}  # fmt: skip
    return [
        OverTime(f"speed-{name.replace('_', '-')}", f"{title}, {unit}", _level(fine, name, page.rate), {name: unit},
                 plots.short)
        for name, (title, unit) in names.items() if fine.values(name).max() > 0
    ]  # fmt: skip


def _level(fine: Timeline, name: str, write: Callable[[float], str], per: float = 1.0) -> str:
    """The middle and the highest of the bins in which there was something."""
    values = fine.values(name) / per
    met = values[np.isfinite(values) & (values > 0)]
    return f"median {write(float(np.median(met)))}, highest {write(float(met.max()))}" if len(met) else "none"


def _engine(fine: Timeline) -> list[OverTime]:
    percent = "{:.0%}".format
    found = [
        OverTime("requests", "Requests in the engine", f"running: {_level(fine, 'running', page.count)}",
                 {"running": "running", "waiting": "waiting"}, plots.short),
        OverTime("kv-cache", "KV cache in use", _level(fine, "kv_cache_usage", percent), {"kv_cache_usage": "in use"},
                 percent, top=1.0),
    ]  # fmt: skip
    if (total := float(fine.values("preemptions").sum())) > 0:
        found.append(OverTime("preemptions", "Preemptions", f"{total:,.0f} in all", {"preemptions": "preemptions"},
                              plots.short, bars=True))  # fmt: skip
    for name, title in _LATENCIES.items():
        p50, p95 = f"{name}_s.p50", f"{name}_s.p95"
        if fine.tells(p95):
            per, unit = (1.0, "s") if np.nanmax(fine.values(p95)) >= _SECONDS else (0.001, "ms")
            says = f"p50: {_level(fine, p50, plots.short, per)}"
            found.append(OverTime(name, f"{title}, {unit}", says, {p50: "p50", p95: "p95"}, plots.short, per=per))
    return found


def _gpu(fine: Timeline) -> list[OverTime]:
    percent = "{:.0%}".format
    busy = {"gpu_utilization": "mean of all GPUs"}
    if not np.allclose(fine.values("gpu_utilization"), fine.values("gpu_least_utilization"), equal_nan=True, atol=0.01):
        busy["gpu_least_utilization"] = "least busy GPU"
    return [
        OverTime("gpu-utilization", "GPU utilization", _level(fine, "gpu_utilization", percent), busy, percent,
                 top=1.0),
        OverTime("gpu-memory", "Memory in use on each GPU, GiB",
                 _level(fine, "gpu_memory_bytes", plots.short, _GIB),
                 {"gpu_memory_bytes": "GiB"}, plots.short, per=_GIB),
        OverTime("gpu-power", "Power of all GPUs, W", _level(fine, "gpu_power_w", page.count), {"gpu_power_w": "W"},
                 plots.short),
    ]  # fmt: skip


def _lengths(rows: Rows, report: Mapping[str, Any], known: Mapping[str, Any]) -> list[Bars | None]:
    max_tokens = ((known.get("job") or {}).get("sampling") or {}).get("max_tokens")
    longest = (known.get("fingerprint") or {}).get("max_prompt_tokens")
    context = (report["engine"]["args"] or {}).get("max_model_len")
    return [
        _bars("documents", "Documents", rows.document_chars, {}, "characters"),
        _bars(
            "prompts", "Prompts", rows.prompt_tokens, {"max_model_len": context, "longest prompt": longest}, "tokens"
        ),
        _bars("answers", "Answers", rows.completion_tokens, {"max_tokens": max_tokens}, "tokens"),
    ]


def _bars(name: str, title: str, lengths: Lengths, limits: Mapping[str, int | None], unit: str) -> Bars | None:
    """Bars of equal width up to where nearly all lengths are; the few beyond are told."""
    up_to = lengths.counts.cumsum()
    total = int(up_to[-1]) if len(up_to) else 0
    if total < _LEAST:
        return None
    half, nearly = (int(lengths.values[np.searchsorted(up_to, share * total)]) for share in (0.5, 0.995))
    most = int(lengths.values[-1])
    shown = most if most <= 2 * nearly else nearly
    step = next(step for size in range(12) for step in (10**size, 2 * 10**size, 5 * 10**size) if shown / step < _BARS)
    edges = np.arange(0, shown + step + 1, step)
    bars, _ = np.histogram(lengths.values, edges, weights=lengths.counts)
    beyond = total - int(bars.sum())
    says = f"median {half:,}, longest {most:,}" + (f"; {beyond:,} longer than shown" if beyond else "")
    told = {label: int(at) for label, at in limits.items() if at}
    return Bars(
        f"lengths-{name}", f"{title}, {unit}", says, edges.astype(np.float64), bars.astype(np.int64), told, unit
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a bar. share: of the whole bar, 0 to 1. figure: its name in report.json, empty where it has none."""

    label: str
    value: float
    share: float
    color: str
    figure: str = ""


def _bar(*pieces: tuple[str, float, str, str]) -> list[Piece]:
    """Of (label, value, color, figure); those without a value are left out."""
    whole = sum(value for _, value, *_ in pieces)
    return [Piece(label, value, value / whole, color, name) for label, value, color, name in pieces if value > 0]


def tokens(report: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Where prompt and output tokens of the whole run went."""
    told, wasted = report["run"]["tokens"], report["wasted"]
    kept = told["output"] - told["wasted"]
    return {
        "prompt": _bar(
            ("computed", told["prompt"] - told["cached"], "series-1", ""),
            ("from the prefix cache", told["cached"], "series-3", "run.tokens.cached"),
        ),
        "output": _bar(
            ("in whole summaries", kept - wasted["cut"], "series-1", ""),
            ("in summaries cut at max_tokens", wasted["cut"], "series-2", "wasted.cut"),
            ("wasted: answers that were tried again longer", wasted["retries"], "waste-1", "wasted.retries"),
            ("wasted: packs whose documents were sent alone", wasted["fallbacks"], "waste-2", "wasted.fallbacks"),
            ("wasted: documents that failed", wasted["failed"], "waste-3", "wasted.failed"),
            ("wasted: cut short, or done again", wasted["unfinished"], "waste-4", "wasted.unfinished"),
        ),
    }


def times(report: Mapping[str, Any], tracks: Sequence[Track]) -> list[Piece]:
    """Where the seconds of all attempts went; those of shards side by side are added up."""
    told = report["run"]["seconds"]
    tail = min(told["drain"], told["tail"])
    working = told["engine_start"] + told["steady"] + told["drain"]
    total = max(working, sum(one.seconds for one in tracks))
    return _bar(
        ("engine start", told["engine_start"], "series-2", "run.seconds.engine_start"),
        ("steady", told["steady"], "series-1", "run.seconds.steady"),
        ("drain: no more documents to send", told["drain"] - tail, "series-3", ""),
        ("tail: less than half of what the engine can run", tail, "waste-1", ""),
        ("the rest: checks, reading before, report", total - working, "waste-4", ""),
    )
