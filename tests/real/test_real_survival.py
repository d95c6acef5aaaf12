"""Signals, kills and hangs on real vLLM: how a run ends, what is committed, and that no process is left."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from helpers_real import kill_group, real_engine, wait_for
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
TEXT = "The ferry company of {n} Bay sold {n} boats on day {n} and will close its office in the old harbour this year."
GRACE_S = 20
COUNT = 100


@pytest.fixture
def job(tmp_path, model_folder):
    write_jsonl(tmp_path / "a.jsonl", [record(n, text=TEXT.format(n=n)) for n in range(COUNT)])
    return write_job(
        tmp_path,
        [tmp_path / "a.jsonl"],
        engine=real_engine(model_folder) | {"stall_s": 15},
        checkpoint={"rows": 8},
        sampling={"max_tokens": 48},
    )


class Run:
    """The real command line as a person starts it, in a process group of its own."""

    def __init__(self, job: Path) -> None:
        self.err = Path(f"{job}.err")
        with self.err.open("ab") as err:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "batchgen", "run", str(job)], stderr=err, start_new_session=True
            )

    def wait_until(self, word: str) -> None:
        wait_for(lambda: word in self.err.read_text(), timeout=400, child=self.child)

    def processes(self) -> list[psutil.Process]:
        """Those of the engine."""
        found = psutil.Process(self.child.pid).children(recursive=True)
        return [one for one in found if command(one) and "resource_tracker" not in command(one)]

    def core(self) -> psutil.Process:
        return next(one for one in self.processes() if "EngineCore" in command(one))


def command(process: psutil.Process) -> str:
    """Its command line; nothing where it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def running(job: Path, out: Path):
    """A run whose engine works: some parts of this start are on disk."""
    before = set(out.glob("summaries/part-*"))
    run = Run(job)
    try:
        wait_for(lambda: set(out.glob("summaries/part-*")) - before, timeout=400, child=run.child)
        yield run
    finally:
        kill_group(run.child)


