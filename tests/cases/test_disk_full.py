"""Output that cannot be written: full disks, folders that vanish or are read-only (sirepo#1422, h2o-llmstudio#214)."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

from batchgen import fsio
from batchgen.errors import OutputError
from batchgen.sinks.parquet import ParquetSink

TEXT = "Page {n}: " + "the county recorded the tide at the bridge and paid the keeper for another month. " * 20


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB, as the output folder's parent."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def kept_job(tmp_path, out, count):
    """Rows that fill a disk: each keeps its whole random text."""
    records = [record(n, text=TEXT.format(n=n), blob=os.urandom(1500).hex()) for n in range(count)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    inputs = [{"path": str(path), "id_field": "id", "keep": ["title", "blob"]}]
    return write_job(tmp_path, inputs, output={"dir": str(out)}, checkpoint={"rows": 50})


def test_a_full_disk_ends_with_74_and_the_same_command_goes_on(tmp_path, small_disk):
    out = small_disk / "out"
    job = kept_job(tmp_path, out, 1500)
    full = command("run", job)
    assert full.returncode == 74, full.stderr
    last = full.stderr.strip().splitlines()[-1]
    assert "No space left on device" in last
    assert str(out) in last
    assert "bytes are free there" in last
    committed = rows(out)
    assert 0 < len(committed) < 1500
    assert not list(out.rglob(".tmp-*"))
    again = command("run", job)
    assert again.returncode == 74
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = command("run", job)
    assert done.returncode == 0, done.stderr
    assert len(by_id(out)) == 1500
    assert [row for row in rows(out) if row in committed] == committed


def test_the_report_of_before_survives_a_write_that_fails(tmp_path, out, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    start(job)
    before = (out / "report.json").read_bytes()
    write_jsonl(tmp_path / "a.jsonl", map(record, range(8)))
    original = os.fsync

    def fail(descriptor):
        if "report.json" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        original(descriptor)

    monkeypatch.setattr(fsio.os, "fsync", fail)
    with pytest.raises(OutputError, match=r"report\.json.*Disk quota exceeded"):
        start(job)
    assert (out / "report.json").read_bytes() == before
    assert json.loads(before)["documents"]["ok"] == 5
    assert len(by_id(out)) == 8


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_no_step_of_a_write_can_fail_unseen(tmp_path, out, monkeypatch, step):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(20)))], checkpoint={"rows": 5})
    calls = []

    def fail(original):
        def call(*args, **more):
            if "part-" in str(args) or step == "fsync":
                calls.append(args)
            if len(calls) == 3:
                raise OSError(errno.EIO, "Input/output error")
            return original(*args, **more)

        return call

    with monkeypatch.context() as patched:
        if step == "write":
            patched.setattr(ParquetSink, "_write", failing_write(ParquetSink._write))
        elif step == "fsync":
            patched.setattr(fsio.os, "fsync", fail(os.fsync))
        else:
            patched.setattr(fsio.Path, "replace", fail(fsio.Path.replace))
        with suppress(OutputError):  # where it comes so early that nothing was begun, or at the very end
            assert start(job).exit_status == 74
    before = rows(out)
    assert start(job).exit_status == 0
    assert len(by_id(out)) == 20
    assert [row for row in rows(out) if row in before] == before


def failing_write(original):
    count = []

    def call(self, path, *args):
        count.append(path)
        if len(count) == 2:
            raise fsio.output_error(path, OSError(errno.ENOSPC, "No space left on device"))
        return original(self, path, *args)

    return call


def test_a_folder_that_vanishes_ends_the_run_and_is_not_made_anew(tmp_path, out, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(40)))], checkpoint={"rows": 4})
    original, calls = ParquetSink.write_part, []

    def vanish_after(self, *args, **more):
        original(self, *args, **more)
        calls.append(args)
        if len(calls) == 2:
            shutil.move(out, tmp_path / "elsewhere")

    with monkeypatch.context() as patched:
        patched.setattr(ParquetSink, "write_part", vanish_after)
        with pytest.raises(OutputError, match=r"has vanished or was replaced|cannot be written"):
            raise_for(start(job))
    assert not (out / "summaries").exists()
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(tmp_path / "elsewhere", out)
    assert start(job).exit_status == 0
    assert len(by_id(out)) == 40


def raise_for(outcome):
    if outcome.exit_status == 74:
        raise OutputError(outcome.reason)


def test_a_file_system_without_locks_is_refused(tmp_path, out, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(3)))])

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OutputError, match="has no file locks"):
        start(job)
    assert rows(out) == []
