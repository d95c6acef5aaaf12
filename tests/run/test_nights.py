"""A job with a glob, started each night: what is done is not opened again, whoever did it, and new files are."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_run import start, write_job

from batchgen import plan, sinks
from batchgen.data import Record
from batchgen.executors import identity
from batchgen.executors.checking import check
from batchgen.fingerprint import digest
from batchgen.job import jobfile
from batchgen.shards import Shard
from batchgen.sources import jsonl, open_source
from batchgen.storage.checkpoint import Committer
from batchgen.storage.rundir import RunDirectory

TEXT = "The harbour board met and agreed to repair all of the quay wall before the winter. Minutes of meeting "
NEW = 10
# Starts the command line, and prints which input files it has opened.
CHILD = """
import json, os, sys
opened = set()
def met(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and os.fspath(args[0]).endswith(".jsonl"):
        opened.add(os.path.basename(args[0]))
sys.addaudithook(met)
from batchgen.cli import cli
status = cli.main(sys.argv[1:], standalone_mode=False)
print(json.dumps([status, sorted(name for name in opened if name.startswith("night"))]))
"""


def write_night(folder: Path, number: int, each: int) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"night-{number:05d}.jsonl").open("w") as stream:
        stream.writelines(
            json.dumps({"id": f"{number}-{n}", "title": "T", "text": f"{TEXT}{number}-{n}"}) + "\n" for n in range(each)
        )


def all_done(folder: Path, *, files: int, each: int) -> Path:
    """A job whose documents all have their row, as its run would have left it; no engine is waited for."""
    for number in range(files):
        write_night(folder / "in", number, each)
    path = write_job(folder, [str(folder / "in/*.jsonl")])
    checked = check(jobfile.load(path, ()))
    with RunDirectory(checked.job.output.path) as run:
        identity.settle(checked, run, fresh=False, on_change="refuse")
        made = plan.make(checked.job, run)
        sink = sinks.open_sink("parquet", kept=made.kept(checked.job), owner=run.owner)
        run.telemetry(1).touch()
        committer = Committer(
            checked.job, run, sink, digest(checked.fingerprint), 1, {file.source: file for file in made.files},
            layout=made.layout,
        )  # fmt: skip
        for file in made.files:
            for split in (one for one in made.splits if one.source == file.source):
                for one in open_source(checked.job, 0, split.source).read(split):
                    committer.read(one, waiting=True)
                    committer.add([Record(one, "ok", summary="S", prompt_tokens=9, completion_tokens=2, requests=1)])
            committer.ended(file.source)
            if committer.due:
                committer.commit()
        committer.commit()
    return path


def run(path: Path, *words: str) -> tuple[list[str], float]:
    """(names of the input files that the start opened, seconds of processor time that it took)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "run", str(path), *words], capture_output=True, text=True, timeout=100
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, opened = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return opened, (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("files", "each"), [(40, 25), pytest.param(2000, 500, marks=pytest.mark.long, id="a million documents")]
)
def test_only_the_files_of_this_night_are_opened(tmp_path, files, each):
    """A million documents take five seconds; of the processor, since others may share the machine."""
    path = all_done(tmp_path, files=files, each=each)
    opened, seconds = run(path)
    assert opened == []
    assert seconds < 5
    for number in range(files, files + NEW):
        write_night(tmp_path / "in", number, 3)
    opened, _ = run(path)
    assert opened == [f"night-{number:05d}.jsonl" for number in range(files, files + NEW)]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["documents"]["ok"] == files * each + NEW * 3
    assert report["attempt"]["documents"]["ok"] == NEW * 3


@pytest.fixture
def opened(monkeypatch):
    """Names of the input files that the start given here opens."""
    names: set[str] = set()

    def watched(original):
        return lambda path, *rest, **options: names.add(Path(path).name) or original(path, *rest, **options)

    monkeypatch.setattr(jsonl, "open_stream", watched(jsonl.open_stream))
    monkeypatch.setattr(plan, "digest_before", watched(plan.digest_before))

    def get(path, number, count):
        names.clear()
        assert start(path, shard=Shard(number, count)).exit_status == 0
        return set(names)

    return get


def test_shards_open_the_new_files_of_their_shares_and_a_start_over_all_opens_none(tmp_path, opened):
    for number in range(12):
        write_night(tmp_path / "in", number, 4)
    path = write_job(tmp_path, [str(tmp_path / "in/*.jsonl")])
    for number in range(3):
        opened(path, number, 3)
    for number in range(12, 18):
        write_night(tmp_path / "in", number, 4)
    new = {f"night-{number:05d}.jsonl" for number in range(12, 18)}
    first, *others = (opened(path, number, 3) for number in range(3))
    assert first == new  # it plans them, and does its share
    assert set.union(*others) < new
    assert not set.intersection(*others)
    for count in (3, 1, 2):
        assert [opened(path, number, count) for number in range(count)] == [set()] * count
