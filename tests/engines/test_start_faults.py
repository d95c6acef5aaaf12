"""Logs of engines that did not start, as vLLM writes them, and the one line that is told."""

import os
from importlib import util
from pathlib import Path

import pytest

from batchgen.engines import start_faults, vllm_names

KV = (
    "To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (10.55 GiB). "
)
TOO_LONG = f"{KV}Based on the available memory, the estimated maximum model length is 86432. Try increasing `gpu"
TAKEN = (
    "Free memory on device cuda:0 (31.4/47.4 GiB) on startup is less than desired GPU memory utilization (0.95, 45.03 "
    "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.21 GiB is free."
)
ROOT = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
ERROR = "(EngineCore pid=2112) ERROR 11-29 20:34:49 [core.py:1510] "


def trace(last, *functions, prefix=ERROR):
    """A logged trace through these functions of vLLM."""
    frames = [line for name in functions for line in (f'  File "v1/worker.py", line 7, in {name}', "    work()")]
    return "".join(f"{prefix}{line}\n" for line in ["Traceback (most recent call last):", *frames, *last.splitlines()])


def log_of(last, *functions):
    """A whole log: settings, a warning, what the first process died of, and what the others died of after it."""
    return (
        "(MainProcess pid=1) INFO 11-29 20:34:03 [api_utils.py:286] non-default args: {'trust_remote_code': True}\n"
        "(MainProcess pid=1) WARNING 11-29 20:34:03 [cpu.py:224] pass the argument `trust_remote_code=True`\n"
        "[W1129 20:34:46.6 utils.cpp:68] Warning: No space left on device (function init_cpu_memory_env)\n"
        f"{trace(last, *functions)}"
        f"{trace('RuntimeError: WorkerProc initialization failed due to an exception in a background process.', 'run')}"
    )


