"""What changes the text of a summary, as one flat mapping; what only changes speed is not in it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from batchgen.job.config import Job
from batchgen.models.adapter import Adapter
from batchgen.models.model import Model

# Arguments of vLLM that change how fast a summary comes, not which. Anything else counts as changing the text.
_SPEED_ONLY = frozenset({
    "model", "revision", "download_dir",
    "max_model_len",  # counts as the longest prompt, below
    "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes", "block_size",
    "swap_space", "cpu_offload_gb", "enforce_eager", "compilation_config", "optimization_level",
    "enable_prefix_caching", "prefix_caching_hash_algo", "enable_chunked_prefill", "async_scheduling",
    "scheduling_policy", "max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold",
    "tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "disable_custom_all_reduce",
    "max_parallel_loading_workers", "worker_cls", "attention_backend", "stream_interval", "performance_mode",
    "max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras",
})  # fmt: skip
_INPUT = "input["  # keys of one input: compared only while both runs have that input


def fingerprint(
    job: Job,
    model: Model | None,
    *,
    max_prompt_tokens: int,
    adapter: Adapter | None = None,
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Dotted keys to plain values, for comparing and for showing to a person.

    chat_template: SHA-256 of the file the job names; the model's own is one of the model's files.
    """
    found: dict[str, Any] = {"engine.backend": job.engine.backend, "max_prompt_tokens": max_prompt_tokens}
    if model is not None:
        found |= {f"model.{name}": value for name, value in model.identity().items()}
    if adapter is not None:
        found |= {f"adapter.{name}": value for name, value in adapter.identity().items()}
    found |= {f"engine.args.{k}": v for k, v in job.engine.args.items() if k not in _SPEED_ONLY}
    found |= {f"prompt.{k}": v for k, v in job.prompt.model_dump().items()}
    found["prompt.chat_template"] = chat_template
    found |= {f"long_documents.{k}": getattr(job.long_documents, k) for k in job.long_documents.in_force}
    found |= {f"sampling.{k}": v for k, v in job.sampling.model_dump().items()}
    found |= {f"answers.{k}": v for k, v in job.answers.model_dump().items()}
    if job.packing.mode != "off":
        found |= {f"packing.{k}": v for k, v in job.packing.model_dump().items()}
    # The columns are no text, but all parts of a run share one schema.
    found["columns"] = sorted({ours for item in job.input for ours in item.keep.values()})
    reading = ("text_field", "id_field", "min_chars", "keep")
    for item in job.input:
        found |= {f"{_INPUT}{item.source}].{k}": getattr(item, k) for k in reading}
        if item.dataset is not None:  # none where it is local: a folder that is gone must not become one of the Hub
            found[f"{_INPUT}{item.source}].revision"] = item.dataset.revision
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def digest(found: Mapping[str, Any]) -> str:
    """16 hex digits for the `fingerprint` column: of all but the inputs, whose content hashes are in the rows."""
    common = {key: value for key, value in found.items() if not key.startswith(_INPUT)}
    return hashlib.blake2b(json.dumps(common, sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line a key that differs: `sampling.max_tokens: 128 → 256`. Inputs that came or went are no difference."""
    lines = []
    for key in sorted({*old, *new}):
        if key.startswith(_INPUT) and not (key in old and key in new):
            continue
        before, after = old.get(key), new.get(key)
        if before != after:
            lines.append(f"{key}: {_show(before)} → {_show(after)}")
    return lines


def _show(value: Any) -> str:
    text = "(not set)" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:60]} … {text[-30:]} ({len(text)} characters)"
