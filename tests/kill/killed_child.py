"""Runs of the command line in children that die, or get a signal, at a moment that can be named.

A child is forked off a process that has imported batchgen: it costs a tenth of a second, its death is as real as that
of any process. Not collected by pytest. As a script it is a whole new process:

    PYTHONPATH=tests python tests/kill/killed_child.py POINT NTH run JOB.yaml …
"""

import functools
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from helpers_forked import end, fork, main, speak_to

_PACKAGE = str(Path(__file__).parents[2] / "batchgen") + os.sep


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
    for stream in (1, 2):
        speak_to(stream, Path(f"talk-{os.getpid()}.txt"))
    for cue in cues:
        arm(cue)
    time.sleep(max(0.0, at - time.monotonic()))
    main(*words)


def begin(folder: Path, *words: object, cues: tuple[Cue, ...] = (), at: float = 0.0) -> BaseProcess:
    """`batchgen WORDS` in a child with this working directory; `at`: not before this moment of time.monotonic."""
    return fork(_child, str(folder), tuple(map(str, words)), cues, at)


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
    main(*sys.argv[3:])
