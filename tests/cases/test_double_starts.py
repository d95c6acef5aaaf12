"""One job started several times at the same moment, by hand or by a launcher: one writes, the others say who.

NVIDIA-NeMo/Skills#1103 is two tasks of one array index that write the same file; see also open-mpi/ompi#9796.
"""

import functools
import os
import signal
import socket
import time

import pytest
from helpers_kill import scratch
from helpers_run import by_id, record, start, write_job, write_jsonl
from killed_child import Cue, begin, end, talk

DOCUMENTS = 12
SLOW = ("--set", "engine.fake.docs_per_s=1", "--set", "lifecycle.grace_s=0")


@pytest.fixture
def folder():
    with scratch() as at:
        write_jsonl(at / "a.jsonl", map(record, range(DOCUMENTS)))
        write_job(at, [at / "a.jsonl"])
        yield at


def first_to_end(children, patience_s=30):
    limit = time.monotonic() + patience_s
    while time.monotonic() < limit:
        for child in children:
            if child.exitcode is not None:
                return child
        time.sleep(0.01)
    raise AssertionError("nobody gives way")


def told(folder, child, holder):
    """The loser's sentence names the holder."""
    says = talk(folder, child)
    assert f"another process holds this run: pid {holder.pid} on {socket.gethostname()} since 20" in says, says
    assert "Traceback" not in says


def finish(folder):
    """The next start, with nothing cleaned by hand."""
    outcome = start(folder / "job.yaml")
    assert outcome.exit_status == 0
    assert len(by_id(folder / "out")) == DOCUMENTS
    assert {row["status"] for row in by_id(folder / "out").values()} == {"ok"}
    return outcome


def both_at_once(folder, *words, count=2):
    moment = time.monotonic() + 0.15
    children = [begin(folder, "run", "job.yaml", *SLOW, *words, at=moment) for _ in range(count)]
    for left in range(count - 1, 0, -1):
        loser = first_to_end(children)
        assert end(loser) == 73, talk(folder, loser)
        children.remove(loser)
        assert len(children) == left
    (winner,) = children
    assert winner.exitcode is None
    return winner


def attempts(folder):
    """Those that left a trace: every writer leaves telemetry, and parts under its own number."""
    return {path.stem for path in (folder / "out").glob("telemetry-*")}


@pytest.mark.parametrize("n", [*range(8), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 200))])
def test_of_two_starts_at_once_one_writes_and_the_other_says_who(folder, n):
    winner = both_at_once(folder, *(["--fresh"] if n % 4 == 3 else []))
    (loser,) = [path for path in folder.glob("talk-*") if path.name != f"talk-{winner.pid}.txt"]
    assert f"pid {winner.pid} on {socket.gethostname()} since 20" in loser.read_text()
    os.kill(winner.pid, signal.SIGTERM if n % 10 == 1 else signal.SIGKILL)
    assert end(winner) == (75 if n % 10 == 1 else -signal.SIGKILL)
    assert len(attempts(folder)) <= 1
    finish(folder)


def test_of_many_starts_at_once_one_writes(folder):
    winner = both_at_once(folder, count=6)
    winner.kill()
    end(winner)
    assert len(attempts(folder)) <= 1
    finish(folder)


def test_a_start_while_the_first_loads_its_model(folder):
    loading = Cue("batchgen.engines.fake:FakeEngine.__init__@before", 1, functools.partial(time.sleep, 60))
    first = begin(folder, "run", "job.yaml", cues=(loading,))
    while not (folder / "out/plan.json").exists():
        time.sleep(0.01)
    begun = time.monotonic()
    second = begin(folder, "run", "job.yaml")
    assert end(second) == 73
    assert time.monotonic() - begun < 5
    told(folder, second, first)
    first.kill()
    end(first)
    assert finish(folder).report["attempt"]["documents"]["ok"] == DOCUMENTS


def test_the_holder_is_named_although_it_is_slow_to_tell_and_a_dead_one_stands_there(folder):
    dead = begin(folder, "run", "job.yaml", *SLOW)
    while not list((folder / "out").rglob("*.holder.json")):
        time.sleep(0.01)
    dead.kill()
    end(dead)
    slow = Cue("batchgen.fsio:Path.replace@before=holder.json", 1, functools.partial(time.sleep, 0.7))
    first = begin(folder, "run", "job.yaml", *SLOW, cues=(slow,))
    time.sleep(0.3)
    second = begin(folder, "run", "job.yaml", *SLOW)
    assert end(second) == 73
    told(folder, second, first)
    first.kill()
    end(first)
    finish(folder)
