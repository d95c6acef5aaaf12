"""Runs of the command line in children that die, or get a signal, at a moment that can be named.

A child is forked off a process that has imported batchgen: it costs a tenth of a second, its death is as real as that
of any process. Not collected by pytest. As a script it is a whole new process:

    python killed_child.py POINT NTH run JOB.yaml …
"""

import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2] / "batchgen") + os.sep
# Also what a run imports late: pyarrow brings in pandas, where it is installed, with the first value it takes.
_PRELOAD = ("killed_child", "batchgen.__main__", "batchgen.cli", "batchgen.executors.local", "batchgen.engines.fake",
            "pandas", "pyarrow.dataset", "pyarrow.pandas_compat", "pyarrow.parquet", "pytest")  # fmt: skip


def signalled(number: int) -> None:
    os.kill(os.getpid(), number)


KILLED = functools.partial(signalled, signal.SIGKILL)


@dataclass(frozen=True)
class Cue:
    """When, and what then. `point` is one of

    - `module:object.attribute@before` or `…@after`: the nth call; with `=NAME` behind it, the nth call that has an
      argument which ends with this name (a path);
    - `lines` or `lines:fsio,checkpoint`: the nth line of batchgen's code, or of these modules, over all threads.
    """

    point: str
    nth: int = 1
    do: Callable[[], object] = KILLED


def arm(cue: Cue) -> None:
    """Make this process do what the cue says when its moment comes."""
    calls = itertools.count(1)

    def tick() -> None:
        if next(calls) == cue.nth:
            cue.do()

    if cue.point.startswith("lines"):
        _arm_lines(frozenset(cue.point.partition(":")[2].split(",")) - {""}, tick)
    else:
        _arm_call(cue.point, tick)


def _arm_call(point: str, tick: Callable[[], None]) -> None:
    where, _, rest = point.partition("@")
    when, _, name = rest.partition("=")
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    *holders, last = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    original = getattr(owner, last)

    @functools.wraps(original)
    def armed(*args, **kwargs):
        meant = not name or any(str(one).endswith(name) for one in args)
        if meant and when == "before":
            tick()
        value = original(*args, **kwargs)
        if meant and when == "after":
            tick()
        return value

    setattr(owner, last, armed)


def _arm_lines(modules: frozenset[str], tick: Callable[[], None]) -> None:
    def in_function(frame, event, _):
        if event == "line":
            tick()
        return in_function

    def at_call(frame, event, _):
        path = frame.f_code.co_filename
        ours = path.startswith(_PACKAGE) and (not modules or Path(path).stem in modules)
        return in_function if ours else None

    threading.settrace(at_call)
    sys.settrace(at_call)


def _child(folder: str, words: tuple[str, ...], cues: tuple[Cue, ...], at: float) -> None:
    os.chdir(folder)
    talk = os.open(f"talk-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(talk, stream)
    from batchgen import __main__ as entry
    from batchgen.feeding import feed

    feed._PAUSES_S, feed._ECHO_S = (0.0,), 0.02  # nothing holds a fake engine's memory
    sys.argv = ["batchgen", *words]
    for cue in cues:
        arm(cue)
    time.sleep(max(0.0, at - time.monotonic()))
    entry.main()


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


def begin(folder: Path, *words: object, cues: tuple[Cue, ...] = (), at: float = 0.0) -> BaseProcess:
    """`batchgen WORDS` in a child with this working directory; `at`: not before this moment of time.monotonic."""
    child = _context().Process(target=_child, args=(str(folder), tuple(map(str, words)), cues, at))
    child.start()
    return child


def end(child: BaseProcess) -> int:
    """The status it ends with; -9 where SIGKILL ended it."""
    child.join(60)
    if child.exitcode is None:
        child.kill()
        raise AssertionError("the child does not end")
    return child.exitcode


def status_of(folder: Path, *words: object, cues: tuple[Cue, ...] = ()) -> int:
    return end(begin(folder, *words, cues=cues))


def talk(folder: Path, child: BaseProcess | None = None) -> str:
    """What this child, or all in this folder, have printed."""
    return "".join(path.read_text() for path in sorted(folder.glob(f"talk-{child.pid if child else '*'}.txt")))


def kill_after(child: BaseProcess, seconds: float) -> None:
    time.sleep(seconds)
    child.kill()


if __name__ == "__main__":
    arm(Cue(sys.argv[1], int(sys.argv[2])))
    sys.argv = ["batchgen", *sys.argv[3:]]
    from batchgen.cli import main

    main()
