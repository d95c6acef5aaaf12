"""Caches of a node's own, and starts that compile one after the other."""

import errno
import fcntl
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from filelock import FileLock

from batchgen.engines import compile_cache

NAMES = ("VLLM_CACHE_ROOT", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH")
ARGS = {"model": "m", "max_model_len": 512}
# An engine's start of so many seconds, which says when it began and ended.
START = """
import logging, sys, time
from batchgen.engines import compile_cache
from batchgen.errors import Interrupted
from batchgen.lifecycle import Stop
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
stop = Stop()
stop.install()
try:
    with stop.raising(), compile_cache.one_cold_start({"model": sys.argv[1]}):
        print("began", time.monotonic(), flush=True)
        time.sleep(float(sys.argv[2]))
        print("ended", time.monotonic(), flush=True)
except Interrupted:
    print("interrupted", time.monotonic(), flush=True)
"""


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home and a temporary folder of the test, on a machine that is no container."""
    for name in (*NAMES, "XDG_CACHE_HOME", "KUBERNETES_SERVICE_HOST", "VLLM_DISABLE_COMPILE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile_cache, "_CONTAINER", ())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home"


@pytest.fixture
def root(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    return tmp_path / "vllm"


def test_caches_lie_in_a_folder_of_this_node(home, monkeypatch, tmp_path):
    folder = home / ".cache/batchgen" / socket.gethostname()
    assert compile_cache.environment() == {
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TRITON_HOME": str(folder),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert compile_cache.environment()["TRITON_HOME"] == str(tmp_path / "caches/batchgen" / socket.gethostname())


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/fast/vllm")
    assert set(compile_cache.environment()) == set(NAMES[1:])
    for name in NAMES:
        monkeypatch.setenv(name, "/fast")
    monkeypatch.setattr(compile_cache, "_folder", lambda: pytest.fail("a folder was made for nothing"))
    assert compile_cache.environment() == {}


def test_a_container_keeps_its_caches_in_its_temporary_folder(monkeypatch, tmp_path, home):
    (tmp_path / "mark").touch()
    monkeypatch.setattr(compile_cache, "_CONTAINER", (str(tmp_path / "mark"),))
    here = str(tmp_path / "temporary" / f"batchgen-{os.getuid()}")
    assert compile_cache.environment()["TRITON_HOME"] == here
    monkeypatch.setattr(compile_cache, "_CONTAINER", ())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert compile_cache.environment()["TRITON_HOME"] == here
    assert not home.exists()


def test_a_home_that_cannot_be_written_is_done_without(monkeypatch, tmp_path, home):
    home.write_text("no folder")
    here = tmp_path / "temporary" / f"batchgen-{os.getuid()}"
    assert compile_cache.environment()["TRITON_HOME"] == str(here)
    assert here.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", "relative")
    assert compile_cache.environment()["TRITON_HOME"] == str(here)


def test_a_temporary_folder_that_somebody_else_put_there_is_not_used(tmp_path, home):
    home.write_text("no folder")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "temporary" / f"batchgen-{os.getuid()}").symlink_to(tmp_path / "theirs")
    found = Path(compile_cache.environment()["TRITON_HOME"])
    assert found.is_dir()
    assert found.resolve() != (tmp_path / "theirs").resolve()


def begun(model, seconds, root):
    return subprocess.Popen(
        [sys.executable, "-c", START, model, str(seconds)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"VLLM_CACHE_ROOT": str(root)},
    )  # fmt: skip


def times(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    return [float(re.search(rf"^{word} (\S+)$", out, flags=re.MULTILINE)[1]) for word in ("began", "ended")]


def test_starts_that_may_compile_come_one_after_the_other(root):
    spans = sorted(times(one) for one in [begun(f"m{n}", 0.4, root) for n in range(3)])
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_of_many_starts_of_one_kind_the_first_compiles_and_the_others_go_at_once(root):
    spans = sorted(times(one) for one in [begun("m", 1.5, root) for _ in range(4)])
    assert all(spans[0][1] <= other[0] for other in spans[1:])
    assert max(begin for begin, _ in spans[1:]) < min(end for _, end in spans[1:])


def test_a_signal_ends_the_wait_at_once_and_the_wait_is_told(root):
    (root / "batchgen").mkdir(parents=True)
    with FileLock(root / "batchgen/start.lock"), begun("m", 0, root) as waiting:
        assert waiting.stdout.readline().startswith("waiting for another start on this node to compile (")
        sent = time.monotonic()
        waiting.send_signal(signal.SIGTERM)
        assert waiting.stdout.readline().startswith("interrupted")
        assert time.monotonic() - sent < 2
        assert waiting.wait(10) == 0


def test_a_start_that_failed_is_no_start(root):
    with pytest.raises(ZeroDivisionError), compile_cache.one_cold_start(ARGS):
        raise ZeroDivisionError
    assert [path.name for path in (root / "batchgen").iterdir()] == ["start.lock"]
    with FileLock(root / "batchgen/start.lock", timeout=0):
        pass


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(compile_cache, "_PATIENCE_S", 0.3)


@pytest.mark.usefixtures("_impatient")
def test_nobody_is_waited_for_for_ever(root, caplog):
    (root / "batchgen").mkdir(parents=True)
    with FileLock(root / "batchgen/start.lock"), compile_cache.one_cold_start(ARGS):
        pass
    assert f"another start has held {root}/batchgen/start.lock for 0.3 s: going on beside it" in caplog.text


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("args", "variable"), [(ARGS | {"enforce_eager": True}, "0"), (ARGS, "1")], ids=["eager", "no cache"]
)
def test_a_start_that_fills_no_cache_takes_no_lock(root, monkeypatch, caplog, args, variable):
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", variable)
    (root / "batchgen").mkdir(parents=True)
    with FileLock(root / "batchgen/start.lock"), compile_cache.one_cold_start(args):
        pass
    assert caplog.text == ""


@pytest.mark.usefixtures("_impatient")
def test_another_model_argument_version_or_device_may_have_to_compile(root, monkeypatch, tmp_path, caplog):
    (tmp_path / "model").mkdir()
    config = tmp_path / "model/config.json"
    config.write_text("{}")
    args = {"model": str(tmp_path / "model")}

    def waits(args):
        caplog.clear()
        with FileLock(root / "batchgen/start.lock"), compile_cache.one_cold_start(args):
            pass
        return "going on beside it" in caplog.text

    with compile_cache.one_cold_start(args):
        pass
    assert not waits(args)
    assert waits(args | {"max_num_seqs": 3})
    config.write_text('{"hidden_size": 8}')
    assert waits(args)
    assert not waits(args)
    gpu = tmp_path / "nvidia/gpus/0000:01:00.0/information"
    gpu.parent.mkdir(parents=True)
    gpu.write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    monkeypatch.setattr(compile_cache, "_NVIDIA", tmp_path / "nvidia")
    assert waits(args)
    gpu.write_text("Model: \t\t NVIDIA H200\nIRQ: 6\n")
    assert not waits(args)
    monkeypatch.setattr(compile_cache.vllm_names, "package", lambda: ("vllm", "0.99"))
    assert waits(args)


def test_without_file_locks_there_the_lock_is_in_the_temporary_folder(root, monkeypatch, tmp_path):
    flock = fcntl.flock

    def lockless(stream, how):
        if (
            Path(f"/proc/self/fd/{stream if isinstance(stream, int) else stream.fileno()}")
            .readlink()
            .is_relative_to(root)
        ):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(stream, how)

    monkeypatch.setattr(fcntl, "flock", lockless)
    with compile_cache.one_cold_start(ARGS):
        (lock,) = (tmp_path / "temporary").iterdir()
        assert lock.name.startswith(f"batchgen-{os.getuid()}-")
    assert any(path.name.startswith("started-") for path in (root / "batchgen").iterdir())


def test_a_cache_that_cannot_be_written_is_used_as_it_is(root, caplog):
    root.write_text("no folder")
    caplog.set_level("INFO", "batchgen")
    with compile_cache.one_cold_start(ARGS):
        pass
    assert "the compile cache cannot be written" in caplog.text
