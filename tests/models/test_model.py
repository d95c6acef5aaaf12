"""A model is a folder, or a name that the local cache of the Hub knows; its identity is what makes its text."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from helpers_hub import COMMIT, fill

from batchgen.errors import ConfigError
from batchgen.models.model import Model, resolve

FILES = {
    "config.json": json.dumps({"max_position_embeddings": 2048}),
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "merges.txt": "a b",
    "tokenizer.model": "bytes",
    "model.safetensors": "weights",
    "README.md": "A model.",
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_text(content)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


# Where it lies


def test_a_folder_is_taken_as_it_is(folder, monkeypatch):
    assert resolve(str(folder), None) == Model(str(folder), folder, None)
    monkeypatch.chdir(folder.parent)
    assert resolve("model", None).folder.resolve() == folder
    assert resolve("./model", "main").revision is None
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/model", None) == Model(str(folder), folder, None)


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "/a/b/c", "models/a/b", "~/a", "~nobody-here/a", ""])
def test_a_folder_that_is_not_there_is_told_with_the_working_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert resolve(name, None).folder.resolve() == tmp_path  # refused before, as a job without a model
        return
    with pytest.raises(ConfigError) as caught:
        resolve(name, None)
    told = str(caught.value)
    assert told.startswith(f"engine.args.model: {name}: no such folder (working directory {tmp_path})")
    assert "batchgen demo-model models/smollm2-135m-instruct" in told


@pytest.mark.parametrize("name", ["my models/small", "models/", "a--b/c", "org/" + "x" * 200, "org/.small"])
def test_a_name_the_hub_cannot_have_is_a_missing_folder(cache, name):
    with pytest.raises(ConfigError) as caught:
        resolve(name, None)
    assert str(caught.value).startswith(f"engine.args.model: {name}: no such folder")


def test_the_missing_demo_model_is_told_with_the_way_to_it(cache, tmp_path):
    with pytest.raises(ConfigError) as caught:
        resolve("models/smollm2-135m-instruct", None)
    told = str(caught.value)
    assert told.startswith(
        f"engine.args.model: models/smollm2-135m-instruct: no such folder (working directory {tmp_path})"
    )
    assert "nothing in the local cache" in told
    assert "run: hf download models/smollm2-135m-instruct; for the small" in told
    assert told.endswith("for the small demo model: batchgen demo-model models/smollm2-135m-instruct")
    assert "\n" not in told


# The local cache of the Hub


def test_a_name_is_resolved_to_its_commit_in_the_cache(cache):
    snapshot = fill(cache, FILES)
    model = resolve("org/small", None)
    assert (model.name, model.folder, model.revision) == ("org/small", snapshot, COMMIT)
    assert model.max_position_embeddings == 2048


def test_a_revision_is_a_branch_or_a_commit(cache):
    fill(cache, FILES)
    other = "f" * 40
    snapshot = fill(cache, FILES, ref="v2", commit=other)
    assert resolve("org/small", "v2").revision == other
    assert resolve("org/small", other).folder == snapshot
    assert resolve("org/small", None).revision == COMMIT
    with pytest.raises(ConfigError, match="nothing in the local cache"):
        resolve("org/small", "v3")


def test_a_folder_wins_over_the_cache(cache, tmp_path):
    fill(cache, FILES)
    (tmp_path / "org" / "small").mkdir(parents=True)
    assert resolve("org/small", None).revision is None


def test_the_usual_variables_name_the_cache_and_nothing_heavy_is_imported(tmp_path):
    snapshot = fill(tmp_path / "home" / "hub", FILES)
    code = (
        "import sys; from batchgen.models.model import resolve; model = resolve('org/small', None);"
        "print(model.folder, model.revision, sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment = {k: v for k, v in environment.items() if k != "HF_HUB_CACHE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == (f"{snapshot} {COMMIT} []\n", "")


# What it is


def test_the_identity_tells_small_files_by_content_and_weights_by_size(folder):
    identity = Model("m", folder, None).identity()
    assert set(identity) == set(FILES) - {"README.md"}
    assert identity["config.json"] == hashlib.sha256(FILES["config.json"].encode()).hexdigest()
    assert identity["model.safetensors"] == "7 bytes"


def test_of_a_pinned_model_the_commit_tells_the_weights(folder):
    identity = Model("m", folder, COMMIT).identity()
    assert identity["revision"] == COMMIT
    assert "model.safetensors" not in identity
    assert "tokenizer.json" in identity


@pytest.mark.parametrize("name", sorted(set(FILES) - {"README.md"}))
def test_the_identity_changes_with_every_file_that_makes_the_text(folder, name):
    before = Model("m", folder, None).identity()
    (folder / name).write_text(FILES[name] + " ")
    after = Model("m", folder, None).identity()
    assert {key for key in before | after if before.get(key) != after.get(key)} == {name}
    (folder / name).unlink()
    assert name not in Model("m", folder, None).identity()


def test_the_identity_does_not_change_with_the_rest(folder):
    before = Model("m", folder, None).identity()
    (folder / "README.md").write_text("Other words.")
    (folder / "training_args.json").write_text("{}")
    (folder / "picture.png").write_text("x")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "config.json").write_text("{}")
    assert Model("elsewhere", folder, None).identity() == before


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 4096}, "max_position_embeddings": 77}, 4096),
        ({"text_config": None, "max_position_embeddings": 77}, 77),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "long"}, None),
        ({}, None),
    ],
)
def test_the_context_of_a_model(folder, config, length):
    (folder / "config.json").write_text(json.dumps(config))
    assert Model("m", folder, None).max_position_embeddings == length


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "\udcff"])
def test_a_configuration_that_is_none_is_told(folder, content):
    path = folder / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=f"{path}: no model configuration: "):
        _ = Model("m", folder, None).max_position_embeddings


# Its weights


@pytest.fixture
def held(folder):
    """The model's folder with these weight files and, where `index` is given, an index of its shards."""

    def make(*names, index=None):
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_text("weights")
        if index is not None:
            text = index if isinstance(index, str) else json.dumps({"weight_map": dict(enumerate(index))})
            (folder / "model.safetensors.index.json").write_text(text)
        return folder

    return make


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model.safetensors"], None),
        (["pytorch_model.bin"], None),
        (["model.gguf"], None),
        (SHARDS, SHARDS),
        (["consolidated.safetensors"], SHARDS),  # vLLM prefers it
        (["model.safetensors"], "{"),
        (["model.safetensors"], "[]"),
    ],
)
def test_weights_that_are_there_are_not_complained_about(held, names, index):
    Model("m", held(*names, index=index), None).check_weights()


