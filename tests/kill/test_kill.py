"""A run killed anywhere, then given again, ends with the rows of a run that nobody disturbed."""

import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_kill import (
    FORMATS,
    HISTORIES,
    WHEN,
    State,
    calm_rows,
    clean,
    committed,
    kill_job,
    orphans,
    scratch,
    still_there,
)
from helpers_run import rows, same_rows, start
from killed_child import Cue, begin, end, kill_after, signalled, status_of, talk

KILLED = -signal.SIGKILL
PLAIN, CHANGED = HISTORIES[0][0], HISTORIES[3][1]
EDITED = State(edited=frozenset({1, 9, 21, 43, 52}), gone=frozenset({"ids/c.parquet"}))
GONE = 10  # rows of ids/c.parquet


@pytest.fixture
def folder(monkeypatch):
    with scratch() as at:
        monkeypatch.chdir(at)
        yield at


def finish(folder: Path, state: State, form: str, *, poison: bool = False) -> None:
    """Start it again without any disturbance, and compare."""
    before, wanted = committed(folder / "out"), calm_rows(state, form, poison=poison)
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(folder / "out")
    still_there(before, now, wanted)
    same_rows(now, wanted, but=WHEN)
    clean(folder / "out")


def at(module: str, names: str, nths=(1,), *, when=("before", "after")):
    return [(f"batchgen.{module}:{name}@{one}", nth) for name in names.split() for one in when for nth in nths]


WRITES = [
    f"batchgen.fsio:Path.replace@{when}={name}"
    for when in ("before", "after")
    for name in ("run.json", "plan.json", "report.json", "report.md", "failed.jsonl", "holder.json")
]
# Of a start that finds nothing. Here belongs every new place at which a run can be killed.
FIRST = [
    *((point, 1) for point in WRITES),
    *at("fsio", "Path.replace sync", (3, 6, 9)),
    *at("fsio", "os.fsync write_atomic", (4, 7, 8), when=("before",)),
    *at("plan", "make"),
    *at("storage.checkpoint", "load Committer.commit"),
    *at("storage.checkpoint", "Committer.commit", (3, 5)),
    *at("engines.fake", "FakeEngine.submit FakeEngine.poll", (2, 7)),
    *at("engines.fake", "FakeEngine.close"),
    *at("reporting.report", "build write"),
    *at("reporting.html", "renew make"),
    *at("reporting.stats", "Telemetry.event", (1, 2, 9)),
    *at("reporting.stats", "Telemetry.close"),
]
# Between a part and its footer.
FOOTER = [(f"batchgen.fsio:Path.replace@{when}=.footer.json", nth) for when in ("before", "after") for nth in (1, 3)]
# Of a start that finds parts, among them rows of documents that were edited or are gone.
AGAIN = {
    "parquet": [
        *at("sinks.parquet", "ParquetSink.read_keys", (1, 3)),
        *at("sinks.parquet", "ParquetSink._write", (1, 2, 3)),
    ],
    "jsonl": [
        *at("sinks.jsonl", "JsonlSink.read_keys", (1, 3)),
        *at("sinks.jsonl", "JsonlSink._write", (1, 2, 3)),
        *at("fsio", "write_atomic", (4, 5, 6, 7)),
        *at("fsio", "remove", (1, 2)),
    ],
}
BOTH = at("storage.checkpoint", "_read_parts superseded settle _take_out")


def some(cases, *, every=4):
    """Each `every`th for every change; the others are long."""
    return [pytest.param(*one, marks=[pytest.mark.long] if n % every else []) for n, one in enumerate(cases)]


@pytest.mark.parametrize(
    ("form", "point", "nth"),
    some([*((form, *at) for form in FORMATS for at in FIRST), *(("jsonl", *at) for at in FOOTER)]),
)
def test_killed_at_a_named_point(folder, form, point, nth):
    PLAIN.write(folder)
    kill_job(Path(), form)
    assert status_of(folder, "run", "job.yaml", cues=(Cue(point, nth),)) == KILLED
    finish(folder, PLAIN, form)


@pytest.mark.parametrize(
    ("form", "point", "nth"), some([(form, *at) for form in FORMATS for at in [*AGAIN[form], *BOTH]])
)
def test_killed_while_rows_are_loaded_replaced_and_moved(folder, form, point, nth):
    PLAIN.write(folder)
    start(kill_job(Path(), form))
    EDITED.write(folder)
    assert status_of(folder, "run", "job.yaml", cues=(Cue(point, nth),)) == KILLED
    finish(folder, EDITED, form)
    assert len(orphans(folder / "out", form)) == GONE


def dies(folder: Path, *sets: str, cues=(), status=KILLED) -> None:
    words = [word for one in sets for word in ("--set", one)]
    found = status_of(folder, "run", "job.yaml", *words, cues=cues)
    assert found == status, talk(folder)


def on_signal(number: int, *, nth: int = 3) -> Cue:
    return Cue("batchgen.feeding.feed:Feed.collect@before", nth, functools.partial(signalled, number))


