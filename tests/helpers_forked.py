"""The command line in processes that are forked off one that has imported everything: each costs a tenth of a second.

It is as real as a process of its own: it has its streams, its signals, its exit status, and dies like any other. What
Python itself does at its start and at its end is not in it: tests of that start `python -m batchgen`.
"""

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

# Also what a command imports late: pyarrow brings in pandas, where it is installed, with the first value it takes.
# Nothing of Hugging Face: it reads its environment when it is imported.
_PRELOAD = (
    "batchgen.__main__", "batchgen.cli", "batchgen.executors.local", "batchgen.executors.validation",
    "batchgen.executors.inspection", "batchgen.executors.export", "batchgen.engines.fake", "pandas", "pyarrow.csv",
    "pyarrow.dataset", "pyarrow.pandas_compat", "pyarrow.parquet", "pytest",
)  # fmt: skip
# What Python reads at its start.
_AT_START = ("PYTHON", "LC_", "LANG")


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


def fork(target: Callable[..., None], *args: object) -> BaseProcess:
    """The function in a process of its own; its module is imported there, so it should import little."""
    child = _server().Process(target=target, args=args)
    child.start()
    return child


def end(child: BaseProcess, *, within_s: float = 60) -> int:
    """The status it ends with; -9 where SIGKILL ended it."""
    child.join(within_s)
    if child.exitcode is None:
        child.kill()
        raise AssertionError("the child does not end")
    return child.exitcode


def main(*words: str) -> None:
    """In a child: the command line; nothing holds a fake engine's memory, so it does not wait between two of them."""
    from batchgen import __main__ as entry
    from batchgen.feeding import feed

    feed._PAUSES_S, feed._ECHO_S = (0.0,), 0.02
    sys.argv = ["batchgen", *words]
    entry.main()


def speak_to(number: int, path: Path) -> None:
    """In a child: this stream goes to the file, behind what is there."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, number)
    os.close(file)


def _command(words: tuple[str, ...], folder: str, env: dict[str, str], streams: tuple[Path, Path]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    for number, path in enumerate(streams, start=1):
        speak_to(number, path)
    main(*words)


def command(*words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 100):
    """`batchgen WORDS` as subprocess.run tells it, streams as text."""
    env = dict(os.environ if env is None else env)
    folder = str(cwd or Path.cwd())
    words = tuple(map(str, words))
    if any(env.get(name) != os.environ.get(name) for name in env | os.environ if name.startswith(_AT_START)):
        whole = [sys.executable, "-m", "batchgen", *words]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout, env=env, cwd=folder)
    with tempfile.TemporaryDirectory(prefix="batchgen-") as talk:
        streams = Path(talk, "out"), Path(talk, "err")
        status = end(fork(_command, words, folder, env, streams), within_s=timeout)
        told = [path.read_text() for path in streams]
    return subprocess.CompletedProcess(words, status, *told)
