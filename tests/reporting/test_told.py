"""What samples of a telemetry file amount to: means over time, the tail, what GPUs took."""

import json

import pytest

from batchgen.reporting.told import Told, told


def write(path, *events):
    path.write_text("".join(json.dumps(one) + "\n" for one in events))
    return path


def at(second):
    return f"2026-01-01T00:{second // 60:02}:{second % 60:02}.000+00:00"


def engine(second, **more):
    return {"event": "engine", "at": at(second), "max_num_seqs": 8, "replicas": 2, "gpus": ["0", "1"]} | more


def sample(second, running, *, usage=0.5, drain=0.0, **more):
    counts = {"total_s": float(second), "drain_s": drain, "requests": second}
    return {
        "event": "sample", "at": at(second), "counts": counts, "running": running, "waiting": 2 * (running or 0),
        "kv_cache_usage": usage,
    } | more  # fmt: skip


def gpu(name, busy, watts, used=1):
    return {"gpu": name, "utilization": busy, "power_w": watts, "memory_used_bytes": used}


def limits(*watts):
    return [{"gpu": str(n), "uuid": f"GPU-{n}", "power_limit_w": one} for n, one in enumerate(watts)]


def test_load_is_a_mean_over_time_while_documents_came(tmp_path):
    path = write(
        tmp_path / "t-0-1",
        engine(10), sample(10, 16), sample(20, 16, usage=0.7), sample(21, 0), sample(29, 0, usage=0.9, drain=8.0),
    )  # fmt: skip
    # 10 s with 16, one with 8 in the mean; the rest is drain, and counts for the peak alone.
    found = told(path).load.told()
    assert found["running"] == pytest.approx((10 * 16 + 8) / 11, abs=0.01)
    assert found["waiting"] == pytest.approx(2 * (10 * 16 + 8) / 11, abs=0.01)
    assert found["kv_cache_usage"] == pytest.approx((10 * 0.6 + 0.6) / 11, abs=0.001)
    assert found["kv_cache_usage_max"] == 0.9


def test_the_tail_is_what_of_the_drain_has_less_than_half(tmp_path):
    path = write(
        tmp_path / "t-0-1",
        engine(0), sample(0, 3), sample(10, 3),  # few, but documents may still come
        sample(15, 16, drain=5.0), sample(20, 16, drain=10.0), sample(25, 7, drain=15.0), sample(30, 7, drain=20.0),
        sample(34, 0, drain=24.0),
    )  # fmt: skip
    assert told(path).load.tail_s == 5 + 4  # of 16 seats: (16+7)/2 is more than half


def test_an_engine_that_tells_nothing_has_no_load(tmp_path):
    path = write(
        tmp_path / "t-0-1", engine(0), sample(5, None, usage=None, waiting=None), sample(9, None, waiting=None)
    )
    assert set(told(path).load.told().values()) == {None}
    assert told(path).load.tail_s == 0


def test_a_new_engine_begins_anew(tmp_path):
    path = write(tmp_path / "t-0-1", engine(0), sample(0, 16), sample(10, 16), engine(100), sample(110, 0))
    assert told(path).load.told()["running"] == 8.0  # 10 s with 16, then 10 with 0; nothing of the 90 between them


def test_gpus_are_summed_over_time_and_over_gpus(tmp_path):
    both = [gpu("0", 1.0, 600, used=9), gpu("1", 0.5, 200)]
    path = write(
        tmp_path / "t-0-1", engine(10, nvml=limits(700.0, 500.0, None)), sample(20, 1, gpus=both),
        sample(30, 1, gpus=[gpu("0", 0.0, None)] * 2),
    )  # fmt: skip
    found = told(path).gpu()
    assert found == {
        "gpus": 2, "gpu_seconds": 60.0, "utilization": 15 / 40, "memory_peak_bytes": 9, "power_w": 400.0,
        "power_limit_w": 500.0, "energy_wh": round(8000 / 3600, 3),
    }  # fmt: skip


def test_attempts_add_up(tmp_path):
    first = told(write(tmp_path / "t-0-1", engine(0, nvml=limits(700.0)), sample(10, 16, gpus=[gpu("0", 1.0, 100)],
                       shared={"prefix_tokens": 30, "suffix_tokens": 5})))  # fmt: skip
    second = told(write(tmp_path / "t-0-2", engine(0, gpus=["0"]), sample(30, 0, gpus=[gpu("0", 0.0, 300)],
                        shared={"prefix_tokens": 20, "suffix_tokens": 7})))  # fmt: skip
    both = Told()
    for one in (first, second):
        both.add(one)
    assert both.counts.requests == 40
    assert both.gpu()["gpu_seconds"] == 2 * 10 + 30
    assert both.gpu()["utilization"] == 0.25
    assert both.gpu()["power_w"] == 250.0
    assert both.gpu()["power_limit_w"] == 700.0
    assert both.load.told()["running"] == 4.0
    assert both.shared == {"prefix_tokens": 20, "suffix_tokens": 5}


def test_telemetry_of_an_older_version_is_read_as_far_as_it_goes(tmp_path):
    old = {"event": "sample", "at": at(5), "counts": {"requests": 3, "total_s": 5.0}, "running": 1}
    found = told(write(tmp_path / "t-0-1", {"event": "engine", "at": at(0)}, old, {"event": "end", "at": "?"}))
    assert (found.counts.requests, found.gpus, found.shared) == (3, set(), None)
    assert found.latency()["ttft"] == {"count": 0, "p50_ms": None, "p95_ms": None}


def test_no_telemetry_tells_nothing(tmp_path):
    assert told(tmp_path / "none").gpu()["gpu_seconds"] == 0


def test_a_gpu_that_several_shards_or_attempts_use_is_one(tmp_path):
    def of(name, gpus, *uuids):
        known = [{"gpu": gpu, "uuid": uuid} for gpu, uuid in zip(gpus, uuids, strict=False)]
        return told(write(tmp_path / f"telemetry-{name}", engine(0, gpus=gpus, nvml=known), sample(10, 1)))

    run = Told()
    for one in (
        of("00000of00002-00001", ["0"], "GPU-a"),
        of("00000of00002-00002", ["0"], "GPU-a"),
        of("00001of00002-00001", ["0", "1"], "GPU-b", "GPU-a"),
    ):
        run.add(one)
    assert (run.gpu()["gpus"], run.gpu()["gpu_seconds"]) == (2, 40.0)
    # Without NVML the names of a shard are all there is.
    blind = of("00000-00001", ["0"])
    blind.add(of("00000-00002", ["0", "1"]))
    assert (blind.gpu()["gpus"], blind.gpu()["gpu_seconds"]) == (2, 30.0)
