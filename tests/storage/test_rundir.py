"""The run directory: one holder at a time, names that sort, run.json, and a run moved aside."""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from batchgen import fsio
from batchgen.errors import ConfigError, LockedError, OutputError
from batchgen.shards import Shard
from batchgen.storage import rundir
from batchgen.storage.rundir import RunDirectory, shard_of

HOLDER = """
import sys
from pathlib import Path
from batchgen.storage.rundir import RunDirectory, shard_of
with RunDirectory(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "out"


@pytest.fixture
def holder(path):
    """Another process that holds the run."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert select.select([child.stdout], [], [], 60)[0]
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def test_a_run_that_another_process_holds_is_refused_with_who_it_is(path, holder):
    with pytest.raises(LockedError) as e, RunDirectory(path):
        pass
    text = str(e.value)
    assert text.startswith(f"{path}: another process holds this run: ")
    assert f"pid {holder.pid} on {socket.gethostname()} since 20" in text
    assert e.value.exit_status == 73
    assert RunDirectory(path).is_held()
    assert holder.poll() is None


def test_a_refused_start_leaves_the_holders_half_written_files_alone(path, holder):
    rest = path / "summaries" / ".tmp-00000-part-1.parquet"
    rest.parent.mkdir()
    rest.write_bytes(b"half")
    with pytest.raises(LockedError), RunDirectory(path):
        pass
    assert rest.read_bytes() == b"half"
    assert str(holder.pid) in RunDirectory(path).holder()


def test_the_lock_is_free_after_its_holder_was_killed(path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    assert holder.wait(timeout=30) == -signal.SIGKILL
    assert not RunDirectory(path).is_held()
    with RunDirectory(path) as run:
        assert f"pid {os.getpid()} " in run.holder()


def test_the_lock_is_free_after_its_holder_ended(path, holder):
    holder.stdin.close()
    assert holder.wait(timeout=30) == 0
    assert RunDirectory(path).holder() is None
    with RunDirectory(path) as run:
        assert run.is_held()


def test_a_second_start_in_the_same_process_is_refused_too(path):
    with RunDirectory(path):
        with pytest.raises(LockedError, match=f"pid {os.getpid()} "), RunDirectory(path):
            pass
        assert RunDirectory(path).is_held()
    assert not RunDirectory(path).is_held()
    with RunDirectory(path):
        pass


def test_a_holder_that_does_not_tell_its_name_is_said_to_be_starting(path, monkeypatch):
    monkeypatch.setattr(rundir, "_TELLING_S", 0.1)
    with RunDirectory(path) as run:
        (told,) = (path / "locks").glob("*.json")
        told.write_text("{")
        assert run.holder() is None
        with pytest.raises(LockedError, match="just starting"), RunDirectory(path):
            pass


def test_a_name_that_a_killed_holder_left_is_not_taken_for_the_holders(path, holder):
    (told,) = (path / "locks").glob("*.json")
    own = told.read_text()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    told.write_text(json.dumps(json.loads(own) | {"pid": ended.pid}))
    later = threading.Timer(0.5, told.write_text, [own])
    later.start()
    with pytest.raises(LockedError, match=f"pid {holder.pid} "), RunDirectory(path):
        pass
    later.join()


def test_a_lock_that_another_start_moved_aside_is_not_ours(path, monkeypatch):
    """It was opened in the old folder, and is free only once the other holds the new one."""
    other = RunDirectory(path)
    other.__enter__()

    def acquire(lock, original=FileLock.acquire):
        if lock.lock_file.endswith("gate.lock"):
            original(lock)
            return
        monkeypatch.undo()
        other.set_aside()

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(LockedError, match=f"pid {os.getpid()} "), RunDirectory(path):
        pass
    assert other.is_held()
    other.__exit__(None, None, None)


def test_a_look_at_a_run_takes_no_lock_and_makes_no_folder(path):
    assert not RunDirectory(path).is_held()
    assert RunDirectory(path).holder() is None
    assert not path.exists()


def test_an_error_inside_frees_the_lock(path):
    with pytest.raises(ZeroDivisionError), RunDirectory(path):
        raise ZeroDivisionError
    assert not RunDirectory(path).is_held()


def test_a_start_clears_its_own_half_written_files_and_no_others(path):
    names = [".tmp-00000-part", ".tmp-00001-part", "run.json"]
    for folder in (path, path / "summaries", path / "orphans"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).write_bytes(b"")
    with RunDirectory(path):
        for folder in (path, path / "summaries", path / "orphans"):
            assert {one.name for one in folder.iterdir() if one.is_file()} == set(names[1:])


@pytest.mark.parametrize("below", ["", "out", "out/deeper"])
def test_a_directory_that_cannot_be_made_is_an_output_error(tmp_path, below):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"file/.*cannot be written"), RunDirectory(tmp_path / "file" / below):
        pass


