"""What is to be done and what came of it: the files between `batchgen bench` and its peers, and their clock."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

UNAVAILABLE = 69


class UnavailableError(Exception):
    """The peer is not installed, or cannot do this work here; the text says what to do about it."""


@dataclass(frozen=True, slots=True)
class Work:
    """`engine_args` has vLLM's own names. `prompts_file` has lines {"id": str, "prompt_ids": [int]}. Rows go to `out`
    as JSON lines with `id` and `summary`; a peer that writes many files makes `out` a folder of them. `batch` is how
    many documents a peer takes at once, where it has such a setting; null is the peer's own default.
    """

    model: str
    engine_args: dict[str, Any]
    prompts_file: str
    max_tokens: int
    ignore_eos: bool
    temperature: float
    out: str
    batch: int | None = None

    def prompts(self) -> list[tuple[str, list[int]]]:
        """Ids and token ids, in the order of the file."""
        with Path(self.prompts_file).open(encoding="utf-8") as lines:
            return [(one["id"], one["prompt_ids"]) for one in map(json.loads, lines)]

    def vllm_args(self) -> dict[str, Any]:
        return {**self.engine_args, "model": self.model}

    def sampling(self) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams and of its completions endpoint."""
        return {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos, "temperature": self.temperature}


@dataclass(frozen=True, slots=True)
class Result:
    """`seconds`: from the first request to the last durable row; `first_s`: to the first one. `start_s`: from the start
    of this process to the first request. `peak_bytes`: of this process alone, without its children.
    """

    seconds: float
    start_s: float
    first_s: float
    documents: int
    prompt_tokens: int
    output_tokens: int
    peak_bytes: int
    versions: dict[str, str]


class Rows:
    """JSON lines that are on the disk once `write` returns."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  open as long as this object
        self.first: float | None = None
        """`time.time()` when the first rows were durable."""

    def write(self, rows: Iterable[tuple[str, str]]) -> None:
        """Ids and summaries."""
        for name, summary in rows:
            self._file.write(json.dumps({"id": name, "summary": summary}, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.first = self.first or time.time()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Written:
    """What a folder of JSON lines holds; `first` and `last`: `time.time()` when its first file and all were durable."""

    first: float
    last: float
    rows: list[dict[str, Any]]


def sync_folder(folder: str) -> Written:
    """Makes the files of a peer durable, and reads them.

    A file counts as durable at its last write plus the time that the disk takes for it now: what a peer does after its
    last row, as to stop its engine, is not counted.
    """
    times, rows, syncing = [], [], 0.0
    for path in sorted(Path(folder).rglob("*.json*")):
        with path.open(encoding="utf-8") as lines:
            start = time.perf_counter()
            os.fsync(lines.fileno())
            syncing += time.perf_counter() - start
            times.append(os.fstat(lines.fileno()).st_mtime)
            rows += [json.loads(line) for line in lines]
    if not rows:
        raise UnavailableError(f"no row was written into {folder}: the log of this process tells why")
    return Written(first=min(times) + syncing, last=max(times) + syncing, rows=rows)


def result_of(out: str, *, asked: str, packages: Sequence[str]) -> Result:
    """Of a peer that wrote rows with their tokens into a folder; `asked` is the field with the moment of a request."""
    written = sync_folder(out)
    start = min(row[asked] for row in written.rows)
    return Result(
        seconds=written.last - start,
        start_s=start - born(),
        first_s=written.first - start,
        documents=len(written.rows),
        prompt_tokens=sum(row["prompt_tokens"] for row in written.rows),
        output_tokens=sum(row["output_tokens"] for row in written.rows),
        peak_bytes=peak_bytes(),
        versions=versions(*packages),
    )


def born() -> float:
    """`time.time()` at the start of this process."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def peak_bytes() -> int:
    """The most memory that this process has held. Not `getrusage`: it goes on from the peak of the parent."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def versions(*names: str) -> dict[str, str]:
    """Of the distributions with these names that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_installed(needs: Mapping[str, str]) -> None:
    for package, wanted in needs.items():
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f"{package} is not installed: pip install {wanted}")


def main(run: Callable[[Work], Result], needs: Mapping[str, str]) -> None:
    """The program of a peer. `needs`: the packages it imports, and what to give `pip install` for each."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m batchgen.bench.peers.<module> WORK.json RESULT.json")
    try:
        check_installed(needs)
        work = Work(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        result = run(work)
    except UnavailableError as e:
        print(e, file=sys.stderr)  # noqa: T201  the reason, for the one who started this process
        sys.exit(UNAVAILABLE)
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
