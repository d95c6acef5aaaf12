"""Files that end in the middle of something: torn in a character, without a line end, glued together, full of NUL.

The fault is that of can1357/oh-my-pi#8596, NousResearch/hermes-agent#112575, verifywise-ai/verifywise#3478 and
PrimeIntellect-ai/verifiers#1376: the next record is glued to the torn one, and both are lost.
"""

import contextlib
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from helpers_kill import scratch
from helpers_run import by_id, record, rows, same_rows, start, write_job, write_jsonl
from killed_child import Cue, status_of, talk

from batchgen.fsio import open_append
from batchgen.reporting.stats import Telemetry, read_telemetry

DOCUMENTS = 40
ONE, TWO = '{"event": "a", "text": "Café 港"}\n'.encode(), b'{"event": "b"}\n'
TORN = ONE[: ONE.index("港".encode()) + 1]  # in the middle of a character
TAILS = {
    "torn in a character": (ONE + TORN, ["a"], len(ONE)),
    "no line end": (ONE + TWO[:-1], ["a", "b"], None),
    "glued together": (ONE + TORN + TWO, ["a"], None),
    "NUL at the end": (ONE + TWO + bytes(4096), ["a", "b"], len(ONE + TWO)),
    "NUL after a torn line": (ONE + TORN + bytes(70_000), ["a"], len(ONE)),
    "NUL after a whole one": (ONE + TWO[:-1] + bytes(7), ["a", "b"], len(ONE + TWO) - 1),
    "nothing but NUL": (bytes(300), [], 0),
    "one torn line": (TORN, [], 0),
}


@pytest.mark.parametrize("name", TAILS)
def test_what_is_appended_stands_on_lines_of_its_own(tmp_path, name, caplog):
    data, before, cut_at = TAILS[name]
    path = tmp_path / "telemetry-00000-00001.jsonl"
    path.write_bytes(data)
    telemetry = Telemetry(path, attempt=1)
    with caplog.at_level("WARNING", "batchgen"):
        telemetry.event("commit")
        telemetry.event("end")
    telemetry._stream.close()
    assert [one["event"] for one in read_telemetry(path)] == [*before, "start", "commit", "end"]
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert all(line.count(b'"event"') == 1 for line in lines) or name == "glued together"
    told = [one.getMessage() for one in caplog.records]
    if cut_at is None:
        assert told == []
    else:
        assert told == [f"{path}: its last line was torn: cut back to byte {cut_at}, {len(data) - cut_at} bytes less"]


@pytest.mark.parametrize("name", TAILS)
def test_a_log_keeps_its_torn_line_and_gets_its_line_end(tmp_path, name):
    path = tmp_path / "engine.log"
    path.write_bytes(TAILS[name][0])
    with open_append(path, records=False) as stream:
        stream.write("next\n")
    whole = TAILS[name][0].rstrip(b"\0")
    assert path.read_bytes() == whole + (b"\n" if whole and not whole.endswith(b"\n") else b"") + b"next\n"


@pytest.mark.parametrize("name", TAILS)
def test_the_events_around_a_torn_line_are_read(tmp_path, name):
    path = tmp_path / "t.jsonl"
    path.write_bytes(TAILS[name][0] + b"\n" + TWO)
    before = ["a"] if name == "NUL after a whole one" else TAILS[name][1]
    assert [one["event"] for one in read_telemetry(path)] == [*before, "b"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found = {}
    for form in ("parquet", "jsonl"):
        with contextlib.chdir(tmp_path_factory.mktemp("undisturbed")):
            start(job_of(Path(), form))
            found[form] = rows(Path("out"))
    return found


def job_of(folder, form):
    write_jsonl(folder / "a.jsonl", [record(n, title=f"Café 港 {n}") for n in range(DOCUMENTS)])
    return write_job(folder, [folder / "a.jsonl"], output={"dir": "out", "format": form}, checkpoint={"rows": 3})


@pytest.mark.parametrize("times", [12, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_files_cut_anywhere_cost_no_row(tmp_path, monkeypatch, undisturbed, form, times):
    """A start that ends early; then the newest part, footer or telemetry loses its end or gets NULs."""
    monkeypatch.chdir(tmp_path)
    job = job_of(Path(), form)
    start(job, limit=25)
    Path("out").rename("left")
    dice = random.Random(7)
    set_aside = 0
    for _ in range(times):
        shutil.rmtree("out", ignore_errors=True)
        shutil.copytree("left", "out")
        part = max(Path("out/summaries").glob("part-*"))
        victim = dice.choice([part, part, *Path("out/summaries").glob(f".{part.stem}*"), *Path("out").glob("telem*")])
        cut = dice.randrange(200)
        whole = victim.read_bytes()
        victim.write_bytes(whole[: len(whole) - cut] + bytes(dice.choice([0, 0, cut])))
        outcome = start(job)
        print(f"{victim}: {cut} bytes")
        assert outcome.exit_status == 0
        assert len(by_id(Path("out"))) == DOCUMENTS
        same_rows(rows(Path("out")), undisturbed[form])
        for path in Path("out/summaries").glob("*.jsonl"):
            assert all(json.loads(line)["doc_key"] for line in path.read_bytes().split(b"\n")[:-1])
        told = outcome.report["notes"]["damaged parts"]
        assert len(told) == (cut > 0 and victim == part)
        set_aside += len(told)
        if told:
            assert told[0].startswith(f"{part.name}: ")
            assert form == "parquet" or re.search(r"at byte \d+", told[0])
            assert (Path("out/damaged") / part.name).exists()
    assert set_aside > times / 5


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 100))])
def test_a_run_killed_anywhere_whose_newest_file_is_cut_loses_and_doubles_no_id(monkeypatch, undisturbed, seed):
    """Parts, their footers and telemetry alike; 0 to 200 bytes are gone."""
    dice = random.Random(seed)
    form = dice.choice(["parquet", "jsonl", "jsonl"])
    with scratch() as folder:
        monkeypatch.chdir(folder)
        job = job_of(Path(), form)
        cue = Cue("lines:checkpoint,feed,fsio,jsonl,parquet,stats", dice.randrange(1, 6000))
        assert status_of(folder, "run", job, cues=(cue,)) in (0, -9), talk(folder)
        files = [*Path("out/summaries").glob("*part*"), *Path("out").glob("telemetry-*"), *Path("out/logs").glob("*")]
        print(f"seed {seed}: {form}, {cue}")
        victim = max(files, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
        if victim is not None and (size := victim.stat().st_size):
            cut = dice.randrange(201)
            print(f"{victim}: {size} bytes, {cut} less")
            with victim.open("r+b") as stream:
                stream.truncate(max(0, size - cut))
        outcome = start(job)
        assert outcome.exit_status == 0
        assert len(by_id(Path("out"))) == DOCUMENTS
        same_rows(rows(Path("out")), undisturbed[form])
        for path in [*Path("out/summaries").glob("part-*.jsonl"), *Path("out").glob("telemetry-*-00002.jsonl")]:
            assert all(isinstance(json.loads(line), dict) for line in path.read_bytes().split(b"\n")[:-1])
        for sentence in outcome.report["notes"]["damaged parts"]:
            assert sentence.startswith(f"{victim.name}: ")
            assert form == "parquet" or re.search(r"at byte \d+|it is empty|SHA-256", sentence)
            assert (Path("out/damaged") / victim.name).exists()