def left(processes: list[psutil.Process], *, within_s: float) -> list[str]:
    """Those that still live after so many seconds."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [command(one) for one in alive if command(one)]


def ends_interrupted(run: Run, out: Path, before: int) -> None:
    """With 75, in time, with more rows than before, nobody struck, nobody left."""
    begin = time.monotonic()
    processes = run.processes()
    assert run.child.wait(GRACE_S + 30) == 75
    took = time.monotonic() - begin
    print(f"\nended with 75 after {took:.1f} s, {before} rows before, {len(rows(out))} after")
    assert took < GRACE_S + 4
    assert left(processes, within_s=2) == []
    assert len(rows(out)) > before
    assert not list(out.glob("strikes-*"))
    assert not list(out.rglob(".tmp-*"))


def to_parent(run):
    run.child.send_signal(signal.SIGTERM)


def to_foreground_group(run):
    os.killpg(run.child.pid, signal.SIGINT)


def to_every_process(run):
    for one in run.processes():
        one.send_signal(signal.SIGTERM)
    run.child.send_signal(signal.SIGTERM)


def usr1(run):
    os.killpg(run.child.pid, signal.SIGUSR1)


@pytest.mark.xdist_group("engine")  # the largest group: it begins first, and no two engines share the cores
def test_a_run_comes_to_its_end_through_kill_signal_and_the_death_of_its_engine(job, out):
    """The short form of the long tests below, one start after the other."""
    with running(job, out) as run:
        processes = run.processes()
        assert len(processes) >= 2
        run.child.kill()
        run.child.wait()
        assert left(processes, within_s=15) == []
    committed = rows(out)
    with running(job, out) as run:
        before = len(rows(out))
        to_every_process(run)
        ends_interrupted(run, out, before)
    report = json.loads((out / "report.json").read_text())
    assert report["attempt"]["documents"]["ok"] == len(rows(out)) - len(committed)
    assert [row for row in rows(out) if row in committed] == committed
    committed = rows(out)
    with running(job, out) as run:
        run.core().kill()
        assert run.child.wait(600) == 0
        assert "its process is gone" in run.err.read_text()
    found = by_id(out)
    assert len(rows(out)) == len(found) == COUNT
    assert {row["status"] for row in found.values()} == {"ok"}
    assert max(row["attempts"] for row in found.values()) == 2
    assert [row for row in rows(out) if row in committed] == committed
    report = json.loads((out / "report.json").read_text())
    assert report["attempt"]["documents"]["ok"] == COUNT - len(committed)  # nothing was done twice
    assert report["engine"]["kv_cache_tokens"] > 0
    assert start(job).report["attempt"]["requests"] == 0


@pytest.mark.long
@pytest.mark.parametrize("send", [to_every_process, to_parent, to_foreground_group, usr1])
def test_a_signal_lets_the_run_drain(job, out, send):
    with running(job, out) as run:
        before = len(rows(out))
        send(run)
        ends_interrupted(run, out, before)


@pytest.mark.long
def test_a_signal_while_the_engine_starts(job, out):
    run = Run(job)
    try:
        run.wait_until("starting the engine")
        wait_for(run.processes, timeout=100, child=run.child)
        time.sleep(2)
        processes = run.processes()
        begin = time.monotonic()
        to_every_process(run)
        assert run.child.wait(60) == 75
        assert time.monotonic() - begin < GRACE_S + 4
        assert left(processes, within_s=10) == []
    finally:
        kill_group(run.child)


@pytest.mark.long
def test_a_killed_parent_leaves_no_process(job, out):
    with running(job, out) as run:
        processes = run.processes()
        assert len(processes) >= 2
        run.child.kill()
        run.child.wait()
        begin = time.monotonic()
        assert left(processes, within_s=15) == []
        print(f"\ngone {time.monotonic() - begin:.1f} s after the parent")


@pytest.mark.long
def test_a_second_signal_leaves_at_once_and_leaves_nothing(job, out):
    with running(job, out) as run:
        processes = run.processes()
        run.child.send_signal(signal.SIGTERM)
        time.sleep(1)
        run.child.send_signal(signal.SIGINT)
        assert run.child.wait(5) == 128 + signal.SIGINT
        assert left(processes, within_s=15) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda core: core.kill(), "its process is gone"),
        (lambda core: core.suspend(), "no sign of work for 15 s"),
    ],
    ids=["killed", "stopped"],
)
def test_the_run_finishes_by_itself_after_its_engine(job, out, fault, reason):
    with running(job, out) as run:
        fault(run.core())
        assert run.child.wait(600) == 0
        assert reason in run.err.read_text()
    found = by_id(out)
    assert len(found) == COUNT
    assert {row["status"] for row in found.values()} == {"ok"}
    assert max(row["attempts"] for row in found.values()) == 2


@pytest.fixture
def two_engines(tmp_path, model_folder):
    """The job on two engines side by side."""
    write_jsonl(tmp_path / "a.jsonl", [record(n, text=TEXT.format(n=n)) for n in range(COUNT)])
    engine = real_engine(model_folder, kv_cache_memory_bytes=512 << 20) | {"stall_s": 15, "replicas_per_gpu": 2}
    return write_job(
        tmp_path, [tmp_path / "a.jsonl"], engine=engine, checkpoint={"rows": 8}, sampling={"max_tokens": 48}
    )


@pytest.mark.long
def test_two_engines_drain_at_a_signal(two_engines, out):
    with running(two_engines, out) as run:
        assert sum("EngineCore" in command(one) for one in run.processes()) == 2
        before = len(rows(out))
        to_every_process(run)
        ends_interrupted(run, out, before)


@pytest.mark.long
def test_two_engines_end_with_their_run(two_engines, out):
    with running(two_engines, out) as run:
        processes = run.processes()
        run.child.kill()
        run.child.wait()
        assert left(processes, within_s=15) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", [lambda core: core.kill(), lambda core: core.suspend()], ids=["killed", "stopped"])
def test_one_of_two_engines_dies_and_the_other_goes_on(two_engines, out, fault):
    with running(two_engines, out) as run:
        fault(run.core())
        assert run.child.wait(600) == 0
        told = run.err.read_text()
        assert "requests in flight are sent again" in told
        assert "resource_tracker" not in told
    found = by_id(out)
    assert len(rows(out)) == len(found) == COUNT
    assert {row["status"] for row in found.values()} == {"ok"}
