"""Memory of a run does not follow the size of its files: neither of a file, nor of a row group, nor of a line."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import rows, start, write_job

from batchgen.engines.fake import FakeEngine
from batchgen.sources import parquet

ROWS = 5_000
TEXT = ("The harbour board met and agreed to repair the quay wall before the winter comes. " * 400)[:32768]
PEAK = "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
RUN = "import sys; from batchgen.cli import cli; cli.main(['run', sys.argv[1]], standalone_mode=False)"
READ = """
import sys
from batchgen.job.config import Input
from batchgen.data import Split
from batchgen.sources.parquet import ParquetSource
source = ParquetSource(Input(path=sys.argv[1], id_field='id'), 0, sys.argv[1], frozenset(['text']))
for start, end in source.cut(begin=0, target_bytes=1 << 40):
    assert sum(1 for _ in source.read(Split(0, 0, sys.argv[1], start, end))) >= 0
"""


def peak_mib(code: str, argument: Path) -> float:
    """Peak memory (VmHWM) of a child that runs the code; ru_maxrss would begin with the parent's."""
    child = subprocess.run(
        [sys.executable, "-c", f"{code}\n{PEAK}", str(argument)], capture_output=True, text=True, timeout=100
    )
    assert child.returncode == 0, child.stderr
    return int(child.stdout.split()[-1]) / 1024


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One row group of 164 MB of text in 60 kB, again as a second file, and none."""
    folder = tmp_path_factory.mktemp("memory")
    table = pa.table({"id": [f"d{n}" for n in range(ROWS)], "text": [TEXT] * ROWS})
    for name, number in (("one", 0), ("two", ROWS)):
        ids = pa.array([f"d{n + number}" for n in range(ROWS)])
        pq.write_table(table.set_column(0, "id", ids), folder / f"{name}.parquet", row_group_size=ROWS)
    pq.write_table(table.slice(0, 0), folder / "none.parquet")
    assert (folder / "one.parquet").stat().st_size < 200_000
    return folder


def job_of(folder: Path, name: str, files) -> Path:
    (folder / name).mkdir()
    return write_job(
        folder / name,
        [{"path": str(file), "id_field": "id"} for file in files],
        prompt={"user": "{{ text }}"},
        engine={"backend": "fake", "args": {"max_model_len": 256, "max_num_seqs": 64}},
    )


def test_a_row_group_is_not_held_in_memory(tmp_path, files):
    """apache/arrow#39808"""
    # report.html of an empty run has no plot, so its process has no matplotlib.
    plots = "from matplotlib.backends import backend_svg\n"
    empty = peak_mib(plots + RUN, job_of(tmp_path, "empty", [files / "none.parquet"]))
    one = peak_mib(RUN, job_of(tmp_path, "first", [files / "one.parquet"]))
    assert len(rows(tmp_path / "first/out")) == ROWS
    assert one - empty < 140  # the row group is 164 MB, and a process with plots is more than its imports
    both = peak_mib(RUN, job_of(tmp_path, "both", [files / "one.parquet", files / "two.parquet"]))
    assert len(rows(tmp_path / "both/out")) == 2 * ROWS
    assert both - one < 20


def test_the_source_alone_holds_a_few_rows_and_the_pages_they_lie_in(files, tmp_path):
    """Repeated texts, which pages hold once, and texts of their own, which are the size of the row group."""
    own = tmp_path / "own.parquet"
    count = 4 * ROWS
    texts = [f"{n} {TEXT[:8192]}" for n in range(count)]
    pq.write_table(pa.table({"id": list(range(count)), "text": texts}), own, row_group_size=count, compression=None)
    assert own.stat().st_size > 160_000_000
    empty = peak_mib(READ, files / "none.parquet")
    assert peak_mib(READ, files / "one.parquet") - empty < 40
    assert peak_mib(READ, own) - empty < 60


def test_the_first_document_reaches_the_engine_before_the_last_is_decoded(tmp_path, files, monkeypatch):
    decoded, at_first = [0], []

    def count(batch, original=parquet._records):
        decoded[0] += batch.num_rows
        return original(batch)

    def submit(self, request, original=FakeEngine.submit):
        at_first.append(decoded[0])
        return original(self, request)

    monkeypatch.setattr(parquet, "_records", count)
    monkeypatch.setattr(FakeEngine, "submit", submit)
    outcome = start(job_of(tmp_path, "run", [files / "one.parquet"]), limit=1250)
    assert outcome.report["documents"]["ok"] == 1250
    assert at_first[0] < 625


def test_a_line_that_is_too_long_is_not_held_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.truncate(200 << 20)  # NULs, none of them on disk
        stream.seek(0, 2)
        stream.write(b'\n{"id": "d0", "text": "%s"}\n' % TEXT.encode())
    empty = peak_mib(RUN, job_of(tmp_path, "empty", [write_empty(tmp_path)]))
    code = RUN.replace("; cli", "; from batchgen.sources import streams; streams.MAX_LINE_BYTES = 1 << 20; cli", 1)
    assert "MAX_LINE_BYTES" in code
    job = job_of(tmp_path, "long", [path])
    assert peak_mib(code.replace("cli.main", "\ntry: cli.main", 1) + "\nexcept SystemExit: pass", job) - empty < 60
    found = {row["status"]: row for row in rows(tmp_path / "long/out")}
    assert found["failed"]["error_type"] == "record_too_large"
    assert found["failed"]["error"].startswith(f"line 1: the line has {(200 << 20) + 1:,} bytes")
    assert found["ok"]["id"] == "d0"
    assert json.loads((tmp_path / "long/out/report.json").read_text())["exit_status"] == 3


def write_empty(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.write_bytes(b"")
    return path
