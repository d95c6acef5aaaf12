"""Real vLLM whose KV cache is too small for the context: told in one line, or adapted to what the documents need."""

import json

import pytest
from helpers_hub import hub
from helpers_real import real_engine, run_to_end
from helpers_run import record, rows, write_job, write_jsonl

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]

SMALL = 8 << 20  # bytes of KV cache: some hundred tokens of the demo model


@pytest.mark.long
def test_a_small_cache_is_told_and_adapted_to(tmp_path, out, model_folder, monkeypatch):
    inputs = [write_jsonl(tmp_path / "a.jsonl", [record(n) for n in range(6)])]
    engine = real_engine(model_folder, max_model_len=1024, kv_cache_memory_bytes=SMALL)
    job = write_job(tmp_path, inputs, engine=engine, sampling={"max_tokens": 16, "ignore_eos": True})
    with hub({}) as (where, asked):
        for name, value in where.items():
            monkeypatch.setenv(name, value)
        assert run_to_end(job) == 69
        [told] = [line for line in (tmp_path / "job.yaml.err").read_text().splitlines() if "did not start" in line]
        assert "set engine.args.max_model_len to " in told
        assert "kv_cache_memory_bytes" in told.partition(" (vLLM: ")[0]
        assert "engine.adapt: true" in told
        assert rows(out) == []

        assert run_to_end(job, "--set", "engine.adapt=true") == 0
    assert asked == []  # the model is a local folder: nothing is looked up on the Hub
    assert [row["status"] for row in rows(out)] == ["ok"] * 6
    [change] = json.loads((out / "run.json").read_text())["decisions"]["engine"]["changes"]
    assert (change["argument"], change["before"]) == ("max_model_len", 1024)
    assert change["after"] == max(row["prompt_tokens"] for row in rows(out)) + 16
    assert max(row["completion_tokens"] for row in rows(out)) == 16
    engine = json.loads((out / "report.json").read_text())["engine"]
    assert engine["args"]["max_model_len"] == change["after"]
    assert f"engine.adapt: max_model_len 1024 → {change['after']}" in (tmp_path / "job.yaml.err").read_text()
