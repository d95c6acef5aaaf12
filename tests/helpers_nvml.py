"""A stand-in for the module `pynvml`: a machine with GPUs that do what they are told to."""

import sys
from dataclasses import dataclass, field
from types import ModuleType


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """busy in percent; watts; used and total in bytes; energy in joules, None where the GPU has no counter."""

    uuid: str
    name: str = "NVIDIA Test"
    busy: int = 80
    watts: float = 500.0
    used: int = 3 << 30
    total: int = 8 << 30
    energy: float | None = None
    parts: list["Gpu"] = field(default_factory=list)
    is_part: bool = False


class Nvml(ModuleType):
    """Each method is what NVML's function of that name does; `broken` ones raise."""

    NVMLError = NVMLError

    def __init__(self, *gpus, broken=()):
        super().__init__("pynvml")
        self.gpus = gpus
        self.open = 0
        self.asked = []
        for name in ("Init", "Shutdown", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetHandleByUUID",
                     "DeviceGetUUID", "DeviceGetName", "DeviceGetMemoryInfo", "DeviceGetUtilizationRates",
                     "DeviceGetPowerUsage", "DeviceGetTotalEnergyConsumption", "DeviceGetMigMode",
                     "DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex",
                     "DeviceGetPowerManagementLimit"):  # fmt: skip
            setattr(self, f"nvml{name}", self._asked(name, name in broken))

    def _asked(self, name, broken):
        def ask(*args):
            self.asked.append(name)
            if broken:
                raise NVMLError(name)
            return getattr(self, f"_{name}")(*args)

        return ask

    def _Init(self):  # noqa: N802  named as NVML's
        self.open += 1

    def _Shutdown(self):  # noqa: N802
        self.open -= 1

    def _DeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def _DeviceGetHandleByIndex(self, n):  # noqa: N802
        return self.gpus[n]

    def _DeviceGetHandleByUUID(self, uuid):  # noqa: N802
        every = [one for gpu in self.gpus for one in (gpu, *gpu.parts)]
        found = [one for one in every if one.uuid == uuid]
        if not found:
            raise NVMLError("not found")
        return found[0]

    def _DeviceGetUUID(self, gpu):  # noqa: N802
        return gpu.uuid

    def _DeviceGetName(self, gpu):  # noqa: N802
        return gpu.name

    def _DeviceGetMemoryInfo(self, gpu):  # noqa: N802
        return gpu  # has `used` and `total`

    def _DeviceGetUtilizationRates(self, gpu):  # noqa: N802
        assert not gpu.is_part, "NVML does not know that of a part"
        return type("Rates", (), {"gpu": gpu.busy})

    def _DeviceGetPowerUsage(self, gpu):  # noqa: N802
        return int(gpu.watts * 1000)

    def _DeviceGetPowerManagementLimit(self, gpu):  # noqa: N802
        return 700_000

    def _DeviceGetTotalEnergyConsumption(self, gpu):  # noqa: N802
        if gpu.energy is None:
            raise NVMLError("not supported")
        return int(gpu.energy * 1000)

    def _DeviceGetMigMode(self, gpu):  # noqa: N802
        return [int(bool(gpu.parts)), 0]

    def _DeviceGetMaxMigDeviceCount(self, gpu):  # noqa: N802
        return 7

    def _DeviceGetMigDeviceHandleByIndex(self, gpu, n):  # noqa: N802
        if n >= len(gpu.parts):
            raise NVMLError("not found")
        return gpu.parts[n]


def install(monkeypatch, *gpus, broken=()) -> Nvml:
    """What `import pynvml` gives from now on."""
    nvml = Nvml(*gpus, broken=broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml
