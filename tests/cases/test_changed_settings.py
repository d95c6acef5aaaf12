"""Another prompt or model never mixes with the old rows unasked (OpenEuroLLM/JudgeArena#41); harmless keys are free."""

import shutil

import pytest
from helpers_run import record, rows, start, write_job, write_jsonl

from batchgen.errors import FingerprintError


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))])


WELSH = "prompt.user='{{ title }} {{ text }} Summarize this in Welsh.'"


def test_another_prompt_is_refused_with_the_keys_that_differ_and_nothing_is_mixed(job, out):
    start(job, limit=3)
    before = rows(out)
    with pytest.raises(FingerprintError) as caught:
        start(job, WELSH, "sampling.temperature=0.7")
    assert "prompt.user: " in str(caught.value)
    assert "sampling.temperature: 0.0 → 0.7" in str(caught.value)
    assert "sampling.max_tokens" not in str(caught.value)
    assert "--on-change" in str(caught.value)
    assert rows(out) == before
    # Asked for, it is a run of its own.
    assert start(job, WELSH, on_change="new-run").report["documents"]["ok"] == 6
    assert len({row["fingerprint"] for row in rows(out)}) == 1


def test_settings_that_do_not_change_text_go_on(job, out):
    start(job, limit=3)
    harmless = ["name=other", "checkpoint.interval_s=1", "failures.max=5", "engine.args.max_num_seqs=2",
                "input.0.on_duplicate=refuse", "engine.feed=generate"]  # fmt: skip
    outcome = start(job, *harmless)
    assert (outcome.exit_status, outcome.report["attempt"]["requests"]) == (0, 3)
    assert len(rows(out)) == 6


def test_each_row_tells_the_settings_it_was_made_under(job, out):
    start(job, limit=3)
    start(job, WELSH, on_change="keep")
    found = rows(out)
    assert len(found) == 6
    assert sorted(row["fingerprint"] for row in found).count(found[0]["fingerprint"]) == 3
    assert {len(row["fingerprint"]) for row in found} == {16}


def test_a_model_that_was_replaced_in_place_is_another(job, out, tmp_path, model_folder):
    model = tmp_path / "model"
    model.mkdir()
    for path in model_folder.iterdir():
        (model / path.name).symlink_to(path)
    start(job, f"engine.args.model={model}", limit=3)
    (model / "tokenizer_config.json").unlink()
    shutil.copy(model_folder / "tokenizer_config.json", model / "tokenizer_config.json")
    assert start(job, f"engine.args.model={model}", limit=1).report["documents"]["ok"] == 4  # the same bytes
    with (model / "tokenizer_config.json").open("a") as stream:
        stream.write("\n")
    with pytest.raises(FingerprintError, match=r"model\.tokenizer_config\.json"):
        start(job, f"engine.args.model={model}")
    assert len(rows(out)) == 4
