"""A LoRA adapter on real vLLM: it changes what every request answers, and one that vLLM does not take is told."""

import json

import pytest
from helpers_hub import COMMIT, fill
from helpers_lora import write_random_adapter
from helpers_real import ON_SHARED, real_engine, run_to_end
from helpers_run import record, rows, write_job, write_jsonl
from test_engines import run

from batchgen.data import Request
from batchgen.engines.vllm import GenerateEngine, VllmEngine
from batchgen.errors import EngineError
from batchgen.job.config import Sampling
from batchgen.models.adapter import resolve

pytestmark = ON_SHARED


@pytest.mark.parametrize("feed", [VllmEngine, GenerateEngine])
def test_every_request_uses_the_adapter(tmp_path, model_folder, lent, feed):
    from vllm import SamplingParams

    adapter = resolve(str(write_random_adapter(tmp_path / "adapter", model_folder)))
    engine = feed({}, Sampling(temperature=0), log=tmp_path / "engine.log", adapter=adapter)
    try:
        assert engine.info.adapter == str(tmp_path / "adapter")
        requests = [Request(f"r{n}", list(range(65 + n, 85 + n)), 16) for n in range(6)]
        prompts = [{"prompt_token_ids": one.prompt_ids} for one in requests]
        outputs = engine.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        base = {one.custom_id: output.outputs[0].text for one, output in zip(requests, outputs, strict=True)}
        found = {one.custom_id: one for one in run(engine, requests)}
        assert [one.error for one in found.values()] == [None] * 6
        # Another batch can give another text, but none of so strong an adapter is the base model's.
        assert [name for name in base if found[name].text == base[name]] == []

        unknown = resolve(str(write_random_adapter(tmp_path / "unknown", model_folder, use_dora=True)))
        engine.llm.llm_engine.remove_lora(1)
        with pytest.raises(EngineError, match=f"vLLM does not take the adapter {tmp_path}/unknown: .*DoRA"):
            engine._load(unknown)
    finally:
        engine.llm.llm_engine.remove_lora(1)  # the other feed has the same engine
        engine.close()


@pytest.mark.long
def test_a_run_on_a_model_and_an_adapter_of_the_local_cache_needs_no_network(tmp_path, out, model_folder, monkeypatch):
    """The Hub's cache as a login node leaves it, without a network."""
    write_random_adapter(tmp_path / "adapter", model_folder)
    for name, folder in (("org/small", model_folder), ("org/letters", tmp_path / "adapter")):
        files = {file.name: file for file in folder.resolve().iterdir() if file.is_file()}
        fill(tmp_path / "home/hub", files, name=name, tree=[*files, "original/params.json"])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))
    engine = real_engine("org/small") | {"adapter": "org/letters"}
    job = write_job(tmp_path, [tmp_path / "a.jsonl"], engine=engine, sampling={"max_tokens": 12})
    assert run_to_end(job) == 0
    assert [row["status"] for row in rows(out)] == ["ok"] * 6
    known = json.loads((out / "run.json").read_text())
    assert known["engine"]["adapter"] == f"org/letters ({COMMIT})"
    assert known["engine"]["args"].items() >= {"enable_lora": True, "max_lora_rank": 8, "revision": COMMIT}.items()
    assert known["fingerprint"]["adapter.revision"] == known["fingerprint"]["model.revision"] == COMMIT
