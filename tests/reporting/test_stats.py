"""Counts add up, in any grouping; times are those of their phases; telemetry survives a kill."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from helpers_config import document
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Completion, Record
from batchgen.engines.base import EngineMetrics
from batchgen.errors import OutputError
from batchgen.reporting import stats as stats_module
from batchgen.reporting.stats import Counts, Stats, Telemetry, counts_of, read_telemetry

NAMES = [field.name for field in dataclasses.fields(Counts)]
# Whole seconds: sums of them are exact.
COUNTS = st.builds(lambda values: Counts(**dict(zip(NAMES, values, strict=True))),
                   st.lists(st.integers(0, 10**9), min_size=len(NAMES), max_size=len(NAMES)))  # fmt: skip


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stats_module, "time", clock)
    return clock


@given(COUNTS, COUNTS, COUNTS)
def test_adding_is_associative_and_commutative(a, b, c):
    assert (a + b) + c == a + (b + c) == sum([c, a], start=b)
    assert a + b == b + a
    assert a + Counts() == a


@given(COUNTS, COUNTS)
def test_adding_adds_every_field(a, b):
    for name in NAMES:
        values = getattr(a, name), getattr(b, name)
        assert getattr(a + b, name) == (max(values) if "peak" in name else sum(values))


@pytest.mark.parametrize(
    ("counts", "wasted"),
    [
        (Counts(), 0),
        (Counts(completion_tokens=100, generated_tokens=100, kept_tokens=100), 0),
        (Counts(completion_tokens=100, generated_tokens=130, kept_tokens=90), 40),
        (Counts(completion_tokens=100, kept_tokens=90), 10),  # the engine was never asked
        (Counts(generated_tokens=50), 50),  # nothing finished
    ],
)
def test_wasted_tokens_are_in_no_ok_record(counts, wasted):
    assert counts.wasted_tokens == wasted


def record(status, *, tokens=0, error=None):
    return Record(document("x"), status, error_type=error, completion_tokens=tokens)


def test_an_answer_that_was_dropped_is_wasted_and_reasoning_is_not():
    stats = Stats()
    for n in range(2):
        stats.completed(Completion(f"r{n}", completion_tokens=50))
    kept = Record(document("x"), "ok", completion_tokens=100, dropped_tokens=50, reasoning_tokens=80, requests=2)
    stats.recorded(kept)
    stats.recorded(Record(document("x"), "failed", error_type="no_answer", reasoning_tokens=7))
    assert (stats.counts.kept_tokens, stats.counts.wasted_tokens, stats.counts.reasoning_tokens) == (50, 50, 87)


def test_a_worked_example(clock):
    """Start 20 s, 30 s with documents coming, 5 s for the last; the numbers are worked out by hand."""
    stats = Stats()
    clock.now += 2
    stats.counts.read = 6
    stats.recorded(record("skipped", error="empty"))
    clock.now += 20
    stats.engine_started(20)
    for n in range(4):
        clock.now += 5
        stats.completed(Completion(f"r{n}", prompt_tokens=100, cached_tokens=64, completion_tokens=10))
        stats.recorded(record("ok", tokens=10))
    clock.now += 10
    stats.no_more_documents()
    clock.now += 5
    stats.completed(Completion("r4", prompt_tokens=100, completion_tokens=3, error="no"))
    stats.recorded(record("failed", tokens=3, error="request_failed"))
    stats.engine(EngineMetrics(generation_tokens=50, prefix_cache_queries=500, prefix_cache_hits=256, preemptions=2))
    clock.now += 1
    counts = stats.now()
    assert (counts.ok, counts.failed, counts.skipped, counts.requests) == (4, 1, 1, 5)
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (500, 256, 43)
    assert (counts.kept_tokens, counts.generated_tokens, counts.wasted_tokens) == (40, 50, 10)
    assert (counts.engine_start_s, counts.steady_s, counts.drain_s, counts.total_s) == (20, 30, 5, 58)
    assert (counts.prefix_cache_queries, counts.prefix_cache_hits, counts.preemptions) == (500, 256, 2)
    assert stats.reasons == {"skipped: empty": 1, "failed: request_failed": 1}
    assert stats.seconds == 58


def test_without_an_engine_there_are_no_phases(clock):
    stats = Stats()
    clock.now += 7
    counts = stats.now()
    assert (counts.total_s, counts.engine_start_s, counts.steady_s, counts.drain_s) == (7, 0, 0, 0)
    stats.no_more_documents()
    clock.now += 7
    counts = stats.now()
    assert (counts.total_s, counts.steady_s, counts.drain_s) == (14, 0, 0)


def test_time_is_steady_while_documents_come_and_drain_after(clock):
    stats = Stats()
    stats.engine_started(0)
    clock.now += 4
    assert (stats.now().steady_s, stats.now().drain_s) == (4, 0)
    stats.completed(Completion("r1"))
    clock.now += 4
    assert (stats.now().steady_s, stats.now().drain_s) == (8, 0)
    stats.no_more_documents()
    stats.no_more_documents()
    clock.now += 3
    stats.completed(Completion("r2"))
    stats.no_more_documents()
    clock.now += 100  # what comes after the last completion is no time of the engine
    assert (stats.now().steady_s, stats.now().drain_s) == (8, 3)


def test_time_after_the_last_completion_is_no_time_of_the_engine(clock):
    stats = Stats()
    stats.engine_started(0)
    clock.now += 4
    stats.completed(Completion("r1"))
    clock.now += 50  # reading on, but all of it is done already
    stats.no_more_documents()
    assert (stats.now().steady_s, stats.now().drain_s) == (4, 0)


def test_what_came_out_since_the_engine_was_asked_was_generated_too(clock):
    stats = Stats()
    stats.engine(EngineMetrics(generation_tokens=30))
    stats.completed(Completion("r1", completion_tokens=100))
    first = stats.now()
    assert first.generated_tokens == 100
    second = Counts(completion_tokens=120, generated_tokens=150, kept_tokens=120)
    assert (first + second).generated_tokens == 250
    assert (first + second).wasted_tokens == first.wasted_tokens + second.wasted_tokens


def test_an_engine_that_tells_nothing_counts_as_nothing():
    stats = Stats()
    stats.engine(EngineMetrics())
    counts = stats.now()
    assert (counts.generated_tokens, counts.prefix_cache_queries, counts.preemptions) == (0, 0, 0)


def test_now_is_a_copy(clock):
    stats = Stats()
    counts = stats.now()
    stats.recorded(record("ok"))
    assert (counts.ok, stats.now().ok) == (0, 1)


# Telemetry


def test_a_start_with_nothing_to_tell_leaves_no_file(tmp_path):
    telemetry = Telemetry(tmp_path / "t.jsonl", attempt=1)
    telemetry.close(Stats(), 0)
    assert list(tmp_path.iterdir()) == []


def test_events_are_lines_that_begin_with_the_start(tmp_path):
    path = tmp_path / "t.jsonl"
    telemetry = Telemetry(path, attempt=3)
    stats = Stats()
    stats.recorded(record("ok", tokens=7))
    assert telemetry.due
    telemetry.sample(stats, EngineMetrics(generation_tokens=9, running=2, waiting=1, kv_cache_usage=0.25))
    assert not telemetry.due
    telemetry.event("commit", rows=1, path=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # on disk before the end
    telemetry.close(stats, 75)
    lines.append(json.loads(path.read_text().splitlines()[-1]))
    assert [line["event"] for line in lines] == ["start", "sample", "commit", "end"]
    assert lines[0]["attempt"] == 3
    assert (lines[1]["running"], lines[1]["waiting"], lines[1]["kv_cache_usage"]) == (2, 1, 0.25)
    assert (lines[1]["counts"]["ok"], lines[1]["counts"]["generated_tokens"]) == (1, 9)
    assert lines[2]["path"] == str(path)
    assert (lines[3]["exit_status"], lines[3]["counts"]["kept_tokens"]) == (75, 7)
    assert all(line["at"].endswith("+00:00") for line in lines)


def test_the_last_counts_are_read_back(tmp_path):
    path = tmp_path / "t.jsonl"
    stats = Stats()
    telemetry = Telemetry(path)
    telemetry.sample(stats, EngineMetrics())
    stats.recorded(record("ok", tokens=7))
    telemetry.sample(stats, EngineMetrics(generation_tokens=11))
    telemetry.close(stats, 0)
    found = counts_of(path)
    assert (found.ok, found.kept_tokens, found.generated_tokens) == (1, 7, 11)


def test_the_file_is_closed_at_the_end(tmp_path):
    def is_open():
        return path in {one.readlink() for one in Path("/proc/self/fd").iterdir() if one.exists()}

    path = tmp_path / "t.jsonl"
    telemetry = Telemetry(path)
    telemetry.event("commit")
    assert is_open()
    telemetry.close(Stats(), 0)
    assert not is_open()


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "t.jsonl"
    telemetry = Telemetry(path)
    stats = Stats()
    stats.recorded(record("ok"))
    telemetry.sample(stats, EngineMetrics())
    telemetry.close(stats, 0)
    whole = path.read_bytes()
    events = list(read_telemetry(path))
    edges = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for end in sorted({*range(0, len(whole), 29), *(edge - n for edge in edges for n in (0, 1, 2))}):
        path.write_bytes(whole[:end])
        finished = sum(edge - 1 <= end for edge in edges)
        assert list(read_telemetry(path)) == events[:finished]
    path.write_bytes(whole[: edges[0] + 5])
    assert counts_of(path) == Counts()


def test_events_after_a_bad_line_are_read(tmp_path):
    path = tmp_path / "t.jsonl"
    good = json.dumps({"event": "end", "counts": {"ok": 3}}).encode()
    path.write_bytes(good[:9] + good + b"\n" + bytes(40) + b"\n\xff\n\n[1]\n" + b"[" * 100_000 + b"\n" + good + b"\n")
    assert [one["event"] for one in read_telemetry(path)] == ["end"]
    assert counts_of(path) == Counts(ok=3)


def test_counts_of_another_version_are_read_as_far_as_they_are_known(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"event": "end", "counts": {"ok": 3, "of_tomorrow": 5}}\n[1]\n')
    assert counts_of(path) == Counts(ok=3)


def test_telemetry_that_cannot_be_written_stops_the_run(tmp_path):
    telemetry = Telemetry(tmp_path / "none" / "t.jsonl")
    with pytest.raises(OutputError, match="cannot be written"):
        telemetry.event("commit")


def test_what_other_threads_see_is_now_and_changes_nothing(clock):
    stats = Stats()
    stats.engine_started(2.0)
    clock.now += 3
    stats.completed(Completion("1", completion_tokens=5))
    before = dataclasses.replace(stats.counts)
    seen = stats.seen()
    assert stats.counts == before
    now = stats.now()
    assert dataclasses.replace(seen, peak_rss_bytes=0) == dataclasses.replace(now, peak_rss_bytes=0)
    assert (seen.total_s, seen.steady_s, seen.generated_tokens) == (3, 3, 5)


def test_all_times_are_those_before_and_after_the_sample():
    stats = Stats()
    for n, seconds in enumerate((1.0, 2.0, 4.0)):
        stats.completed(Completion(str(n), ttft_s=seconds))
        if n == 1:
            assert len(stats.take_times()["ttft_s"]) == 2
    assert [len(stats.times["ttft_s"]), len(stats.all_times()["ttft_s"])] == [1, 3]
    assert len(stats.all_times()["ttft_s"]) == 3  # asking takes nothing


def test_commits_are_counted_with_the_time_of_the_last():
    stats = Stats()
    assert stats.committed_at is None
    stats.committed(3)
    stats.committed(4)
    assert (stats.commits, stats.committed_rows) == (2, 7)
    assert abs(stats.committed_at - time.time()) < 60
