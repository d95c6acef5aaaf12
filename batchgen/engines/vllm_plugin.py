"""Runs inside the engine's processes: they live exactly as long as the run that started them.

vLLM calls `register` (entry point group `vllm.general_plugins`) in every process of its own, after that process has
set its signal handlers. Those end it at the first SIGINT or SIGTERM, and a Ctrl-C or a scancel reaches all processes
of a job: the run could then commit nothing more. So signals are left to the run alone, and the kernel ends these
processes when the one that started them is gone, however it went. A process of vLLM that ends by itself, because
the engine does not start, would wait for ever for children that ignore its SIGTERM: it kills them first.
"""

import ctypes
import faulthandler
import os
import signal
from multiprocessing import active_children
from multiprocessing.util import Finalize
from pathlib import Path

from batchgen.fsio import open_append

OWNER = "BATCHGEN_ENGINE_OWNER"  # environment: the pid of the run; without it nothing is done
STACKS = "BATCHGEN_ENGINE_STACKS"  # environment: the folder for stacks
STACKS_SIGNAL = signal.SIGRTMIN + 3  # asks an engine process to write its stacks there
_PR_SET_PDEATHSIG = 1
_FIRST = 1000  # among what multiprocessing does at the end of a process
_LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def register() -> None:
    owner = int(os.environ.get(OWNER, "0"))
    if owner in {0, os.getpid()}:
        return
    Finalize(None, _kill_children, exitpriority=_FIRST)
    live_with(owner)
    if folder := os.environ.get(STACKS):
        stream = open_append(Path(folder) / f"stacks-{os.getpid()}.txt", records=False)
        faulthandler.register(STACKS_SIGNAL, file=stream, all_threads=True)


def live_with(owner: int) -> None:
    """Leave signals to the run, and have the kernel end this process when the one that started it is gone.

    owner: the pid of the run, or of the process between it and this one.
    """
    for one in _LEFT_TO_THE_RUN:
        signal.signal(one, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(owner, 0)
    except ProcessLookupError:  # it ended before the kernel was asked to tell
        os._exit(1)


def _kill_children() -> None:
    for child in active_children():
        child.kill()


def environment(folder: Path) -> dict[str, str]:
    """What the environment needs before an engine starts. folder: where stacks go."""
    found = {OWNER: str(os.getpid()), STACKS: str(folder.absolute())}
    if chosen := os.environ.get("VLLM_PLUGINS"):  # a user's choice of plugins must not leave ours out
        found["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*chosen.split(","), "batchgen"]))
    return found
