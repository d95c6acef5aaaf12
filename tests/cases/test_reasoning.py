"""Models that think aloud: only the job says so, and no thought ever stands in the summary column.

jundot/omlx#2606, vllm-project/vllm#35230
"""

import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

SAID = "The board will renew 40 metres of quay at Elmstead."
THOUGHT = "They want it short; 40 metres is the figure."
# name → (text, finish_reason)
ANSWERS = {
    "normal": (f"<think>{THOUGHT}</think>\n\n{SAID}", "stop"),
    "opened in the prompt": (f"{THOUGHT}</think>{SAID}", "stop"),
    "nothing thought": (f"<think>\n\n</think>\n\n{SAID}", "stop"),
    "thought twice": (f"<think>{THOUGHT}</think>{SAID}<think>check</think>", "stop"),
    "cut in the thought": (f"<think>{THOUGHT} Draft: {SAID}", "length"),
    "cut without tags": ("Okay, a summary is wanted. First, I", "length"),
    "thought only": ("<think>done</think>", "stop"),
    "stopped without closing": (f"<think>{THOUGHT} {SAID}", "stop"),
    "speaks of tags": ("The note says that <think> opens a hidden part and </think> closes it.", "stop"),
    "channels": (f"analysis: {THOUGHT}\n\nfinal: {SAID}", "stop"),
}
WITH_SUMMARY = ["normal", "opened in the prompt", "nothing thought", "thought twice"]
WITHOUT = {
    "cut in the thought": "reasoning_cut",
    "cut without tags": "reasoning_cut",
    "thought only": "empty_output",
    "stopped without closing": "no_answer",
    "channels": "no_answer",
}


def job(tmp_path, **sections):
    """A document for each answer; its id is the name of the answer it gets."""
    told = [{"match": f"[{name}]", "text": text, "finish_reason": why} for name, (text, why) in ANSWERS.items()]
    records = [record(n, id=name, title=f"[{name}]") for n, name in enumerate(ANSWERS)]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": {"answers": told}}
    path = write_jsonl(tmp_path / "a.jsonl", records)
    return write_job(tmp_path, [path], engine=engine, sampling={"max_tokens": 300}, **sections)


def test_a_model_that_is_said_to_reason(tmp_path, out):
    done = command("run", job(tmp_path, answers={"reasoning_end": "</think>"}))
    assert done.returncode == 3
    found = {row["id"]: row for row in rows(out)}
    for name in WITH_SUMMARY:
        assert (found[name]["status"], found[name]["summary"], found[name]["error_type"]) == ("ok", SAID, None), name
        assert found[name]["reasoning_tokens"] == found[name]["completion_tokens"] - len(SAID)
    for name, error_type in WITHOUT.items():
        assert (found[name]["status"], found[name]["summary"]) == ("failed", None), name
        assert found[name]["error_type"] == error_type, name
        assert found[name]["reasoning_tokens"] == found[name]["completion_tokens"]
    assert not any(part in (row["summary"] or "") for row in found.values() for part in (THOUGHT, "check", "think>"))


def test_reasoning_tokens_are_counted_apart_in_the_report(tmp_path, out):
    report = start(job(tmp_path, answers={"reasoning_end": "</think>"})).report
    for scope in ("attempt", "run"):
        assert report[scope]["tokens"]["reasoning"] == sum(row["reasoning_tokens"] for row in rows(out)) > 0
    assert report["attempt"]["tokens"]["output"] == sum(len(text) for text, _ in ANSWERS.values())
    assert f"| of these reasoning | {report['run']['tokens']['reasoning']:,} |" in (out / "report.md").read_text()


def test_whether_a_model_reasons_is_not_guessed(tmp_path, out):
    outcome = start(job(tmp_path))
    assert outcome.exit_status == 0
    for (_, name), row in by_id(out).items():
        text, finish_reason = ANSWERS[name]
        assert row["summary"] == text
        assert row["flags"] == (["summary_cut"] if finish_reason == "length" else [])
    assert outcome.report["run"]["tokens"]["reasoning"] == 0


def test_another_kind_of_reasoning_is_named_by_its_end(tmp_path, out):
    start(job(tmp_path, answers={"reasoning_end": "final:"}))
    assert by_id(out)["str", "channels"]["summary"] == SAID
    assert {row["error_type"] for row in rows(out) if row["id"] != "channels"} == {"no_answer", "reasoning_cut"}


def test_a_cut_thought_gets_more_room_where_the_job_allows(tmp_path, out):
    """The engine would say more than max_tokens lets it."""
    path = job(tmp_path, answers={"reasoning_end": "</think>", "retry_max_tokens": 250})
    start(path, "sampling.max_tokens=20")
    found = {row["id"]: row for row in rows(out)}
    for name in WITH_SUMMARY:
        assert (found[name]["summary"], found[name]["requests"]) == (SAID, 2), name
    for name in ("cut in the thought", "cut without tags"):
        assert (found[name]["error_type"], found[name]["requests"]) == ("reasoning_cut", 2), name
    assert found["thought only"]["requests"] == 1


@pytest.mark.parametrize("key", ["answers.reasoning_end=</reason>", "answers.retry_max_tokens=900"])
def test_how_answers_are_read_belongs_to_the_run(tmp_path, out, key):
    path = job(tmp_path, answers={"reasoning_end": "</think>"})
    start(path)
    done = command("run", path, "--set", key)
    assert done.returncode == 78
    assert key.partition("=")[0] in done.stderr
