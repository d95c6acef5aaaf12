"""Files as streams of lines, packed (gzip, zstd) or not, however long a line is."""

import contextlib
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import pyarrow as pa

MAX_LINE_BYTES = 256 << 20  # a longer line is never whole in memory
_BUFFER = 1 << 20
_SMALL_BUFFER = 1 << 16
_PACKED_BUFFER = 1 << 18
_DIGESTED_BYTES = 1 << 12
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x50\x2a\x4d\x18": "zstd",  # a frame that says nothing, which pzstd writes first
}

Stream: TypeAlias = io.BufferedReader


def format_ending(name: str) -> str:
    """The ending of a file's name that tells its format: `.jsonl` for A.JSONL.gz."""
    return PurePath(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


class DamagedStreamError(Exception):
    """A packed file cannot be unpacked to its end; the text says how far it is damaged."""


@dataclass(frozen=True, slots=True)
class LongLine:
    """Stands for a line over MAX_LINE_BYTES. size: its bytes, LF included. digest: a hash of them."""

    size: int
    digest: bytes

    def __len__(self) -> int:
        return self.size


class Unpacked(io.RawIOBase):
    """The content of a packed file, all members or frames of it.

    Raises DamagedStreamError after the last byte that can be unpacked.
    """

    def __init__(self, path: Path, packing: str) -> None:
        self._path = path
        self._packing = packing
        self._at = 0
        self._fault: Exception | None = None
        self._file, self._stream = self._open()

    def _open(self) -> tuple[pa.NativeFile, pa.NativeFile]:
        file = pa.OSFile(str(self._path))
        return file, pa.CompressedInputStream(file, self._packing)

    @property
    def packed_position(self) -> int:
        """Bytes of the packed file that were read so far."""
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed and hasattr(self, "_stream"):  # closed by Python as well where opening failed
            self._stream.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        count = 0
        if self._fault is None:
            try:
                count = self._stream.readinto(view)
            except (OSError, pa.ArrowException) as e:
                if getattr(e, "errno", None) is not None:
                    raise  # the disk is at fault, not the stream
                self._fault = e
                count = self._salvage(view)
        if self._fault is not None and not count:
            raise DamagedStreamError(self._sentence(str(self._fault))) from self._fault
        self._at += count
        return count

    def _salvage(self, view: memoryview) -> int:
        """Fill in what comes before the fault: pyarrow drops what it had unpacked in the call that met it."""
        count = 0
        _, stream = self._open()
        with stream, contextlib.suppress(OSError):
            left = self._at
            while left and (block := stream.read(min(left, _PACKED_BUFFER))):
                left -= len(block)
            while not left and count < len(view) and (byte := stream.read(1)):
                view[count : count + 1] = byte
                count += 1
        return count

    def _sentence(self, fault: str) -> str:
        if "Truncated" in fault:
            return f"the {self._packing} stream is cut short"
        return f"the {self._packing} stream is damaged ({fault})"


def open_stream(path: Path, *, most: int | None = None) -> Stream:
    """The file's content, unpacked if its first bytes say that it is packed, whatever its name says.

    most: about so many bytes of it will be read; a small split is not worth a megabyte of reading ahead.
    """
    stream: Stream = io.BufferedReader(io.FileIO(path), _BUFFER if most is None or most > _BUFFER else _SMALL_BUFFER)
    if (packing := _packing(stream.peek(4)[:4])) is None:
        return stream
    stream.close()
    return io.BufferedReader(Unpacked(path, packing), _PACKED_BUFFER)


def is_packed(stream: Stream) -> bool:
    return isinstance(stream.raw, Unpacked)


def position(stream: Stream) -> int:
    """Bytes of the file itself that were read so far."""
    return stream.raw.packed_position if isinstance(stream.raw, Unpacked) else stream.tell()


def digest_before(path: Path, at: int) -> str:
    """A hash of what stands right before this byte: where it is the same, the file was only appended to since.

    What is put in or taken out further up moves it. Raises OSError.
    """
    with path.open("rb") as stream:
        stream.seek(max(0, at - _DIGESTED_BYTES))
        return hashlib.blake2b(stream.read(min(at, _DIGESTED_BYTES)), digest_size=8).hexdigest()


def _packing(head: bytes) -> str | None:
    """What the first bytes of a file say; a file that is cut within them is taken for text."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def read_line(stream: Stream) -> bytes | LongLine:
    """The next line with its LF; empty at the end of the file."""
    line = stream.readline(MAX_LINE_BYTES + 1)
    if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
        return line
    size, digest = len(line), hashlib.blake2b(line, digest_size=16)
    while not line.endswith(b"\n") and (line := stream.readline(_BUFFER)):
        size += len(line)
        digest.update(line)
    return LongLine(size, digest.digest())
