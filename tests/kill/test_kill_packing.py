"""A run of packs that is killed anywhere: no document is lost, no committed row is made again, and packs go on."""

import json
import random
from pathlib import Path

import pytest
from helpers_kill import clean, killed, still_there
from helpers_packs import number, text_of
from helpers_run import rows, start, write_job, write_jsonl

DOCUMENTS = 41
# The fourth pack is wrong: its documents are on their way alone when the later kills come.
SPOILT = json.dumps([{"match": "4621 metres", "text": "[]"}])
PLACES = [
    ("batchgen.engines.fake:FakeEngine.submit@before", 3),
    ("batchgen.engines.fake:FakeEngine.poll@before", 2),
    ("batchgen.engines.fake:FakeEngine.poll@after", 3),
    *(
        (f"batchgen.workflows.packed:PackedWorkflow._unpack@{when}", nth)
        for when in ("before", "after")
        for nth in (1, 5)
    ),
    *((f"batchgen.storage.checkpoint:Committer.commit@{when}", nth) for when in ("before", "after") for nth in (1, 3)),
    *((f"batchgen.fsio:Path.replace@{when}=run.json", nth) for when in ("before", "after") for nth in (1, 2)),
]


def corpus(mode, form="parquet"):
    write_jsonl(Path("in/a.jsonl"), [{"id": f"d{n}", "text": text_of(n)} for n in range(DOCUMENTS)])
    return write_job(
        Path(),
        [{"path": "in/a.jsonl", "id_field": "id"}],
        prompt={"system": "You write summaries.", "user": "{{ text }}"},
        packing={"mode": mode, "max_documents": 4},
        engine={
            "backend": "fake",
            "args": {"max_model_len": 8192, "max_num_seqs": 2},
            "fake": {"answers": json.loads(SPOILT) if mode == "on" else []},
        },
        sampling={"max_tokens": 300},
        checkpoint={"rows": 4},
        output={"dir": "out", "format": form},
    )


def finish(job):
    """Start it again: what is left is done and nothing else, in packs of what is left."""
    before = rows(Path("out"))
    report = start(job).report
    now = rows(Path("out"))
    still_there(before, now, now)
    assert sorted(row["id"] for row in now) == sorted(f"d{n}" for n in range(DOCUMENTS))
    assert report["attempt"]["documents"]["ok"] == DOCUMENTS - len(before)
    for row in now:
        n = int(row["id"][1:])
        if row["pack_size"] > 1:
            assert [m for m in range(DOCUMENTS) if str(number(m)) in row["summary"]] == [n]
    clean(Path("out"))
    return before, report


@pytest.mark.parametrize(("point", "nth"), PLACES)
def test_killed_at_a_named_point(tmp_path, monkeypatch, point, nth):
    monkeypatch.chdir(tmp_path)
    job = corpus("on")
    assert killed(point, nth)
    before, report = finish(job)
    assert report["attempt"]["packs"] >= (DOCUMENTS - len(before)) // 4 - 1
    assert report["packing"]["fallbacks"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["on", "auto"])
def test_killed_again_and_again(tmp_path, monkeypatch, mode, seed):
    monkeypatch.chdir(tmp_path)
    dice = random.Random(seed)
    job = corpus(mode, ["parquet", "jsonl"][seed])
    for _ in range(6):
        before = rows(Path("out")) if Path("out/summaries").exists() else []
        if not killed("batchgen.engines.fake:FakeEngine.poll@after", dice.randint(1, 4)):
            break
        still_there(before, rows(Path("out")), rows(Path("out")))
    finish(job)
