"""GPUs are looked at by NVML: those of this run alone, and nothing of it is ever an error."""

import sys
import threading
import time

import pytest
from helpers_nvml import Gpu, install

from batchgen.reporting.gpus import GpuWatch

A = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
B = "GPU-bbbbbbbb-1111-2222-3333-444444444444"


@pytest.fixture
def watch():
    """Makes watches that look fast, has each look once, and closes them at the end."""
    made = []

    def make(*names):
        made.append(GpuWatch(names, look_s=0.005))
        if made[-1].found:
            look(made[-1])
        return made[-1]

    yield make
    for one in made:
        one.close()


def look(watch):
    """Wait until each GPU was looked at again."""
    nvml = watch._nvml
    seen = len(nvml.asked)
    while len(nvml.asked) < seen + 8 * len(watch._gpus):
        time.sleep(0.002)


def names(reading):
    return [one["gpu"] for one in reading]


def test_what_a_gpu_does_and_is(monkeypatch, watch):
    install(monkeypatch, Gpu(A))
    found = watch("0")
    assert found.read() == [{"gpu": "0", "utilization": 0.8, "memory_used_bytes": 3 << 30, "power_w": 500.0}]
    assert found.found == [
        {"gpu": "0", "name": "NVIDIA Test", "uuid": A, "memory_bytes": 8 << 30, "power_limit_w": 700.0}
    ]


def test_a_reading_is_the_mean_since_the_one_before(monkeypatch, watch):
    gpu = Gpu(A, busy=0)
    install(monkeypatch, gpu)
    found = watch("0")
    found.read()
    gpu.busy = 100
    look(found)
    look(found)
    assert found.read()[0]["utilization"] > 0.5
    look(found)
    assert found.read()[0]["utilization"] == 1.0


def test_power_is_what_the_energy_counter_says(monkeypatch, watch):
    gpu = Gpu(A, watts=1, energy=5000)
    install(monkeypatch, gpu)
    monkeypatch.setattr("batchgen.reporting.gpus.LOOK_S", 0.1)
    found = watch("0")
    found.read()
    begin = time.monotonic()
    while (past := time.monotonic() - begin) < 0.3:
        gpu.energy = 5000 + 200 * past
        time.sleep(0.002)
    assert found.read()[0]["power_w"] == pytest.approx(200, rel=0.25)


@pytest.mark.parametrize(
    ("named", "known"),
    [
        (["1"], ["1"]),
        (["1", "0"], ["1", "0"]),
        ([B], [B]),
        (["GPU-bbbb"], ["GPU-bbbb"]),  # CUDA takes shortened ones
        (["GPU-"], []),  # of both
        (["2"], []),
        (["remote-0"], []),
        (["nonsense", "0"], ["0"]),
    ],
)
def test_only_those_of_this_run(monkeypatch, watch, named, known):
    install(monkeypatch, Gpu(A), Gpu(B, used=1))
    found = watch(*named)
    assert names(found.found) == known
    assert names(found.read() or []) == known
    if known and known[0] != "0":
        assert found.read()[0]["memory_used_bytes"] == 1


def test_numbers_of_different_gpus_are_cudas_own(monkeypatch, watch):
    install(monkeypatch, Gpu(A, name="small"), Gpu(B, name="large"))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert watch("0").read() is None
    assert names(watch(A).read()) == [A]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert names(watch("0").read()) == ["0"]


def parts(*uuids):
    return [Gpu(uuid, used=7, is_part=True) for uuid in uuids]


def test_of_a_part_of_a_gpu_there_is_the_memory_alone(monkeypatch, watch):
    install(monkeypatch, Gpu(A, parts=parts("MIG-1", "MIG-2")), Gpu(B))
    assert watch("MIG-2").read() == [{"gpu": "MIG-2", "utilization": None, "memory_used_bytes": 7, "power_w": None}]
    assert watch("MIG-3").read() is None
    assert watch("0").read() is None  # CUDA's first may be any of the two
    install(monkeypatch, Gpu(A, parts=parts("MIG-1")))
    assert watch("0").read()[0]["memory_used_bytes"] == 7


@pytest.mark.parametrize("broken", ["Init", "DeviceGetCount", "DeviceGetUUID"])
def test_an_nvml_that_does_not_work_tells_nothing(monkeypatch, watch, broken):
    install(monkeypatch, Gpu(A), broken=[broken])
    found = watch("0")
    assert (found.found, found.read()) == ([], None)


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        ("DeviceGetUtilizationRates", "utilization"),
        ("DeviceGetPowerUsage", "power_w"),
        ("DeviceGetMemoryInfo", "memory_used_bytes"),
    ],
)
def test_what_nvml_does_not_tell_is_null(monkeypatch, watch, broken, lost):
    install(monkeypatch, Gpu(A), broken=[broken])
    (reading,) = watch("0").read()
    assert [name for name, value in reading.items() if value is None] == [lost]


def test_without_the_module_there_is_nothing(monkeypatch, watch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert watch("0").read() is None


def test_nvml_is_not_even_loaded_where_there_is_no_gpu_to_ask(monkeypatch, watch):
    nvml = install(monkeypatch, Gpu(A))
    assert watch().read() is None
    assert nvml.asked == []


def test_it_is_closed_once_or_twice(monkeypatch, watch):
    nvml = install(monkeypatch, Gpu(A))
    found = watch("0")
    found.close()
    found.close()
    assert nvml.open == 0
    assert "gpus" not in {thread.name for thread in threading.enumerate()}


def test_an_nvml_that_hangs_holds_nobody_up(monkeypatch, watch):
    gpu = Gpu(A)
    nvml = install(monkeypatch, gpu)
    monkeypatch.setattr("batchgen.reporting.gpus._JOIN_S", 0.01)
    found = watch("0")
    end, hangs = threading.Event(), threading.Event()

    def hang(_):
        hangs.set()
        end.wait()
        return gpu

    nvml.nvmlDeviceGetMemoryInfo = hang
    assert hangs.wait(10)
    begin = time.monotonic()
    found.read()
    found.close()
    assert time.monotonic() - begin < 1
    assert nvml.open == 1  # not shut down under the call that hangs
    end.set()
    found._thread.join()
