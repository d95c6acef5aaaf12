"""report.json and report.md: where the documents, the tokens and the time went.

Documents, flags and lengths are read from the committed rows; times and tokens of all requests from telemetry. Rates
divide by the engine's steady and drain time of the same scope and are null where there was none.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined

from batchgen import __version__, fsio
from batchgen.checkpoint import newest_rows
from batchgen.rundir import RunDirectory
from batchgen.sinks.base import DamagedPartError, Sink
from batchgen.stats import Counts, counts_of

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(slots=True)
class Rows:
    """What the committed rows tell, read column by column, part by part."""

    status: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    kept_tokens: int = 0
    superseded: int = 0  # rows of edited documents that stand beside their newer row, not counted above
    prompt_tokens: list[Any] = field(default_factory=list)
    completion_tokens: list[Any] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.status.values())


def read_rows(run: RunDirectory, sink: Sink) -> Rows:
    """The sums over all committed parts, the newest row of each key; a part that vanishes meanwhile is left out."""
    rows = Rows()
    parts = []
    for path in run.parts(sink.suffix):
        with contextlib.suppress(DamagedPartError):
            parts.append((path, sink.read_keys(path)))
    newest, _ = newest_rows(parts)
    rows.superseded = int((~newest).sum())
    begin = 0
    for path, held in parts:
        mask = newest[begin : begin + len(held.keys)]
        begin += len(held.keys)
        try:
            table = sink.read(path, ["status", "error_type", "flags", "prompt_tokens", "completion_tokens"])
        except DamagedPartError:
            continue
        if len(table) == len(mask):  # else it was rewritten in between, and holds newest rows only
            table = table.filter(pa.array(mask))
        for pair in (
            table.select(["status", "error_type"])
            .group_by(["status", "error_type"])
            .aggregate([([], "count_all")])
            .to_pylist()
        ):
            rows.status[pair["status"]] += pair["count_all"]
            if pair["error_type"]:
                rows.reasons[f"{pair['status']}: {pair['error_type']}"] += pair["count_all"]
        rows.flags.update(flag for flag in pc.list_flatten(table.column("flags")).to_pylist() if flag)
        ok = table.filter(pc.equal(table.column("status"), "ok"))
        rows.prompt_tokens.append(ok.column("prompt_tokens").to_numpy())
        rows.completion_tokens.append(ok.column("completion_tokens").to_numpy())
        rows.kept_tokens += int(pc.sum(ok.column("completion_tokens")).as_py() or 0)
    return rows


@dataclass(frozen=True, slots=True)
class Scope:
    """What the report is about besides rows and telemetry."""

    name: str
    attempt: int
    counts: Counts
    exit_status: int
    reason: str
    rows: Rows
    stale: int  # edited documents that were met and still have their old row
    total_rows: int
    total_exact: bool
    notes: Mapping[str, Any]


def build(run: RunDirectory, scope: Scope) -> dict[str, Any]:
    """The report as plain JSON values."""
    rows = scope.rows
    known = run.read_run() or {}
    earlier = [counts_of(path) for path in run.telemetries() if path != run.telemetry(scope.attempt)]
    whole = sum(earlier, start=scope.counts)
    run_tokens = _tokens(whole) | {"wasted": max(whole.generated_tokens, whole.completion_tokens) - rows.kept_tokens}
    engine = known.get("engine") or {}
    return {
        "name": scope.name,
        "run_dir": str(run.path),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_status": scope.exit_status,
        "reason": scope.reason,
        "documents": {
            "total": scope.total_rows,
            "total_is_exact": scope.total_exact,
            "ok": rows.status["ok"],
            "failed": rows.status["failed"],
            "skipped": rows.status["skipped"],
            "pending": max(0, scope.total_rows - rows.count + scope.stale),
            "reasons": dict(sorted(rows.reasons.items())),
            "flags": dict(sorted(rows.flags.items())),
        },
        "attempt": {"number": scope.attempt} | _scope(scope.counts, _tokens(scope.counts)),
        "run": {"attempts": len(earlier) + (scope.counts.total_s > 0)} | _scope(whole, run_tokens),
        "lengths": {
            "prompt_tokens": _lengths(rows.prompt_tokens),
            "completion_tokens": _lengths(rows.completion_tokens),
        },
        "engine": {
            name: engine.get(name)
            for name in ("backend", "device", "max_num_seqs", "kv_cache_tokens", "kv_cache_max_concurrency", "args")
        },
        "versions": {"batchgen": __version__, **engine.get("versions", {})},
        "notes": dict(scope.notes),
    }


def _tokens(counts: Counts) -> dict[str, int]:
    return {
        "prompt": counts.prompt_tokens,
        "cached": counts.cached_tokens,
        "output": max(counts.generated_tokens, counts.completion_tokens),
        "wasted": counts.wasted_tokens,
    }


def _scope(counts: Counts, tokens: Mapping[str, int]) -> dict[str, Any]:
    seconds = counts.steady_s + counts.drain_s
    queries = counts.prefix_cache_queries
    return {
        "documents": {
            "read": counts.read,
            "done_before": counts.done_before,
            "ok": counts.ok,
            "failed": counts.failed,
            "skipped": counts.skipped,
        },
        "requests": counts.requests,
        "tokens": dict(tokens),
        "seconds": {
            "total": round(counts.total_s, 3),
            "engine_start": round(counts.engine_start_s, 3),
            "steady": round(counts.steady_s, 3),
            "drain": round(counts.drain_s, 3),
            "commit": round(counts.commit_s, 3),
            "starved": round(counts.starved_s, 3),
        },
        "rates": {
            "docs_per_s": _rate(counts.ok, seconds),
            "prompt_tokens_per_s": _rate(counts.prompt_tokens, seconds),
            "output_tokens_per_s": _rate(tokens["output"], seconds),
        },
        "prefix_cache": {
            "queries": queries,
            "hits": counts.prefix_cache_hits,
            "hit_share": round(counts.prefix_cache_hits / queries, 4) if queries else None,
        },
        "preemptions": counts.preemptions,
    }


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 else None


def _lengths(arrays: Sequence[Any]) -> dict[str, int | None]:
    values = np.concatenate(arrays) if arrays else np.empty(0)
    if not len(values):
        return dict.fromkeys(_QUANTILES)
    return {name: int(np.quantile(values, share)) for name, share in _QUANTILES.items()}


def write(run: RunDirectory, report: Mapping[str, Any]) -> None:
    """Replace report.json and report.md; each is whole at any moment. Raises OutputError."""
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    fsio.write_atomic(run.report_json, text.encode(), owner=run.owner)
    fsio.write_atomic(run.report_md, markdown(report).encode(), owner=run.owner)


def markdown(report: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("batchgen"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701  Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["count"] = lambda value: "–" if value is None else f"{value:,}"
    environment.filters["rate"] = lambda value: "–" if value is None else f"{value:,.1f}"
    environment.filters["share"] = lambda value: "–" if value is None else f"{value:.1%}"
    return environment.get_template("report.md").render(report)
