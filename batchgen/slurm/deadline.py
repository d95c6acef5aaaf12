"""The end of a Slurm job's time as the deadline of the run inside of it.

The warning signal of the printed script comes before it. This is for scripts that ask for none, and for signals that
are lost on the way.
"""

import contextlib
import logging
import os
import subprocess
import threading
import time

from batchgen.lifecycle import Stop

_PATIENCE_S = 30.0
_LOOK_S = 30.0
log = logging.getLogger("batchgen")


def watch(stop: Stop, *, lead_s: float) -> None:
    """In a Slurm job: ask to stop lead_s seconds before its time is over. Elsewhere nothing happens."""
    job = _job()
    if job is None:
        return
    alarm = stop.alarm()

    def wait() -> None:
        if _wait(job, lead_s):
            alarm()

    threading.Thread(target=wait, name="time limit", daemon=True).start()


def _job() -> str | None:
    """The job that this process is in. The number of a whole array is also that of one of its tasks."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _told() -> float | None:
    """What newer Slurms tell without being asked."""
    with contextlib.suppress(ValueError):
        end = float(os.environ.get("SLURM_JOB_END_TIME", ""))
        return end if end > time.time() else None
    return None


def _asked(job: str) -> float | None:
    """When Slurm ends the job, in seconds since 1970, as it says now: the limit can change while the job runs."""
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            words, env=os.environ | {"SLURM_TIME_FORMAT": "%s"}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_PATIENCE_S, check=True,
        )  # fmt: skip
        return float(done.stdout)
    return None


def _wait(job: str, lead_s: float) -> bool:
    """Wait until the job's time is nearly over; false where it never will be."""
    known, end = None, _told() or _asked(job)
    if end is None or end < time.time():  # no limit, or a job that is gone and left its number behind
        return False
    while end != known:
        log.info("Slurm ends job %s at %s; the run stops %g s before", job, _clock(end), lead_s)
        known = end
        while (left := end - lead_s - time.time()) > 0:
            time.sleep(min(left, _LOOK_S))
        end = _asked(job) or known
    return True


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
