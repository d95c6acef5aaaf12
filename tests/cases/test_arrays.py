"""Arrays that begin elsewhere, have holes or more tasks than documents (NeMo-Curator#2154, datatrove#238)."""

import json
import os
import subprocess
import sys

import pytest
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

from batchgen.job import jobfile
from batchgen.shards import Shard
from batchgen.slurm import script
from batchgen.slurm.script import Wish

COUNT = 7


@pytest.fixture
def job(tmp_path):
    """Seven documents in three files."""
    inputs = [write_jsonl(tmp_path / f"{n}.jsonl", map(record, range(n, COUNT, 3))) for n in range(3)]
    return write_job(tmp_path, inputs)


def submit(job, shares, numbers, *offset) -> list[int]:
    """Run the printed script for `shares` tasks as these tasks of an array; their exit statuses."""
    text = script.tasks(Wish(jobfile.load(job), (), job.parent, tasks=shares, time="60",
                             batchgen=(sys.executable, "-m", "batchgen")))  # fmt: skip
    (job.parent / "script.sbatch").write_text(text)
    told = {"MIN": min(numbers), "MAX": max(numbers), "COUNT": len(numbers), "JOB_ID": 77}
    ended = []
    for number in numbers:
        env = os.environ | {f"SLURM_ARRAY_{name if name == 'JOB_ID' else f'TASK_{name}'}": str(value)
                            for name, value in (told | {"ID": number}).items()}  # fmt: skip
        words = ["bash", job.parent / "script.sbatch", *map(str, offset)]
        env["SLURM_JOB_ID"] = str(77 + number)
        ended.append(subprocess.run(words, env=env, capture_output=True, timeout=60).returncode)
    return ended


@pytest.mark.long
@pytest.mark.parametrize(
    ("shares", "arrays"),
    [
        (3, [((0, 1, 2), ())]),
        (3, [((1, 2, 3), (-1,))]),
        (10, [(range(10), ())]),
        (8, [(range(4), (0,)), (range(4), (4,))]),
        (1, [((5,), (-5,))]),
        (4, [((0, 2), ()), ((1, 3), ())]),
    ],
    ids=["zero_based", "one_based", "more_tasks_than_documents", "windows", "one_task", "holes"],
)
def test_all_shares_together_are_all_documents(job, out, shares, arrays):
    for numbers, offset in arrays:
        assert submit(job, shares, list(numbers), *offset) == [0] * len(numbers)
    assert len(by_id(out)) == len(rows(out)) == COUNT
    for number in range(shares if shares > 1 else 0):
        found = json.loads((out / f"report-{number:05d}of{shares:05d}.json").read_text())
        assert found["documents"]["pending"] == 0


@pytest.mark.parametrize(
    ("shares", "numbers"),
    [(3, [1, 2, 3]), (4, [0, 2, 4, 6]), (1, [5]), (4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])],
    ids=["one_based", "step", "one_task", "more_tasks_than_shares"],
)
def test_an_array_that_would_leave_shares_out_begins_nothing(job, out, shares, numbers):
    assert submit(job, shares, numbers) == [78] * len(numbers)
    assert not out.exists()


def test_a_task_that_runs_again_with_fewer_others_does_its_own_documents(job, out):
    """The count of tasks is that of the rerun; the number of shares is not."""
    every = [Shard(number, 4) for number in range(4)]
    shares = {}
    for shard in every:
        before = set(by_id(out))
        start(job, shard=shard)
        shares[shard.number] = set(by_id(out)) - before
    whole = set(by_id(out))
    assert len(whole) == COUNT
    for path in out.glob("summaries/part-*"):
        path.unlink()
    assert submit(job, 4, [1, 3]) == [0, 0]
    assert set(by_id(out)) == shares[1] | shares[3]
