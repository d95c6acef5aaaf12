"""Commands that look at a job or at a run, and change neither."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.commands.options import JOB, JSON, RUN_DIR, SET
from batchgen.commands.telling import reader_has_gone, say, show, show_json

if TYPE_CHECKING:
    from batchgen.executors.writers import Format


@click.command()
@JOB
@SET
@click.option("--quick", is_flag=True, help="Read the beginning of each file only, and not all ids.")
@JSON
def validate(*, job: Path, sets: tuple[str, ...], quick: bool, as_json: bool) -> int:
    """Check a job and its inputs, and list all that is wrong.

    Keys, vLLM's argument names, templates, the model's files, the output folder, every input file, lengths of prompts,
    duplicate ids. No engine is started and nothing is written.
    """
    from batchgen.executors import validation

    found, exit_status = validation.validate(job, sets, quick=quick)
    if as_json:
        show_json(found)
    else:
        show(validation.text(found))
    return exit_status


@click.command()
@RUN_DIR
@click.option("--watch", is_flag=True, help="Show it until nobody works on it any more.")
@JSON
def status(*, run_dir: Path, watch: bool, as_json: bool) -> int:
    """Tell how far a run is."""
    from batchgen.executors import inspection

    if watch:
        from batchgen.executors import watching

        if as_json:
            raise click.UsageError("--watch is for people: without it, --json tells the same to programs")
        watching.watch(run_dir)
        return 0
    found = inspection.status(run_dir)
    if as_json:
        show_json(found)
    else:
        show(inspection.status_text(found))
    return 0


@click.command()
@RUN_DIR
@click.argument("other", metavar="[OTHER_RUN]", required=False, type=click.Path(
    path_type=Path, file_okay=False, exists=True))  # fmt: skip
@click.option("--html", "out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write it as "
              "one page of HTML.")  # fmt: skip
@click.option("--write", "write", is_flag=True, help="Write report.json, report.md, report.html and failed.jsonl in "
              "RUN_DIR too, over all shards.")  # fmt: skip
@JSON
def report(*, run_dir: Path, other: Path | None, out: Path | None, write: bool, as_json: bool) -> int:
    """Make the report of a run anew, or put two runs side by side, and print it.

    From what is committed now, by all shards, of a run that goes on or was killed too. Without --write nothing is
    written in RUN_DIR.
    """
    from batchgen.executors import comparison, inspection, pages
    from batchgen.reporting import report as reports

    if write and other is not None:
        raise click.UsageError("--write is for one run: name no other")
    if out is not None:
        say(f"{pages.write(run_dir, other, out):,} bytes → {out}")
        if not (as_json or write):
            return 0
    if other is not None:
        found = comparison.compare(run_dir, other)[0]
    else:
        found = inspection.write_report(run_dir) if write else inspection.report(run_dir)
    if as_json:
        show_json(found)
    else:
        show(reports.markdown(found) if other is None else comparison.markdown(found), end="")
    return 0


@click.command()
@RUN_DIR
@click.argument("out", metavar="OUT")
@click.option("--format", "form", type=click.Choice(["parquet", "jsonl", "csv"]), help="The format, where OUT does "
              "not end in it.")  # fmt: skip
@click.option("--sort", is_flag=True, help="Write the rows in the order of the input.")
@click.option("--failed", is_flag=True, help="Write failed rows only.")
@click.option("--force", is_flag=True, help="Replace OUT where it is there.")
@JSON
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
        return reader_has_gone()
    if as_json:
        show_json(written)
    say(f"{written['rows']:,} rows, {written['bytes']:,} bytes → {'stdout' if path is None else path}")
    return 0
