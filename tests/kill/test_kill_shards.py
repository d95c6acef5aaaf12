"""Shards side by side, killed at any moment, then with another number of them: one row a document in the end."""

import functools
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from helpers_kill import FORMATS, WHEN, State, calm_rows, clean, committed, kill_job, orphans, scratch, still_there
from helpers_run import rows, same_rows, start
from killed_child import Cue, begin, end, signalled, talk

from batchgen.shards import Shard

KILLED = -signal.SIGKILL
ENDS = {0, 75, KILLED}
# What can be killed, and how late in the life of a start.
MOMENTS = {
    "lines": 30_000,
    "lines:fsio,checkpoint,jsonl,parquet,rundir,index,view,layout,plan,identity": 6_000,
    "batchgen.fsio:Path.replace@before": 14,
    "batchgen.fsio:Path.replace@after": 14,
    "batchgen.storage.rundir:RunDirectory.alone@after": 4,
    "batchgen.storage.rundir:RunDirectory._take@after": 1,
    "batchgen.storage.checkpoint:_take_out@before": 1,
    "batchgen.storage.checkpoint:Committer.commit@after": 4,
    "batchgen.engines.fake:FakeEngine.poll@after": 6,
}
PLAIN = State()
EDITED = State(edited=frozenset({0, 2, 9, 21, 43, 52}), appended=3)
# An edit is never taken back: of an old row that stands beside a newer one the content would be the wanted one again.
GONE = State(edited=EDITED.edited | {40, 41, 5}, gone=frozenset({"ids/b.jsonl.gz"}), appended=4)
FEWER = State(gone=frozenset({"ids/a.jsonl", "ids/c.parquet"}))
HISTORIES = ((PLAIN,), (PLAIN, EDITED), (PLAIN, GONE), (PLAIN, EDITED, GONE), (FEWER, EDITED), (PLAIN, FEWER, EDITED))
_FIRST, _SEEDS = int(os.environ.get("SEED") or 0), int(os.environ.get("KILLS") or 40)


@pytest.fixture
def folder(monkeypatch):
    with scratch() as at:
        monkeypatch.chdir(at)
        yield at


def side_by_side(dice: random.Random, folder: Path, count: int, *words: str) -> list[int]:
    """All shards at the same time, most of them killed or stopped at some moment."""
    children = []
    for number in range(count):
        point = dice.choice(list(MOMENTS))
        number_of = signal.SIGTERM if dice.random() < 0.2 else signal.SIGKILL
        cue = Cue(point, dice.randrange(1, MOMENTS[point] + 1), functools.partial(signalled, number_of))
        cues = (cue,) if dice.random() < 0.8 else ()
        children.append(begin(folder, "run", "job.yaml", "--shard", f"{number}/{count}", *words, cues=cues))
    statuses = [end(child) for child in children]
    assert set(statuses) <= ENDS, talk(folder)
    return statuses


def all_shards(count: int) -> None:
    for number in range(count):
        assert start(Path("job.yaml"), shard=Shard(number, count)).exit_status == 0


def single(some: list[dict], wanted: list[dict]) -> list[dict]:
    """The rows of documents whose id stands once: of the others a shard knows those of its share alone."""
    twice = {row["id"] for row in wanted if row["error_type"] == "duplicate_id"}
    return [row for row in some if row["id"] is None or row["id"] not in twice]


def once_each(out: Path, wanted: list[dict]) -> None:
    """Assert that shards alone leave one row a document, of documents that are gone maybe one too."""
    now = Counter(row["doc_key"] for row in rows(out))
    keys = [row["doc_key"] for row in single(wanted, wanted)]
    assert {key: now[key] for key in keys} == dict.fromkeys(keys, 1)


def _placeless(some: list[dict], wanted: list[dict]) -> list[dict]:
    """The same without the place of an ok row whose id stands twice: where both hold the same, either was done."""
    alone = [row["doc_key"] for row in single(wanted, wanted)]
    return [
        row if row["doc_key"] in alone or row["status"] != "ok" else row | {"place": None, "source": None}
        for row in some
    ]


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[pytest.mark.long] if n > _FIRST else []) for n in range(_FIRST, _FIRST + _SEEDS)],
)
def test_shards_killed_side_by_side(folder, seed):
    dice = random.Random(seed)
    form, history = dice.choice(FORMATS), dice.choice(HISTORIES)
    kill_job(Path(), form)
    count = 1
    for state in history:
        state.write(folder)
        for _ in range(dice.choice([1, 2, 3])):
            before, count = committed(folder / "out"), dice.choice([2, 3, 4])
            statuses = side_by_side(dice, folder, count)
            print(f"seed {seed}: {form}, {state}, {count} shards: {statuses}")
            held = calm_rows(state, form)
            still_there(single(before, held), committed(folder / "out"), held)
    wanted = calm_rows(history[-1], form)
    all_shards(dice.choice([count, 2, 3, 5]))
    once_each(folder / "out", wanted)
    before = committed(folder / "out")
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(folder / "out")
    still_there(single(before, wanted), now, wanted)
    same_rows(_placeless(now, wanted), _placeless(wanted, wanted), but=WHEN)
    clean(folder / "out")
    gone = {row["doc_key"] for row in before} - {row["doc_key"] for row in now}
    assert gone <= set(orphans(folder / "out", form))


def test_one_of_four_killed_leaves_the_others_at_work(folder):
    PLAIN.write(folder)
    kill_job(Path(), "parquet")
    killed = Cue("batchgen.storage.checkpoint:Committer.commit@after", 1)
    children = [
        begin(folder, "run", "job.yaml", "--shard", f"{n}/4", cues=(killed,) if n == 2 else ()) for n in range(4)
    ]
    assert [end(child) for child in children] == [0, 0, KILLED, 0]
    again = begin(folder, "run", "job.yaml", "--shard", "2/4")
    assert end(again) == 0
    once_each(folder / "out", calm_rows(PLAIN, "parquet"))
