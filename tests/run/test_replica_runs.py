"""Whole runs on several engines: one row a document, whichever of them dies, and whatever their number was before."""

import threading
import time

import psutil
import pytest
from helpers_run import by_id, record, rows, start, stop_after_a_part, workers, write_job, write_jsonl

POISON = "the sealed box under the pier"


def job(tmp_path, records, *, replicas=2, **fake):
    inputs = [write_jsonl(tmp_path / "a.jsonl", records)]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": fake, "stall_s": 0.6,
              "replicas_per_gpu": replicas}  # fmt: skip
    return write_job(tmp_path, inputs, engine=engine, checkpoint={"rows": 16})


def kill_one_soon(folder):
    """Kill a worker as soon as there is a part."""
    killed = []

    def watch():
        end = time.monotonic() + 30
        while time.monotonic() < end:
            found = workers()
            if found and any((folder / "summaries").glob("part-*")):
                found[0].kill()
                killed.append(found[0].pid)
                return
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    return killed


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not psutil.wait_procs(workers(), timeout=5)[1]


def test_all_documents_get_a_row_and_the_report_tells_the_engines(tmp_path, out):
    outcome = start(job(tmp_path, map(record, range(60)), replicas=3))
    assert outcome.exit_status == 0
    assert len(rows(out)) == len(by_id(out)) == 60
    assert outcome.report["engine"]["replicas"] == 3
    assert "fake, 3 engines, each with" in (out / "report.md").read_text()
    assert outcome.report["attempt"]["requests"] == 60
    assert outcome.report["attempt"]["tokens"]["output"] == 60 * 24


def test_one_that_is_killed_costs_no_row(tmp_path, out):
    path = job(tmp_path, map(record, range(300)), docs_per_s=60)
    killed = kill_one_soon(out)
    outcome = start(path)
    assert killed
    assert outcome.exit_status == 0
    assert len(rows(out)) == len(by_id(out)) == 300
    assert {row["status"] for row in rows(out)} == {"ok"}
    assert outcome.report["attempt"]["documents"]["ok"] == 300
    assert len(outcome.report["notes"]["engine deaths"]) == 1
    assert "its process has ended" in outcome.report["notes"]["engine deaths"][0]


@pytest.mark.parametrize("way", ["die_on", pytest.param("hang_on", marks=pytest.mark.long)])
def test_a_document_that_kills_engines_fails_alone(tmp_path, out, way):
    records = [record(n, text=f"Day {n}: {POISON} was opened.") if n == 13 else record(n) for n in range(40)]
    outcome = start(job(tmp_path, records, **{way: POISON}))
    assert outcome.exit_status == 3
    found = by_id(out)
    assert len(rows(out)) == len(found) == 40
    assert [row["id"] for row in found.values() if row["status"] == "failed"] == ["d13"]
    assert {row["error_type"] for row in found.values()} == {None, "engine_died"}


def test_a_stopped_run_goes_on_with_another_number_of_engines(tmp_path, out, monkeypatch):
    path = job(tmp_path, map(record, range(200)), docs_per_s=80)
    with monkeypatch.context() as patch:
        assert start(path, stop=stop_after_a_part(patch)).exit_status == 75
    before = len(rows(out))
    assert 0 < before < 200
    outcome = start(path, "engine.replicas_per_gpu=1", "engine.fake.docs_per_s=5000")
    assert outcome.exit_status == 0
    assert len(rows(out)) == len(by_id(out)) == 200
