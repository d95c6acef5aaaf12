"""Telemetry over time: what is added up equals the counts, whatever the attempts, shards and pauses are."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from batchgen.reporting import series
from batchgen.reporting.buckets import Buckets
from batchgen.reporting.stats import Counts
from batchgen.storage.rundir import RunDirectory

BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


class Told:
    """Telemetry of an attempt, written by hand: seconds are those since `begin`, itself seconds after BEGAN."""

    def __init__(self, folder, *, shard=0, attempt=1, begin=0.0):
        self._path = folder / f"telemetry-{shard:05d}-{attempt:05d}.jsonl"
        self._begin = begin

    def event(self, name, at, **values):
        when = (BEGAN + timedelta(seconds=self._begin + at)).isoformat(timespec="milliseconds")
        with self._path.open("a") as stream:
            stream.write(json.dumps({"event": name, "at": when, **values}) + "\n")
        return self

    def sample(self, at, ok, *, drain_s=0.0, ttft=(), **gauges):
        times = Buckets()
        for seconds in ttft:
            times.add(seconds)
        counts = Counts(ok=ok, prompt_tokens=100 * ok, generated_tokens=10 * ok, total_s=at, drain_s=drain_s)
        told = {"counts": dataclasses.asdict(counts), "times": {"ttft_s": {"buckets": times.to_json()}}}
        return self.event("sample", at, **told, **gauges)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


def shown(run, **options):
    found = series.timeline(series.read_tracks(run), **options)
    assert found is not None
    return found


def total(found, name):
    return float((found.values(name) * np.diff(found.edges)).sum())


def test_what_is_added_up_is_what_was_counted(run, tmp_path):
    told = Told(tmp_path).event("start", 20).event("engine", 20)
    for n in range(1, 21):
        told.sample(20 + 5 * n, 7 * n, running=8, waiting=2, kv_cache_usage=0.5)
    found = shown(run)
    assert found.seconds == 120
    assert total(found, "ok") == pytest.approx(140)
    assert total(found, "prompt_tokens") == pytest.approx(14_000)
    assert total(found, "output_tokens") == pytest.approx(1400)
    working = found.edges[:-1] > 20
    assert found.values("ok")[working] == pytest.approx(1.4)
    assert found.values("running")[working] == pytest.approx(8)
    assert found.values("kv_cache_usage")[working] == pytest.approx(0.5)
    assert np.isnan(found.values("running")[found.edges[1:] <= 20]).all()
    assert found.phases == ((0.0, pytest.approx(20, abs=0.1), "start"),)


def test_the_clock_stands_still_between_attempts(run, tmp_path):
    Told(tmp_path).event("engine", 0).sample(30, 60)
    Told(tmp_path, attempt=2, begin=90_000).event("engine", 10).sample(20, 10).sample(50, 40)
    found = shown(run)
    assert found.seconds == 80
    assert found.restarts == (30,)
    assert total(found, "ok") == pytest.approx(100)
    assert found.values("ok")[found.edges[1:] <= 30] == pytest.approx(2)
    assert found.phases == ((pytest.approx(30, abs=0.1), pytest.approx(40, abs=0.1), "start"),)


def test_shards_side_by_side_add_up(run, tmp_path):
    for shard in range(4):
        told = Told(tmp_path, shard=shard, begin=shard).event("engine", 0)
        told.sample(50, 50, running=3, kv_cache_usage=0.2 * shard, drain_s=0.0)
        told.sample(100, 100, running=3, kv_cache_usage=0.2 * shard, drain_s=20.0)
    found = shown(run)
    assert found.seconds == 103
    assert total(found, "ok") == pytest.approx(400)
    middle = (found.edges[:-1] > 5) & (found.edges[1:] < 95)
    assert found.values("ok")[middle] == pytest.approx(4)
    assert found.values("running")[middle] == pytest.approx(12)
    assert found.values("kv_cache_usage")[middle] == pytest.approx(0.3)
    assert found.restarts == ()
    (drain,) = found.phases
    assert drain == (pytest.approx(83, abs=0.1), pytest.approx(103, abs=0.1), "drain")


def test_gpus_are_averaged_and_their_power_is_added(run, tmp_path):
    def gpus(*busy):
        return [
            {"gpu": str(n), "utilization": share, "memory_used_bytes": 8 << 30, "power_w": 500.0}
            for n, share in enumerate(busy)
        ]

    Told(tmp_path).event("engine", 0).sample(10, 1, gpus=gpus(0.9, 0.5)).sample(20, 2, gpus=gpus(0.9, 0.5))
    found = shown(run)
    assert found.values("gpu_utilization") == pytest.approx(0.7)
    assert found.values("gpu_least_utilization") == pytest.approx(0.5)
    assert found.values("gpu_power_w") == pytest.approx(1000)
    assert found.values("gpu_memory_bytes") == pytest.approx(8 << 30)


def test_quantiles_of_a_bin_are_those_of_its_requests(run, tmp_path):
    told = Told(tmp_path).event("engine", 0)
    told.sample(10, 1, ttft=[0.1] * 9 + [3.0]).sample(20, 2, ttft=[0.2] * 10)
    found = shown(run)
    p50, p95 = found.values("ttft_s.p50"), found.values("ttft_s.p95")
    assert sorted(p50[np.isfinite(p50)]) == pytest.approx([0.1, 0.2], rel=0.03)
    assert sorted(p95[np.isfinite(p95)]) == pytest.approx([0.2, 3.0], rel=0.03)
    assert not found.tells("tpot_s.p50")


def test_times_of_weeks_stay_few_and_none_is_lost(run, tmp_path, monkeypatch):
    monkeypatch.setattr(series, "_SLOTS", 10)
    told = Told(tmp_path).event("engine", 0)
    for n in range(1, 101):
        told.sample(5 * n, n, ttft=[0.1, 0.4])
    (track,) = series.read_tracks(run)
    assert len(track.times) <= 10
    assert sum(len(slot["ttft_s"]) for slot in track.times.values()) == 200


def test_engine_deaths_are_marked(run, tmp_path):
    Told(tmp_path).event("engine", 0).sample(10, 1).event("engine_died", 12).event("engine", 14).sample(40, 2)
    assert shown(run).deaths == (12,)


def test_an_attempt_that_goes_on_is_shown_up_to_now(run, tmp_path):
    Told(tmp_path).event("engine", 0).sample(10, 5)
    now = {run.telemetry(1): Counts(ok=9, total_s=18.0)}
    found = series.timeline(series.read_tracks(run, now))
    assert found.seconds == 18
    assert total(found, "ok") == pytest.approx(9)


def test_a_short_run_has_nothing_to_show_over_time(run, tmp_path):
    Told(tmp_path).event("engine", 0).sample(4, 5)
    assert series.timeline(series.read_tracks(run)) is None
    assert series.timeline([]) is None


@pytest.mark.parametrize(
    "line", ["", "{}", '{"event": "sample"}', '{"event": "sample", "at": 5, "counts": null}', '{"event": "engine"']
)
def test_lines_of_others_do_no_harm(run, tmp_path, line):
    told = Told(tmp_path).event("engine", 0).sample(10, 1)
    with run.telemetry(1).open("a") as stream:
        stream.write(line + "\n")
    told.sample(20, 2)
    assert total(shown(run), "ok") == pytest.approx(2)


def test_an_attempt_that_was_killed_before_its_first_sample(run, tmp_path):
    Told(tmp_path).event("start", 5).event("engine", 35)
    (track,) = series.read_tracks(run)
    assert (track.seconds, track.ready, track.end) == (30, 30, None)
