"""What `status` and `report` tell of a run that goes, ended or was killed, over all its shards; nothing is started."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen import fsio, sinks
from batchgen.errors import ConfigError
from batchgen.reporting import ends, html
from batchgen.reporting import report as reports
from batchgen.reporting.rows import read_rows
from batchgen.sinks.base import Sink
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View


def open_run(path: Path) -> tuple[RunDirectory, dict[str, Any], Sink]:
    """(the run, its run.json, the sink of its parts). Raises ConfigError where the folder is none."""
    run = RunDirectory(path)
    known = run.read_run()
    if known is None:
        raise ConfigError(f"{path}: is no run directory: it has no run.json")
    name = sinks.format_of(run.summaries) or known["job"]["output"].get("format", "parquet")
    return run, known, sinks.open_sink(name, owner=run.owner)


def report(path: Path) -> dict[str, Any]:
    """The report of the run as it is now, with the keys of report.json. Raises ConfigError where the folder is none."""
    run, _, sink = open_run(path)
    return reports.afresh(run, read_rows(run, sink))


def write_report(path: Path) -> dict[str, Any]:
    """The same, written too: report.json, report.md, report.html and failed.jsonl of the whole run.

    With shards each of them has its own at its end; this puts them together. Raises OutputError.
    """
    run, _, sink = open_run(path)
    with run.alone():
        rows = read_rows(run, sink)
        value = reports.afresh(run, rows)
        if value["shards"]:
            value["notes"]["failed documents"] = _write_failed(run, len(value["shards"]))
        reports.write(run, value)
    html.renew(html.Shown(View(run, sink), value, rows))  # it takes longer, and locks nobody out
    return value


def _write_failed(run: RunDirectory, count: int) -> str | None:
    """failed.jsonl of the lists of all shards; its path, None where nobody failed."""
    lists = [one.failed_jsonl for one in run.every_shard(count) if one.failed_jsonl.exists()]
    if not lists:
        fsio.remove(run.failed_jsonl)
        return None
    with fsio.atomic(run.failed_jsonl, owner=run.owner) as stream:
        for one in lists:
            with one.open("rb") as part:
                shutil.copyfileobj(part, stream)
    return str(run.failed_jsonl)


def status(path: Path) -> dict[str, Any]:
    """How far a run is. Raises ConfigError where the folder is none."""
    run, known, sink = open_run(path)
    rows = read_rows(run, sink)
    every = ends.shares(run)
    total, exact = reports.total(run, rows, every)
    end = ends.together(every)
    pending = None if total is None else max(0, total - rows.count)
    running = [one for one in every if one.end.reason == "running"]
    rate = sum(one.docs_per_s or 0.0 for one in running)
    return {
        "name": known.get("name"),
        "run_dir": str(path),
        "began": known.get("began"),
        "running": _who(running),
        "exit_status": end.exit_status,
        "reason": end.reason,
        "total": total,
        "total_is_exact": exact,
        "ok": rows.status["ok"],
        "failed": rows.status["failed"],
        "skipped": rows.status["skipped"],
        "pending": pending,
        "reasons": dict(sorted(rows.reasons.items())),
        "parts": len(run.parts(sink.suffix)),
        "damaged_parts": rows.damaged,
        "attempts": len(run.telemetries()),
        "docs_per_s": round(rate, 3) if rate else None,
        "left_s": round(pending / rate) if rate and pending is not None else None,
        "shards": [reports.of_shard(one) for one in every] if len(every) > 1 else [],
    }


def _who(running: Sequence[ends.Share]) -> str | None:
    """Who holds the run, or how many of its shards are held."""
    if not running:
        return None
    first = running[0]
    if first.run.shard.is_whole:
        return first.run.holder() or "just starting"
    return f"{len(running)} of {first.run.shard.count} shards"


def status_text(found: Mapping[str, Any]) -> str:
    about = "" if found["total_is_exact"] else "about "
    total = "documents not counted yet" if found["total"] is None else f"{about}{found['total']:,} documents"
    pending = "" if found["pending"] is None else f", {found['pending']:,} pending"
    ended = (
        found["reason"] if found["exit_status"] is None else f"{found['reason']} (exit status {found['exit_status']})"
    )
    lines = [
        f"{found['name']} ({found['run_dir']}), began {found['began']}",
        f"  {total}: {found['ok']:,} ok, {found['failed']:,} failed, {found['skipped']:,} skipped{pending}",
        *(f"  {reason}: {count:,}" for reason, count in found["reasons"].items()),
        f"  {found['parts']} parts by {found['attempts']} attempts",
        *(f"  damaged, to be done again at the next start: {part}" for part in found["damaged_parts"]),
        f"  running: {found['running']}{_speed(found)}" if found["running"] else f"  not running; last: {ended}",
        *(f"    {_shard_text(one)}" for one in found.get("shards", ())),
    ]
    return "\n".join(lines)


def _speed(found: Mapping[str, Any]) -> str:
    if found.get("docs_per_s") is None:
        return ""
    left = found["left_s"]
    time = "" if left is None else f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    return f"; {found['docs_per_s']:.1f} docs/s{time}"


def _shard_text(one: Mapping[str, Any]) -> str:
    speed = "" if one["docs_per_s"] is None else f", {one['docs_per_s']:.1f} docs/s"
    ended = one["reason"] if one["exit_status"] is None else f"{one['reason']} (exit status {one['exit_status']})"
    return f"{one['shard']}: {one['done']:,} done{speed}; {one['running'] or ended}"
