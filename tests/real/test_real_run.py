"""Real vLLM, real weights, a real kill."""

import json
import time

import pytest
from helpers_real import kill_group, real_engine, run_to_end, started, wait_for
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

# Its short form is in test_real_survival.py.
pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]
DOCUMENTS = 28


def test_killed_in_the_middle_and_given_again(tmp_path, out, model_folder):
    write_jsonl(tmp_path / "a.jsonl", [*map(record, range(DOCUMENTS)), record(DOCUMENTS, text="")])
    job = write_job(
        tmp_path,
        [tmp_path / "a.jsonl"],
        engine=real_engine(model_folder, max_num_seqs=4),
        checkpoint={"rows": 4, "interval_s": 2},
        sampling={"max_tokens": 24},
    )
    with started(job) as child:
        wait_for(lambda: len(list(out.glob("summaries/part-*"))) >= 2, timeout=400, child=child)
        kill_group(child)
    committed = rows(out)
    assert 5 <= len(committed) < DOCUMENTS + 1

    assert run_to_end(job) == 0
    found = by_id(out)
    assert len(found) == DOCUMENTS + 1
    assert [row for row in rows(out) if row in committed] == committed
    assert sum(row["status"] == "ok" for row in found.values()) == DOCUMENTS
    report = json.loads((out / "report.json").read_text())
    done = sum(row["status"] == "ok" for row in committed)
    assert report["attempt"]["requests"] == DOCUMENTS - done  # nothing was done twice
    assert report["engine"]["kv_cache_tokens"] > 0
    latency = report["attempt"]["latency"]
    assert {one["count"] for one in latency.values()} == {report["attempt"]["requests"]}
    assert 0 < latency["tpot"]["p50_ms"] < latency["ttft"]["p95_ms"] < 1000 * report["attempt"]["seconds"]["total"]
    assert latency["queue"]["p95_ms"] <= latency["ttft"]["p95_ms"] * 1.05  # it waits before its first token
    assert report["engine"]["gpus"] == []
    assert report["attempt"]["shared"]["suffix_tokens"] > 0  # at least where the answer begins
    assert report["attempt"]["tokens"]["output"] >= report["attempt"]["tokens"]["wasted"] == 0

    begin = time.monotonic()
    assert start(job).report["attempt"]["requests"] == 0
    assert time.monotonic() - begin < 2
