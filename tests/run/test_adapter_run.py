"""A job with an adapter: what is refused before anything starts, and what another adapter means for a run."""

import json
import logging

import pytest
from helpers_lora import write_adapter
from helpers_run import command, record, rows, start, write_job, write_jsonl

from batchgen.errors import ConfigError, FingerprintError
from batchgen.executors.checking import check
from batchgen.job import jobfile


@pytest.fixture
def job(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(3)))
    write_adapter(tmp_path / "adapter")
    args = {"max_model_len": 2048, "max_num_seqs": 4}
    engine = {"backend": "fake", "args": args, "adapter": str(tmp_path / "adapter")}
    return write_job(tmp_path, [tmp_path / "a.jsonl"], engine=engine)


def test_another_adapter_is_another_run(job, out, tmp_path):
    start(job)
    before = rows(out)
    assert len(before) == 3
    assert json.loads((out / "run.json").read_text())["job"]["engine"]["adapter"] == str(tmp_path / "adapter")
    assert start(job).exit_status == 0
    write_adapter(tmp_path / "adapter", weights=b"heights")
    with pytest.raises(FingerprintError, match=r"adapter\.adapter_model\.safetensors: "):
        start(job)
    with pytest.raises(FingerprintError, match=r"adapter\.adapter_config\.json: .* → \(not set\)"):
        start(job, "engine.adapter=null")
    assert rows(out) == before
    assert start(job, on_change="keep").exit_status == 0


def test_the_same_adapter_in_another_place_is_the_same_run(job, tmp_path):
    start(job)
    (tmp_path / "adapter").rename(tmp_path / "moved")
    assert start(job, f"engine.adapter={tmp_path / 'moved'}").exit_status == 0


def test_an_adapter_that_is_not_there_stops_the_run_before_it_begins(job, out):
    with pytest.raises(ConfigError, match=r"^engine\.adapter: nowhere: no such folder"):
        start(job, "engine.adapter=nowhere")
    assert not out.exists()


@pytest.fixture
def on_vllm(job, tmp_path):
    """The sets that put the job on vLLM with a model of its own; nothing of it is started."""
    model = tmp_path / "small"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 2048}')
    (model / "model.safetensors").write_bytes(b"weights")
    return ["--set", "engine.backend=vllm", "--set", f"engine.args.model={model}"]


def test_validate_tells_a_rank_that_vllm_does_not_take(job, on_vllm, tmp_path):
    write_adapter(tmp_path / "adapter", r=100_000)
    done = command("validate", job, *on_vllm)
    assert done.returncode == 78
    assert "its rank is 100000, vLLM takes adapters of up to" in done.stdout


def test_validate_lists_the_doubt_about_an_adapter_and_says_nothing_else(job, on_vllm):
    done = command("validate", job, *on_vllm, "--set", "engine.backend=fake", "--set", "prompt.mode=completion")
    assert done.stderr == ""
    assert "was made for models/smollm2-135m-instruct, engine.args.model is " in done.stdout.partition("warnings:")[2]


def test_validate_tells_weights_that_are_no_adapter(job, on_vllm):
    done = command("validate", job, *on_vllm)
    assert done.returncode == 78
    assert "adapter_model.safetensors: is no safetensors file of an adapter" in done.stdout


def test_an_adapter_of_another_model_is_a_warning(job, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("batchgen"), "propagate", True)  # the command line turns it off
    for name, warned in (("other", True), ("smollm2-135m-instruct", False)):
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").write_text('{"max_position_embeddings": 2048}')
        caplog.clear()
        checked = check(jobfile.load(job, [f"engine.args.model={model}", "prompt.mode=completion"]))
        assert checked.adapter.rank == 8
        said = f"was made for models/smollm2-135m-instruct, engine.args.model is {model}"
        assert (said in caplog.text) is warned
