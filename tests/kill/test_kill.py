"""A run killed anywhere, then given again, ends with the rows of a run that nobody disturbed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_kill import killed
from helpers_run import record, rows, same_rows, start, write_job, write_jsonl

DOCUMENTS = 60
OFTEN = [
    "batchgen.fsio:Path.replace@before",  # the temporary file is written, not renamed
    "batchgen.fsio:Path.replace@after",
    "batchgen.fsio:sync@after",
    "batchgen.checkpoint:Committer.commit@after",
    "batchgen.engines.fake:FakeEngine.poll@before",
]
ONCE = [
    "batchgen.checkpoint:load@after",
    "batchgen.plan:make@after",
    "batchgen.engines.fake:FakeEngine.close@before",  # between the last commit and the report
    "batchgen.report:write@before",
]


def corpus(folder: Path, edited=()):
    for name, numbers in (("a", range(40)), ("b", range(40, DOCUMENTS))):
        more = {n: {"text": f"An edited text about harbour {n}, long enough to be summarized again."} for n in edited}
        write_jsonl(folder / f"in/{name}.jsonl", [record(n, **more.get(n, {})) for n in numbers])
    return write_job(folder, [folder / "in/*.jsonl"], checkpoint={"rows": 7})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, monkeypatch_module):
    """Rows of plain runs: of the corpus, and of the corpus with two documents edited and file b gone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    monkeypatch_module.chdir(folder)
    assert start(corpus(Path())).exit_status == 0
    first = rows(Path("out"))
    corpus(Path(), edited=[3, 17])
    Path("in/b.jsonl").unlink()
    assert start(Path("job.yaml")).exit_status == 0
    return first, rows(Path("out"))


@pytest.mark.parametrize(
    ("point", "nth"), [*((point, 1) for point in ONCE), *((point, nth) for point in OFTEN for nth in (1, 3, 6))]
)
def test_killed_at_a_named_point(tmp_path, monkeypatch, undisturbed, point, nth):
    monkeypatch.chdir(tmp_path)
    corpus(Path())
    assert killed(point, nth)
    committed = rows(Path("out"))
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(Path("out"))
    assert [row for row in now if row in committed] == committed  # no committed row changed
    same_rows(now, undisturbed[0])
    assert not list(Path("out").rglob(".tmp-*"))


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_rows_are_replaced_and_moved(tmp_path, monkeypatch, undisturbed, when, nth):
    monkeypatch.chdir(tmp_path)
    corpus(Path())
    start(Path("job.yaml"))
    corpus(Path(), edited=[3, 17])
    Path("in/b.jsonl").unlink()
    assert killed(f"batchgen.sinks.parquet:ParquetSink._write@{when}", nth)
    assert start(Path("job.yaml")).exit_status == 0
    same_rows(rows(Path("out")), undisturbed[1])
    import pyarrow.dataset as ds

    orphans = ds.dataset("out/orphans").to_table().column("id").to_pylist()
    assert sorted(orphans) == sorted(f"d{n}" for n in range(40, DOCUMENTS))


def random_kills(job: Path, seed: int) -> int:
    """Kill starts at random moments until three were killed; the number of starts it took."""
    dice = random.Random(seed)
    starts = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-m", "batchgen", "run", str(job)], stderr=subprocess.DEVNULL, start_new_session=True
        )
        starts += 1
        time.sleep(dice.uniform(0.2, 1.2))
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return starts


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_times(tmp_path, monkeypatch, undisturbed, seed):
    monkeypatch.chdir(tmp_path)
    corpus(Path())
    print(f"seed {seed}")
    slow = "engine: {backend: fake, args: {max_model_len: 2048, max_num_seqs: 4}, fake: {docs_per_s: 80}}\n"
    text = Path("job.yaml").read_text()
    Path("slow.yaml").write_text(text[: text.index("engine:")] + slow + text[text.index("sampling:") :])
    random_kills(Path("slow.yaml"), seed)
    committed = rows(Path("out"))
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(Path("out"))
    assert [row for row in now if row in committed] == committed
    same_rows(now, undisturbed[0])
