"""The real engine in tests: runs through the command line, in process groups that can be killed whole."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen.reporting.stats import read_telemetry


def real_engine(model: Path, *, max_num_seqs=8, **args):
    return {
        "backend": "vllm",
        "args": {"model": str(model), "max_model_len": 2048, "max_num_seqs": max_num_seqs} | args,
    }


# For tests that share an engine (conftest.py): they run in one process. What vLLM imports warns; that is not for our
# tests to judge.
ON_SHARED = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.xdist_group("engine"),
]
# Telemetry after every step: what finished before a kill is then told to the last step.
TELLING = "import batchgen.reporting.stats as s; s.SAMPLE_S = 0.0; from batchgen.cli import main; main()"


@contextlib.contextmanager
def started(job: Path, *options):
    """A start in a process group of its own, gone at the end; what it says goes to job.yaml.err."""
    with Path(f"{job}.err").open("ab") as err:
        child = subprocess.Popen(
            [sys.executable, "-c", TELLING, "run", str(job), *options], stderr=err, start_new_session=True
        )
    try:
        yield child
    finally:
        kill_group(child)


def run_to_end(job: Path, *options, timeout=500) -> int:
    """The exit status of a start; fails where it leaves a process of its engine behind."""
    with started(job, *options) as child:
        status = child.wait(timeout)
        assert not engine_processes(child.pid)
        return status


def kill_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def wait_for(condition, *, timeout: float, child: subprocess.Popen) -> None:
    """Until the condition holds; fails when the child ends or the time is up."""
    end = time.monotonic() + timeout
    while not condition():
        assert child.poll() is None, "the run ended before it came this far"
        assert time.monotonic() < end, "the run never came this far"
        time.sleep(0.05)


def engine_processes(group: int) -> list[int]:
    """Processes of vLLM engines in a process group, by what they call themselves."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                here = os.getpgid(int(entry.name)) == group
            except OSError:
                continue
            if here and re.search(rb"VLLM::", line):
                found.append(int(entry.name))
    return found


def requests_finished(out: Path) -> int:
    """Requests that all attempts together saw finish, by their telemetry."""
    total = 0
    for path in out.glob("telemetry-*.jsonl"):
        last = {}
        for event in read_telemetry(path):
            last = event.get("counts", last)
        total += last.get("requests", 0)
    return total
