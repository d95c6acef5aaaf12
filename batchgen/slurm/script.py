"""The batch scripts that `sbatch` takes: one for the tasks of a job, one for the report over them."""

import math
import os
import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.engines import settings
from batchgen.errors import ConfigError
from batchgen.job.jobfile import JobFile
from batchgen.text import one_line

# Slurm sends the warning up to a minute early, and looks at limits twice a minute.
_WARNING_S = 90  # before the limit, at least
_SETTLING_S = 70  # after lifecycle.grace_s: the last commit and the report, and half a minute of Slurm's
_START_S = 120  # a limit that leaves less for a start and its work is a mistake
_REPORT_TIME = "01:00:00"
# What the script depends on, or the command has an option of its own for.
_OURS = (
    "--array", "--cpus-per-task", "--gpus-per-task", "--nodes", "--no-requeue", "--ntasks", "--ntasks-per-node",
    "--open-mode", "--partition", "--requeue", "--signal", "--time", "--wrap",
)  # fmt: skip
_OURS_SHORT = "acnNpt"
# Where compilers behind an engine keep what they make.
_CACHES = (
    "for name in VLLM_CACHE_ROOT TORCHINDUCTOR_CACHE_DIR TRITON_HOME TRITON_CACHE_DIR FLASHINFER_WORKSPACE_BASE "
    'CUDA_CACHE_PATH; do [[ -z ${!name:-} ]] || export "$name=${!name}/$SLURMD_NODENAME"; done'
)
_PLAIN = string.ascii_letters + string.digits + "/-_.,:=+@% "


@dataclass(frozen=True, slots=True)
class Wish:
    """What the scripts are to be.

    nodes: None for an array, whose tasks lie anywhere; else one job over so many nodes. tasks: of all of them together.
    at_once: tasks of the array that may run at the same time. time: as Slurm writes it. gpus: of a task; None for as
    many as an engine of the job needs. options: further ones for sbatch. batchgen: how the command is called. folder:
    where relative paths of the job start. requeue: whether a task whose time is over puts itself back into the queue.
    """

    file: JobFile
    sets: Sequence[str]
    folder: Path
    tasks: int
    time: str
    at_once: int | None = None
    nodes: int | None = None
    gpus: int | None = None
    cpus: int = 8
    partition: str | None = None
    options: Sequence[str] = ()
    modules: Sequence[str] = ()
    container: str | None = None
    batchgen: Sequence[str] = ("batchgen",)
    requeue: bool = True

    @property
    def per_node(self) -> int:
        return self.tasks // (self.nodes or self.tasks)


def tasks(wish: Wish) -> str:
    """The script with all tasks of the job. Raises ConfigError where it would be of no use."""
    job, name = wish.file.job, wish.file.job.name
    warning = max(_WARNING_S, math.ceil(job.lifecycle.grace_s) + _SETTLING_S)
    _check(wish, warning)
    array = wish.nodes is None
    options = [f"--job-name={name}"]
    if array:
        limit = f"%{wish.at_once}" if wish.at_once else ""
        options += [f"--array=0-{wish.tasks - 1}{limit}", "--nodes=1", "--ntasks=1"]
    else:
        options += [f"--nodes={wish.nodes}", f"--ntasks-per-node={wish.per_node}"]
    gpus = _gpus(wish)
    each = [f"--cpus-per-task={wish.cpus}"] + ([f"--gpus-per-task={gpus}"] if gpus else [])
    # `B:` is the batch shell; without it the signal goes to what srun has started, and to nothing else.
    options += [*each, f"--time={wish.time}", *_partition(wish), f"--signal={'B:' if array else ''}USR1@{warning}"]
    options += ["--requeue", "--open-mode=append", f"--output={name}-{'%A_%a' if array else '%j'}.out", *wish.options]
    step = [f"--ntasks={wish.tasks}", *each, "--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"]
    return _render(
        "tasks.sh",
        wish,
        options=options,
        array=array,
        tasks=wish.tasks,
        requeue=wish.requeue,
        before="" if wish.requeue else "exec ",
        after=" &" if wish.requeue else "",
        step=shlex.join([*step, f"--output={name}-%j-%t.out"]),
        caches=_CACHES,
        command=_command(wish, ["run", str(wish.file.origin.file), *_words("--set", wish.sets)], gpus=gpus > 0),
        run_dir=_run_dir(wish),
    )


