"""Every status of docs/exit-codes.md, made by the command line that a user types."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_run import command, record, rows, start, write_job, write_jsonl

from batchgen.storage.rundir import RunDirectory

PAGE = Path(__file__).parent.parent / "docs" / "exit-codes.md"
MADE = {}


def makes(status, why):
    """The decorated function makes a command end with this status, and returns (status, what it said on stderr)."""

    def add(function):
        MADE[status, why] = function
        return function

    return add


def job_of(folder, *records, **sections):
    return write_job(folder, [write_jsonl(folder / "a.jsonl", records or map(record, range(8)))], **sections)


def run(job, *words, env=None):
    done = command("run", job, *words, env=env)
    return done.returncode, done.stderr


def sabotaged(folder, code):
    """An environment in which Python runs this code before anything else."""
    (folder / "sitecustomize.py").write_text(code)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def slow(job, *words):
    """A run of some minutes, once it is in its middle."""
    words = [sys.executable, "-m", "batchgen", "run", str(job), "--set", "engine.fake.docs_per_s=0.5", *words]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not list((job.parent / "out").glob("telemetry-*")):
        time.sleep(0.02)
        assert child.poll() is None
    return child


def ended(child):
    """(status, what it said since) of a child that is about to end."""
    with child.stderr:
        return child.wait(60), child.stderr.read()


@makes("0", "done")
def _(folder):
    return run(job_of(folder))


@makes("0", "limit")
def _(folder):
    status, said = run(job_of(folder), "--limit", "3")
    assert "--limit 3 reached: 8 documents: 3 ok, 0 failed, 0 skipped, 5 pending" in said
    return status, said


@makes("1", "a bug")
def _(folder):
    status, said = run(job_of(folder), env=sabotaged(folder, "import batchgen.plan\ndel batchgen.plan.make\n"))
    assert "this is a bug in batchgen; please report it with these lines" in said
    assert "Traceback" in said
    assert "AttributeError" in said
    return status, ""


@makes("2", "usage")
def _(folder):
    return run(job_of(folder), "--limits", "3")


@makes("3", "too many failed")
def _(folder):
    return run(job_of(folder, record(1), {"id": "d2"}))


@makes("65", "no file matches")
def _(folder):
    job = job_of(folder)
    (folder / "a.jsonl").unlink()
    return run(job)


@makes("65", "not to its end, and documents failed")
def _(folder):
    import gzip

    job = job_of(folder, record(1), {"id": "d2"})
    data = gzip.compress((folder / "a.jsonl").read_bytes() * 50)
    (folder / "a.jsonl").write_bytes(data[:-20])
    return run(job)


@makes("69", "engines die")
def _(folder):
    env = sabotaged(folder, "import batchgen.feeding.feed as f\nf._PAUSES_S, f._ECHO_S = (0.0,), 0.0\n")
    status, said = run(job_of(folder), "--set", "engine.fake.die_after=0", env=env)
    assert "5 engines in a row ended without finishing a request" in said
    return status, said


@makes("73", "held")
def _(folder):
    job = job_of(folder)
    with RunDirectory(folder / "out"):
        status, said = run(job)
    assert f"pid {os.getpid()} on " in said
    return status, said


@makes("74", "no folder")
def _(folder):
    (folder / "file").write_text("")
    return run(job_of(folder, output={"dir": str(folder / "file/out")}))


@makes("75", "signal")
def _(folder):
    child = slow(job_of(folder), "--set", "lifecycle.grace_s=0")
    child.terminate()
    return ended(child)


@makes("75", "deadline")
def _(folder):
    return run(
        job_of(folder), "--deadline", "1s", "--set", "engine.fake.docs_per_s=0.5", "--set", "lifecycle.grace_s=0"
    )


@makes("78", "a key")
def _(folder):
    return run(job_of(folder), "--set", "engine.fed=rolling")


@makes("78", "other settings")
def _(folder):
    job = job_of(folder)
    start(job)
    return run(job, "--set", "sampling.max_tokens=32")


@makes("141", "stdout closed")
def _(folder):
    job = job_of(folder, *map(record, range(2000)))
    start(job)
    words = [sys.executable, "-m", "batchgen", "export", str(folder / "out"), "-"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.readline()
    child.stdout.close()
    return ended(child)


def second(folder, number):
    child = slow(job_of(folder))
    child.send_signal(signal.SIGUSR1)
    while "finishing what is in flight" not in child.stderr.readline():
        pass
    begin = time.monotonic()
    child.send_signal(number)
    status, said = ended(child)
    assert time.monotonic() - begin < 5  # at once, though the grace is 20 s
    return status - number, said


@makes("128 + n", "SIGINT")
def _(folder):
    return second(folder, signal.SIGINT)


@makes("128 + n", "SIGTERM")
def _(folder):
    return second(folder, signal.SIGTERM)


@pytest.mark.parametrize(("told", "why"), MADE)
def test_the_status_is_made(tmp_path, told, why):
    status, said = MADE[told, why](tmp_path)
    assert str(status) == told.removesuffix(" + n"), said
    assert "Traceback" not in said
    committed = rows(tmp_path / "out")
    assert len({row["doc_key"] for row in committed}) == len(committed)


def test_every_status_of_the_page_is_made_here():
    told = re.findall(r"^\| (\d+(?: \+ n)?) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {status for status, _ in MADE} == set(told)
