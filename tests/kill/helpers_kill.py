"""A small corpus of every kind of input, its changes between starts, and the rows that a calm run makes of it."""

import contextlib
import functools
import json
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from helpers_data import packed
from helpers_run import rows, start, write_job
from killed_child import Cue, status_of, talk

from batchgen.sinks import open_sink

# Where there is such a disk: fsync costs nothing there, and what a kill leaves is the same.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
FORMATS = ("parquet", "jsonl")
# What follows from when a row was made, not from the document.
WHEN = ("finished_at", "attempts", "cached_tokens")
TEXT = "The harbour board met on day {n} and agreed to repair the quay wall; version {v:03}."


@dataclass(frozen=True)
class State:
    """What the inputs hold: documents with these numbers are edited, so many are appended, these files are gone.

    An edited document is as long as it was, so that no other moves: places are those of a run from the beginning.
    """

    edited: frozenset[int] = frozenset()
    appended: int = 0
    gone: frozenset[str] = frozenset()

    def write(self, folder: Path) -> None:
        """The files in folder/in; files that stay as they are are left alone."""
        ids = [self._record(n) for n in range(12)]
        ids[7:7] = [self._record(2, id="d2"), self._record(61, id="d5"), self._record(62, text=" "), "{torn"]
        ids += [self._record(n) for n in range(70, 70 + self.appended)]
        numbers = [self._record(n, id=n) for n in range(20, 28)]
        table = pa.Table.from_pylist([self._record(n) for n in range(40, 50)])
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=4)
        plain = [self._record(n) for n in range(50, 56)] + [self._record(n) for n in range(80, 80 + self.appended)]
        files = {
            "ids/a.jsonl": _lines(ids),
            "ids/b.jsonl.gz": packed(_lines(numbers), "gzip"),
            "ids/c.parquet": bytes(sink.getvalue()),
            "plain/d.jsonl": _lines(plain),
        }
        for name, data in files.items():
            path = folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in self.gone:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    def _record(self, n: int, **more) -> dict:
        version = 2 if n in self.edited else 1
        return {"id": f"d{n}", "title": f"Minutes {n:03}", "text": TEXT.format(n=f"{n:03}", v=version)} | more


def _lines(records) -> bytes:
    return b"".join((one if isinstance(one, str) else json.dumps(one)).encode() + b"\n" for one in records)


# What a run meets from start to start.
HISTORIES = (
    (State(),),
    (State(), State(edited=frozenset({1, 9, 21, 43, 52}))),
    (State(), State(edited=frozenset({0, 2, 61}), appended=3)),
    (State(), State(gone=frozenset({"ids/c.parquet"}), appended=2)),
    (State(gone=frozenset({"ids/a.jsonl"})), State(edited=frozenset({22}))),
    (State(), State(edited=frozenset({40, 41, 5}), gone=frozenset({"ids/b.jsonl.gz"})), State(edited=frozenset({41}))),
)


def kill_job(folder: Path, form: str, *, poison: bool = False) -> Path:
    """The job of the corpus. Paths in it are relative: its run is started in its folder.

    poison: one document kills every engine that it is sent to.
    """
    item = {"keep": ["title"]}
    fake = {"fake": {"die_on": "day 051"}} if poison else {}
    return write_job(
        folder,
        [{"path": "in/ids", "id_field": "id"} | item, {"path": "in/plain"} | item],
        checkpoint={"rows": 7},
        failures={"max": 100},
        output={"dir": "out", "format": form},
        engine={"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}} | fake,
    )


@functools.cache
def calm_rows(state: State, form: str, *, poison: bool = False) -> list[dict]:
    """The rows of a run that nobody disturbs, begun with the inputs in this state."""
    with scratch() as folder, contextlib.chdir(folder):
        state.write(folder)
        assert start(kill_job(Path(), form, poison=poison)).exit_status == 0
        return rows(folder / "out")


@contextlib.contextmanager
def scratch():
    """An empty folder in memory, where the system has such a disk."""
    folder = tempfile.mkdtemp(prefix="batchgen-", dir=MEMORY)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def orphans(out: Path, form: str) -> list[str]:
    """The doc_keys in orphans/; each part may hold a key once."""
    sink = open_sink(form, owner="00000")
    found = []
    for path in (out / "orphans").glob("part-*"):
        keys = [row["doc_key"] for row in sink.rows(path)]
        assert len(keys) == len(set(keys)), path
        found += keys
    return found


def committed(out: Path) -> list[dict]:
    """The rows of all parts; a run that is held or dead may have two of a document."""
    return rows(out)


def still_there(before: list[dict], now: list[dict], wanted: list[dict]) -> None:
    """Assert that no row of `before` has changed or gone, apart from those whose document is edited or gone."""
    current = {row["doc_key"]: row["content_hash"] for row in wanted}
    kept = [row for row in before if current.get(row["doc_key"]) == row["content_hash"]]
    assert [row for row in now if row in kept] == kept


def clean(out: Path) -> None:
    """Assert that nothing is left of kills."""
    assert not list(out.rglob(".tmp-*"))
    assert not list(out.rglob("*.holder.json"))
    assert not list(out.glob("damaged"))
    assert not list(out.glob("strikes-*"))


def killed(point: str, nth: int, *options: str, command: str = "run") -> bool:
    """One start in the working directory that dies at the point; False where it ended before it came there."""
    status = status_of(Path.cwd(), command, "job.yaml", *options, cues=(Cue(point, nth),))
    assert status in (0, 3, -signal.SIGKILL), talk(Path.cwd())
    return status < 0
