"""Which settings make another run, and how a difference is told."""

import json

import pytest
from helpers_data import job
from helpers_lora import write_adapter

from batchgen.fingerprint import differences, digest, fingerprint
from batchgen.models.adapter import resolve
from batchgen.models.model import Model


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / "README.md").write_text("about")
    return folder


def of(tmp_path, *inputs, model=None, room=1000, args=None, **sections):
    engine = {"backend": "vllm", "args": {"model": "m"} | (args or {})}
    return fingerprint(job(tmp_path, *inputs, **{"engine": engine} | sections), model, max_prompt_tokens=room)


def keys(old, new):
    return [line.split(": ")[0] for line in differences(old, new)]


SPEED = {
    "max_num_seqs": 512, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.5, "enforce_eager": True,
    "enable_prefix_caching": False, "enable_chunked_prefill": True, "block_size": 32, "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2, "kv_cache_memory_bytes": 2**30, "async_scheduling": True,
    "download_dir": "/elsewhere", "compilation_config": {"level": 3}, "attention_backend": "FLASHINFER",
    "max_lora_rank": 64, "max_loras": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", SPEED)
def test_arguments_that_only_change_speed_do_not_count(tmp_path, name):
    assert of(tmp_path, args={name: SPEED[name]}) == of(tmp_path)


TEXT = {
    "dtype": "float16", "quantization": "awq", "kv_cache_dtype": "fp8", "seed": 7, "enable_lora": True,
    "speculative_config": {"model": "x"}, "hf_overrides": {"a": 1}, "generation_config": "vllm",
    "tokenizer": "other/tokenizer", "tokenizer_revision": "abc", "tokenizer_mode": "slow", "trust_remote_code": True,
    "an_argument_nobody_knows_yet": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT)
def test_arguments_that_change_the_text_and_those_nobody_knows_count(tmp_path, name):
    old, new = of(tmp_path), of(tmp_path, args={name: TEXT[name]})
    assert keys(old, new) == keys(new, old) == [f"engine.args.{name}"]
    assert digest(old) != digest(new)


@pytest.mark.parametrize(
    ("section", "changed"),
    [
        ({"prompt": {"user": "{{ text }}!"}}, ["prompt.user"]),
        ({"prompt": {"user": "{{ text }}", "system": "S"}}, ["prompt.system"]),
        ({"sampling": {"temperature": 0.5}}, ["sampling.temperature"]),
        ({"sampling": {"max_tokens": 7}}, ["sampling.max_tokens"]),
        ({"sampling": {"stop": ["\n"], "top_p": 0.9}}, ["sampling.stop", "sampling.top_p"]),
        ({"engine": {"backend": "fake", "args": {"model": "m"}}}, ["engine.backend"]),
        ({"name": "other"}, []),
        ({"checkpoint": {"interval_s": 1, "rows": 1}}, []),
        ({"failures": {"max": 5}}, []),
        ({"output": {"dir": "elsewhere"}}, []),
        ({"engine": {"backend": "vllm", "feed": "generate", "args": {"model": "m"}}}, []),
    ],
)
def test_sections_count_where_they_change_the_text(tmp_path, section, changed):
    assert keys(of(tmp_path), of(tmp_path, **section)) == changed


def test_the_longest_prompt_counts_and_the_context_that_leaves_it_the_same_does_not(tmp_path):
    assert keys(of(tmp_path, room=1000), of(tmp_path, room=900)) == ["max_prompt_tokens"]
    assert keys(of(tmp_path), of(tmp_path, args={"max_model_len": 4096})) == []


A = {"path": "a.jsonl", "id_field": "id", "text_field": "text"}
B = {"path": "b.jsonl", "text_field": "body", "min_chars": 5}


def test_inputs_that_come_go_or_change_places_are_no_difference(tmp_path):
    one, both, turned = of(tmp_path, A), of(tmp_path, A, B), of(tmp_path, B, A)
    for old, new in ((one, both), (both, one), (both, turned), (one, of(tmp_path, B))):
        assert differences(old, new) == []


@pytest.mark.parametrize(
    ("key", "value"), [("text_field", "body"), ("id_field", None), ("id_field", "k"), ("min_chars", 9)]
)
def test_an_input_that_is_read_in_another_way_is_a_difference(tmp_path, key, value):
    assert keys(of(tmp_path, A, B), of(tmp_path, B, A | {key: value})) == [f"input[a.jsonl].{key}"]


def test_kept_columns_count_whichever_input_they_come_from(tmp_path):
    old = of(tmp_path, A | {"keep": ["title"]}, B)
    assert keys(old, of(tmp_path, A | {"keep": ["title", "year"]}, B)) == ["columns", "input[a.jsonl].keep"]
    moved = keys(old, of(tmp_path, A, B | {"keep": {"heading": "title"}}))
    assert moved == ["input[a.jsonl].keep", "input[b.jsonl].keep"]


def test_a_model_with_the_same_files_is_the_same_wherever_it_lies(tmp_path, folder):
    copy = tmp_path / "copy"
    folder.rename(copy)
    folder.mkdir()
    for file in copy.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    one, other = (of(tmp_path, model=Model(str(at), at, None), args={"model": str(at)}) for at in (folder, copy))
    assert one == other
    assert any(key.startswith("model.") for key in one)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_model_file_that_changed_in_place_is_a_difference(tmp_path, folder, name):
    old = of(tmp_path, model=Model("m", folder, None))
    with (folder / name).open("ab") as stream:
        stream.write(b" ")
    assert keys(old, of(tmp_path, model=Model("m", folder, None))) == [f"model.{name}"]


@pytest.mark.parametrize("name", ["generation_config.json", "vocab.txt", "model-00002-of-00002.safetensors"])
def test_a_model_file_that_comes_or_goes_is_a_difference(tmp_path, folder, name):
    without = of(tmp_path, model=Model("m", folder, None))
    (folder / name).write_bytes(b"{}")
    assert keys(without, of(tmp_path, model=Model("m", folder, None))) == [f"model.{name}"]


@pytest.mark.parametrize("name", ["README.md", "training_args.json", "notes.pdf", ".lock", "folder.json/"])
def test_files_that_make_no_text_do_not_count(tmp_path, folder, name):
    old = of(tmp_path, model=Model("m", folder, None))
    if name.endswith("/"):
        (folder / name).mkdir()
    else:
        (folder / name).write_text("new")
    assert differences(old, of(tmp_path, model=Model("m", folder, None))) == []


def test_a_model_of_the_hub_is_its_revision_and_its_weights_need_not_be_there(tmp_path, folder):
    one = of(tmp_path, model=Model("org/m", folder, "c0ffee"))
    (folder / "model.safetensors").unlink()
    assert of(tmp_path, model=Model("org/m", folder, "c0ffee")) == one
    assert keys(one, of(tmp_path, model=Model("org/m", folder, "decade"))) == ["model.revision"]


def test_an_adapter_is_its_files(tmp_path):
    def with_adapter(folder):
        adapter = resolve(str(folder))
        return fingerprint(job(tmp_path), None, max_prompt_tokens=1000, adapter=adapter)

    without = fingerprint(job(tmp_path), None, max_prompt_tokens=1000)
    one, same = (with_adapter(write_adapter(tmp_path / name)) for name in "ab")
    both = ["adapter.adapter_config.json", "adapter.adapter_model.safetensors"]
    assert one == same
    assert keys(without, one) == keys(one, without) == both
    assert keys(one, with_adapter(write_adapter(tmp_path / "c", weights=b"heights"))) == both[1:]
    assert keys(one, with_adapter(write_adapter(tmp_path / "d", lora_alpha=32))) == both[:1]


def test_a_fingerprint_survives_run_json(tmp_path, folder):
    args = {"speculative_config": {"b": 1, "a": [1.5, None, True]}, "dtype": "auto", "limit": (1, 2)}
    found = of(tmp_path, A, model=Model("m", folder, None), args=args, sampling={"stop": ["\u2028"]})
    again = json.loads(json.dumps(found, indent=2, sort_keys=True))
    assert differences(found, again) == []
    assert digest(again) == digest(found)
    assert len(digest(found)) == 16
    int(digest(found), 16)


def test_differences_are_one_readable_line_a_key(tmp_path):
    old = of(tmp_path, prompt={"user": "{{ text }}", "system": "Wörter\nin lines"}, sampling={"max_tokens": 128})
    new = of(tmp_path, args={"dtype": "float16"}, sampling={"max_tokens": 256})
    assert differences(old, new) == [
        'engine.args.dtype: (not set) → "float16"',
        'prompt.system: "Wörter\\nin lines" → (not set)',
        "sampling.max_tokens: 128 → 256",
    ]


def test_a_long_value_is_shown_by_its_ends_and_its_length(tmp_path):
    old = of(tmp_path, prompt={"user": "{{ text }}", "system": "begin " + "x" * 500 + " end"})
    (line,) = differences(old, of(tmp_path))
    assert line.startswith('prompt.system: "begin xxx')
    assert ' end" (512 characters) → (not set)' in line
    assert len(line) < 200


def test_a_long_text_that_changed_in_its_middle_is_a_difference(tmp_path):
    old, new = (of(tmp_path, prompt={"user": "{{ text }}" + "x" * 300 + c + "x" * 300}) for c in "ab")
    assert keys(old, new) == ["prompt.user"]
