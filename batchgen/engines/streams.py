"""What engines and their processes print goes to a log, not to the terminal."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchgen.fsio import open_append


@contextlib.contextmanager
def standard_streams_to(stream: Any) -> Iterator[None]:
    """Stdout and stderr of this process, and of processes it starts meanwhile, go to `stream`."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        os.close(saved[0])
        os.close(saved[1])


def vllm_log_to(log: Path) -> Callable[[], None]:
    """Send what vLLM's logger in this process would print to `log`; the function returned undoes that.

    Children keep the streams they were started with; this logger would otherwise go on to the terminal.
    """
    stream = open_append(log, records=False)
    moved = [
        handler
        for handler in logging.getLogger("vllm").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
    ]
    for handler in moved:
        handler.setStream(stream)

    def undo() -> None:
        for handler in moved:
            handler.setStream(sys.stderr)
        stream.close()

    return undo
