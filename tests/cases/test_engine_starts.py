"""Engines that do not start, as users meet it: one plain line, and nothing else is touched.

The real texts are vLLM's (vllm-project/vllm#10517, #20305, #2418), buried there in traces of child processes.
"""

import hashlib

import pytest
from helpers_run import command, record, rows, start, write_job, write_jsonl

from batchgen.errors import EngineError
from batchgen.storage.rundir import RunDirectory

FRAME = '  File "a.py", line 1, in f\n    g()\n'
# What an engine says, and what the line has to tell a user to change.
STARTS = {
    "the context is longer than the KV cache": (
        "max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (86432)",
        ["engine.args.max_model_len to 86432", "gpu_memory_utilization"],
    ),
    "another process has the GPU": (
        "Free memory on device (31.4/47.4 GiB) on startup is less than desired GPU memory utilization (0.95, 45.0 GiB)",
        ["engine.args.gpu_memory_utilization to 0.65", "what else uses the device"],
    ),
    "nothing is left for the cache": (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        ["raise engine.args.gpu_memory_utilization"],
    ),
    "out of memory": (
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 47.4 GiB",
        ["lower engine.args.gpu_memory_utilization"],
    ),
    "no word at all": ("engine core failed to start", ["look for what ended the engine's processes"]),
    "a trace": (
        "Traceback (most recent call last):\n"
        + '  File "a.py", line 1, in f\n    g()\n' * 80
        + "ValueError: no such thing",
        ["no such thing"],
    ),
}


def job(folder, text, count=20):
    inputs = [write_jsonl(folder / "a.jsonl", [record(n) for n in range(count)])]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": {"start_faults": [text]}}
    return write_job(folder, inputs, engine=engine)


def parts(out):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (out / "summaries").iterdir()}


@pytest.mark.parametrize(("text", "change"), STARTS.values(), ids=STARTS)
def test_one_line_says_what_to_change_and_then_the_cause(tmp_path, out, text, change):
    done = command("run", job(tmp_path, text))
    assert done.returncode == EngineError.exit_status == 69
    [line] = [line for line in done.stderr.splitlines() if "did not start" in line]
    assert all(words in line.partition(" (vLLM: ")[0] or words in line for words in change), line
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert rows(out) == []
    assert not list((out / "summaries").glob("*"))


@pytest.mark.parametrize(("text", "change"), [*STARTS.values()][:2], ids=[*STARTS][:2])
def test_what_is_done_stays_as_it_is(tmp_path, out, text, change):
    del change
    path = job(tmp_path, text)
    start(path, "engine.fake.start_faults=[]", limit=7)
    before, done_before = parts(out), rows(out)
    assert len(done_before) == 7
    assert start(path).exit_status == 69
    assert parts(out) == before
    assert rows(out) == done_before
    assert not RunDirectory(out).is_held()
    assert start(path, "engine.fake.start_faults=[]").exit_status == 0
    assert len(rows(out)) == 20
    assert {row["status"] for row in rows(out)} == {"ok"}


@pytest.mark.parametrize(
    ("mistake", "status"),
    [
        ("input.0.path=nothing/*.jsonl", 65),
        ("prompt.user=no text here", 78),
        ("engine.args.max_model_len=64", 78),
        ("output.dir=/proc/nowhere", 74),
        ("engine.args.model=no/such/folder", 78),
    ],
)
def test_what_needs_no_gpu_is_looked_at_before(tmp_path, mistake, status):
    done = command("run", job(tmp_path, STARTS["out of memory"][0]), "--set", mistake)
    assert done.returncode == status
    assert "did not start" not in done.stderr


def test_a_run_with_nothing_to_do_starts_no_engine(tmp_path):
    path = job(tmp_path, "engine core failed to start")
    start(path, "engine.fake.start_faults=[]")
    assert start(path).exit_status == 0
