"""What a run tells of its engine and its GPUs while it goes, and what its report makes of that."""

import json
from datetime import datetime

import pytest
from helpers_nvml import Gpu, install
from helpers_run import record, rows, start, write_job, write_jsonl

from batchgen.executors import inspection
from batchgen.reporting.stats import read_telemetry

TELLS = "engine.fake.tells={running: 4, waiting: 3, kv_cache_usage: 0.75, queue_s: 1, ttft_s: 1.5, tpot_s: 0.02}"


@pytest.fixture
def job(tmp_path):
    documents = [record(n, text="The quay wall is old. " * (n + 2)) for n in range(20)]
    return write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", documents)])


def samples(out, attempt=1):
    return [one for one in read_telemetry(out / f"telemetry-00000-{attempt:05d}.jsonl") if one["event"] == "sample"]


def near(seconds):
    return pytest.approx(seconds * 1000, rel=0.0222)


def test_a_sample_has_the_engines_state_and_the_times_of_its_window(job, out, monkeypatch):
    monkeypatch.setattr("batchgen.reporting.stats.SAMPLE_S", 0.1)
    start(job, TELLS, "engine.fake.docs_per_s=40")
    told = samples(out)
    assert len(told) > 2
    assert {(one["running"], one["waiting"], one["kv_cache_usage"]) for one in told} == {(4, 3, 0.75)}
    assert {one["gpus"] for one in told} == {None}
    counts = [one["times"]["ttft_s"]["count"] for one in told]
    assert sum(counts) == 20
    assert max(counts) < 20  # of the window, not of the attempt
    for one in told:
        if one["times"]["ttft_s"]["count"]:
            assert one["times"]["ttft_s"]["p95_ms"] == near(1.5)


def test_times_of_a_resumed_run_add_up(job):
    start(job, TELLS, limit=15)
    built = start(job, TELLS, "engine.fake.tells.ttft_s=30").report
    assert (built["attempt"]["latency"]["ttft"]["count"], built["run"]["latency"]["ttft"]["count"]) == (5, 20)
    assert built["attempt"]["latency"]["ttft"]["p50_ms"] == near(30)
    assert built["run"]["latency"]["ttft"] == {"count": 20, "p50_ms": near(1.5), "p95_ms": near(30)}
    assert built["run"]["latency"]["queue"]["p50_ms"] == near(1)
    assert built["run"]["latency"]["tpot"]["p95_ms"] == near(0.02)


def test_times_of_several_engines_are_those_of_one(job):
    built = start(job, TELLS, "engine.replicas_per_gpu=2").report
    assert built["attempt"]["latency"]["tpot"] == {"count": 20, "p50_ms": near(0.02), "p95_ms": near(0.02)}


def test_times_up_to_an_engines_death_are_told(job):
    built = start(job, TELLS, "engine.fake.die_after=7", "engine.fake.lives=1").report
    assert built["attempt"]["latency"]["ttft"]["count"] == built["attempt"]["requests"] > 0


def test_an_engine_that_tells_no_times_has_none(job):
    built = start(job).report
    assert built["attempt"]["latency"]["ttft"] == {"count": 0, "p50_ms": None, "p95_ms": None}


def test_gpus_are_in_samples_and_in_the_report(job, out, monkeypatch):
    nvml = install(monkeypatch, Gpu("GPU-a"), Gpu("GPU-b", busy=40, watts=100, used=5 << 30), Gpu("GPU-of-others"))
    built = start(job, "engine.fake.tells={gpus: 2}", "engine.fake.docs_per_s=40").report
    engine = next(one for one in read_telemetry(out / "telemetry-00000-00001.jsonl") if one["event"] == "engine")
    assert [(one["gpu"], one["uuid"]) for one in engine["nvml"]] == [("0", "GPU-a"), ("1", "GPU-b")]
    last = samples(out)[-1]["gpus"]
    assert [one["gpu"] for one in last] == ["0", "1"]
    gpu = built["attempt"]["gpu"]
    assert built["engine"]["gpus"] == ["0", "1"]
    assert gpu["gpus"] == 2
    assert gpu["gpu_seconds"] == pytest.approx(2 * built["attempt"]["seconds"]["total"], abs=0.01)
    assert (gpu["utilization"], gpu["power_w"], gpu["memory_peak_bytes"]) == (0.6, 300.0, 5 << 30)
    began, ended = (datetime.fromisoformat(one["at"]) for one in (engine, samples(out)[-1]))
    assert gpu["energy_wh"] == pytest.approx(600 * (ended - began).total_seconds() / 3600, rel=0.01, abs=0.001)
    assert nvml.open == 0
    assert "share of time in which one computed | 60.0%" in (out / "report.md").read_text()


def test_gpus_of_attempts_add_up_also_those_of_a_killed_one(job, out, monkeypatch):
    install(monkeypatch, Gpu("GPU-a"))
    first = start(job, "engine.fake.tells={gpus: 1}", "engine.fake.docs_per_s=40", limit=15).report
    telemetry = out / "telemetry-00000-00001.jsonl"
    lines = telemetry.read_text().splitlines(keepends=True)
    assert '"event": "end"' in lines[-1]
    telemetry.write_text("".join(lines[:-1]))  # as if it had been killed
    second = start(job, "engine.fake.tells={gpus: 1}", "engine.fake.docs_per_s=40").report
    both = first["attempt"]["gpu"]["gpu_seconds"] + second["attempt"]["gpu"]["gpu_seconds"]
    assert second["run"]["gpu"]["gpu_seconds"] == pytest.approx(both, abs=0.2)
    assert (second["run"]["gpu"]["gpus"], second["run"]["gpu"]["utilization"]) == (1, 0.8)


def test_a_machine_without_nvml_makes_the_same_run(job, out, monkeypatch):
    install(monkeypatch, Gpu("GPU-a"), broken=["Init"])
    built = start(job, "engine.fake.tells={gpus: 1}").report
    assert built["attempt"]["gpu"]["gpus"] == 1
    assert built["attempt"]["gpu"]["utilization"] is None
    assert {one["gpus"] for one in samples(out)} == {None}


def test_histograms_are_those_of_the_rows_of_all_attempts(job, out):
    start(job, limit=12)
    built = start(job).report
    found = rows(out)
    for name in ("document_chars", "prompt_tokens", "completion_tokens"):
        histogram = built["histograms"][name]
        for n, count in enumerate(histogram["counts"]):
            low, high = histogram["edges"][n : n + 2]
            assert count == sum(low <= row[name] < high for row in found)
        assert sum(histogram["counts"]) == 20
    assert sorted(row["document_chars"] for row in found) == [22 * (n + 2) for n in range(20)]


def test_a_document_that_was_cut_has_its_whole_length(tmp_path, out):
    documents = [record(0, text="The quay wall is old. " * 5000), record(1, text=""), record(2)]
    lines = write_jsonl(tmp_path / "a.jsonl", documents)
    lines.write_text(lines.read_text() + "no record\n")
    start(write_job(tmp_path, [lines]))
    found = {row["id"]: row["document_chars"] for row in rows(out)}
    assert found == {"d0": 22 * 5000, "d1": 0, "d2": len(documents[2]["text"]), None: 0}


def test_a_report_made_while_the_run_goes_has_the_same_figures(job, out):
    start(job, TELLS)
    report = inspection.report(out)
    written = json.loads((out / "report.json").read_text())
    for name in ("latency", "gpu"):
        assert report["attempt"][name] == written["attempt"][name]
    assert report["histograms"] == written["histograms"]
