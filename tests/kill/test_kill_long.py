"""A run with long documents that is killed: finished pieces of unfinished documents are not asked for again."""

import gc
import json
import os
import random
import signal
from pathlib import Path

import pytest
from helpers_kill import WHEN, clean, killed
from helpers_run import rows, same_rows, start, write_job, write_jsonl
from killed_child import Cue, status_of, talk

from batchgen.engines.fake import FakeEngine

SENTENCE = "On day {n} the harbour board agreed to repair {m} metres of quay wall before the winter comes. "
PIECES = Path("out/pieces/answers-00000.jsonl")
DOCUMENTS = 12
POLICIES = ["map_reduce", "refine"]


def tell_and_die():
    """Write down what the engine has read so far, then die like a process that is killed."""
    engine = next(one for one in gc.get_objects() if isinstance(one, FakeEngine))
    Path("spent.txt").write_text(f"{engine._completed} {engine._prompt_tokens}")
    os.kill(os.getpid(), signal.SIGKILL)


def long_job(folder=Path(), *, policy, documents=DOCUMENTS, speed=None, interval_s=0.03, sentences=250):
    """Some documents of a dozen pieces, with short ones among them."""
    texts = ["".join(SENTENCE.format(n=n, m=m) for m in range(sentences)) for n in range(documents)]
    texts[3::4] = [text[:900] for text in texts[3::4]]
    docs = [{"id": f"d{n}", "title": "T", "text": text} for n, text in enumerate(texts)]
    write_jsonl(folder / "in/a.jsonl", docs)
    return write_job(
        folder,
        ["in/a.jsonl"],
        engine={
            "backend": "fake",
            "args": {"max_model_len": 2048, "max_num_seqs": 8},
            "fake": {} if speed is None else {"docs_per_s": speed},
        },
        checkpoint={"interval_s": interval_s},
        long_documents={"policy": policy},
        output={"dir": "out"},
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory, monkeypatch_module):
    """The report and the rows of runs that nobody disturbed."""
    found = {}
    for policy in POLICIES:
        monkeypatch_module.chdir(tmp_path_factory.mktemp("calm"))
        found[policy] = start(long_job(policy=policy)).report, rows(Path("out"))
        assert not PIECES.parent.exists()
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_killed_at_80_percent_it_spends_at_most_a_tenth_more(tmp_path, monkeypatch, calm, policy):
    monkeypatch.chdir(tmp_path)
    report, wanted = calm[policy]
    requests, tokens = report["attempt"]["requests"], report["attempt"]["tokens"]["prompt"]
    long_job(policy=policy, speed=requests / 2)  # two seconds of work
    point = "batchgen.engines.fake:FakeEngine._generate@before"
    assert status_of(tmp_path, "run", "job.yaml", cues=(Cue(point, requests * 8 // 10, tell_and_die),)) < 0, talk(
        tmp_path
    )
    completed, spent = map(int, Path("spent.txt").read_text().split())
    assert completed == requests * 8 // 10 - 1
    assert PIECES.exists()
    resumed = start(Path("job.yaml")).report["attempt"]["tokens"]["prompt"]
    assert spent + resumed <= 1.1 * tokens
    same_rows(rows(Path("out")), wanted, but=WHEN)
    clean(Path("out"))
    assert not PIECES.parent.exists()


STEPS = ["before", "after"]
PLACES = [
    *((f"batchgen.fsio:Path.replace@{when}=answers-00000.jsonl", nth) for when in STEPS for nth in (1, 3)),
    *((f"batchgen.storage.checkpoint:Committer.commit@{when}", nth) for when in STEPS for nth in (2, 5)),
    *((f"batchgen.storage.kept_answers:KeptAnswers.write@{when}", nth) for when in STEPS for nth in (2, 6)),
    ("batchgen.storage.kept_answers:KeptAnswers.keep@after", 9),
    ("batchgen.storage.kept_answers:KeptAnswers.forget@after", 2),
    ("batchgen.engines.fake:FakeEngine.poll@before", 9),
    ("batchgen.executors.ending:Ending.settle@before", 1),
    ("batchgen.storage.rundir:RunDirectory.remove_pieces@before", 1),
    ("batchgen.storage.rundir:RunDirectory.remove_pieces@after", 1),
    ("batchgen.reporting.report:write@before", 1),
]


# Each place for every change under one of the two policies, in turn; under the other one it is long.
@pytest.mark.parametrize(
    ("policy", "point", "nth"),
    [
        pytest.param(policy, *place, marks=[pytest.mark.long] if (n + m) % 2 else [])
        for n, place in enumerate(PLACES)
        for m, policy in enumerate(POLICIES)
    ],
)
def test_killed_at_a_named_point(tmp_path, monkeypatch, calm, policy, point, nth):
    monkeypatch.chdir(tmp_path)
    long_job(policy=policy, interval_s=1e-9)
    assert killed(point, nth)
    before = rows(Path("out"))
    assert start(Path("job.yaml")).exit_status == 0
    now = rows(Path("out"))
    same_rows(now, calm[policy][1], but=WHEN)
    assert [row for row in now if row in before] == before
    clean(Path("out"))
    assert not PIECES.parent.exists()


@pytest.mark.parametrize("policy", POLICIES)
def test_killed_again_and_again_it_comes_to_its_end(tmp_path, monkeypatch, calm, policy):
    """Each start finishes some pieces only, fewer than a document has."""
    monkeypatch.chdir(tmp_path)
    dice = random.Random(0)
    long_job(policy=policy, documents=2, interval_s=1e-9)
    starts = 0
    while killed("batchgen.storage.kept_answers:KeptAnswers.write@after", dice.choice((1, 2, 3))):
        starts += 1
        assert starts < 60
    assert starts > 2
    same_rows(rows(Path("out")), [row for row in calm[policy][1] if row["id"] in ("d0", "d1")], but=WHEN)


def half_done(policy="map_reduce"):
    """A run in the working directory that was killed with some pieces of a document done."""
    job = long_job(policy=policy, documents=1)
    assert killed(
        "batchgen.storage.kept_answers:KeptAnswers.write@after", 4, "--set", "checkpoint.interval_s=0.000000001"
    )
    assert PIECES.exists()
    assert not rows(Path("out"))
    return job


def test_a_damaged_file_is_ignored_and_told(tmp_path, monkeypatch, calm, caplog):
    monkeypatch.chdir(tmp_path)
    job = half_done()
    data = PIECES.read_bytes()
    PIECES.write_bytes(data.replace(b"day 0", b"day 9"))
    whole = calm["map_reduce"][1]
    assert start(job).report["attempt"]["requests"] == next(row["requests"] for row in whole if row["id"] == "d0")
    assert "damaged (another checksum), ignored; the pieces in it are asked again" in caplog.text
    same_rows(rows(Path("out")), [row for row in whole if row["id"] == "d0"], but=WHEN)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]\n", b'{"blake2b": 1}\n', b"\xff\xfe", b"null\n{}"])
def test_a_file_that_is_none_is_ignored(tmp_path, monkeypatch, caplog, data):
    monkeypatch.chdir(tmp_path)
    job = half_done()
    PIECES.write_bytes(data)
    assert start(job).exit_status == 0
    assert "damaged" in caplog.text


def test_other_settings_use_none_of_it(tmp_path, monkeypatch, calm):
    monkeypatch.chdir(tmp_path)
    job = half_done()
    outcome = start(job, "sampling.temperature=0.5", on_change="keep")
    whole = next(row for row in calm["map_reduce"][1] if row["id"] == "d0")
    assert outcome.report["attempt"]["requests"] == whole["requests"]


def test_an_edited_document_uses_none_of_its_old_pieces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = half_done()
    one = json.loads(Path("in/a.jsonl").read_text())
    write_jsonl(Path("in/a.jsonl"), [one | {"text": one["text"].replace("harbour", "library")}])
    found = start(job).report
    (row,) = rows(Path("out"))
    assert found["attempt"]["requests"] == row["requests"]


def test_a_finished_part_wins_over_pieces(tmp_path, monkeypatch, calm):
    """What lies in pieces/ of a document that has its row is never looked at."""
    monkeypatch.chdir(tmp_path)
    job = half_done()
    data = PIECES.read_bytes()
    start(job)
    PIECES.parent.mkdir()
    PIECES.write_bytes(data)
    before = rows(Path("out"))
    assert start(job).report["attempt"]["requests"] == 0
    assert rows(Path("out")) == before
    assert not PIECES.exists()
