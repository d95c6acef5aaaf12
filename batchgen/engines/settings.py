"""The engine arguments a run uses: the job's, and values for this platform where the job leaves them out."""

import os
from typing import Any

import psutil

from batchgen.engines import profiles, vllm_names
from batchgen.errors import ConfigError
from batchgen.job.config import Job, Sampling
from batchgen.models.adapter import Adapter
from batchgen.models.model import Model
from batchgen.models.tokenizer import Tokenizer

_GIB = 1 << 30
_FAKE_MAX_MODEL_LEN = 4096
_FAKE_MAX_NUM_SEQS = 256
# So few documents run all at once, also with the least max_num_seqs that vLLM takes by itself: a single wave of at most
# _FEW_STEPS steps. Without CUDA graphs a step takes some 10 ms more (an estimate: launching the kernels of 30 layers
# one by one), so the wave loses 10 s at the most, 1 s with answers of 128 tokens. With them, the first start on a node
# compiles for about 100 of 163 to 208 s on an H200; with warm caches it takes 51 to 66 s and still captures them.
FEW_DOCUMENTS = 256
_FEW_STEPS = 1024


def whole_number(job: Job, name: str) -> int | None:
    """An engine argument batchgen itself counts with, None where the job leaves it out. Raises ConfigError."""
    value = job.engine.args.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"engine.args.{name}: a whole number is wanted (given: {value!r})")
    return value


def max_model_len(job: Job, model: Model | None) -> int:
    """Tokens of prompt and answer together: the job's, else the model's own, else the fake engine's."""
    given = whole_number(job, "max_model_len")
    if given is not None:
        return given
    own = None if model is None else model.max_position_embeddings
    return own or _FAKE_MAX_MODEL_LEN


def least_context(model: Model | None, context: int) -> int:
    """A max_model_len below it would change the texts: vLLM picks the factors of LongRoPE by it."""
    config = {} if model is None else model.config.get("text_config") or model.config
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su"):
        return 1
    short = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    return short + 1 if isinstance(short, int) and context > short else 1


def max_num_seqs(job: Job) -> int:
    """For the fake engine; vLLM tells its own."""
    given = whole_number(job, "max_num_seqs")
    return _FAKE_MAX_NUM_SEQS if given is None else given


def at_once(job: Job) -> int:
    """Requests of one long document in flight: a quarter of what runs, so that it fills no engine alone."""
    given = whole_number(job, "max_num_seqs") or profile(job).get("max_num_seqs") or _FAKE_MAX_NUM_SEQS
    return max(1, int(given) // 4)


def reads_weights(job: Job) -> bool:
    """Whether the engine will read the weights that lie beside the model's configuration."""
    args = job.engine.args
    return job.engine.backend == "vllm" and args.get("load_format") in (None, "auto") and not args.get("download_dir")


def lora(job: Job, adapter: Adapter) -> dict[str, Any]:
    """Arguments that let the engine take the adapter. Raises ConfigError where it cannot."""
    if job.engine.args.get("enable_lora") is False:
        raise ConfigError(
            "engine.args.enable_lora is false, and engine.adapter names an adapter: leave one of them out"
        )
    ranks = vllm_names.lora_ranks()
    given = whole_number(job, "max_lora_rank")
    if given is not None and given < adapter.rank:
        raise ConfigError(
            f"engine.args.max_lora_rank is {given}, and the rank of {adapter.name} is {adapter.rank}: leave it out, "
            "batchgen sets it"
        )
    fitting = [rank for rank in ranks if rank >= adapter.rank]
    if not fitting:
        raise ConfigError(
            f"engine.adapter: {adapter.name}: its rank is {adapter.rank}, vLLM takes adapters of up to {max(ranks)}"
        )
    return {"enable_lora": True, "max_lora_rank": min(fitting)}


def profile(job: Job) -> dict[str, Any]:
    """What `engine.profile` sets: its values for this platform where the job itself has none."""
    filled = profiles.fill(job.engine.profile, cpu=vllm_names.is_for_cpu())
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):  # says the same, and vLLM would not look at it
        filled.pop("kv_cache_memory_bytes", None)
    if job.engine.args.get("enable_chunked_prefill") is False:  # then a batch holds the longest prompt
        filled.pop("max_num_batched_tokens", None)
    return {name: value for name, value in filled.items() if name not in job.engine.args}


def for_few(job: Job, documents: int | None) -> dict[str, Any]:
    """What a start with little to do sets: no CUDA graphs, and no more sequences than documents; {} for any other.

    Both or none: max_num_seqs is a part of the key of vLLM's compiled graphs, so a value for every number of documents
    would have them compiled anew. documents: at most so many are left, None where nobody knows.
    """
    args = job.engine.args
    steps = job.answers.retry_max_tokens or job.sampling.max_tokens
    if job.packing.mode != "off":
        steps = max(steps, job.packing.max_documents * job.sampling.max_tokens)
    if documents is None or documents > FEW_DOCUMENTS or steps > _FEW_STEPS:
        return {}
    if not args.get("enforce_eager", True) or {"compilation_config", "optimization_level"} & args.keys():
        return {}  # the job wants them compiled
    batch = whole_number(job, "max_num_batched_tokens") or documents  # vLLM takes no more sequences than that
    return {"enforce_eager": True, "max_num_seqs": max(1, min(documents, batch))}


def chosen(job: Job, model: Model, adapter: Adapter | None = None, *, documents: int | None = None) -> dict[str, Any]:
    """What batchgen adds to the job's `engine.args`; none of it changes the text of a summary.

    documents: at most so many are left to do, None where nobody knows.
    """
    added: dict[str, Any] = {"max_model_len": max_model_len(job, model)}
    if model.revision:
        added["revision"] = model.revision
    if vllm_names.is_for_cpu():
        # Compiling takes longer than a laptop's whole run; a short shared instruction fills no block of 128.
        added |= {"enforce_eager": True, "block_size": 32}
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            # vLLM takes most of the machine by default; 4 GiB are enough for small models and fit one NUMA node.
            quarter = psutil.virtual_memory().available // 4
            added["kv_cache_memory_bytes"] = max(_GIB // 2, min(quarter, 4 * _GIB))
    if adapter is not None:
        added |= lora(job, adapter)
    if job.packing.mode != "off" and job.packing.answer == "json":
        # By default the model may fill the space between the items with line ends, a fifth of the answer and more.
        added["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    added |= profile(job)
    few = for_few(job, documents)
    if few and "max_num_seqs" in added:
        few["max_num_seqs"] = min(few["max_num_seqs"], added["max_num_seqs"])
    added |= few
    return {name: value for name, value in added.items() if name not in job.engine.args}


def sampling(job: Job, tokenizer: Tokenizer) -> Sampling:
    """The job's, so that the tag which ends the reasoning is in the answers. Raises ConfigError where it is not."""
    name, end = "skip_special_tokens", job.answers.reasoning_end
    if end is None or not tokenizer.hides(end):
        return job.sampling
    if job.sampling.others.get(name) is True:
        raise ConfigError(
            f"sampling.{name}: {end} is a special token of the model, so with true no answer would show where its "
            "reasoning ends: leave it out, batchgen sets it"
        )
    return job.sampling.model_copy(update={name: False})
