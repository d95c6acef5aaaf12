"""Machines without a network: local folders work at once, and nothing is looked up.

Look-ups of names hung or failed on such machines although the model was there (vllm-project/vllm#1910, #23684, #8458).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_run import record, rows, write_job, write_jsonl

SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
# Tells of every use of the network, and of what the environment was before and after.
WATCHED = """
import json, os, sys
looked_up = []

def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        looked_up.append([event, repr(args)])
        raise OSError(101, "no network here")

def switches():
    return {k: v for k, v in os.environ.items() if k.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_"))}

sys.addaudithook(watch)
before = switches()
from batchgen.__main__ import main
try:
    main()
finally:
    with open(sys.argv[-1] + ".watched", "w") as stream:
        json.dump({"looked_up": looked_up, "before": before, "after": switches()}, stream)
"""


def watched(*words, job, env=()):
    """A command in a process that has no network; what it tried to look up, and its environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words, str(job)],
        capture_output=True, text=True, timeout=100, env=clean | dict(env),
    )  # fmt: skip
    seconds = time.monotonic() - began
    return done, json.loads(Path(f"{job}.watched").read_text()), seconds


@pytest.fixture(params=["switched off", "without a word"])
def env(request):
    """As a cluster sets it, and as one that does not."""
    return dict.fromkeys(SWITCHES, "1") if request.param == "switched off" else {}


def local_job(folder, model, **more):
    inputs = [write_jsonl(folder / "a.jsonl", [record(n) for n in range(5)])]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "model": str(model)} | more}
    return write_job(folder, inputs, engine=engine)


@pytest.mark.parametrize("env", [pytest.param("switched off", marks=pytest.mark.long), "without a word"], indirect=True)
def test_a_local_folder_is_all_that_is_needed(tmp_path, out, model_folder, env):
    done, seen, _ = watched("run", job=local_job(tmp_path, model_folder), env=env)
    assert done.returncode == 0, done.stderr
    assert seen["looked_up"] == []
    assert seen["after"] == seen["before"] == env
    assert {row["status"] for row in rows(out)} == {"ok"}


def test_a_job_is_checked_without_a_network(tmp_path, model_folder):
    done, seen, _ = watched("validate", job=local_job(tmp_path, model_folder))
    assert done.returncode == 0, done.stderr
    assert seen["looked_up"] == []


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_name_that_is_not_in_the_cache_is_one_line_before_anything_is_begun(tmp_path, out, env, command):
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    done, seen, seconds = watched(command, job=local_job(tmp_path, "org/small"), env=env | cache)
    assert done.returncode == 78
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "engine.args.model: org/small" in line]
    assert command == "validate" or done.stderr.splitlines() == [line]
    assert not out.exists()
    assert seen["after"] == seen["before"] == env | cache
    assert seconds < 30  # no sleeps between tries
    if env:
        assert seen["looked_up"] == []
        assert "hf download org/small" in line
