"""How many engines work side by side, and what each of them gets: its GPUs, its share of memory, its cores.

One engine is run by two processes, and a model under a billion parameters is bound by them, not by the GPU. On an H200
the throughput of a 135M model grew with every engine: whole runs with 1, 2, 4 and 8 of them did about 500, 1,050, 2,000
and 2,480 documents a second (docs/performance.md).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.engines import settings, vllm_names
from batchgen.errors import ConfigError
from batchgen.job.config import Job
from batchgen.models.model import Model

_GIB = 1 << 30
# The rule of `auto`: so many parameters keep a GPU busy together, for no more engines than that.
_ENOUGH_PARAMETERS = 1.2e9
_MOST = 8
_CORES_EACH = 2  # the engine's core and what feeds it
_DOCUMENTS_EACH = 500  # fewer are done before another engine has started
_SHARE = 0.92  # of the GPU's memory, where the job says nothing: vLLM's own default
_BESIDE_CACHE = 4 * _GIB  # activations, graphs and the CUDA context of one engine
_LEAST_CACHE = _GIB


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of several. label: its number, for logs. environment: of its process; args: beside the job's."""

    label: str
    environment: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use. gpus: as CUDA_VISIBLE_DEVICES names them; gpu_bytes: memory of the smallest."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    gpu_bytes: int | None


def machine() -> Machine:
    """What is here, without loading CUDA: vLLM's processes must be the first to do that."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if vllm_names.package() is None or vllm_names.is_for_cpu():
        return Machine(cores, (), None)
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  no NVML, no driver, another vendor's GPU: vLLM itself finds out what is there
        return Machine(cores, (), None)
    try:
        handles: dict[str, Any] = {}
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            handles |= {str(number): handle, str(pynvml.nvmlDeviceGetUUID(handle)): handle}
        everything = ",".join(name for name in handles if name.isdecimal())
        named = os.environ.get("CUDA_VISIBLE_DEVICES", everything)
        visible = tuple(name.strip() for name in named.split(",") if name.strip())
        if not all(name in handles for name in visible):  # a part of a GPU (MIG), or a shortened name
            return Machine(cores, (), None)
        sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handles[name]).total) for name in visible]
        return Machine(cores, visible, min(sizes, default=None))
    finally:
        pynvml.nvmlShutdown()


def replicas(job: Job, model: Model | None, *, documents: int | None, here: Machine | None = None) -> list[Replica]:
    """The engines of a run, one where there is nothing to share. Raises ConfigError where the job's number cannot be.

    documents: at most so many are left, None where nobody knows.
    """
    wanted = job.engine.replicas_per_gpu
    if job.engine.feed == "generate":
        if wanted not in {"auto", 1}:
            raise ConfigError("engine.replicas_per_gpu: `feed: generate` is one engine; leave one of them out")
        return [Replica("1")]
    if job.engine.backend == "fake":
        return [Replica(str(n + 1)) for n in range(1 if wanted == "auto" else wanted)]
    here = here or machine()
    args = job.engine.args
    sizes = [settings.whole_number(job, name) or 1 for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    together = sizes[0] * sizes[1]
    if args.get("distributed_executor_backend") not in {None, "mp", "uni"}:  # its processes are not of this machine
        return [Replica("1")]
    groups = [here.gpus[at : at + together] for at in range(0, len(here.gpus) - together + 1, together)] or [()]
    if documents is not None:
        groups = groups[: max(1, documents // _DOCUMENTS_EACH)]
    each = _auto(model, here, len(groups), documents) if wanted == "auto" else wanted
    if together > 1 and each > 1:
        raise ConfigError(
            "engine.replicas_per_gpu: an engine over several GPUs is one replica; leave one of the two out"
        )
    share = _share(job, model, here, each)
    total = len(groups) * each
    places = [(gpus, n) for n in range(each) for gpus in groups]
    return [
        Replica(str(number + 1), _environment(gpus, number, total, here), share)
        for number, (gpus, _) in enumerate(places)
    ]


def _auto(model: Model | None, here: Machine, gpus: int, documents: int | None) -> int:
    """One for a model that keeps a GPU busy by itself; more for smaller ones, as far as cores and documents go."""
    parameters = None if model is None else model.parameters
    if not here.gpus or here.gpu_bytes is None or parameters is None:
        return 1
    most = [_MOST, int(_ENOUGH_PARAMETERS / parameters), len(here.cores) // (_CORES_EACH * gpus)]
    if documents is not None:
        most.append(documents // (_DOCUMENTS_EACH * gpus))
    return max(1, min(most))


def _share(job: Job, model: Model | None, here: Machine, each: int) -> dict[str, Any]:
    """What one of `each` engines on a GPU gets of its memory.

    The size of its KV cache is given: vLLM would find it by measuring what is free, while the others take theirs.
    """
    if each == 1 or "kv_cache_memory_bytes" in job.engine.args:
        return {}
    if not here.gpus or here.gpu_bytes is None:
        if vllm_names.is_for_cpu():  # settings.chosen gives each its cache
            return {}
        raise ConfigError(
            "engine.replicas_per_gpu: the memory of the GPUs cannot be read here, so it cannot be shared out: set "
            "engine.args.kv_cache_memory_bytes, which is for each engine"
        )
    share = float(job.engine.args.get("gpu_memory_utilization", _SHARE)) / each
    weights = 2 * (model.parameters or 0) if model else 0
    cache = int(here.gpu_bytes * share) - weights - _BESIDE_CACHE
    if cache < _LEAST_CACHE:
        raise ConfigError(
            f"engine.replicas_per_gpu: {each} engines on a GPU of {here.gpu_bytes // _GIB} GiB leave no room for a KV "
            "cache each: take fewer"
        )
    return {"gpu_memory_utilization": round(share, 3), "kv_cache_memory_bytes": cache}


def _environment(gpus: Sequence[str], number: int, total: int, here: Machine) -> dict[str, str]:
    """Where one of several engines runs: its GPUs, or its cores, and ports of its own."""
    if total == 1:
        return {}
    found = {}
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif "VLLM_CPU_OMP_THREADS_BIND" not in os.environ and (mine := here.cores[number::total]):
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, mine))
    # Engines that look for a free port at the same moment find the same.
    first = os.environ.get("VLLM_PORT", "")
    base = int(first) if first.isdecimal() else 20_000 + os.getpid() * 64 % 40_000
    found["VLLM_PORT"] = str(base + number * 8)
    return found
