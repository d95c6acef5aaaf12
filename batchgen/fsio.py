"""The one way files of a run come to be: written aside, fsynced, renamed, the folder fsynced."""

import contextlib
import os
import shutil
from pathlib import Path

from batchgen.errors import OutputError

TEMPORARY = ".tmp-"


def write_atomic(path: Path, data: bytes | memoryview, *, owner: str = "0") -> None:
    """`path` holds `data` on disk when this returns, and what it held before when it does not.

    owner: whose temporary file it is; a process clears away only its own. Raises OutputError.
    """
    aside = path.parent / f"{TEMPORARY}{owner}-{path.name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
        sync(path.parent)
    except OSError as e:
        with contextlib.suppress(OSError):  # what stopped the write may stop this too
            aside.unlink()
        raise output_error(path, e) from e


def remove(path: Path) -> None:
    """Remove a file, durably; none there is fine. Raises OutputError."""
    try:
        path.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as e:
        raise output_error(path, e) from e


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_temporary(folder: Path, owner: str) -> None:
    """Remove what a killed process of this owner left half written."""
    for path in sorted(folder.glob(f"{TEMPORARY}{owner}-*")):
        remove(path)


def output_error(path: Path, e: OSError) -> OutputError:
    """The error for a write that failed, with the place and what is left there."""
    try:
        free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "; its folder is gone"
    reason = e.strerror or str(e)
    return OutputError(
        f"{path}: cannot be written: {reason}{free}. What is committed is safe: the same command goes on"
    )