# The last line of a trace, functions above it, what the sentence has to hold, and the kind.
FAULTS = {
    "context": (
        f"ValueError: {TOO_LONG}",
        (), ["set engine.args.max_model_len to 86432 or less", "131072"], "kv_cache",
    ),
    "context, nothing fits": (
        f"ValueError: {KV}",
        (), ["lower engine.args.max_model_len", "16.0 GiB"], "kv_cache",
    ),
    "context, older": (
        (
            "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be "
            "stored in KV cache (86432). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`"
        ),
        (), ["set engine.args.max_model_len to 86432 or less", "gpu_memory_utilization"], "kv_cache",
    ),
    "no cache": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        (), ["raise engine.args.gpu_memory_utilization"], "no_cache",
    ),
    "taken": (
        f"ValueError: {TAKEN}",
        (), ["set engine.args.gpu_memory_utilization to 0.65", "31.4 of 47.4"], "gpu_taken",
    ),
    "taken, on a CPU": (
        (
            "ValueError: Available memory on node 0 (9.8/19.6 GiB) on startup is less than desired CPU memory "
            "utilization (0.92, 18.03 GiB)."
        ),
        (), ["set engine.args.gpu_memory_utilization to 0.49", "0.92"], "gpu_taken",
    ),
    "weights": (
        OOM,
        ("load_model", "create_weights"), ["a smaller or quantized model", "weights do not fit"], "memory",
    ),
    "batch": (
        OOM,
        ("determine_available_memory", "profile_run"), ["max_num_batched_tokens", "largest batch"], "memory",
    ),
    "graphs": (
        OOM,
        ("compile_or_warm_up_model", "capture_model"), ["enforce_eager: true", "CUDA graphs"], "memory",
    ),
    "sampler": (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
        (), ["lower engine.args.max_num_seqs"], "memory",
    ),
    "memory": (
        OOM,
        (), ["lower engine.args.gpu_memory_utilization, max_num_seqs or"], "memory",
    ),
    "main memory": (
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you "
            "tried to"
        ),
        (), ["more main memory"], "other",
    ),
    "architecture": (
        (
            "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported "
            "architectures: dict_keys"
        ),
        (), ["take another model", "['FooForCausalLM']"], "other",
    ),
    "architecture that was": (
        (
            "ValueError: Model architecture FooForCausalLM was supported in vLLM until v0.10, and is not supported "
            "anymore."
        ),
        (), ["the version of vLLM", "FooForCausalLM"], "other",
    ),
    "type": (
        (
            "ValueError: The checkpoint you are trying to load has model type `foo` but Transformers does not "
            "recognize this architecture. This could be because"
        ),
        (), ["take another model", "its type foo"], "other",
    ),
    "code": (
        "ValueError: The repository org/x contains custom code which must be executed to correctly load the model.",
        (), ["engine.args.trust_remote_code: true"], "other",
    ),
    "longer than the model's": (
        (
            "ValueError: User-specified max_model_len (100000) is greater than the derived max_model_len "
            "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json)."
        ),
        (), ["set engine.args.max_model_len to 8192 or less"], "other",
    ),
    "no weights": (
        "RuntimeError: Cannot find any model weights with `models/x`",
        (), ["no weights"], "other",
    ),
    "weights cut": (
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not "
            "fully covered"
        ),
        (), ["download the model again", "cut short"], "other",
    ),
    "other weights": (
        (
            "ValueError: Following weights were not initialized from checkpoint: "
            "{'model.layers.31.input_layernorm.weight'}"
        ),
        (), ["do not match its config.json"], "other",
    ),
    "weights too many": (
        "ValueError: There is no module or parameter named 'layers.20' in LlamaModel. The available",
        (), ["do not match its config.json"], "other",
    ),
    "quantization of the GPU": (
        (
            "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. "
            "Current capability: 80."
        ),
        (), ["quantized otherwise", "89", "80"], "other",
    ),
    "scheme of the GPU": (
        (
            "RuntimeError: Quantization scheme is not supported for the current GPU. Min capability: 90. Current "
            "capability: 75."
        ),
        (), ["quantized otherwise", "90", "75"], "other",
    ),
    "quantization of the platform": (
        "ValueError: awq quantization is currently not supported in cpu.",
        (), ["awq does not run on cpu"], "other",
    ),
    "quantization unknown": (
        "ValueError: Unknown quantization method: foo. Must be one of ['awq']",
        (), ["no foo"], "other",
    ),
    "quantization twice": (
        (
            "ValueError: Quantization method specified in the model config (awq) does not match the quantization "
            "method specified in the `quantization` argument (fp8)."
        ),
        (), ["it says fp8, the model is awq"], "other",
    ),
    "dtype": (
        (
            "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 "
            "GPU has"
        ),
        (), ["engine.args.dtype: half"], "other",
    ),
    "too few GPUs": (
        "ValueError: World size (4) is larger than the number of available GPUs (2) in this node.",
        (), ["engine.args.tensor_parallel_size to 2 or less"], "other",
    ),
    "heads": (
        "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (4).",
        (), ["a divisor of 9, which 4 is not"], "other",
    ),
    "driver": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        (), ["newer NVIDIA driver"], "other",
    ),
    "kernel": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        (), ["another GPU"], "other",
    ),
    "no GPU": (
        "RuntimeError: Failed to infer device type, please set",
        (), ["no GPU is visible"], "other",
    ),
    "libnuma": (
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'",
        (), ["libnuma1"], "other",
    ),
    "shared memory": (
        (
            "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 240 MiB required, 64 MiB free. "
            "Increase /dev/shm (e.g. --shm-size or --ipc=host)."
        ),
        (), ["--shm-size 4g", "has 64 MiB free", "240 MiB more"], "other",
    ),
    "disk": (
        "OSError: [Errno 28] No space left on device: '/data/cache/vllm/x'",
        (), ["make room", "HF_HOME", "full at /data/cache/vllm/x"], "other",
    ),
    "quota": (
        "OSError: [Errno 122] Disk quota exceeded",
        (), ["make room", "the disk is full (vLLM"], "other",
    ),
    "offline": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        (), ["hf download", "out of reach"], "other",
    ),
    "gated": (
        "OSError: You are trying to access a gated repo.\nCannot access gated repo for url",
        (), ["HF_TOKEN"], "other",
    ),
    "timeout": (
        (
            "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow "
            "weight loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S)."
        ),
        (), ["raise VLLM_ENGINE_READY_TIMEOUT_S", "600 s"], "other",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("last", "functions", "words", "kind"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_line_with_what_to_change(last, functions, words, kind):
    error = start_faults.error(log_of(last, *functions), ROOT, log=Path("logs/engine-00001.log"))
    told = str(error)
    assert told.startswith("the engine did not start: ")
    assert "\n" not in told
    assert len(told) < 600
    assert all(word in told for word in words), told
    assert "full log: logs/engine-00001.log" in told
    assert "{" not in told.partition(" (vLLM: ")[0]
    assert error.exit_status == 69
    assert error.fault is not None
    assert error.fault.kind == kind


@pytest.mark.parametrize(("last", "functions", "words", "kind"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_this_process_is_known_by_what_it_raised(last, functions, words, kind):
    del functions
    fault = start_faults.error("", last).fault
    assert fault is not None
    assert fault.kind == kind
    assert kind == "memory" or all(word in str(start_faults.error("", last)) for word in words)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (TOO_LONG, {"context": 131072, "fits": 86432}),
        ("max seq len (131072) larger than tokens that fit in KV cache (86432)", {"context": 131072, "fits": 86432}),
        (KV, {"context": 131072, "needed": 16.0, "held": 10.55}),
        (TAKEN, {"free": 31.4, "total": 47.4, "wanted": 0.95, "share": 0.65}),
    ],
)
def test_numbers_are_taken_from_the_text(text, numbers):
    assert start_faults.find("", text).numbers == numbers


def test_the_cause_comes_after_what_to_change_and_is_cut():
    told = str(
        start_faults.error("", f"1 validation error for ModelConfig\n  Value error, {TOO_LONG} {'x ' * 500}[type=v")
    )
    change, _, cause = told.partition(" (vLLM: ")
    assert "max_model_len" in change
    assert cause.startswith("To serve at least one request")
    assert len(cause) < 220


def test_the_first_fault_counts_and_not_what_came_of_it():
    log = trace(OOM, "load_model") + trace(f"ValueError: {TAKEN}") + trace("RuntimeError: NCCL error", "init")
    assert start_faults.find(log, ROOT).kind == "memory"
    assert start_faults.find(log, ROOT).place == "weights"


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("ValueError: nobody knows this", "ValueError: nobody knows this"),
        (
            "KeyError: 'foo'\n\nDuring handling of the above exception, another one occurred:\n\nValueError: no foo",
            "ValueError: no foo",
        ),
        (
            "OSError: no file\n\nThe above exception was the direct cause of the next:\n\nRuntimeError: no load",
            "OSError: no file",
        ),
        ("AssertionError", "AssertionError"),
    ],
)
def test_an_unknown_fault_is_told_in_the_words_of_its_cause(last, cause):
    error = start_faults.error(log_of(last), ROOT, log=Path("a.log"))
    assert error.fault is None
    assert str(error) == f"the engine did not start: {cause} (full log: a.log)"


