"""Signals of schedulers: to the batch shell alone, to all, at any moment, and a kill soon after (submitit#1615)."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

from batchgen.job import jobfile
from batchgen.slurm import script
from batchgen.slurm.script import Wish

COUNT = 60


@pytest.fixture
def job(tmp_path):
    """A run of some six seconds."""
    inputs = [write_jsonl(tmp_path / "a.jsonl", map(record, range(COUNT)))]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": {"docs_per_s": 10}}
    return write_job(tmp_path, inputs, engine=engine, checkpoint={"rows": 7}, lifecycle={"grace_s": 3})


@pytest.fixture
def batch(tmp_path, job):
    """Starts a printed script as Slurm does, in a session of its own."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "batchgen").write_text(f'#!/bin/sh\nexec {sys.executable} -m batchgen "$@"\n')
    (commands / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    for one in commands.iterdir():
        one.chmod(0o755)
    told = {"JOB_ID": "77", "ARRAY_JOB_ID": "77", "ARRAY_TASK_ID": "0"}
    env = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}
    env |= {f"SLURM_{name}": value for name, value in told.items()}
    started = []

    def run(form: str) -> subprocess.Popen:
        path = tmp_path / "script.sh"
        wish = Wish(jobfile.load(job), (), tmp_path, tasks=1, time="60", requeue=form == "wait")
        path.write_text(script.tasks(wish))
        with (tmp_path / "slurm.out").open("ab") as out:
            started.append(subprocess.Popen(["bash", path], stdout=out, stderr=out, env=env, start_new_session=True))
        return started[-1]

    yield run
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def until_rows(out: Path, count: int = 1) -> None:
    end = time.monotonic() + 60
    while len(list(out.glob("summaries/part-*"))) < count:
        assert time.monotonic() < end, "the run wrote nothing"
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("form", ["exec", "wait"])
def test_the_warning_signal_reaches_the_run_through_the_printed_scripts(batch, job, out, tmp_path, form):
    child = batch(form)
    until_rows(out)
    child.send_signal(signal.SIGUSR1)  # to the shell alone
    assert child.wait(30) == 75
    assert (tmp_path / "slurm.out").read_text().count("SIGUSR1") >= 1
    assert (tmp_path / "requeued").exists() is (form == "wait")
    before = rows(out)
    assert 0 < len(before) < COUNT
    assert start(job, "engine.fake.docs_per_s=null").exit_status == 0
    assert len(by_id(out)) == COUNT
    assert [row for row in rows(out) if row in before] == before


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("form", ["exec", "wait"])
def test_the_limit_itself_reaches_all_processes(batch, out, tmp_path, form):
    child = batch(form)
    until_rows(out)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(30) == 75
    assert not (tmp_path / "requeued").exists()  # who was cancelled is not to come back
    end = time.monotonic() + 10
    while left := [one for one in psutil.process_iter(["cmdline"]) if str(out.parent) in str(one.info["cmdline"])]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert len(rows(out)) > 0


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 20))])
def test_a_term_at_any_moment_is_over_before_the_kill(job, out, tmp_path, seed):
    """Also while Python itself starts: the handler stands before anything is imported."""
    after = random.Random(seed).uniform(0.25, 4)
    with (tmp_path / "err").open("wb") as err:
        child = subprocess.Popen([sys.executable, "-m", "batchgen", "run", str(job)], stderr=err)
    time.sleep(after)
    child.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    status = child.wait(40)
    took = time.monotonic() - begin
    print(f"seed {seed}: TERM after {after:.2f} s, {status} after {took:.2f} s")
    assert status in {75, -signal.SIGTERM} if after < 0.5 else status == 75, (tmp_path / "err").read_text()
    assert took < 3 + 4
    assert start(job, "engine.fake.docs_per_s=null").exit_status == 0
    assert len(by_id(out)) == COUNT


def test_a_window_that_takes_minutes_is_not_waited_for(job, out):
    words = ["--set", "engine.feed=generate", "--set", "engine.fake.docs_per_s=0.05"]
    child = subprocess.Popen([sys.executable, "-m", "batchgen", "run", str(job), *words], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list(out.glob("telemetry-*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert child.wait(60) == 75
    assert time.monotonic() - begin < 3 + 4
    assert rows(out) == []
