"""The limit of a Slurm job as a deadline, with a stand-in for squeue."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

from batchgen.lifecycle import Stop
from batchgen.slurm import deadline

COUNT = 60


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Sets what squeue answers: a text in place of a time, or a shell's command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for name in ("SLURM_JOB_END_TIME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)

    def answers(script: str) -> None:
        new = folder / "new"
        new.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $@" >> {tmp_path}/asked\n{script}\n')
        new.chmod(0o755)
        new.replace(folder / "squeue")

    answers("exit 1")
    return answers


@pytest.fixture
def told(monkeypatch):
    """Seconds after which a run is asked to stop; None where nobody waits any more, or not for something near."""
    before = signal.getsignal(signal.SIGALRM)

    def wait(lead_s: float = 0.0) -> float | None:
        stop, begin = Stop(), time.monotonic()
        deadline.watch(stop, lead_s=lead_s)
        waiting = [one for one in threading.enumerate() if one.name == "time limit"][-1:]
        while stop.at is None and time.monotonic() < begin + 1.5 and any(one.is_alive() for one in waiting):
            time.sleep(0.02)
        return None if stop.at is None else stop.at - begin

    monkeypatch.setattr(deadline, "_LOOK_S", 0.1)
    yield wait
    signal.signal(signal.SIGALRM, before)


def test_outside_of_slurm_nobody_is_asked(squeue, told, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    squeue("date +%s")
    assert told() is None
    assert not (tmp_path / "asked").exists()


def test_the_limit_that_squeue_tells(squeue, told, tmp_path):
    squeue(f"echo {int(time.time()) + 11}")
    assert 0 < told(10) <= 2
    assert "%s --noheader --jobs=77 --format=%e" in (tmp_path / "asked").read_text()


def test_a_task_asks_for_itself(squeue, told, tmp_path, monkeypatch):
    """The number of the array is also that of one task, and asked for it squeue lists all of them."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    squeue(f"echo {int(time.time()) + 11}")
    assert 0 < told(10) <= 2
    assert "--jobs=77_3" in (tmp_path / "asked").read_text()


def test_the_limit_that_the_environment_tells(squeue, told, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 11))
    assert 0 < told(10) <= 2


def test_a_limit_that_was_moved_meanwhile_holds(squeue, told, monkeypatch):
    """An administrator can give a job that runs more time; its environment does not change."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 11))
    squeue(f"echo {int(time.time()) + 864_000}")
    assert told(10) is None


def test_a_limit_that_is_near_stops_at_once(squeue, told):
    squeue(f"echo {int(time.time()) + 5}")
    assert told(60) < 1


@pytest.mark.parametrize("answer", ["exit 1", "echo NONE", "echo N/A", "true", "echo 0", "date +%s -d '1 hour ago'"])
def test_without_a_limit_the_run_goes_on(squeue, told, answer):
    squeue(answer)
    assert told() is None


def test_the_number_of_a_job_that_is_gone_stops_nothing(squeue, told, monkeypatch):
    """A shell or tmux that was started inside of a job keeps its environment."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 100))
    assert told() is None


def test_without_squeue_the_run_goes_on(squeue, told, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert told() is None


def test_a_run_ends_before_its_limit_and_goes_on_in_the_next_job(squeue, tmp_path, out):
    inputs = [write_jsonl(tmp_path / "a.jsonl", map(record, range(COUNT)))]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": {"docs_per_s": 10}}
    job = write_job(tmp_path, inputs, engine=engine, lifecycle={"grace_s": 1})
    squeue(f"echo {int(time.time()) + 1 + 10 + 3}")  # grace, what comes after it, work
    done = subprocess.run([sys.executable, "-m", "batchgen", "run", job], capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, done.stderr
    assert "Slurm ends job 77 at" in done.stderr
    assert "stopped by the deadline" in done.stderr
    before = rows(out)
    assert 0 < len(before) < COUNT
    assert start(job, "engine.fake.docs_per_s=null").exit_status == 0
    assert len(by_id(out)) == COUNT
