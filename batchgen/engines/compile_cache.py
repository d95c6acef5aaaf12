"""Where the compilers behind an engine keep what they make, and one cold start at a time.

vLLM, inductor, Triton, FlashInfer and the CUDA driver write below the home folder. Nodes that share it corrupt each
other's files there, and so do starts on one node that compile the same at once. So each node has a folder of its own,
and a start that may have to compile waits for the one that does.

The lock lies in that folder: it is held against just those that write there, also where each task of a cluster has a
temporary folder of its own. Only on a file system without locks it lies in the temporary folder.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from batchgen import fsio
from batchgen.engines import vllm_names

# A start that compiles takes three to four minutes; this is more than three of different models, one after the other.
_PATIENCE_S = 900.0
_ASK_S = 0.2
_CONTAINER = ("/.dockerenv", "/run/.containerenv")
_NVIDIA = Path("/proc/driver/nvidia")
# Environment: the variable and where it points in the node's folder. VLLM_CACHE_ROOT also holds inductor's files, the
# Triton kernels of compiled graphs, DeepGEMM's and what FlashInfer tuned: vLLM puts them there by itself.
_VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_HOME": "",  # .triton: kernels outside of compiled graphs
    "FLASHINFER_WORKSPACE_BASE": "",  # .cache/flashinfer
    "CUDA_CACHE_PATH": "cuda",
}
log = logging.getLogger("batchgen")


def environment() -> dict[str, str]:
    """What the environment needs before vllm is imported, without what the user has set."""
    unset = [name for name in _VARIABLES if not os.environ.get(name)]
    if not unset:
        return {}
    folder = _folder()
    return {name: str(folder / _VARIABLES[name]) for name in unset}


def _folder() -> Path:
    """A folder of this user that no other node writes to.

    A container's host name is mostly new each time: nothing would be found again under it, and a shared home would fill
    with such folders. So there, and where the home cannot be written, it is a temporary folder.
    """
    if not (any(Path(mark).exists() for mark in _CONTAINER) or os.environ.get("KUBERNETES_SERVICE_HOST")):
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = caches / "batchgen" / socket.gethostname()
        if caches.is_absolute() and _is_ours(folder):
            return folder
    folder = Path(tempfile.gettempdir(), f"batchgen-{os.getuid()}")
    # Compiled code is loaded from it: a folder that somebody else has put there is none of ours.
    return folder if _is_ours(folder) else Path(tempfile.mkdtemp(prefix="batchgen-"))


def _is_ours(folder: Path) -> bool:
    """Make the folder where there is none; whether it belongs to this user alone and can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):
        return False
    return found.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink() and os.access(folder, os.W_OK)


@contextlib.contextmanager
def one_cold_start(args: Mapping[str, Any]) -> Iterator[None]:
    """Around the start of an engine with these arguments, after `environment` was set.

    Where nothing tells that such an engine has started here before, other starts that compile are waited for, and they
    wait for this one. A signal handler may raise in the wait.
    """
    if args.get("enforce_eager") or os.environ.get("VLLM_DISABLE_COMPILE_CACHE", "0") != "0":
        yield
        return
    root = Path(os.environ["VLLM_CACHE_ROOT"]).expanduser() / "batchgen"
    mark = root / f"started-{_combination(args)}"
    with contextlib.ExitStack() as held:
        if not mark.exists():
            lock = _lock(root)
            if lock is not None and _acquire(lock):
                held.callback(lock.release)
            if mark.exists():  # the one that was waited for has compiled what this one needs
                held.close()
        yield
        with contextlib.suppress(OSError):
            mark.touch()


def _combination(args: Mapping[str, Any]) -> str:
    """What decides whether there is something to compile: versions, model, arguments, devices."""
    config = Path(str(args.get("model")), "config.json")
    found = [
        vllm_names.package(),
        {name: args[name] for name in sorted(args)},
        config.read_text(errors="replace") if config.is_file() else "",
        _devices(),
    ]
    return hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()[:16]


def _devices() -> list[str]:
    """The driver and each kind of GPU of this node, read without loading CUDA; nothing where there is none."""
    texts = [path.read_text(errors="replace") for path in sorted(_NVIDIA.glob("gpus/*/information"))]
    kinds = {line for text in texts for line in text.splitlines() if line.startswith("Model")}
    driver = _NVIDIA / "version"
    return sorted(kinds) + ([driver.read_text(errors="replace")] if driver.is_file() else [])


def _lock(root: Path) -> FileLock | None:
    """The lock of the caches below root; None where there can be none, or nothing can be written and corrupted."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = root / "start.lock"
        if not fsio.has_locks(path):
            # By its place, so that starts with other caches are not waited for.
            place = hashlib.sha256(str(root).encode()).hexdigest()[:16]
            path = Path(tempfile.gettempdir(), f"batchgen-{os.getuid()}-{place}.lock")
        # filelock makes do without locks of the kernel, and one of a killed start would stay.
        return FileLock(path) if fsio.has_locks(path) else None
    except OSError as e:
        log.info("the compile cache cannot be written or locked (%s); starting without its lock", e)
        return None


def _acquire(lock: FileLock) -> bool:
    """Get the lock, or tell why there is none."""
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            told = ("waiting for another start on this node to compile (%s)", lock.lock_file)
            # In a thread: what a signal handler raises inside of a log call is swallowed there, and the wait goes on.
            threading.Thread(target=log.info, args=told).start()
            lock.acquire(timeout=_PATIENCE_S, poll_interval=_ASK_S)
    except Timeout:
        log.warning("another start has held %s for %g s: going on beside it", lock.lock_file, _PATIENCE_S)
        return False
    except OSError as e:
        log.warning("%s cannot be locked (%s): going on without", lock.lock_file, e)
        return False
    return True
