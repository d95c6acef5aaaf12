"""Arguments and options that several commands take."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from batchgen.lifecycle import Stop
    from batchgen.reporting.serving import Ports
    from batchgen.shards import Shard

JOB = click.argument("job", metavar="JOB.yaml", type=click.Path(path_type=Path, dir_okay=False, exists=True))
SET = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Set a key of the job: --set engine.feed=generate."
)
RUN_DIR = click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path, file_okay=False, exists=True))
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


class Duration(click.ParamType[float]):
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


class ShardOf(click.ParamType["Shard"]):
    """A share of a run such as 2/4, from 0/4 to 3/4."""

    name = "K/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "Shard":
        from batchgen.shards import MOST, Shard

        if isinstance(value, Shard):
            return value
        found = re.fullmatch(r"(\d+)/(\d+)", value)
        if found is None:
            self.fail(f"{value!r} is no share of a run; write it like 0/4: shard 0 of 4", param, ctx)
        number, count = int(found[1]), int(found[2])
        if not number < count <= MOST:
            last = f"the last one of {count} is {count - 1}/{count}" if 0 < count <= MOST else f"N is 1 to {MOST:,}"
            self.fail(f"there is no shard {value}: K counts from 0, and {last}", param, ctx)
        return Shard(number, count)


SHARD = click.option(
    "--shard",
    type=ShardOf(),
    default="0/1",
    help="Do share K of N, from 0 to N-1, while other processes do the others.",
)


class PortsType(click.ParamType["Ports"]):
    """A port, or several, with or without an address."""

    name = "[ADDRESS:]PORT[-PORT]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "Ports":
        from batchgen.reporting.serving import Ports

        if isinstance(value, Ports):
            return value
        try:
            return Ports.read(value)
        except ValueError as e:
            self.fail(f"{value!r} is no port; {e}", param, ctx)


DEADLINE = click.option("--deadline", type=Duration(), help="Stop after this time, like at a signal: 3h50m, 90s, 2d.")

NOTIFY = click.option(
    "--notify-command", metavar="COMMAND", help="Run this by the shell at the end, whatever the end is; "
    "$BATCHGEN_REPORT and $BATCHGEN_EXIT_STATUS tell it how.",
)  # fmt: skip
METRICS = click.option(
    "--metrics-port",
    "metrics",
    type=PortsType(),
    metavar="[ADDRESS:]PORT[-PORT]",
    help="Serve Prometheus metrics while the run goes, at 127.0.0.1 unless an address stands before the port; of a "
    "range such as 9400-9415 at the first port that is free.",
)


def set_deadlines(stop: "Stop", deadline: float | None, grace_s: float) -> None:
    """Set the deadlines of a run: the one that was asked for, and the limit of the Slurm job that it is in."""
    from batchgen.slurm import deadline as limit

    if deadline is not None:
        stop.set_deadline(deadline)
    limit.watch(stop, lead_s=grace_s + 10)  # after it come the last commit and the report


def the_stop() -> "Stop":
    """What asks this run to stop: the entry point's, which has caught signals since the first line."""
    from batchgen.lifecycle import Stop

    return click.get_current_context().obj or Stop()