def report(wish: Wish) -> str:
    """The script that writes the report when all tasks have ended. Raises ConfigError as `tasks` does."""
    _check(wish, 0)
    name = wish.file.job.name
    options = [f"--job-name={name}-report", "--nodes=1", "--ntasks=1", f"--time={_REPORT_TIME}", *_partition(wish)]
    options += ["--requeue", "--open-mode=append", f"--output={name}-report-%j.out", *wish.options]
    command = _command(wish, ["report", _run_dir(wish), "--write"], gpus=False)
    return _render("report.sh", wish, options=options, command=command)


def seconds(time: str) -> int | None:
    """What Slurm means with a time limit such as 90, 1:30:00 or 2-12; None where it has no limit, or 0.

    Raises ConfigError.
    """
    if time.lower() in {"infinite", "unlimited", "0"}:
        return None
    found = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})", time)
    if found is None:
        raise ConfigError(
            f"--time {time}: write it as Slurm does: minutes, hours:minutes:seconds, or days-hours:minutes:seconds"
        )
    fields = [int(one) for one in found["fields"].split(":")]
    if found["days"] is not None:  # hours come first: 2-12 are two days and a half
        hours, minutes, rest = (*fields, 0, 0)[:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + rest
    if len(fields) == 3:
        return (fields[0] * 60 + fields[1]) * 60 + fields[2]
    minutes, rest = (*fields, 0)[:2]
    return minutes * 60 + rest


def _check(wish: Wish, warning: int) -> None:
    limit = seconds(wish.time)
    if limit is not None and limit < warning + _START_S:
        raise ConfigError(
            f"--time {wish.time}: the warning comes {warning} s before the limit, up to a minute earlier, and leaves "
            f"no time for work; give it {math.ceil((warning + _START_S) / 60)} minutes or more"
        )
    if wish.partition is not None and not re.fullmatch(r"[\w.,-]+", wish.partition):
        raise ConfigError(f"--partition {wish.partition!r}: this is no name of a partition")
    for option in wish.options:
        _check_option(option)


def _check_option(option: str) -> None:
    if not option.startswith("-") or not option.isprintable():
        raise ConfigError(f"--sbatch {option!r}: an option of sbatch is wanted: --sbatch=--account=me")
    name = option.split("=", maxsplit=1)[0].split(maxsplit=1)[0]
    short = not name.startswith("--") and name[1:2] in _OURS_SHORT
    # sbatch takes any beginning of a name that is the only one.
    if short or (name.startswith("--") and any(ours.startswith(name) for ours in _OURS)):
        raise ConfigError(
            f"--sbatch {option}: the script needs this as it is, or batchgen slurm has an option for it; see --help"
        )


def _gpus(wish: Wish) -> int:
    """GPUs of a task. Raises ConfigError where they are too few for an engine of the job."""
    job = wish.file.job
    together = ("tensor_parallel_size", "pipeline_parallel_size")
    need = math.prod(settings.whole_number(job, name) or 1 for name in together)
    if wish.gpus and wish.gpus < need:
        raise ConfigError(
            f"--gpus-per-task {wish.gpus}: an engine of this job needs {need} (engine.args.{' × '.join(together)})"
        )
    return need if wish.gpus is None else wish.gpus


def _partition(wish: Wish) -> list[str]:
    return [] if wish.partition is None else [f"--partition={wish.partition}"]


def _quoted(word: str) -> str:
    """A word for bash. What would do something to a terminal is written as bytes: people look at scripts."""
    if one_line(word) == word:
        return shlex.quote(word)
    told = [chr(one) if chr(one) in _PLAIN else f"\\x{one:02x}" for one in os.fsencode(word)]
    return f"$'{''.join(told)}'"


def _words(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _command(wish: Wish, words: Sequence[str], *, gpus: bool) -> str:
    """A call of batchgen for a shell, inside of the container where there is one."""
    inside: list[str] = []
    if wish.container is not None:
        inside = ["apptainer", "exec", *(["--nv"] if gpus else []), wish.container]
    return " ".join(_quoted(word) for word in [*inside, *wish.batchgen, *words])


def _run_dir(wish: Wish) -> str:
    path = str(wish.file.job.output.path)
    return f"./{path}" if path.startswith("-") else path


def _render(template: str, wish: Wish, **values: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchgen.slurm"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701  a shell's script, and names are quoted for it
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = lambda value: _quoted(str(value))
    same = {"name": wish.file.job.name, "folder": wish.folder, "modules": wish.modules}
    return environment.get_template(template).render(same | values)
