"""The one way files of a run come to be: written aside, fsynced, renamed, the folder fsynced."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from batchgen.errors import OutputError

TEMPORARY = ".tmp-"
_BLOCK = 1 << 16
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
log = logging.getLogger("batchgen")


@contextlib.contextmanager
def atomic(path: Path, *, owner: str) -> Iterator[BinaryIO]:
    """A stream whose bytes are `path` on disk when the block has ended, and nothing when it raises.

    owner: whose temporary file it is; a process clears away only its own. Raises OutputError.
    """
    aside = path.parent / f"{TEMPORARY}{owner}-{path.name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
        sync(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):  # what stopped the write may stop this too
            aside.unlink()
        if isinstance(e, OSError):
            raise output_error(path, e) from e
        raise


def write_atomic(path: Path, data: bytes | memoryview, *, owner: str = "0") -> None:
    """`path` holds `data` on disk when this returns, and what it held before when it does not. Raises OutputError."""
    with atomic(path, owner=owner) as stream:
        stream.write(data)


def remove(path: Path) -> None:
    """Remove a file, durably; none there is fine. Raises OutputError."""
    try:
        path.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as e:
        raise output_error(path, e) from e


def move(path: Path, folder: Path) -> None:
    """Move a file into a folder on the same disk, which is made; none there is fine. Raises OutputError."""
    try:
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(folder / path.name)
    except OSError as e:
        raise output_error(path, e) from e


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_append(path: Path, *, records: bool) -> TextIO:
    """A text file to go on with, whatever a kill or a power failure left at its end; each line goes out at once.

    NUL bytes at the end (room that was never written) go. Then a last line without its end is completed by one, or
    cut off where the file holds `records` (JSON Lines) and the line is no whole one: the next would be glued to it.
    Raises OSError.
    """
    with path.open("a+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        whole, last = _last_line(stream, size)
        torn = bool(last) and records and not _is_record(last)
        kept = whole if torn else whole + len(last)
        if kept < size:
            log.warning("%s: its last line was torn: cut back to byte %s, %s bytes less", path, kept, size - kept)
            stream.truncate(kept)
        if last and not torn:
            stream.write(b"\n")
    return path.open("a", encoding="utf-8", buffering=1)


def _last_line(stream: BinaryIO, at: int) -> tuple[int, bytes]:
    """(where the last line begins, what it holds without the NULs at its end); empty after a line end."""
    tail = b""
    while at and b"\n" not in tail:
        begin = max(0, at - _BLOCK)
        stream.seek(begin)
        tail = (stream.read(at - begin) + tail).rstrip(b"\0")
        at = begin
    begin = tail.rfind(b"\n") + 1
    return at + begin, tail[begin:]


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def has_locks(path: Path) -> bool:
    """Whether the kernel frees a lock on this file when its holder is gone. Makes the file; raises OSError."""
    with path.open("a+") as stream:  # NFS wants a file that is read for a shared lock
        try:
            # Shared: whoever looks meanwhile whether the lock is held must not take this for its holder.
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            return False
    return True


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
