"""Whole runs whose engine does not start at once, with `engine.adapt`."""

import json

import pytest
from helpers_config import MODEL, need_model
from helpers_run import command, record, rows, same_rows, start, write_job, write_jsonl

from batchgen.errors import EngineError

NO_FIT = "max seq len (2048) larger than tokens that fit in KV cache ({})"
TAKEN = "free memory on device (31.4/47.4 GiB) below the wanted share (0.92)"
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


def job(folder, *faults, records=None, adapt=True, args=None, **sections):
    records = [record(n) for n in range(20)] if records is None else records
    inputs = [write_jsonl(folder / "a.jsonl", records)]
    engine = {
        "backend": "fake", "adapt": adapt, "args": {"max_model_len": 2048, "max_num_seqs": 64} | (args or {}),
        "fake": {"start_faults": list(faults)},
    }  # fmt: skip
    return write_job(folder, inputs, engine=engine, **sections)


def decisions(out):
    return json.loads((out / "run.json").read_text()).get("decisions", {}).get("engine")


def used(outcome):
    return {change["argument"]: change["after"] for change in outcome.report["engine"]["adapted"]}


def longest(found):
    return max(row["prompt_tokens"] for row in found)


def test_a_run_goes_on_with_less_and_tells_what_it_used(tmp_path, out):
    outcome = start(job(tmp_path, NO_FIT.format(900), TAKEN, OOM))
    assert outcome.exit_status == 0
    need = longest(rows(out)) + 64
    assert used(outcome) == {"max_model_len": need, "gpu_memory_utilization": 0.65, "max_num_seqs": 32,
                             "max_num_batched_tokens": 4096}  # fmt: skip
    assert outcome.report["engine"]["args"] == {"max_model_len": need, "gpu_memory_utilization": 0.65,
                                                "max_num_seqs": 32, "max_num_batched_tokens": 4096}  # fmt: skip
    assert outcome.report["engine"]["max_num_seqs"] == 32
    assert [change["argument"] for change in decisions(out)["changes"]] == [*used(outcome)]
    text = (out / "report.md").read_text()
    assert f"- adapted: max_model_len 2048 → {need} (the KV cache holds 900 tokens, the documents need {need})" in text
    assert "- adapted: gpu_memory_utilization default → 0.65 (31.4 of 47.4 GiB are free" in text


def test_rows_are_those_of_a_run_whose_engine_started_at_once(tmp_path, out):
    records = [record(n) for n in range(20)] + [record(99, text="A long one. " * 40)]
    (tmp_path / "calm").mkdir()
    start(job(tmp_path, NO_FIT.format(1000), OOM, OOM, OOM, OOM, records=records))
    start(job(tmp_path / "calm", records=records))
    calm = [row | {"source": str(tmp_path / "a.jsonl")} for row in rows(tmp_path / "calm/out")]
    same_rows(rows(out), calm)
    assert {row["fingerprint"] for row in calm} == {row["fingerprint"] for row in rows(out)}


def test_a_document_that_fills_the_context_keeps_it_whole(tmp_path, out):
    records = [record(1), record(2, text="A very long one. " * 400)]
    outcome = start(job(tmp_path, NO_FIT.format(1000), records=records))
    assert "max_model_len" not in used(outcome)  # room was made instead
    assert used(outcome)["max_num_seqs"] == 32
    assert longest(rows(out)) == 2048 - 64
    assert [row["flags"] for row in rows(out)].count(["document_truncated"]) == 1


def test_packs_keep_the_context_that_they_are_cut_for(tmp_path, out):
    outcome = start(job(tmp_path, NO_FIT.format(900), packing={"mode": "on"}))
    assert outcome.exit_status == 0
    assert "max_model_len" not in used(outcome)