# Shards


def test_shards_of_one_number_run_side_by_side_and_others_do_not(path):
    with RunDirectory(path, Shard(0, 3)) as first, RunDirectory(path, Shard(2, 3)) as third:
        assert [one.shard for one in first.running()] == [Shard(0, 3), Shard(2, 3)]
        assert [one.shard for one in third.others] == [Shard(0, 3)]
        for other in (Shard(), Shard(1, 2)):
            with pytest.raises(LockedError, match=r"at work in 3 shards"), RunDirectory(path, other):
                pass
    with RunDirectory(path), pytest.raises(LockedError, match="at work undivided"), RunDirectory(path, Shard(0, 3)):
        pass


def test_of_starts_with_different_numbers_at_once_one_number_wins(path):
    """Both look at the other locks before either could have its own, were there no gate."""
    path.mkdir(parents=True)
    for _ in range(20):
        ready, taken, refused = threading.Barrier(4), [], []

        def begin(shard, ready=ready, taken=taken, refused=refused):
            run = RunDirectory(path, shard)
            ready.wait()
            try:
                run.__enter__()
                taken.append(run)
            except LockedError:
                refused.append(shard)

        shards = [Shard(0, 2), Shard(1, 2), Shard(0, 3), Shard(1, 3)]
        threads = [threading.Thread(target=begin, args=(shard,)) for shard in shards]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert len({run.shard.count for run in taken}) == 1
        assert len(taken) == len(refused) == 2
        for run in taken:
            run.__exit__(None, None, None)


def test_a_start_that_tries_whether_there_are_locks_is_not_taken_for_one_at_work(path, monkeypatch):
    """It does so before the gate: a start with another number would be refused though nobody is at work."""
    run = RunDirectory(path, Shard(0, 3))
    with run:
        pass
    held = []

    def flock(stream, how):
        fcntl.flock(stream, how)
        held.append(RunDirectory(path, Shard(0, 3)).is_held())

    monkeypatch.setattr(fsio, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": flock}))
    with run:
        pass
    assert held == [False]


def test_names_of_a_shard_are_its_own(path):
    run, other = RunDirectory(path, Shard(1, 4)), RunDirectory(path)
    for name in ("retry_json", "strikes_json", "pieces_file", "report_json", "report_md", "failed_jsonl", "logs"):
        assert getattr(run, name) != getattr(other, name)
    assert run.part(2, 3, ".parquet").name == "part-00002-00001of00004-000003.parquet"
    run.summaries.mkdir(parents=True)
    run.part(6, 1, ".parquet").write_bytes(b"")
    run.telemetry(7).write_bytes(b"")
    assert (run.next_attempt(), other.next_attempt()) == (8, 8)
    assert shard_of(run.part(6, 1, ".parquet")) == Shard(1, 4)
    assert run.parts(".parquet") == other.parts(".parquet")
    other.telemetry(5).write_bytes(b"")
    assert run.telemetries() == [run.telemetry(7)]
    assert other.telemetries() == [other.telemetry(5), run.telemetry(7)]


def test_what_shards_of_another_number_left_half_written_goes(path):
    path.mkdir(parents=True)
    ours, theirs, dead = (path / f".tmp-{shard.label}-run.json" for shard in (Shard(0, 2), Shard(1, 2), Shard(2, 3)))
    for one in (ours, theirs, dead, path / "run.json"):
        one.write_bytes(b"")
    with RunDirectory(path, Shard(0, 2)):
        assert sorted(path.glob(".tmp-*")) == [theirs]


# Parts and attempts


def test_parts_sort_by_attempt_and_number_and_only_committed_ones_count(path):
    run = RunDirectory(path)
    run.summaries.mkdir(parents=True)
    wanted = [run.part(attempt, number, ".parquet") for attempt in (2, 10, 100) for number in (1, 9, 10, 1000)]
    for part in [*reversed(wanted), run.part(1, 1, ".jsonl"), run.summaries / ".tmp-00000-part-00001.parquet"]:
        part.write_bytes(b"")
    assert run.parts(".parquet") == wanted


def test_an_attempt_is_one_more_than_any_that_left_a_trace(path):
    run = RunDirectory(path)
    assert run.next_attempt() == 1
    run.summaries.mkdir(parents=True)
    run.part(3, 1, ".parquet").write_bytes(b"")
    assert run.next_attempt() == 4
    run.telemetry(11).write_bytes(b"")
    assert run.next_attempt() == 12
    run.part(100_000, 1, ".parquet").write_bytes(b"")
    assert run.next_attempt() == 100_001
    assert run.telemetries() == [run.telemetry(11)]


def test_other_files_are_no_trace_of_an_attempt(path):
    run = RunDirectory(path)
    run.summaries.mkdir(parents=True)
    for name in ("part-x-y-z.parquet", "a-9-b", "telemetry-9.jsonl", "my-part-9-9-9.parquet"):
        (run.summaries / name).write_bytes(b"")
    assert run.next_attempt() == 1


# run.json


def test_run_json_comes_back_as_it_was_written(path):
    run = RunDirectory(path)
    assert run.read_run() is None
    value = {"name": "ä", "fingerprint": {"a": [1, None, 1.5]}, "began": "2026"}
    run.write_run(value | {"path": Path("a/b")})
    assert run.read_run() == value | {"path": "a/b"}


def test_a_new_directory_with_nothing_but_our_names_is_a_new_run(path):
    with RunDirectory(path) as run:
        for folder in (run.summaries, run.orphans, run.damaged, run.logs):
            folder.mkdir()
        for file in (run.plan_json, run.report_json, run.report_md, run.telemetry(1), path / ".tmp-00000-run.json"):
            file.write_bytes(b"")
        assert run.read_run() is None


@pytest.mark.parametrize("name", ["notes.txt", "data", "my-run.json", "summary", ".git"])
def test_a_folder_of_somebody_else_is_refused_with_what_it_holds(path, name):
    (path / name).mkdir(parents=True)
    rest = path / ".tmp-00000-a"
    rest.write_bytes(b"")
    refused = rf"{path}: is no run directory \(it holds {name}\)"
    with pytest.raises(ConfigError, match=refused):
        RunDirectory(path).read_run()
    with pytest.raises(ConfigError, match=refused), RunDirectory(path):
        pass
    assert {one.name for one in path.iterdir()} == {name, rest.name}


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "export"])
def test_a_run_goes_on_though_somebody_left_a_file_in_its_directory(path, name):
    with RunDirectory(path) as run:
        run.write_run({"name": "old"})
    (path / name).write_bytes(b"")
    with RunDirectory(path) as run:
        assert run.read_run() == {"name": "old"}


