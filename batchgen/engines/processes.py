"""The processes that an engine starts: which they are, what they hold, and their end."""

import contextlib
from collections.abc import Sequence

import psutil

_END_S = 10.0


def children(pid: int | None = None) -> list[psutil.Process]:
    """Processes below this one, or below `pid`; Python's own resource tracker is left out, it ends with us."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in part for part in process.cmdline()):
                    found.append(process)
    return found


def memory(some: Sequence[psutil.Process]) -> int:
    """What these have resident, in bytes."""
    found = 0
    for process in some:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss
    return found


def end(some: Sequence[psutil.Process]) -> None:
    """Kill these, and wait until they are gone and their memory is free."""
    for process in some:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(some, timeout=_END_S)
