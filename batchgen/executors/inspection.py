"""What `validate` and `status` tell; neither starts an engine nor writes anything."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen import plan, report, sinks
from batchgen.config import JobFile
from batchgen.engines import settings
from batchgen.errors import ConfigError
from batchgen.executors.local import check, tokenizer_of
from batchgen.fingerprint import differences
from batchgen.prompts import PromptBuilder
from batchgen.rundir import RunDirectory
from batchgen.sinks.base import Sink


def validate(file: JobFile) -> dict[str, Any]:
    """What a run of this job would work with. Raises ConfigError or InputError with what is wrong."""
    checked = check(file)
    job = checked.job
    PromptBuilder(job, tokenizer_of(checked), max_prompt_tokens=checked.max_prompt_tokens)  # template and room
    files = plan.discover(job)
    run = RunDirectory(job.output.path)
    old = run.read_run()
    sinks.refuse_other(run.summaries, job.output.format)
    args: dict[str, Any] = dict(job.engine.args)
    if job.engine.backend == "vllm" and checked.model is not None:
        args |= settings.chosen(job, checked.model, checked.adapter)
    return {
        "job": str(file.origin.file),
        "backend": job.engine.backend,
        "engine_args": args,
        "max_prompt_tokens": checked.max_prompt_tokens,
        "files": [{"path": f.source, "rows": f.rows, "exact": f.exact, "bytes": f.size} for f in files],
        "rows": sum(f.rows for f in files),
        "output": str(run.path),
        "differences": [] if old is None else differences(old["fingerprint"], checked.fingerprint),
    }


def validation_text(found: Mapping[str, Any]) -> str:
    lines = [f"{found['job']}: valid"]
    for file in found["files"]:
        size = f", {file['bytes']:,} bytes" if file["bytes"] else ""
        lines.append(f"  {file['path']}: {_count(file['rows'], exact=file['exact'])}{size}")
    rows = _count(found["rows"], exact=all(file["exact"] for file in found["files"]))
    lines.append(f"  {rows} → {found['output']}; prompts of up to {found['max_prompt_tokens']:,} tokens")
    lines += [f"  engine.args.{name}: {value}" for name, value in found["engine_args"].items()]
    if found["differences"]:
        lines.append("The run there was made with other settings; `run` will ask for --on-change:")
        lines += [f"  {line}" for line in found["differences"]]
    return "\n".join(lines)


def _count(rows: int, *, exact: bool) -> str:
    if not exact and not rows:
        return "rows not counted yet"
    return f"{'' if exact else 'about '}{rows:,} rows"


def open_run(path: Path) -> tuple[RunDirectory, dict[str, Any], Sink]:
    """(the run, its run.json, the sink of its parts). Raises ConfigError where the folder is none."""
    run = RunDirectory(path)
    known = run.read_run()
    if known is None:
        raise ConfigError(f"{path}: is no run directory: it has no run.json")
    name = sinks.format_of(run.summaries) or known["job"]["output"].get("format", "parquet")
    return run, known, sinks.open_sink(name, owner=run.owner)


def status(path: Path) -> dict[str, Any]:
    """How far a run is. Raises ConfigError where the folder is none."""
    run, known, sink = open_run(path)
    rows = report.read_rows(run, sink)
    planned, exact = plan.known_rows(run)
    total = planned if exact else max(planned, rows.count)
    return {
        "name": known["name"],
        "run_dir": str(path),
        "began": known["began"],
        "running": run.holder() if run.is_held() else None,
        "total": total,
        "total_is_exact": exact,
        "ok": rows.status["ok"],
        "failed": rows.status["failed"],
        "skipped": rows.status["skipped"],
        "pending": max(0, total - rows.count),
        "reasons": dict(sorted(rows.reasons.items())),
        "parts": len(run.parts(sink.suffix)),
        "attempts": len(run.telemetries()),
    }


def status_text(found: Mapping[str, Any]) -> str:
    about = "" if found["total_is_exact"] else "about "
    lines = [
        f"{found['name']} ({found['run_dir']}), began {found['began']}",
        (
            f"  {about}{found['total']:,} documents: {found['ok']:,} ok, {found['failed']:,} failed, "
            f"{found['skipped']:,} skipped, {found['pending']:,} pending"
        ),
        *(f"  {reason}: {count:,}" for reason, count in found["reasons"].items()),
        f"  {found['parts']} parts by {found['attempts']} attempts",
        f"  running: {found['running']}" if found["running"] else "  not running",
    ]
    return "\n".join(lines)