@pytest.mark.parametrize(
    ("names", "index", "told"),
    [
        ([], None, "weights (.safetensors, .bin, .gguf, .pt, .pth)"),
        ([], SHARDS, f"2 of its weight files ({SHARDS[0]}, …)"),
        (SHARDS[:1], SHARDS, f"1 of its weight files ({SHARDS[1]})"),
    ],
)
def test_weights_that_are_missing_are_told(cache, held, names, index, told):
    folder = held(*names, index=index)
    with pytest.raises(ConfigError) as caught:
        Model(str(folder), folder, None).check_weights()
    assert str(caught.value) == f"engine.args.model: {folder}: the folder does not hold {told}"
    with pytest.raises(ConfigError) as caught:
        Model("org/small", folder, COMMIT).check_weights()
    assert str(caught.value).startswith(
        f"engine.args.model: org/small: the local cache ({folder}) does not hold {told}"
    )
    assert str(caught.value).endswith(f"run: hf download org/small --revision {COMMIT}")


def test_a_link_into_the_cache_whose_file_is_gone_is_no_weight(cache, held):
    folder = held()
    (folder / "model.safetensors").symlink_to(folder.parent / "blobs" / "gone")
    with pytest.raises(ConfigError, match="does not hold weights"):
        Model("org/small", folder, COMMIT).check_weights()


def test_with_a_network_the_engine_gets_the_weights_itself(cache, held, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Model("org/small", held(), COMMIT).check_weights()
