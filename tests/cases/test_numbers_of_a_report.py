"""Throughput as it is: tokens that were generated, apart from prompts, from the start and from earlier attempts.

vllm-project/vllm#10753 counted requested tokens, vllm-project/vllm#8231 prompt and output under one name.
"""

import re
import time

from helpers_run import record, start, write_job, write_jsonl

from batchgen.data import Completion, Document, Record
from batchgen.engines.base import EngineMetrics
from batchgen.executors import local
from batchgen.feeding import reader
from batchgen.reporting import report
from batchgen.reporting.rows import read_rows
from batchgen.reporting.stats import Stats, read_telemetry
from batchgen.sinks.parquet import ParquetSink
from batchgen.storage.rundir import RunDirectory

# (document, prompt tokens, of these cached, output tokens): c was cut and asked again, d failed.
REQUESTS = [("a", 100, 0, 40), ("b", 100, 80, 10), ("c", 300, 80, 200), ("c", 300, 288, 90), ("d", 50, 0, 0)]


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def document(name):
    return Document(name.encode() * 16, bytes(8), "a.jsonl", f"byte {ord(name)}", name, "str", {}, "", {}, 0)


def attempt(monkeypatch):
    """60 s of engine start and 20 s of work, as the loop tells them."""
    clock = Clock()
    monkeypatch.setattr("batchgen.reporting.stats.time", clock)
    stats = Stats()
    clock.now = 60
    stats.engine_started(60)
    clock.now = 80
    for name, prompt, cached, out in REQUESTS:
        stats.completed(Completion(name, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=out))
    stats.no_more_documents()
    records = [Record(document(name), "ok", summary="s", completion_tokens=out) for name, out in
               (("a", 40), ("b", 10), ("c", 90))]  # fmt: skip
    records.append(Record(document("d"), "failed", error_type="request_failed", error="e"))
    for one in records:
        stats.recorded(one)
    # The engine's own hit counts take in what it computed again after a preemption.
    stats.engine(EngineMetrics(generation_tokens=340, prefix_cache_queries=2000, prefix_cache_hits=1900))
    return stats, records


def build(run, stats, rows, number=1):
    return report.build(run, report.Scope(
        name="demo", attempt=number, counts=stats.now(), exit_status=3, reason="", rows=rows, stale=0, total_rows=4,
        total_exact=True, notes={},
    ))  # fmt: skip


def test_a_worked_example(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    run.summaries.mkdir()
    run.write_run({})
    stats, records = attempt(monkeypatch)
    sink = ParquetSink({}, owner="0")
    sink.write_part(run.part(1, 1, ".parquet"), records, fingerprint="f", footer={})
    built = build(run, stats, read_rows(run, sink))
    assert (built["documents"]["ok"], built["documents"]["failed"]) == (3, 1)
    for scope in ("attempt", "run"):
        assert built[scope]["tokens"] == {"prompt": 850, "cached": 448, "output": 340, "reasoning": 0, "wasted": 200}
        # Over the engine's 20 seconds, not over the 60 of its start, nor over max_tokens.
        assert built[scope]["rates"] == {"docs_per_s": 0.15, "prompt_tokens_per_s": 42.5, "output_tokens_per_s": 17.0}
        assert built[scope]["seconds"]["engine_start"] == 60
        assert built[scope]["seconds"]["steady"] + built[scope]["seconds"]["drain"] == 20
        assert built[scope]["prefix_cache"]["hit_share"] == round(448 / 850, 4)
    # Nowhere do prompt and output tokens stand together under one name.
    text = report.markdown(built)
    assert set(re.findall(r"\| ([\w ]*tok/s) ", text)) == {"prompt tok/s", "output tok/s"}
    assert not {"tokens_per_s", "total_tokens"} & set(built["run"]["rates"])


def test_a_resume_tells_this_attempt_and_the_whole_run_apart(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(20)))])
    first = start(job, limit=15).report
    second = start(job, "engine.fake.docs_per_s=50").report  # slow enough for times in milliseconds
    assert (second["attempt"]["documents"]["ok"], second["attempt"]["documents"]["done_before"]) == (5, 15)
    assert (second["attempt"]["requests"], second["run"]["requests"]) == (5, 20)
    assert second["run"]["tokens"]["output"] == first["run"]["tokens"]["output"] + second["attempt"]["tokens"]["output"]
    # Documents that were done before do not raise the rate.
    seconds = second["attempt"]["seconds"]
    assert abs(second["attempt"]["rates"]["docs_per_s"] * (seconds["steady"] + seconds["drain"]) - 5) < 0.5


def test_output_tokens_are_those_generated_not_those_asked_for(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(4)))], sampling={"max_tokens": 500})
    assert start(job).report["run"]["tokens"]["output"] == 4 * 24  # what the fake engine writes


def test_an_engine_that_could_run_more_than_is_read_is_starved(tmp_path, monkeypatch):
    """Also one that always has something in flight: its seats are empty all the same."""
    monkeypatch.setattr(reader, "_BATCH_S", 0.0)
    monkeypatch.setattr(reader, "_COUNTED", 1)

    def slowly(line, reading):
        for document in reader.read_documents(line, reading):
            time.sleep(0.02)
            yield document

    monkeypatch.setattr(local, "read_documents", slowly)
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(40)))])
    fast = start(job).report
    slow_engine = start(job, "engine.fake.docs_per_s=60", fresh=True).report
    assert fast["attempt"]["starved_share"] > 0.8
    assert slow_engine["attempt"]["starved_share"] > 0.4
    for built in (fast, slow_engine):
        seconds = built["attempt"]["seconds"]
        assert 0 < seconds["starved"] <= seconds["steady"] + seconds["drain"] + 0.01


def test_an_engine_that_is_slower_than_the_reader_is_not_starved(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(100)))])
    built = start(job, "engine.fake.docs_per_s=100").report
    assert built["attempt"]["seconds"]["steady"] > 0.5
    assert built["attempt"]["starved_share"] < 0.05


def test_the_peak_of_the_memory_is_told_by_the_report_and_by_telemetry(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(20)))])
    first = start(job, limit=10).report
    second = start(job).report
    own = first["attempt"]["memory"]["peak_rss_bytes"]
    assert 10 << 20 < own < 100 << 30
    assert first["attempt"]["memory"]["engine_peak_rss_bytes"] is None  # the fake engine has no process
    peaks = [attempt["memory"]["peak_rss_bytes"] for attempt in (first["run"], second["attempt"], second["run"])]
    assert peaks == [own, max(peaks), max(peaks)]
    telling = [event for event in read_telemetry(out / "telemetry-00000-00001.jsonl") if event["event"] == "sample"]
    assert telling
    for event in telling:
        assert 10 << 20 < event["rss_bytes"] <= event["counts"]["peak_rss_bytes"] + (1 << 20)
        assert event["engine_rss_bytes"] is None