DRAIN = [
    *at("feeding.feed", "Feed.drain Feed.close"),
    *at("feeding.feed", "Feed.collect", (3, 4), when=("after",)),
    *at("feeding.feed", "Feed.commit", (3,)),
    *at("reporting.report", "write"),
]


@pytest.mark.parametrize(("form", "point", "nth"), some([(form, *at) for form in FORMATS for at in DRAIN]))
def test_killed_while_it_drains(folder, form, point, nth):
    PLAIN.write(folder)
    kill_job(Path(), form)
    dies(folder, cues=(on_signal(signal.SIGTERM), Cue(point, nth)))
    finish(folder, PLAIN, form)


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        *at("storage.strikes", "Strikes.add Strikes.forget"),
        *((f"batchgen.fsio:Path.replace@{when}=strikes-00000.json", 1) for when in ("before", "after")),
        *at("feeding.feed", "Feed.recover Feed._free", (1, 2)),
    ],
)
def test_killed_around_the_death_of_an_engine(folder, point, nth):
    PLAIN.write(folder)
    kill_job(Path(), "parquet")
    dies(folder, "engine.fake.die_after=9", cues=(Cue(point, nth),))
    finish(folder, PLAIN, "parquet")


@pytest.mark.parametrize("nth", range(10, 150, 28))
def test_a_signal_while_the_job_is_checked_is_no_mistake_in_the_job(folder, nth):
    PLAIN.write(folder)
    kill_job(Path(), "parquet")
    dies(folder, cues=(Cue("lines:prompts", nth, functools.partial(signalled, signal.SIGTERM)),), status=75)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_leaves_at_once(folder, second):
    PLAIN.write(folder)
    kill_job(Path(), "parquet")
    again = Cue("batchgen.feeding.feed:Feed.drain@before", 1, functools.partial(_later, second))
    dies(folder, cues=(on_signal(signal.SIGTERM), again), status=128 + second)
    assert not (folder / "out/report.json").exists()
    finish(folder, PLAIN, "parquet")


def _later(number: int) -> None:
    time.sleep(0.6)  # the same signal within half a second is an echo
    signalled(number)


# Random moments. A seed is one run over the changes of its inputs, disturbed at every start but the last.

# `make kill` says which and how many.
_FIRST_SEED, _SEEDS = int(os.environ.get("SEED") or 0), int(os.environ.get("KILLS") or 200)
SEEDS = some([[seed] for seed in range(_FIRST_SEED, _FIRST_SEED + _SEEDS)], every=16)
ENDS = {0, 75, KILLED, *(128 + one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))}
LINES = {"lines": 30_000, "lines:fsio,checkpoint,jsonl,parquet,rundir,index": 4_000, "lines:fsio": 900}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def disturbed(dice: random.Random, folder: Path, *, poison: bool) -> str:
    """One start that is disturbed at a random moment; what was done to it."""
    words = ["run", "job.yaml", *dice.choice([(), (), (), ("--limit", dice.randrange(1, 30))])]
    if (
        dice.random() < 0.2 and not poison
    ):  # enough for a poll or two: an engine that finishes nothing five times ends the run
        words += ["--set", f"engine.fake.die_after={dice.randrange(13, 20)}", "--set", "failures.strikes=99"]
    if dice.random() < 0.25:
        child, after = begin(folder, *words), dice.uniform(0, 0.3)
        kill_after(child, after)
        done = f"killed after {after:.4f} s"
    else:
        first = dice.choice(SIGNALS)
        place = dice.choice(list(LINES))
        nth = dice.randrange(1, LINES[place])
        cues = [Cue(place, nth, functools.partial(signalled, first))]
        if first != signal.SIGKILL and dice.random() < 0.5:
            cues.append(
                Cue(place, nth + dice.randrange(1, 300), functools.partial(signalled, dice.choice(SIGNALS[2:])))
            )
        child = begin(folder, *words, cues=tuple(cues))
        done = str(cues)
    status = end(child)
    assert status in ENDS, f"{words} {done}: {status}\n{talk(folder)}"
    return f"{words} {done} → {status}"


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_moments(folder, seed):
    dice = random.Random(seed)
    form, history, poison = dice.choice(FORMATS), dice.choice(HISTORIES), dice.random() < 0.2
    print(f"seed {seed}: {form}, {history}, {poison=}")
    kill_job(Path(), form, poison=poison)
    for state in history:
        state.write(folder)
        for _ in range(dice.choice([1, 1, 2]) if len(history) > 1 else 3):
            before = committed(folder / "out")
            print(disturbed(dice, folder, poison=poison))
            still_there(before, committed(folder / "out"), calm_rows(state, form, poison=poison))
    finish(folder, history[-1], form, poison=poison)


@pytest.mark.parametrize("seed", range(2))
def test_a_whole_process_killed_at_random_times(folder, seed):
    """Not forked, so that it also dies while it starts."""
    dice = random.Random(seed)
    form = FORMATS[seed % 2]
    PLAIN.write(folder)
    kill_job(Path(), form)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-m", "batchgen", "run", "job.yaml", "--set", "engine.fake.docs_per_s=60"],
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(dice.uniform(0.1, 1.2))
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        assert child.wait() in (0, KILLED)
    finish(folder, PLAIN, form)
