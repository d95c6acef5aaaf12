"""The run directory: its names, its locks, and run.json.

Each shard that runs holds a lock of its own, whose name tells how many shards there are; so nobody has to be asked
whether a run is at work with another number of them. The gate is passed by one start at a time: between its look at the
other locks and its taking its own nobody else takes one. Both are over in a moment, whatever a shard is busy with.

What belongs to all shards (run.json, plan.json, parts that are rewritten) changes under a further lock: `alone`.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from filelock import FileLock, Timeout

from batchgen import fsio
from batchgen.errors import ConfigError, LockedError, OutputError
from batchgen.shards import WHOLE, Shard, of_label

_PATIENCE_S = 0.2  # `status` takes the lock for a moment to see whether it is held
_TELLING_S = 2.0  # who takes the lock writes its name next
_GATE_S = 60.0  # many starts at once pass one by one, each in milliseconds
_SAID_S = 2.0  # who waits longer for the others says so
log = logging.getLogger("batchgen")


class RunDirectory:
    """Paths of a run directory as one shard has them; as a context manager it holds the shard's lock."""

    def __init__(self, path: Path, shard: Shard = WHOLE) -> None:
        self.path = path
        self.shard = shard
        label = shard.label
        own = "" if shard.is_whole else f"-{label}"
        self.summaries = path / "summaries"
        self.orphans = path / "orphans"
        self.damaged = path / "damaged"
        self.logs = path / "logs" / own.removeprefix("-")
        self.plan_json = path / "plan.json"
        self.run_json = path / "run.json"
        self.failed_jsonl = path / f"failed{own}.jsonl"
        self.retry_json = path / f"retry-{label}.json"
        self.strikes_json = path / f"strikes-{label}.json"
        self.pieces = path / "pieces"
        self.pieces_file = self.pieces / f"answers-{label}.jsonl"
        self.report_json = path / f"report{own}.json"
        self.report_md = path / f"report{own}.md"
        self.report_html = path / f"report{own}.html"
        self._locks = path / "locks"
        self._lock_file = self._locks / f"shard-{label}.lock"
        self._holder_file = self._lock_file.with_suffix(".holder.json")
        self._lock: FileLock | None = None
        self._lock_is: tuple[int, int] | None = None
        self._alone = FileLock(self._locks / "run.lock")

    def __enter__(self) -> Self:
        """Take the lock, or raise LockedError with who holds it. The kernel frees it however the holder ends.

        Raises LockedError too where the run is at work with another number of shards; ConfigError in a folder that is
        no run's and holds other things: nothing is written or cleared there.
        """
        if not self.run_json.exists():
            self._refuse_foreign("name another as output.dir")
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            self._lock_file.touch()
            _refuse_lockless(self._lock_file)
        except OSError as e:
            raise fsio.output_error(self._lock_file, e) from e
        there = _identity(self._lock_file)
        with self._gate():
            self._refuse_other_count()
            taken = self._take(there)
        if not taken:
            raise self._locked()
        for folder in (self.path, self.summaries, self.orphans, self.pieces, self._locks):
            for owner in self._dead_owners(folder):
                fsio.clear_temporary(folder, owner)
        return self

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        gate = FileLock(self._locks / "gate.lock", timeout=_GATE_S)
        try:
            gate.acquire()
        except Timeout as e:
            raise LockedError(f"{self.path}: other starts hold {gate.lock_file}; start the same command again") from e
        except OSError as e:
            raise fsio.output_error(Path(gate.lock_file), e) from e
        try:
            yield
        finally:
            gate.release()

    def _refuse_other_count(self) -> None:
        # Not all that run: a thousand shards would each look at a thousand locks, one after the other.
        others = [one for one in self._locked_shards() if one.shard.count != self.shard.count and one.is_held()]
        if others:
            how = "undivided" if others[0].shard.is_whole else f"in {others[0].shard.count} shards"
            raise LockedError(
                f"{self.path}: this run is at work {how}, so no {self.shard} of it starts: {others[0].who_holds()}"
            )

    def _take(self, there: tuple[int, int] | None) -> bool:
        """Whether the shard's lock was free: it is ours now, and tells so. there: which file it is."""
        lock = FileLock(self._lock_file, timeout=_PATIENCE_S)
        try:
            lock.acquire()
        except Timeout:
            return False
        except OSError as e:
            raise fsio.output_error(self._lock_file, e) from e
        self._lock_is = _identity(self._lock_file)
        if self._lock_is != there:  # another start moved the run aside meanwhile: our lock went with it
            lock.release()
            return False
        self._lock = lock
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat("T", "seconds"),
        }
        fsio.write_atomic(self._holder_file, json.dumps(holder).encode(), owner=self.owner)
        return True

    def _dead_owners(self, folder: Path) -> list[str]:
        """Whose half written files in this folder nobody goes on with: ours, and those of another number of shards."""
        names = (path.name.split("-")[1] for path in folder.glob(f"{fsio.TEMPORARY}*-*"))
        shards = {name: of_label(name) for name in names}
        other = {name for name, shard in shards.items() if shard is not None and shard.count != self.shard.count}
        return sorted(other | {self.owner})

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While this is entered no other shard changes what belongs to all of them. Can be entered again inside.

        It waits for the others as long as it takes: who ends, however, leaves it free. Raises OutputError.
        """
        said = self._alone.is_locked
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            while True:
                with contextlib.suppress(Timeout):
                    self._alone.acquire(timeout=_SAID_S)
                    break
                if not said:
                    said = True
                    log.info("waiting for another shard, which plans or tidies up")
        except OSError as e:
            raise fsio.output_error(Path(self._alone.lock_file), e) from e
        try:
            yield
        finally:
            self._alone.release()

    def running(self) -> "list[RunDirectory]":
        """The run as its shards have it that are at work now, by their number."""
        return [one for one in self._locked_shards() if one.is_held()]

    def _locked_shards(self) -> "list[RunDirectory]":
        """The run as shards have it that ever had their lock."""
        found = (of_label(path.stem.removeprefix("shard-")) for path in self._locks.glob("shard-*.lock"))
        shards = sorted((shard.count, shard.number) for shard in found if shard is not None)
        return [RunDirectory(self.path, Shard(number, count)) for count, number in shards]

    def every_shard(self, count: int) -> "list[RunDirectory]":
        """The run as each of so many shards has it."""
        return [RunDirectory(self.path, Shard(number, count)) for number in range(count)]

    @property
    def others(self) -> "list[RunDirectory]":
        """The shards that are at work besides this one."""
        return [one for one in self.running() if one.shard != self.shard]

    def who_holds(self) -> str:
        """The holder of a lock that is held."""
        told = self.holder() or "just starting"
        return told if self.shard.is_whole else f"{self.shard}: {told}"

    def still_ours(self) -> None:
        """Raise OutputError where the folder is not the one that was locked: removed, unmounted, or replaced."""
        if self._lock_is is None or _identity(self._lock_file) != self._lock_is:
            raise OutputError(
                f"{self.path}: the run directory has vanished or was replaced while this run held it; nothing more is "
                "written there. Bring it back and start the same command again"
            )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # it only tells; the lock holds
                self._holder_file.unlink()
            self._lock.release()
            self._lock = None

    def _locked(self) -> LockedError:
        """The error that names who holds the run; waits a moment for one that has the lock and has not told yet."""
        end = time.monotonic() + _TELLING_S
        while (told := self._told()) is None or _is_gone(told["host"], told["pid"]):
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        what = "run" if self.shard.is_whole else "shard of the run"
        return LockedError(f"{self.path}: another process holds this {what}: {self.who_holds()}")

    def holder(self) -> str | None:
        """Who says to hold the run: host, pid and since when."""
        told = self._told()
        return None if told is None else f"pid {told['pid']} on {told['host']} since {told['since']}"

    def _told(self) -> dict[str, Any] | None:
        try:
            told = json.loads(self._holder_file.read_text())
            return {"host": told["host"], "pid": int(told["pid"]), "since": told["since"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def is_held(self) -> bool:
        """Whether some process holds the run now. Only looks: a run that one may not write can be asked too."""
        try:
            lock = self._lock_file.open("rb")
        except OSError:
            return False
        with lock:
            try:
                # Shared: the lock of a run is exclusive, and two that ask do not meet.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as e:
                return e.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
        return False

    @property
    def owner(self) -> str:
        """Whose temporary files are ours: this shard's."""
        return self.shard.label

    def parts(self, suffix: str) -> list[Path]:
        """Committed parts, oldest first: a part's name sorts by attempt, shard and number."""
        return sorted(self.summaries.glob(f"part-*{suffix}"))

    def part(self, attempt: int, number: int, suffix: str) -> Path:
        return self.summaries / f"part-{attempt:05d}-{self.shard.label}-{number:06d}{suffix}"

    def remove_pieces(self) -> None:
        """Remove the file with finished pieces, after a start over all those of shards too. Raises OutputError."""
        if self.pieces.is_dir():
            for path in (
                self.pieces_file,
                *(self.of_other_counts(self.pieces, "answers") if self.shard.is_whole else ()),
            ):
                fsio.remove(path)
            with contextlib.suppress(OSError):  # something else lies there
                self.pieces.rmdir()

    def forget_other_counts(self) -> None:
        """Remove what shards of another number have said of themselves: nobody adds it up any more."""
        folders = ((self.path, ("report", "failed", "retry")), (self._locks, ("shard",)))
        for path in (one for folder, names in folders for name in names for one in self.of_other_counts(folder, name)):
            if path.suffix != ".lock":
                fsio.remove(path)

    def of_other_counts(self, folder: Path, name: str) -> list[Path]:
        """Files `<name>-<shard>.…` of shards of another number; no such shard is at work."""
        shards = {
            path: of_label(path.name.removeprefix(f"{name}-").partition(".")[0]) for path in folder.glob(f"{name}-*")
        }
        return sorted(path for path, shard in shards.items() if shard is not None and shard.count != self.shard.count)

    def telemetry(self, attempt: int) -> Path:
        return self.path / f"telemetry-{self.shard.label}-{attempt:05d}.jsonl"

    def telemetries(self) -> list[Path]:
        """Those of this shard's attempts, oldest first; of all where the run is looked at as a whole."""
        found = self.path.glob("telemetry-*.jsonl" if self.shard.is_whole else f"telemetry-{self.shard.label}-*.jsonl")
        return sorted(found, key=lambda path: (path.stem.rpartition("-")[2], path.name))

    def next_attempt(self) -> int:
        """One more than any attempt that left a trace."""
        names = [path.name for folder in (self.path, self.summaries) for path in folder.glob("*-*-*")]
        numbers = [
            int(found[1])
            for name in names
            if (found := re.match(r"part-(\d+)-", name) or re.match(r"telemetry-[\dof]+-(\d+)\.", name))
        ]
        return max(numbers, default=0) + 1

    def read_run(self) -> dict[str, Any] | None:
        """run.json, or None in a new directory. Raises ConfigError where there are parts but no run.json."""
        try:
            value = json.loads(self.run_json.read_text())
        except FileNotFoundError:
            if any(self.summaries.glob("part-*")):
                raise ConfigError(
                    f"{self.path}: holds parts but no run.json, so nobody knows which settings made them; "
                    "start with --fresh to move them aside"
                ) from None
            self._refuse_foreign("name the folder of a run")
            return None
        except (OSError, ValueError) as e:
            raise ConfigError(f"{self.run_json}: cannot be read: {e}; start with --fresh to move the run aside") from e
        if not isinstance(value, dict):
            raise ConfigError(f"{self.run_json}: cannot be read: no object; start with --fresh to move the run aside")
        return value

    def _refuse_foreign(self, way_out: str) -> None:
        if self.path.is_dir() and (foreign := _foreign(self.path)):
            raise ConfigError(f"{self.path}: is no run directory (it holds {foreign}); {way_out}")

    def write_run(self, value: Mapping[str, Any]) -> None:
        data = json.dumps(value, indent=2, sort_keys=True, default=str) + "\n"
        fsio.write_atomic(self.run_json, data.encode(), owner=self.owner)

    def set_aside(self) -> Path:
        """Move this run, lock and all, to a free name beside it, and begin an empty directory in its place."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        names = [
            self.path.with_name(f"{self.path.name}.{stamp}{suffix}")
            for suffix in ("", *map("-{}".format, range(1, 99)))
        ]
        aside = next(name for name in names if not name.exists())
        try:
            self.path.rename(aside)
        except OSError as e:
            raise fsio.output_error(self.path, e) from e
        old, self._lock = self._lock, None
        self.__enter__()
        if old is not None:
            old.release()
        (aside / self._holder_file.relative_to(self.path)).unlink(missing_ok=True)
        return aside


def attempt_of(part: Path) -> int:
    """The attempt that committed a part."""
    return int(part.name.split("-")[1])


def shard_of(part: Path) -> Shard | None:
    """The shard that committed a part."""
    return of_label(part.name.split("-")[2])


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is, whatever its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_gone(host: str, pid: int) -> bool:
    """Whether this process is known to have ended: a killed holder leaves its name behind."""
    return host == socket.gethostname() and not psutil.pid_exists(pid)


def _refuse_lockless(path: Path) -> None:
    """Raise OutputError on a file system that has no locks the kernel frees when their holder is gone."""
    if not fsio.has_locks(path):
        raise OutputError(
            f"{path.parent.parent}: this file system has no file locks, so two runs could write at once; put "
            "output.dir on a local disk, or mount the network file system with locks (NFS: without nolock; Lustre: "
            "with flock)"
        )


def _foreign(path: Path) -> str | None:
    """A name in the folder that no run directory holds."""
    ours = re.compile(
        r"(\.tmp-.*|locks|logs|summaries|orphans|damaged|pieces|(run|plan|report|failed)\..*|"
        r"(telemetry|strikes|retry|report|failed)-.*)$"
    )
    return next((entry.name for entry in sorted(path.iterdir()) if not ours.match(entry.name)), None)
