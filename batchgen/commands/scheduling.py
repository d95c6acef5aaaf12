"""The command for clusters: scripts for Slurm."""

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from batchgen.commands.options import JOB, SET
from batchgen.commands.telling import say, show


@dataclass(frozen=True, slots=True)
class _Count:
    """tasks of an array; at_once: of these may run at the same time."""

    tasks: int
    at_once: int | None


class _Array(click.ParamType[_Count]):
    """8, or 8%2 for two of them at a time."""

    name = "N[%M]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Count:
        if isinstance(value, _Count):
            return value
        found = re.fullmatch(r"([1-9]\d*)(?:%([1-9]\d*))?", value)
        if found is None:
            self.fail(
                f"{value!r}: a number of tasks is wanted, such as 8, or 8%2 for two of them at a time", param, ctx
            )
        return _Count(int(found[1]), int(found[2]) if found[2] else None)


_COUNT = click.IntRange(min=1)


@click.command()
@JOB
@SET
@click.option("--array", type=_Array(), help="An array of N tasks on a node each, all at once or M of them.")
@click.option("--nodes", type=_COUNT, metavar="N", help="In place of --array: one job over N nodes.")
@click.option("--tasks-per-node", type=_COUNT, metavar="T", help="With --nodes: tasks on each node. [default: 1]")
@click.option(
    "--gpus-per-task", "gpus", type=click.IntRange(min=0), metavar="G",
    help="GPUs of a task, which runs an engine or more on them; 0 for none. [default: as many as one engine needs]",
)  # fmt: skip
@click.option(
    "--cpus-per-task", "cpus", type=_COUNT, default=8, show_default=True, metavar="C", help="Cores of a task."
)
@click.option("--time", metavar="LIMIT", required=True, help="Time limit of a task as Slurm writes it: 04:00:00.")
@click.option("--partition", metavar="NAME", help="The partition.")
@click.option(
    "--sbatch", "options", metavar="OPTION", multiple=True,
    help="Another option of sbatch: --sbatch=--account=me; can be given several times.",
)  # fmt: skip
@click.option(
    "--module", "modules", metavar="NAME", multiple=True,
    help="Load this environment module before; can be given several times.",
)  # fmt: skip
@click.option("--container", metavar="IMAGE", help="Run in this Apptainer image.")
@click.option(
    "--command", "batchgen", metavar="WORDS",
    help="How batchgen is called on the nodes. [default: by its place here; `batchgen` in a container]",
)  # fmt: skip
@click.option(
    "--at-limit", type=click.Choice(["requeue", "exit"]), default="requeue", show_default=True,
    help="What a task does when its time is over: put itself back into the queue, or end with 75.",
)  # fmt: skip
@click.option("--report", "for_report", is_flag=True, help="Print the script of the last task: it writes the report.")
@click.option("--submit", is_flag=True, help="Give both scripts to sbatch, and print the numbers of their jobs.")
def slurm(
    *, job: Path, sets: tuple[str, ...], array: _Count | None, nodes: int | None, tasks_per_node: int | None,
    batchgen: str | None, at_limit: str, for_report: bool, submit: bool, **others: Any,
) -> int:  # fmt: skip
    """Print a batch script that does the job on a Slurm cluster, or submit it.

    Each task does its share of the documents. docs/slurm.md tells what the script takes care of.
    """
    if (array is None) == (nodes is None):
        raise click.UsageError("--array N or --nodes N is wanted, one of the two")
    if tasks_per_node is not None and nodes is None:
        raise click.UsageError("--tasks-per-node goes with --nodes; tasks of an array share nodes as Slurm sees fit")
    if for_report and submit:
        raise click.UsageError("--submit gives sbatch both scripts: leave --report out")
    from batchgen.job import jobfile
    from batchgen.slurm import sbatch, script

    count = array or _Count((nodes or 1) * (tasks_per_node or 1), None)
    wish = script.Wish(
        file=jobfile.load(job, sets), sets=sets, folder=Path.cwd(), tasks=count.tasks, at_once=count.at_once,
        nodes=nodes, batchgen=_called(batchgen, contained=others["container"] is not None),
        requeue=at_limit == "requeue", **others,
    )  # fmt: skip
    if not submit:
        show((script.report if for_report else script.tasks)(wish), end="")
        return 0
    tasks, report = script.tasks(wish), script.report(wish)
    number = sbatch.submit(tasks)
    show(number)
    last = sbatch.submit(report, f"--dependency=afterany:{number}")
    show(last)
    say(f"{count.tasks} tasks are job {number}; job {last} writes the report when they have ended")
    return 0


def _called(words: str | None, *, contained: bool) -> list[str]:
    """How a node calls batchgen: from this very environment, as long as nothing else is said."""
    if words is not None:
        return shlex.split(words)
    if contained:
        return ["batchgen"]
    here = shutil.which("batchgen", path=str(Path(sys.executable).parent))
    return [here] if here else [sys.executable, "-m", "batchgen"]
