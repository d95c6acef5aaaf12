"""report.json and report.md: where the documents, the tokens and the time went.

Documents, flags and lengths are read from the committed rows; times and tokens of all requests from telemetry. Rates
divide by the engine's steady and drain time of the same scope and are null where there was none.

`build` makes the report of an attempt that ends; `afresh` that of a run as it lies there.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from batchgen import __version__, fsio, plan
from batchgen.reporting.cost import cost
from batchgen.reporting.ends import Share, attempt_of, shares, together
from batchgen.reporting.rows import COSTS, Rows
from batchgen.reporting.stats import Counts, counts_of
from batchgen.reporting.told import Told, told
from batchgen.reporting.why import why
from batchgen.storage.rundir import RunDirectory
from batchgen.text import harmless

_ENGINE = (
    "backend",
    "device",
    "max_num_seqs",
    "kv_cache_tokens",
    "kv_cache_max_concurrency",
    "replicas",
    "gpus",
    "args",
    "adapter",
    "adapted",
)


@dataclass(frozen=True, slots=True)
class Scope:
    """What the report is about besides rows and telemetry."""

    name: str
    attempt: int
    counts: Counts
    exit_status: int | None  # None where there is no end
    reason: str
    rows: Rows
    stale: int  # edited documents that were met and still have their old row
    total_rows: int | None  # None where nobody has looked at the input yet
    total_exact: bool
    notes: Mapping[str, Any]
    latest: tuple[Path, ...] = ()  # telemetry of the attempts that it is about; none: that of `attempt`
    shards: Sequence[Share] = ()  # where it is about several


def build(run: RunDirectory, scope: Scope) -> dict[str, Any]:
    """The report as plain JSON values."""
    rows = scope.rows
    known = run.read_run() or {}
    latest = scope.latest or (run.telemetry(scope.attempt),)
    this = told(latest[0], scope.counts) if len(latest) == 1 else _sum(latest)
    earlier = [told(path) for path in run.telemetries() if path not in latest]
    every = Told()
    for one in (this, *earlier):
        every.add(one)
    whole = every.counts
    run_tokens = _tokens(whole) | {"wasted": max(whole.generated_tokens, whole.completion_tokens) - rows.kept_tokens}
    engine = known.get("engine") or {}
    built = {
        "name": scope.name,
        "run_dir": str(run.path),
        "shard": None if run.shard.is_whole else f"{run.shard.number}/{run.shard.count}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_status": scope.exit_status,
        "reason": scope.reason,
        "documents": {
            "total": scope.total_rows,
            "total_is_exact": scope.total_exact,
            "ok": rows.status["ok"],
            "failed": rows.status["failed"],
            "skipped": rows.status["skipped"],
            "pending": None if scope.total_rows is None else max(0, scope.total_rows - rows.count + scope.stale),
            "reasons": dict(sorted(rows.reasons.items())),
            "flags": dict(sorted(rows.flags.items())),
            "ways": {way: {name: costs[name] for name in ("documents", *COSTS)} for way, costs in rows.ways.items()},
        },
        "packing": _packing(known, rows),
        "attempt": {"number": scope.attempt} | _scope(this, _tokens(scope.counts)),
        "run": {"attempts": len(earlier) + (len(latest) if scope.counts.total_s > 0 else 0)}
        | _scope(every, run_tokens),
        "wasted": _wasted(run_tokens["wasted"], rows),
        "lengths": {name: lengths.quantiles() for name, lengths in rows.lengths.items()},
        "histograms": {name: lengths.histogram() for name, lengths in rows.lengths.items()},
        "engine": {name: engine.get(name) for name in _ENGINE},
        "versions": {"batchgen": __version__, **engine.get("versions", {})},
        "shards": [of_shard(one) for one in scope.shards],
        "notes": dict(scope.notes),
    }
    job = known.get("job") or {}
    return built | {"cost": cost(built, job), "why": why(built, job)}


def _wasted(total: int, rows: Rows) -> dict[str, int]:
    """What became of output tokens that are in no summary, and how many are in summaries that were cut."""
    told = {"retries": rows.retry_tokens, "fallbacks": rows.fallback_tokens, "failed": rows.failed_tokens}
    return told | {"unfinished": max(0, total - sum(told.values())), "cut": rows.cut_tokens}


def _sum(paths: Iterable[Path]) -> Told:
    found = Told()
    for path in paths:
        found.add(told(path))
    return found


def of_shard(share: Share) -> dict[str, Any]:
    return {
        "shard": f"{share.run.shard.number}/{share.run.shard.count}",
        "attempt": share.attempt,
        "exit_status": share.end.exit_status,
        "reason": share.end.reason,
        "running": share.run.holder() if share.end.reason == "running" else None,
        "done": share.done,
        "docs_per_s": None if share.docs_per_s is None else round(share.docs_per_s, 3),
    }


def _packing(known: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    return {
        "mode": ((known.get("job") or {}).get("packing") or {}).get("mode"),
        "decision": (known.get("decisions") or {}).get("packing"),
        "documents": rows.packed,
        "fallbacks": dict(sorted(rows.fallbacks.items())),
        "wasted_tokens": rows.fallback_tokens,
    }


def total(run: RunDirectory, rows: Rows, every: Sequence[Share]) -> tuple[int | None, bool]:
    """(documents in the input as the latest start saw it, whether they are counted); None before there is a plan."""
    planned, exact = plan.known_rows(run)
    if planned is None or exact:
        return planned, exact
    if len(every) > 1 and all(one.total is not None for one in every):  # each has counted its own
        return sum(one.total or 0 for one in every), True
    return max(planned, rows.count), False


def afresh(run: RunDirectory, rows: Rows) -> dict[str, Any]:
    """The report of a run that goes on, ended or was killed, from what lies there; its numbers are those of `build`.

    The attempt is the latest that left telemetry, with shards the latest of each; the end and the notes are those of
    the latest starts, null where one has no end.
    """
    every = shares(run)
    end = together(every)
    notes = dict(end.notes)
    if rows.damaged:
        notes["damaged parts"] = [*(notes["damaged parts"] or []), *rows.damaged]
    total_rows, exact = total(run, rows, every)
    latest = tuple(one.telemetry for one in every if one.telemetry is not None)
    scope = Scope(
        name=(run.read_run() or {}).get("name", run.path.name),
        attempt=max(map(attempt_of, latest), default=0),
        counts=sum((counts_of(path) for path in latest), start=Counts()),
        exit_status=end.exit_status,
        reason=end.reason,
        rows=rows,
        stale=end.stale,
        total_rows=total_rows,
        total_exact=exact,
        notes=notes,
        latest=latest,
        shards=every if len(every) > 1 else (),
    )
    return build(run, scope)


def _tokens(counts: Counts) -> dict[str, int]:
    return {
        "prompt": counts.prompt_tokens,
        "cached": counts.cached_tokens,
        "output": max(counts.generated_tokens, counts.completion_tokens),
        "reasoning": counts.reasoning_tokens,
        "wasted": counts.wasted_tokens,
    }


def _scope(told: Told, tokens: Mapping[str, int]) -> dict[str, Any]:
    counts = told.counts
    seconds = counts.steady_s + counts.drain_s
    return {
        "documents": {
            "read": counts.read,
            "done_before": counts.done_before,
            "ok": counts.ok,
            "failed": counts.failed,
            "skipped": counts.skipped,
        },
        "requests": counts.requests,
        "packs": counts.packs,
        "pack_extras": counts.pack_extras,
        "tokens": dict(tokens),
        "seconds": {
            "total": round(counts.total_s, 3),
            "engine_start": round(counts.engine_start_s, 3),
            "steady": round(counts.steady_s, 3),
            "drain": round(counts.drain_s, 3),
            "tail": round(told.load.tail_s, 3),
            "commit": round(counts.commit_s, 3),
            "starved": round(counts.starved_s, 3),
            "encode": round(counts.encode_s, 3),
            "loop_cpu": round(counts.loop_cpu_s, 3),
        },
        "starved_share": round(counts.starved_s / seconds, 4) if seconds > 0 else None,
        "rates": {
            "docs_per_s": _rate(counts.ok, seconds),
            "prompt_tokens_per_s": _rate(counts.prompt_tokens, seconds),
            "output_tokens_per_s": _rate(tokens["output"], seconds),
        },
        "load": told.load.told(),
        "shared": told.shared or {"prefix_tokens": None, "suffix_tokens": None},
        "prefix_cache": {
            "queries": counts.prefix_cache_queries,
            "hits": counts.prefix_cache_hits,
            # Not hits of queries: the engine counts what it computes again after a preemption as hits.
            "hit_share": round(counts.cached_tokens / counts.prompt_tokens, 4) if counts.prompt_tokens else None,
        },
        "preemptions": counts.preemptions,
        "latency": told.latency(),
        "gpu": told.gpu(),
        "memory": {
            "peak_rss_bytes": counts.peak_rss_bytes or None,
            "engine_peak_rss_bytes": counts.engine_peak_rss_bytes or None,
        },
    }


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 else None


def _milliseconds(value: float) -> str:
    """The four digits that are known of it."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _money(value: float) -> str:
    """At least two digits behind the point, and four that mean something: 1,234.50, 0.8500, 0.001234."""
    places = 2 if abs(value) >= 100 or not value else max(2, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def write(run: RunDirectory, report: Mapping[str, Any]) -> None:
    """Replace report.json and report.md; each is whole at any moment. Raises OutputError."""
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    fsio.write_atomic(run.report_json, harmless(text).encode(), owner=run.owner)
    fsio.write_atomic(run.report_md, markdown(report).encode(), owner=run.owner)


def markdown(report: Mapping[str, Any]) -> str:
    return harmless(_template().render(report))


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("batchgen.reporting"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701  Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["count"] = lambda value: "–" if value is None else f"{value:,}"
    environment.filters["rate"] = lambda value: "–" if value is None else f"{value:,.1f}"
    environment.filters["mib"] = lambda value: "–" if value is None else f"{value / (1 << 20):,.0f}"
    environment.filters["times"] = lambda value: (
        f"{_milliseconds(value['p50_ms'])} / {_milliseconds(value['p95_ms'])}" if value["count"] else "–"
    )
    environment.filters["money"] = lambda value: "–" if value is None else _money(value)
    environment.filters["hours"] = lambda value: f"{value:,.3f}"
    environment.filters["share"] = lambda value: "–" if value is None else f"{value:.1%}"
    return environment.get_template("report.md")
