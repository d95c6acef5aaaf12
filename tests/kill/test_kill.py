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

from batchgen.sinks import open_sink

DOCUMENTS = 60
OFTEN = [
    "batchgen.fsio:Path.replace@before",  # the temporary file is written, not renamed
    "batchgen.fsio:Path.replace@after",
    "batchgen.fsio:sync@after",
    "batchgen.checkpoint:Committer.commit@after",
    "batchgen.engines.fake:FakeEngine.poll@before",
]
FORMATS = ["parquet", "jsonl"]
STEPS = ["before", "after"]
ONCE = [
    "batchgen.checkpoint:load@after",
    "batchgen.plan:make@after",
    "batchgen.engines.fake:FakeEngine.close@before",  # between the last commit and the report
    "batchgen.report:write@before",
]


# Between the steps of a part with a footer beside it.
JSONL = [
    "batchgen.fsio:write_atomic@before",
    "batchgen.fsio:write_atomic@after",
    "batchgen.fsio:sync@after",
    "batchgen.sinks.jsonl:JsonlSink.write_part@after",
]


def corpus(folder: Path, edited=(), form="parquet"):
    for name, numbers in (("a", range(40)), ("b", range(40, DOCUMENTS))):
        more = {n: {"text": f"An edited text about harbour {n}, long enough to be summarized again."} for n in edited}
        write_jsonl(folder / f"in/{name}.jsonl", [record(n, **more.get(n, {})) for n in numbers])
    output = {"dir": str(folder / "out"), "format": form}
    return write_job(folder, [folder / "in/*.jsonl"], checkpoint={"rows": 7}, output=output)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, monkeypatch_module):
    """Rows of plain runs: of the corpus, and of the corpus with two documents edited and file b gone; by format."""
    found = {}
    for form in FORMATS:
        monkeypatch_module.chdir(tmp_path_factory.mktemp("undisturbed"))
        assert start(corpus(Path(), form=form)).exit_status == 0
        first = rows(Path("out"))
        corpus(Path(), edited=[3, 17], form=form)
        Path("in/b.jsonl").unlink()
        assert start(Path("job.yaml")).exit_status == 0
        found[form] = first, rows(Path("out"))
    return found


@pytest.mark.parametrize(
    ("form", "point", "nth"),
    [
        *(("parquet", point, 1) for point in ONCE),
        *(("parquet", point, nth) for point in OFTEN for nth in (1, 3, 6)),
        # run.json and plan.json are written before the parts: these are inside of and between parts.
        *(("jsonl", point, nth) for point in JSONL for nth in (3, 6, 7, 8)),
    ],
)
def test_killed_at_a_named_point(tmp_path, monkeypatch, undisturbed, form, point, nth):
    monkeypatch.chdir(tmp_path)
    corpus(Path(), form=form)
    assert killed(point, nth)
    committed = rows(Path("out"))
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(Path("out"))
    assert [row for row in now if row in committed] == committed  # no committed row changed
    same_rows(now, undisturbed[form][0])
    assert not list(Path("out").rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("form", "point", "nth"),
    [
        *(("parquet", f"batchgen.sinks.parquet:ParquetSink._write@{when}", nth) for when in STEPS for nth in (1, 2, 3)),
        *(("jsonl", f"batchgen.sinks.jsonl:JsonlSink._write@{when}", 2) for when in STEPS),
        *(("jsonl", f"batchgen.fsio:remove@{when}", nth) for when in STEPS for nth in (1, 2)),
        *(("jsonl", "batchgen.fsio:write_atomic@after", nth) for nth in (4, 5, 6, 7, 8)),
    ],
)
def test_killed_while_rows_are_replaced_and_moved(tmp_path, monkeypatch, undisturbed, form, point, nth):
    monkeypatch.chdir(tmp_path)
    corpus(Path(), form=form)
    start(Path("job.yaml"))
    corpus(Path(), edited=[3, 17], form=form)
    Path("in/b.jsonl").unlink()
    assert killed(point, nth)
    assert start(Path("job.yaml")).exit_status == 0
    same_rows(rows(Path("out")), undisturbed[form][1])
    sink = open_sink(form, owner="00000")
    orphans = [row["id"] for path in Path("out/orphans").glob("part-*") for row in sink.rows(path)]
    assert sorted(orphans) == sorted(f"d{n}" for n in range(40, DOCUMENTS))
    assert not list(Path("out").rglob(".tmp-*"))


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
    form = FORMATS[seed % 2]
    corpus(Path(), form=form)
    print(f"seed {seed}")
    slow = "engine: {backend: fake, args: {max_model_len: 2048, max_num_seqs: 4}, fake: {docs_per_s: 80}}\n"
    text = Path("job.yaml").read_text()
    Path("slow.yaml").write_text(text[: text.index("engine:")] + slow + text[text.index("sampling:") :])
    random_kills(Path("slow.yaml"), seed)
    committed = rows(Path("out"))
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(Path("out"))
    assert [row for row in now if row in committed] == committed
    same_rows(now, undisturbed[form][0])