def test_an_answer_that_is_sent_for_once_more_has_its_room(tmp_path, out):
    more = {"retry_max_tokens": 300}
    outcome = start(job(tmp_path, NO_FIT.format(900), answers=more, sampling={"max_tokens": 8}))
    assert outcome.exit_status == 0
    assert {row["requests"] for row in rows(out)} == {2}
    assert used(outcome) == {"max_model_len": longest(rows(out)) // 2 + 300}  # of two requests
    assert {row["status"] for row in rows(out)} == {"ok"}


def test_what_cannot_be_adapted_ends_with_69_and_what_was_tried(tmp_path, out):
    records = [record(1), record(2, text="A very long one. " * 400)]
    outcome = start(job(tmp_path, *[NO_FIT.format(1000)] * 9, records=records))
    assert outcome.exit_status == EngineError.exit_status
    assert "the documents need a context of 2,048 tokens" in outcome.reason
    assert "tried: max_num_seqs 64 → 16, max_num_batched_tokens default → 1024, enforce_eager default → true" in (
        outcome.reason
    )
    assert decisions(out) is None
    assert rows(out) == []


def test_a_resume_begins_with_what_was_used(tmp_path, out):
    path = job(tmp_path, NO_FIT.format(900), OOM)
    first = start(path, limit=5)
    assert len(rows(out)) == 5
    second = start(path, "engine.fake.start_faults=[]")
    assert second.exit_status == 0
    assert len(rows(out)) == 20
    assert used(second) == used(first)
    assert second.report["engine"]["args"]["max_model_len"] == used(first)["max_model_len"]
    assert second.report["engine"]["args"]["gpu_memory_utilization"] == 0.85


def test_the_fingerprint_does_not_know_of_it(tmp_path, out):
    path = job(tmp_path, NO_FIT.format(900))
    start(path, limit=5)
    before = json.loads((out / "run.json").read_text())["fingerprint"]
    assert start(path, "engine.adapt=false", "engine.fake.start_faults=[]").exit_status == 0
    assert json.loads((out / "run.json").read_text())["fingerprint"] == before
    assert before["max_prompt_tokens"] == 2048 - 64


@pytest.mark.parametrize(
    ("change", "remembered"),
    [
        ("engine.adapt=true", True),
        ("engine.adapt=false", False),
        ("engine.args.max_num_seqs=8", False),
        ("engine.stall_s=7", True),
    ],
)
def test_decisions_hold_for_the_arguments_they_were_made_for(tmp_path, out, change, remembered):
    path = job(tmp_path, OOM)
    start(path, limit=5)
    again = start(path, "engine.fake.start_faults=[]", change)
    assert used(again) == ({"gpu_memory_utilization": 0.85} if remembered else {})


def test_a_longer_document_that_came_later_gets_its_context(tmp_path, out):
    path = job(tmp_path, NO_FIT.format(900), OOM)
    small = used(start(path))["max_model_len"]
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write(json.dumps(record(50, text="A long one. " * 60)) + "\n")
    second = start(path, "engine.fake.start_faults=[]")
    assert second.exit_status == 0
    assert {row["status"] for row in rows(out)} == {"ok"}
    assert longest(rows(out)) + 64 > small
    assert used(second) == {"gpu_memory_utilization": 0.85}


def test_a_short_document_that_came_later_costs_no_failed_start(tmp_path, out):
    path = job(tmp_path, NO_FIT.format(900))
    small = used(start(path))
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write(json.dumps(record(5, id="late")) + "\n")
    second = start(path, "engine.fake.start_faults=[]")
    assert used(second) == small
    assert len(rows(out)) == 21


def test_a_fresh_run_begins_anew(tmp_path, out):
    path = job(tmp_path, OOM)
    start(path)
    assert used(start(path, "engine.fake.start_faults=[]", fresh=True)) == {}


def test_an_engine_that_is_started_again_gets_the_same(tmp_path):
    outcome = start(job(tmp_path, OOM), "engine.fake.die_after=13", "engine.args.max_num_seqs=4")
    assert outcome.exit_status == 0
    assert outcome.report["notes"]["engine deaths"]
    assert outcome.report["engine"]["args"]["gpu_memory_utilization"] == 0.85


def test_a_model_s_own_tokenizer_measures_the_documents(tmp_path, out):
    need_model()
    path = job(tmp_path, NO_FIT.format(900), args={"model": str(MODEL)})
    outcome = start(path)
    assert outcome.exit_status == 0
    assert used(outcome) == {"max_model_len": longest(rows(out)) + 64}


def test_each_step_and_the_end_are_lines_on_stderr(tmp_path):
    done = command("run", job(tmp_path, NO_FIT.format(900), OOM))
    assert done.returncode == 0
    steps = [line for line in done.stderr.splitlines() if "engine.adapt: trying" in line]
    assert len(steps) == 2
    assert "the KV cache holds 900 tokens" in steps[0]
    assert "max_model_len 2048 → " in steps[0]
    assert "the GPU's memory was full" in steps[1]
    assert "gpu_memory_utilization default → 0.85" in steps[1]
    last = done.stderr.splitlines()[-1]
    assert "; engine.adapt: max_model_len 2048 → " in last
    assert "gpu_memory_utilization default → 0.85" in last
