"""What the GPUs of a run do, by NVML: no CUDA is loaded, and where NVML cannot tell there is nothing, never an error.

NVML's own utilization is that of a moment. So a thread looks every second, and a reading is the mean since the one
before. NVML can hang with a broken GPU, and then that thread hangs alone.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

LOOK_S = 1.0
_JOIN_S = 2.0


@dataclass(slots=True)
class _Gpu:
    """One GPU, or the part of one (MIG). energy_mj: NVML's counter and when it was read, at the last reading."""

    name: str
    handle: Any
    is_part: bool
    looks: list[float] = field(default_factory=list)  # utilization, 0 to 1
    watts: list[float] = field(default_factory=list)
    fresh: bool = True  # something of it was looked at since the last reading
    memory: int | None = None
    energy: tuple[float, int] | None = None
    energy_before: tuple[float, int] | None = None


class GpuWatch:
    """Looks at GPUs from now on. names: as CUDA_VISIBLE_DEVICES has them; those NVML does not know are left out."""

    def __init__(self, names: Sequence[str], *, look_s: float = LOOK_S) -> None:
        self.names = tuple(names)
        self.found: list[dict[str, Any]] = []  # what they are: see _about
        self._look_s = look_s
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._gpus: list[_Gpu] = []
        self._nvml = _nvml() if self.names else None
        self._thread: threading.Thread | None = None
        if self._nvml is None:
            return
        with contextlib.suppress(Exception):  # whatever NVML or its Python module does, the run goes on
            self._gpus = list(_known(self._nvml, self.names))
            self.found = [_about(self._nvml, one) for one in self._gpus]
        if self._gpus:
            self._thread = threading.Thread(target=self._run, args=(self._nvml,), name="gpus", daemon=True)
            self._thread.start()

    def _run(self, nvml: ModuleType) -> None:
        while not self._left.is_set():
            for one in self._gpus:
                self._look(nvml, one)
            self._left.wait(self._look_s)

    def _look(self, nvml: ModuleType, one: _Gpu) -> None:
        """Ask NVML without the lock: whoever reads must never wait for it."""
        memory = _told(lambda: int(nvml.nvmlDeviceGetMemoryInfo(one.handle).used))
        # Of a part of a GPU NVML has no utilization, and the power is that of all its parts.
        busy = None if one.is_part else _told(lambda: nvml.nvmlDeviceGetUtilizationRates(one.handle).gpu / 100)
        watts = None if one.is_part else _told(lambda: nvml.nvmlDeviceGetPowerUsage(one.handle) / 1000)
        energy = None if one.is_part else _told(lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(one.handle)))
        with self._lock:
            one.memory = memory
            if not one.fresh:
                one.looks, one.watts, one.fresh = [], [], True
            one.looks += [] if busy is None else [busy]
            one.watts += [] if watts is None else [watts]
            one.energy = None if energy is None else (time.monotonic(), energy)
            one.energy_before = one.energy_before or one.energy

    def read(self) -> list[dict[str, Any]] | None:
        """Of each GPU: `gpu`, and since the last reading `utilization` (0 to 1, share of time in which it computed) and
        `power_w`, means, with `memory_used_bytes` of all processes on it now. None where no GPU can be asked.
        """
        if not self._gpus:
            return None
        with self._lock:
            return [_reading(one) for one in self._gpus]

    def close(self) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():  # it hangs in NVML: that must not be shut down under it
                return
        if self._nvml is not None:
            _told(self._nvml.nvmlShutdown)
            self._nvml = None


def _reading(one: _Gpu) -> dict[str, Any]:
    watts = _mean(one.watts)
    if one.energy and one.energy_before and one.energy[0] - one.energy_before[0] > LOOK_S / 2:
        # The counter is exact, what a moment draws is not.
        watts = (one.energy[1] - one.energy_before[1]) / 1000 / (one.energy[0] - one.energy_before[0])
        one.energy_before = one.energy
    busy = _mean(one.looks)
    # Where nobody looks before the next reading, it repeats the last look.
    one.looks, one.watts, one.fresh = one.looks[-1:], one.watts[-1:], False
    return {
        "gpu": one.name,
        "utilization": None if busy is None else round(busy, 4),
        "memory_used_bytes": one.memory,
        "power_w": None if watts is None else round(watts, 1),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _told(ask: Any) -> Any:
    """What NVML answers, None where it does not."""
    try:
        return ask()
    except Exception:  # noqa: BLE001  NVML has many errors, and none of them is the run's
        return None


def _nvml() -> ModuleType | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  no module, no library, no driver
        return None
    return pynvml  # type: ignore[no-any-return]


def _known(nvml: ModuleType, names: Sequence[str]) -> Iterator[_Gpu]:
    every = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    by_uuid = {str(nvml.nvmlDeviceGetUUID(handle)): handle for handle in every}
    for name in names:
        found = None
        if name.isdecimal():
            found = _by_number(nvml, every, int(name))
        elif name.startswith("MIG-"):
            handle = _told(lambda name=name: nvml.nvmlDeviceGetHandleByUUID(name))
            found = None if handle is None else _Gpu(name, handle, is_part=True)
        elif len(fits := [uuid for uuid in by_uuid if uuid.startswith(name)]) == 1:  # CUDA takes shortened ones too
            found = _Gpu(name, by_uuid[fits[0]], is_part=False)
        if found is not None:
            yield found


def _by_number(nvml: ModuleType, every: Sequence[Any], number: int) -> _Gpu | None:
    """The GPU that CUDA calls by this number; None where NVML's numbers may be others."""
    parts = [part for handle in every for part in _parts(nvml, handle)]
    if parts:  # CUDA counts parts then, and shows one at a time
        return _Gpu(str(number), parts[0], is_part=True) if len(parts) == len(every) == 1 and number == 0 else None
    kinds = {str(_told(lambda handle=handle: nvml.nvmlDeviceGetName(handle))) for handle in every}
    if len(kinds) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":  # CUDA counts the fastest first
        return None
    return _Gpu(str(number), every[number], is_part=False) if number < len(every) else None


def _parts(nvml: ModuleType, handle: Any) -> Iterator[Any]:
    """The parts (MIG) that a GPU is cut into; none where it is whole."""
    mode = _told(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    for number in range((_told(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0) if mode else 0):
        part = _told(lambda number=number: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        if part is not None:
            yield part


def _about(nvml: ModuleType, one: _Gpu) -> dict[str, Any]:
    """What a GPU is: `gpu`, `name`, `uuid`, `memory_bytes` and `power_limit_w`, null where NVML does not tell."""
    limit = None if one.is_part else _told(lambda: nvml.nvmlDeviceGetPowerManagementLimit(one.handle) / 1000)
    return {
        "gpu": one.name,
        "name": _told(lambda: str(nvml.nvmlDeviceGetName(one.handle))),
        "uuid": _told(lambda: str(nvml.nvmlDeviceGetUUID(one.handle))),
        "memory_bytes": _told(lambda: int(nvml.nvmlDeviceGetMemoryInfo(one.handle).total)),
        "power_limit_w": limit,
    }
