"""What `status` and `report` tell of a run that goes, ended or was killed; nothing is started or written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen import sinks
from batchgen.errors import ConfigError
from batchgen.reporting import report as reports
from batchgen.sinks.base import Sink
from batchgen.storage.rundir import RunDirectory


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
    return reports.afresh(run, reports.read_rows(run, sink))


def status(path: Path) -> dict[str, Any]:
    """How far a run is. Raises ConfigError where the folder is none."""
    run, known, sink = open_run(path)
    rows = reports.read_rows(run, sink)
    total, exact = reports.total(run, rows)
    end = reports.last_end(run)
    return {
        "name": known.get("name"),
        "run_dir": str(path),
        "began": known.get("began"),
        "running": run.holder() or "just starting" if run.is_held() else None,
        "exit_status": end.exit_status,
        "reason": end.reason,
        "total": total,
        "total_is_exact": exact,
        "ok": rows.status["ok"],
        "failed": rows.status["failed"],
        "skipped": rows.status["skipped"],
        "pending": None if total is None else max(0, total - rows.count),
        "reasons": dict(sorted(rows.reasons.items())),
        "parts": len(run.parts(sink.suffix)),
        "damaged_parts": rows.damaged,
        "attempts": len(run.telemetries()),
    }


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
        f"  running: {found['running']}" if found["running"] else f"  not running; last: {ended}",
    ]
    return "\n".join(lines)