def test_parts_without_run_json_are_refused_with_the_way_out(path):
    run = RunDirectory(path)
    run.summaries.mkdir(parents=True)
    run.part(1, 1, ".parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds parts but no run\.json.*--fresh"):
        run.read_run()


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "\xff"}', b"[]", b"null"])
def test_a_run_json_that_cannot_be_read_is_refused_with_the_way_out(path, data):
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.run_json.write_bytes(data)
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read: .*--fresh"):
        run.read_run()


# A run moved aside


def test_a_run_moved_aside_keeps_everything_and_leaves_an_empty_directory_that_is_held(path):
    with RunDirectory(path) as run:
        run.summaries.mkdir()
        run.part(4, 1, ".parquet").write_bytes(b"rows")
        run.write_run({"name": "old"})
        aside = run.set_aside()
        assert aside.parent == path.parent
        assert aside.name.startswith("out.20")
        old = RunDirectory(aside)
        assert old.part(4, 1, ".parquet").read_bytes() == b"rows"
        assert old.read_run() == {"name": "old"}
        assert (old.is_held(), old.holder()) == (False, None)
        assert (run.read_run(), run.parts(".parquet"), run.next_attempt()) == (None, [], 1)
        assert f"pid {os.getpid()} " in run.holder()
        with pytest.raises(LockedError), RunDirectory(path):
            pass
    assert not RunDirectory(path).is_held()


def test_runs_moved_aside_in_the_same_second_get_names_of_their_own(path):
    with RunDirectory(path) as run:
        names = []
        for n in range(3):
            run.write_run({"n": n})
            names.append(run.set_aside())
    assert len(set(names)) == 3
    assert [json.loads((name / "run.json").read_text())["n"] for name in names] == [0, 1, 2]


def test_a_run_that_cannot_be_moved_is_told_and_stays(path, monkeypatch):
    def fail(*_, **__):
        raise OSError(16, "Device or resource busy")

    with RunDirectory(path) as run:
        run.write_run({"name": "old"})
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(OutputError, match="Device or resource busy"):
                run.set_aside()
        assert run.read_run() == {"name": "old"}
        assert run.is_held()
