"""Two runs need not give the same texts, and nobody promises it: vllm-project/vllm#5898, #7779, #23138."""

import json
from pathlib import Path

from helpers_run import record, rows, start, write_job, write_jsonl

TOP = Path(__file__).parent.parent.parent


def told(page):
    return " ".join((TOP / page).read_text(encoding="utf-8").split())


def test_the_pages_say_so():
    assert "Texts of real engines are not promised to be equal between runs" in told("README.md")
    assert "A test on real vLLM compares ids, counts and statuses, never texts" in told("CONTRIBUTING.md")


def test_what_explains_a_difference_is_kept(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(3)))
    job = write_job(tmp_path, [tmp_path / "a.jsonl"], sampling={"max_tokens": 64, "temperature": 0.5, "seed": 7})
    start(job)
    run = json.loads((out / "run.json").read_text())
    assert run["job"]["sampling"] == {"max_tokens": 64, "temperature": 0.5, "seed": 7}
    assert (run["engine"]["max_num_seqs"], run["engine"]["feed"]) == (4, "rolling")
    assert {"args", "versions", "device"} <= set(run["engine"])  # of vLLM: tests/real
    assert {row["fingerprint"] for row in rows(out)} == {run["fingerprint_digest"]}
    start(job, "engine.feed=generate", on_change="keep")
    assert json.loads((out / "run.json").read_text())["job"]["engine"]["feed"] == "generate"
