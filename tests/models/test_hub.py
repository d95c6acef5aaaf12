"""What a job names on the Hub: found in the cache, fetched, or told with the way to it. The Hub is a local server."""

import os

import pytest
from helpers_hub import COMMIT, fill, hub
from helpers_run import command, record, write_job, write_jsonl

FILES = {
    "config.json": '{"max_position_embeddings": 2048}',
    "tokenizer.json": "{}",
    "original/params.json": "{}",
    "model.safetensors": "weights",
}
LOOK = """
import sys
from batchgen.errors import ConfigError
from batchgen.models.model import resolve
try:
    model = resolve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    print(model.folder.name, sorted(file.name for file in model.folder.iterdir()))
except ConfigError as e:
    print(e)
"""


@pytest.fixture
def look(tmp_path):
    """`look(name, revision)` in a process of its own, with a cache of its own; what it says."""

    def look(*words, **env):
        import subprocess
        import sys

        done = subprocess.run(
            [sys.executable, "-c", LOOK, *words], capture_output=True, text=True, cwd=tmp_path, timeout=60,
            env=environment(tmp_path) | env, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return look


def environment(tmp_path):
    ours = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_what_the_cache_has_not_comes_from_the_hub_and_only_what_is_needed(look):
    with hub(FILES) as (env, asked):
        assert look("org/open", **env) == f"{COMMIT} ['config.json', 'tokenizer.json']"
        assert asked
        asked.clear()
        assert look("org/open", **env) == f"{COMMIT} ['config.json', 'tokenizer.json']"
        assert asked == []


def test_a_cache_that_holds_a_part_is_completed_from_the_hub(look, tmp_path):
    fill(tmp_path / "home/hub", {"config.json": "{}"}, name="org/open")
    with hub(FILES) as (env, _):
        assert look("org/open", **env) == f"{COMMIT} ['config.json', 'tokenizer.json']"


def test_a_gated_repository_is_told_with_its_page_and_the_token(look):
    with hub(FILES) as (env, _):
        assert look("org/gated", **env) == (
            "engine.args.model: org/gated: this repository is gated: accept its terms on "
            f"{env['HF_ENDPOINT']}/org/gated, then put a token of that account into HF_TOKEN in the environment"
        )


def test_a_gated_repository_in_the_cache_needs_no_token(look, tmp_path):
    fill(tmp_path / "home/hub", FILES, name="org/gated", tree=FILES)
    with hub(FILES) as (env, asked):
        assert look("org/gated", **env).startswith(COMMIT)
        assert asked == []


def test_a_repository_that_is_not_there_or_private_is_told(look, tmp_path):
    with hub(FILES) as (env, _):
        told = look("org/missing", **env)
    assert told.startswith(f"engine.args.model: org/missing: no such folder (working directory {tmp_path})")
    assert "the Hub has no such repository, or it is private: then put a token into HF_TOKEN" in told


def test_a_revision_that_is_not_there_is_told(look):
    with hub(FILES) as (env, _):
        assert look("org/open", "v3", **env) == "engine.args.model: org/open: the Hub has no revision 'v3' of it"


def test_a_repository_without_a_tokenizer_is_told(look):
    with hub({"config.json": "{}"}) as (env, _):
        assert look("org/open", **env) == "engine.args.model: org/open: the repository has no tokenizer*"


def test_a_hub_that_cannot_be_reached_is_told(look, tmp_path):
    told = look("org/open", HF_ENDPOINT="http://127.0.0.1:9")  # nobody listens there
    assert f"nothing in the local cache ({tmp_path / 'home/hub'}), and the Hub does not give it: " in told
    assert "\n" not in told


def test_offline_a_cached_model_works_and_nothing_is_asked(look, tmp_path):
    # As `hf download --exclude "original/*"` leaves it: the client knows of a file that was not wanted.
    held = {name: content for name, content in FILES.items() if not name.startswith("original")}
    fill(tmp_path / "home/hub", held, name="org/open", tree=FILES)
    with hub(FILES) as (env, asked):
        for words in (("org/open",), ("org/open", "main"), ("org/open", COMMIT)):
            assert look(*words, HF_HUB_OFFLINE="1", **env).startswith(COMMIT)
        assert asked == []


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("org/other",), "hf download org/other"),
        (("org/open", "v3"), "hf download org/open --revision v3"),
        (("org/open", "f" * 40), f"hf download org/open --revision {'f' * 40}"),
    ],
)
def test_offline_what_is_missing_is_told_with_the_command_that_gets_it(look, tmp_path, words, command):
    fill(tmp_path / "home/hub", FILES, name="org/open")
    told = look(*words, HF_HUB_OFFLINE="1")
    assert f"nothing in the local cache ({tmp_path / 'home/hub'}), and HF_HUB_OFFLINE forbids to ask the Hub" in told
    assert told.endswith(f"run: {command}")


@pytest.mark.parametrize("tree", [(), FILES], ids=["an older client", "a client with a listing"])
def test_offline_a_part_in_the_cache_is_told(look, tmp_path, tree):
    snapshot = fill(tmp_path / "home/hub", {"config.json": "{}"}, name="org/open", tree=tree)
    told = look("org/open", HF_HUB_OFFLINE="1")
    assert f"only a part of it in the local cache ({snapshot}), and HF_HUB_OFFLINE" in told
    assert told.endswith("run: hf download org/open")


def test_validate_tells_offline_that_the_weights_are_missing(tmp_path):
    """The whole way: batchgen itself fetches the small files only, so this is what a cache of its own looks like."""
    write_jsonl(tmp_path / "a.jsonl", [record(0)])
    job = write_job(tmp_path, [tmp_path / "a.jsonl"], engine={"args": {"model": "org/open"}})
    env = environment(tmp_path) | {"HF_HUB_OFFLINE": "1"}
    small = {name: content for name, content in FILES.items() if not name.endswith(".safetensors")}
    snapshot = fill(tmp_path / "home/hub", small, name="org/open")
    done = command("validate", job, env=env)
    assert done.returncode == 78
    assert f"engine.args.model: org/open: the local cache ({snapshot}) does not hold weights" in done.stdout
    assert f"run: hf download org/open --revision {COMMIT}\n" in done.stdout
