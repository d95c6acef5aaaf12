"""`--notify-command`: what a person wants to happen at the end of a start, whatever the end is."""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.commands.telling import tell_error
from batchgen.text import harmless

if TYPE_CHECKING:
    from batchgen.executors.ending import Outcome
    from batchgen.lifecycle import Stop

PATIENCE_S = 60.0
HURRIED_S = 5.0  # after a signal: whoever sent it kills soon
_POLL_S = 0.05
_CHARS = 4000  # of a reason: the kernel takes no environment of any size
log = logging.getLogger("batchgen")


def notifying(
    command: str | None,
    *,
    job: Path,
    stop: "Stop",
    start: Callable[[], "Outcome"],
    tell: Callable[["Outcome"], int],
) -> int:
    """Start, tell how it ended, and run the command; the exit status of the start.

    Without a command errors are raised. With one they are told here: before it runs.
    """
    if command is None:
        return tell(start())
    report = ""
    try:
        outcome = start()
        if outcome.report_md is not None:
            report = str(outcome.report_md.absolute())
        status, reason = tell(outcome), outcome.reason
    except Exception as e:  # noqa: BLE001  each has its exit status
        status, reason = tell_error(e), str(e)
    told = {
        "BATCHGEN_EXIT_STATUS": str(status),
        "BATCHGEN_REASON": harmless(reason)[:_CHARS],
        "BATCHGEN_REPORT": report,
        "BATCHGEN_JOB": str(job.absolute()),
    }
    notify(command, told, stop)
    return status


def notify(command: str, told: Mapping[str, str], stop: "Stop") -> None:
    """Run the command by the shell, with `told` in its environment; its failure is told and changes nothing.

    It is killed, with all that it started, when it takes longer than PATIENCE_S, or HURRIED_S after a signal.
    """
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is for results
            env=os.environ | told,
            start_new_session=True,  # to be killed whole; and a Ctrl-C is not meant for it
        )
    except OSError as e:
        log.error("--notify-command: cannot be run: %s", e.strerror or e)  # noqa: TRY400  no bug
        return
    while (status := child.poll()) is None:
        limit = begin + PATIENCE_S if stop.at is None else max(begin, stop.at) + HURRIED_S
        if time.monotonic() > limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            log.error("--notify-command: not done after %.0f s, killed", time.monotonic() - begin)
            return
        time.sleep(_POLL_S)
    if status:
        how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        log.error("--notify-command: failed: %s", how)
