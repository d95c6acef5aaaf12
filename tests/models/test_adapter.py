"""A LoRA adapter is a folder as PEFT saves it, or such a repository: its rank, its base, what identifies it."""

import hashlib
import json

import pytest
from helpers_hub import COMMIT, fill
from helpers_lora import CONFIG, write_adapter

from batchgen.errors import ConfigError
from batchgen.models.adapter import resolve


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapters" / "letters")


def test_a_folder_is_taken_as_it_is(folder, monkeypatch):
    adapter = resolve(str(folder))
    assert (adapter.name, adapter.folder, adapter.revision, adapter.rank) == (str(folder), folder, None, 8)
    assert adapter.base == "models/smollm2-135m-instruct"
    monkeypatch.chdir(folder.parent)
    assert resolve("letters").folder.resolve() == folder


def test_a_name_on_the_hub_comes_from_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    files = {"adapter_config.json": json.dumps(CONFIG), "adapter_model.safetensors": "weights"}
    snapshot = fill(tmp_path / "hub", files, name="org/letters", tree=[*files, "checkpoint-100/adapter_config.json"])
    adapter = resolve("org/letters")
    assert (adapter.name, adapter.folder, adapter.revision) == ("org/letters", snapshot, COMMIT)
    assert adapter.label == f"org/letters ({COMMIT})"
    assert set(adapter.identity()) == {"revision", "adapter_config.json"}
    with pytest.raises(
        ConfigError, match=r"^engine\.adapter: org/other: no such folder .* run: hf download org/other$"
    ):
        resolve("org/other")


@pytest.mark.parametrize("name", ["nowhere", "./adapters/a", "/a/b", "adapters/a/b", "~/a"])
def test_a_folder_that_is_not_there_is_told_with_the_working_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    assert str(caught.value) == f"engine.adapter: {name}: no such folder (working directory {tmp_path})"


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("adapter_config.json", "is no LoRA adapter: it holds no adapter_config.json"),
        ("adapter_model.safetensors", "is no LoRA adapter: it holds no adapter_model.safetensors"),
    ],
)
def test_a_file_that_is_missing_is_told(folder, gone, told):
    (folder / gone).unlink()
    with pytest.raises(ConfigError) as caught:
        resolve(str(folder))
    assert str(caught.value).startswith(f"engine.adapter: {folder}: {told}")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", "{}", '{"r": null}', '{"r": "8"}', '{"r": 0}', '{"r": -8}', '{"r": true}',
        '{"r": 8.5}', '{"r": [8]}', '{"r": 8, "rank_pattern": {"q_proj": "16"}}', '{"r": 8, "rank_pattern": [1]}',
        "\udcff",
    ],
)  # fmt: skip
def test_a_configuration_without_a_rank_is_told(folder, text):
    path = folder / "adapter_config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        resolve(str(folder))
    assert str(caught.value) == f"engine.adapter: {path}: is no LoRA configuration with a rank `r`"


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"r": 1}, 1),
        ({"r": 64, "rank_pattern": {}}, 64),
        ({"r": 64, "rank_pattern": None}, 64),
        ({"r": 8, "rank_pattern": {"q_proj": 48, "v_proj": 4}}, 48),
        ({"r": 64, "rank_pattern": {"q_proj": 48}}, 64),
    ],
)
def test_the_rank_is_that_of_the_largest_matrices(tmp_path, config, rank):
    assert resolve(str(write_adapter(tmp_path / "a", **config))).rank == rank


@pytest.mark.parametrize(
    ("base", "model", "fits"),
    [
        ("org/small", "org/small", True),
        ("org/Small", "models/small", True),
        ("/scratch/models/small/", "other/small", True),
        ("org/small", "org/large", False),
        (None, "org/large", True),
        ("", "org/large", True),
        (7, "org/large", True),
    ],
)
def test_an_adapter_fits_the_model_it_was_made_for_wherever_that_lies(tmp_path, base, model, fits):
    assert resolve(str(write_adapter(tmp_path / "a", base_model_name_or_path=base))).fits(model) is fits


def test_the_identity_is_the_content_of_both_files(folder):
    before = resolve(str(folder)).identity()
    assert before["adapter_model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    (folder / "README.md").write_text("about")
    assert resolve(str(folder)).identity() == before
    for name, content in (("adapter_model.safetensors", b"heights"), ("adapter_config.json", b'{"r": 16}')):
        old = resolve(str(folder)).identity()
        (folder / name).write_bytes(content)
        new = resolve(str(folder)).identity()
        assert {key for key in old | new if old.get(key) != new.get(key)} == {name}


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_older_files_of_weights_are_taken_where_there_are_no_safetensors(folder, name):
    (folder / name).write_bytes(b"old")
    assert name not in resolve(str(folder)).identity()
    (folder / "adapter_model.safetensors").unlink()
    assert name in resolve(str(folder)).identity()


def matrices(**shapes):
    """A safetensors file of zeros; `q_proj.lora_A` for each layer and so on."""
    import numpy as np
    from safetensors.numpy import save

    return save({f"base_model.model.{name}.weight": np.zeros(shape, np.float16) for name, shape in shapes.items()})


def sized(folder, **shapes):
    return resolve(str(write_adapter(folder, weights=matrices(**shapes))))


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ({"layers.0.self_attn.q_proj.lora_A": (8, 64), "layers.0.self_attn.q_proj.lora_B": (32, 8)}, {64, None}),
        ({"layers.0.mlp.gate_proj.lora_A": (8, 64), "layers.0.mlp.down_proj.lora_A": (8, 96)}, {64, None}),
        ({"layers.0.self_attn.o_proj.lora_A": (8, 32)}, {64, 576, None}),  # tells nothing
    ],
)
def test_an_adapter_has_the_width_of_its_model(tmp_path, shapes, sizes):
    adapter = sized(tmp_path / "a", **shapes)
    for size in (64, 576, None):
        if size in sizes:
            adapter.check_size(size)
        else:
            with pytest.raises(ConfigError, match=r"made for another model: its hidden_size is 64, that of \S+ 576"):
                adapter.check_size(size)


def test_one_matrix_of_another_width_is_enough(tmp_path):
    shapes = {f"layers.{n}.self_attn.v_proj.lora_A": (8, 32 if n == 1 else 64) for n in range(3)}
    with pytest.raises(ConfigError, match="hidden_size is 32"):
        sized(tmp_path / "a", **shapes).check_size(64)


def test_a_damaged_file_of_weights_is_told(tmp_path):
    whole = matrices(**{"layers.0.self_attn.q_proj.lora_A": (8, 64)})
    flat = matrices(**{"layers.0.self_attn.q_proj.lora_A": (8,)})
    for weights in (b"", b"weights", b"\xff" * 64, whole[:-1], whole[:40], flat):
        adapter = resolve(str(write_adapter(tmp_path / "a", weights=weights)))
        with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: is no safetensors file of an adapter"):
            adapter.check_size(64)


def test_files_that_are_no_safetensors_are_left_to_vllm(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    resolve(str(folder)).check_size(64)
