"""Commands that do documents: `run` and `retry-failed`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.commands.notify import notifying
from batchgen.commands.options import DEADLINE, JOB, JSON, METRICS, NOTIFY, SET, SHARD, set_deadlines, the_stop
from batchgen.commands.telling import say, show_json

if TYPE_CHECKING:
    from batchgen.executors.ending import Outcome
    from batchgen.executors.identity import OnChange
    from batchgen.executors.local import Options
    from batchgen.lifecycle import Stop
    from batchgen.reporting.serving import Ports
    from batchgen.shards import Shard


@click.command()
@JOB
@SET
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Do at most N documents that are not done yet.")
@click.option("--fresh", is_flag=True, help="Move the old run aside and begin a new one.")
@click.option(
    "--on-change",
    type=click.Choice(["refuse", "keep", "new-run"]),
    default="refuse",
    show_default=True,
    help="When settings that change the text differ from the run's: refuse; keep the old rows and go on; or move "
    "the old run aside.",
)
@SHARD
@DEADLINE
@NOTIFY
@METRICS
@JSON
def run(
    *,
    job: Path,
    sets: tuple[str, ...],
    limit: int | None,
    fresh: bool,
    on_change: "OnChange",
    shard: "Shard",
    deadline: float | None,
    notify_command: str | None,
    metrics: "Ports | None",
    as_json: bool,
) -> int:
    """Summarize what is not summarized yet."""
    from batchgen.executors import local

    if not shard.is_whole and (fresh or on_change == "new-run"):
        raise click.UsageError(
            "a shard moves no run aside: each of them would, the work of those before it too; move the folder of the "
            "run away, or do that by one start without --shard"
        )
    stop = the_stop()
    options = local.Options(limit=limit, fresh=fresh, on_change=on_change, metrics=metrics, shard=shard)
    return notifying(
        notify_command,
        job=job,
        stop=stop,
        start=lambda: _start(job, sets, options, stop, deadline),
        tell=lambda outcome: _told(outcome, shard, as_json=as_json),
    )


@click.command(name="retry-failed")
@JOB
@SET
@click.option(
    "--type",
    "types",
    metavar="ERROR_TYPE",
    multiple=True,
    help="Try only those of this error type again, whatever it is; can be given several times. Without it, all that a "
    "second try can change.",
)
@click.option(
    "--on-change",
    type=click.Choice(["refuse", "keep"]),
    default="refuse",
    show_default=True,
    help="When settings that change the text differ from the run's: refuse; or make the new rows under the new ones.",
)
@SHARD
@DEADLINE
@NOTIFY
@METRICS
@JSON
def retry_failed(
    *,
    job: Path,
    sets: tuple[str, ...],
    types: tuple[str, ...],
    on_change: "OnChange",
    shard: "Shard",
    deadline: float | None,
    notify_command: str | None,
    metrics: "Ports | None",
    as_json: bool,
) -> int:
    """Try the failed documents of a run again, and replace their rows.

    New and edited documents are left for `run`.
    """
    from batchgen.executors import local

    stop = the_stop()
    options = local.Options(on_change=on_change, retry=frozenset(types), metrics=metrics, shard=shard)
    return notifying(
        notify_command,
        job=job,
        stop=stop,
        start=lambda: _start(job, sets, options, stop, deadline),
        tell=lambda outcome: _told(outcome, shard, as_json=as_json),
    )


def _start(job: Path, sets: Sequence[str], options: "Options", stop: "Stop", deadline: float | None) -> "Outcome":
    from batchgen.executors import local
    from batchgen.job import jobfile

    file = jobfile.load(job, sets)
    set_deadlines(stop, deadline, file.job.lifecycle.grace_s)
    return local.run(file, options, stop)


def _told(outcome: "Outcome", shard: "Shard", *, as_json: bool) -> int:
    """Tell how a start ended; its exit status."""
    assert outcome.report is not None
    if as_json:
        show_json(outcome.report)
    say(_last_words(outcome.report, shard, outcome.report_md))
    return outcome.exit_status


def _last_words(report: Mapping[str, Any], shard: "Shard", file: Path | None) -> str:
    documents = report["documents"]
    pending = f", {documents['pending']:,} pending" if documents["pending"] else ""
    about = "" if documents["total_is_exact"] else "about "
    rate = report["attempt"]["rates"]["docs_per_s"]
    speed = "" if rate is None else f"; {rate:.1f} docs/s"
    text = (
        f"{report['reason']}: {about}{documents['total']:,} documents: {documents['ok']:,} ok, "
        f"{documents['failed']:,} failed, {documents['skipped']:,} skipped{pending}{speed}"
    )
    if adapted := report["engine"]["adapted"]:
        from batchgen.engines.adapt import Change, short

        text += f"; engine.adapt: {short(Change(**change) for change in adapted)}"
    if report["exit_status"] == 75:
        text += "; the same command goes on"
    if documents["failed"]:
        text += f"; failed documents: {report['notes']['failed documents'] or report['run_dir'] + '/summaries'}"
    return f"{'' if shard.is_whole else f'{shard}: '}{text}; report: {file}"
