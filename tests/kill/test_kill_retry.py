"""A retry of failed documents that is killed anywhere: the same command goes on, and one row is left of each."""

import json
import random
from pathlib import Path

import pytest
from helpers_kill import killed
from helpers_run import record, rows, same_rows, start, write_job, write_jsonl

DOCUMENTS = 40
FAILED = [3, *range(30, 40)]  # "day 3"
FORMATS = ["parquet", "jsonl"]
FLAKY = "engine.fake.fail_on=day 3"
BUT = ("finished_at", "attempts", "cached_tokens")
STEPS = ["before", "after"]
# Three parts with new rows; then four parts of before lose their failed rows, two of them all they have.
PARQUET = [
    ("batchgen.executors.retry:Campaign.note@before", 1),
    ("batchgen.executors.retry:Campaign.note@after", 1),
    ("batchgen.storage.checkpoint:Committer.commit@after", 1),
    ("batchgen.engines.fake:FakeEngine.poll@before", 3),
    ("batchgen.storage.checkpoint:settle@before", 1),
    *((f"batchgen.sinks.parquet:ParquetSink._write@{when}", nth) for when in STEPS for nth in (4, 5)),
    ("batchgen.fsio:remove@after", 1),  # a part that held nothing but failed rows
    ("batchgen.storage.checkpoint:settle@after", 1),
    ("batchgen.executors.retry:Campaign.end@after", 1),
    ("batchgen.storage.failed:FailedList._write@before", 1),
    *((f"batchgen.fsio:Path.replace@{when}=retry-00000.json", 1) for when in STEPS),
    *((f"batchgen.fsio:Path.replace@{when}=failed.jsonl", 1) for when in STEPS),
    *((f"batchgen.fsio:remove@{when}=retry-00000.json", 1) for when in STEPS),
]
JSONL = [
    *(("batchgen.fsio:remove@after", nth) for nth in (1, 3, 4)),
    *((f"batchgen.fsio:Path.replace@{when}", 11) for when in STEPS),
    ("batchgen.fsio:Path.replace@after", 12),
]
EVERYWHERE = [
    *((f"batchgen.fsio:Path.replace@{when}", nth) for when in STEPS for nth in range(1, 13)),
    *((f"batchgen.storage.checkpoint:Committer.commit@{when}", nth) for when in STEPS for nth in (1, 2, 3)),
    *((f"batchgen.fsio:remove@{when}", nth) for when in STEPS for nth in (1, 2, 3)),
    ("batchgen.executors.retry:Campaign.begin@after", 1),
    ("batchgen.engines.fake:FakeEngine.close@before", 1),
    ("batchgen.reporting.report:write@before", 1),
]
PLACES = [  # every second one for every change
    *(
        pytest.param(form, *at, marks=[pytest.mark.long] if n % 2 else [])
        for form, places in (("parquet", PARQUET), ("jsonl", JSONL))
        for n, at in enumerate(places)
    ),
    *(pytest.param(form, *at, marks=pytest.mark.long) for form in FORMATS for at in EVERYWHERE),
]


def corpus(form):
    """The job, with a document whose record is at fault besides: its row stays, and there is a list at the end."""
    data = [record(n) for n in range(DOCUMENTS)]
    data[20]["text"] = 7
    write_jsonl(Path("in/a.jsonl"), data)
    output = {"dir": "out", "format": form}
    return write_job(Path(), ["in/*.jsonl"], checkpoint={"rows": 4}, output=output)


@pytest.fixture(scope="module")
def calm(tmp_path_factory, monkeypatch_module):
    """The rows of runs in which nothing failed but that."""
    found = {}
    for form in FORMATS:
        monkeypatch_module.chdir(tmp_path_factory.mktemp("calm"))
        start(corpus(form))
        found[form] = rows(Path("out"))
    return found


def held(found):
    """The row of each document that holds: that of the latest part, as `status` and the next start see it."""
    return {row["doc_key"]: row for row in sorted(found, key=lambda row: row["finished_at"])}


def listed():
    return [json.loads(line)["id"] for line in Path("out/failed.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("form", "point", "nth"), PLACES)
def test_killed_at_a_named_point(tmp_path, monkeypatch, calm, form, point, nth):
    monkeypatch.chdir(tmp_path)
    job = corpus(form)
    assert start(job, FLAKY).report["documents"]["failed"] == len(FAILED) + 1
    before = held(rows(Path("out")))
    assert killed(point, nth, command="retry-failed")
    now = held(rows(Path("out")))
    assert set(now) == set(before)
    assert all(now[key] == row for key, row in before.items() if row["status"] == "ok")
    if nth % 2:  # a plain run takes out what a newer row replaced, and tries nothing
        assert start(job).report["attempt"]["requests"] == 0
        assert rows(Path("out")) == sorted(now.values(), key=lambda row: row["doc_key"])
    start(job, retry=frozenset())
    same_rows(rows(Path("out")), calm[form], but=BUT)
    assert listed() == ["d20"]
    assert not list(Path("out").rglob(".tmp-*"))
    assert not list(Path("out").glob("retry-*"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_killed_again_and_again_no_document_is_tried_twice_in_vain(tmp_path, monkeypatch, calm, seed):
    """Each start of the retry is killed after a part or two, and still it comes to its end."""
    monkeypatch.chdir(tmp_path)
    dice = random.Random(seed)
    form = FORMATS[seed % 2]
    job = corpus(form)
    start(job, "engine.fake.fail_on=metres")
    starts = 1
    while killed(
        "batchgen.storage.checkpoint:Committer.commit@after",
        dice.choice((1, 2)),
        "--set",
        FLAKY,
        command="retry-failed",
    ):
        starts += 1
        assert starts < DOCUMENTS
        assert len(held(rows(Path("out")))) == DOCUMENTS
    failed = {row["id"] for row in rows(Path("out")) if row["status"] == "failed"}
    assert failed == {f"d{n}" for n in FAILED} | {"d20"}
    assert len(rows(Path("out"))) == DOCUMENTS
    start(job, retry=frozenset())
    same_rows(rows(Path("out")), calm[form], but=BUT)