def test_an_error_that_a_line_only_mentions_is_no_cause():
    log = "INFO loading; ValueError: is what others raise\n" + trace("RuntimeError: mine")
    assert start_faults.cause(log) == "RuntimeError: mine"
    assert start_faults.cause("nothing of the kind\n") is None


def test_without_any_cause_the_parent_s_words_count():
    assert str(start_faults.error("", "something\nelse")) == "the engine did not start: something else"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (ROOT, "without a word"),
        ("engine core failed to start", "without a word"),
        (ROOT.replace("{}", "{'EngineCore_DP0': -9}"), "more main memory"),
    ],
)
def test_processes_that_end_without_a_word(reason, words):
    assert words in str(start_faults.error("INFO all is well\n", reason))
    told = str(start_faults.error(trace("ValueError: a cause"), reason))
    assert told == "the engine did not start: ValueError: a cause"


def test_settings_in_the_log_are_no_faults():
    assert start_faults.find(log_of("ValueError: nobody knows this"), ROOT) is None


def test_who_holds_the_gpu_is_named(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '4711, /usr/bin/python3, 16000 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "uses the device (pid 4711, /usr/bin/python3, 16000 MiB)" in str(start_faults.error("", TAKEN))
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert "uses the device: 31.4" in str(start_faults.error("", TAKEN))


@pytest.mark.parametrize(("version", "told"), [("0.32.0", ""), ("0.8.5", "vllm is 0.8.5"), ("1.0.0", "vllm is 1.0.0")])
def test_another_version_of_vllm_is_named_where_nobody_knows_the_fault(monkeypatch, version, told):
    monkeypatch.setattr(vllm_names, "package", lambda: ("vllm", version))
    note = vllm_names.version_note()
    assert told in note
    assert bool(note) is bool(told)
    assert str(start_faults.error("", "what", note=note)) == f"the engine did not start: what{note}"
    assert note not in str(start_faults.error("", OOM, note=note)) or not note


# Where these words come from, so that another vLLM which words them differently is noticed.
SOURCES = {
    "v1/core/kv_cache_utils.py": [
        "No available memory for the cache blocks", "max seq len", 'KV "\n            f"cache is needed',
        "the estimated maximum model length is",
    ],
    "v1/worker/utils.py": ["Free memory on device", "is less than desired GPU memory utilization"],
    "v1/worker/gpu_model_runner.py": ["CUDA out of memory occurred when warming up sampler", "def capture_model"],
    "v1/engine/utils.py": ["Engine core initialization failed", "Failed core proc(s)"],
    "v1/engine/core_client.py": ["Timed out waiting for engine core processes to"],
    "model_executor/models/registry.py": ["are not supported for now", "was supported in vLLM until"],
    "config/vllm.py": ["is not supported for the current GPU. Minimum"],
    "config/model.py": ["Unknown quantization method", "User-specified max_model_len", "must be divisible"],
    "config/parallel.py": ["is larger than the number of"],
    "config/device.py": ["Failed to infer device type"],
    "distributed/device_communicators/shm_broadcast.py": ["Insufficient space in {", " MiB required, ", " MiB free. "],
}  # fmt: skip


@pytest.mark.parametrize("file", SOURCES)
def test_vllm_still_says_it_so(file):
    spec = util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    text = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    assert [words for words in SOURCES[file] if words not in text] == []
