"""What an attempt counts and times, and how attempts add up. Times are seconds, tokens are counts."""

import copy
import dataclasses
import json
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import thread_time
from typing import Any, Self, TextIO

import jsonlines
import psutil

from batchgen.data import Completion, Record
from batchgen.engines.base import EngineInfo, EngineMetrics
from batchgen.fsio import open_append, output_error
from batchgen.reporting.buckets import Buckets
from batchgen.reporting.gpus import GpuWatch
from batchgen.reporting.shared import Shared

SAMPLE_S = 5.0
TIMES = ("queue_s", "ttft_s", "tpot_s")  # of a Completion
_PEAKS = ("peak_rss_bytes", "engine_peak_rss_bytes")


@dataclass(slots=True)
class Counts:
    """Sums of one attempt, or of several: `+` is associative. Of peaks it takes the highest.

    `starved_s`: the engine could run more and no document was ready. `encode_s`: the reader made token ids, while the
    engine worked. `loop_cpu_s`: processor time of the thread that feeds the engine, up to the last completion.

    Tokens are those of finished requests. `generated_tokens` is the engine's own count, which includes tokens of
    requests that did not finish. `kept_tokens` are output tokens of ok records, without those of answers that were
    dropped for better ones; `reasoning_tokens` are of all records. `packs` are answered requests for several documents,
    `pack_extras` summaries in their answers that nobody asked for. Memory is that of the run's own process, and that
    of the engine's processes as far as it was sampled; 0 where nobody looked.
    """

    read: int = 0
    done_before: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    requests: int = 0
    packs: int = 0
    pack_extras: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    generated_tokens: int = 0
    kept_tokens: int = 0
    reasoning_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    engine_starts: int = 0
    engine_deaths: int = 0
    total_s: float = 0.0
    engine_start_s: float = 0.0
    steady_s: float = 0.0
    drain_s: float = 0.0
    commit_s: float = 0.0
    starved_s: float = 0.0
    encode_s: float = 0.0
    loop_cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    engine_peak_rss_bytes: int = 0

    def __add__(self, other: Self) -> "Counts":
        names = [f.name for f in dataclasses.fields(self) if f.name not in _PEAKS]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Counts(**sums, **{name: max(getattr(self, name), getattr(other, name)) for name in _PEAKS})

    @property
    def wasted_tokens(self) -> int:
        """Output tokens that are in no ok record of the attempt that made them."""
        return max(self.generated_tokens, self.completion_tokens) - self.kept_tokens


class Stats:
    """The counts of the running attempt. The reader's thread writes `read`, `done_before`, `encode_s` and `shared`, the
    engine's the rest.

    Phases: start of the engine; steady, from the first request until no more documents come; drain, to the last
    completion.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.reasons: Counter[str] = Counter()
        self.deaths: list[str] = []
        self.engine_start_s = 0.0  # of the latest one
        self.engine_now = EngineMetrics()  # as last sampled
        self.in_flight = 0  # requests
        self.commits = 0
        self.committed_rows = 0
        self.committed_at: float | None = None  # Unix time of the last commit
        self.gpus: list[dict[str, Any]] | None = None  # as last sampled: see GpuWatch.read
        self.times = {name: Buckets() for name in TIMES}  # of requests that finished since the last sample
        self._sampled_times = {name: Buckets() for name in TIMES}  # of those before
        self._sampling = threading.Lock()
        self.shared = Shared()  # by the reader's thread
        self._cpu: float | None = None  # of this thread, when the first engine had started
        self._closed_engines = dict.fromkeys(
            ("generated_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions"), 0
        )
        self._begin = time.monotonic()
        self._first: float | None = None
        self._last_input: float | None = None
        self._last_output: float | None = None
        self._end: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def engine_started(self, seconds: float) -> None:
        self.engine_start_s = seconds
        self.counts.engine_start_s += seconds
        self.counts.engine_starts += 1
        self._first = self._first or time.monotonic()
        self._cpu = self._cpu or thread_time()

    @property
    def all_read(self) -> bool:
        """Whether the reader has met the end, so that all documents there are have been counted."""
        return self._last_input is not None

    def no_more_documents(self) -> None:
        self._last_input = self._last_input or time.monotonic()

    def completed(self, completion: Completion) -> None:
        self._last_output = time.monotonic()
        if self._cpu is not None:
            self.counts.loop_cpu_s = thread_time() - self._cpu
        self.counts.requests += 1
        self.counts.prompt_tokens += completion.prompt_tokens
        self.counts.cached_tokens += completion.cached_tokens
        self.counts.completion_tokens += completion.completion_tokens
        for name, buckets in self.times.items():
            if (seconds := getattr(completion, name)) is not None:
                buckets.add(seconds)

    def recorded(self, record: Record) -> None:
        self.counts.reasoning_tokens += record.reasoning_tokens
        if record.status == "ok":
            self.counts.ok += 1
            self.counts.kept_tokens += record.completion_tokens - record.dropped_tokens
        elif record.status == "failed":
            self.counts.failed += 1
        else:
            self.counts.skipped += 1
        if record.error_type:
            self.reasons[f"{record.status}: {record.error_type}"] += 1

    def engine(self, metrics: EngineMetrics) -> None:
        """What the engine counts; its numbers begin anew with every engine."""
        self.engine_now = metrics
        for name, value in (
            ("generated_tokens", metrics.generation_tokens),
            ("prefix_cache_queries", metrics.prefix_cache_queries),
            ("prefix_cache_hits", metrics.prefix_cache_hits),
            ("preemptions", metrics.preemptions),
        ):
            setattr(self.counts, name, self._closed_engines[name] + (value or 0))
        self.counts.engine_peak_rss_bytes = max(self.counts.engine_peak_rss_bytes, metrics.rss_bytes or 0)

    def committed(self, rows: int) -> None:
        """A part with so many rows is on disk."""
        self.commits += 1
        self.committed_rows += rows
        self.committed_at = datetime.now(UTC).timestamp()

    def engine_died(self, reason: str) -> None:
        self.counts.engine_deaths += 1
        self.deaths.append(reason)

    def engine_closed(self) -> None:
        """What the engine has counted so far stays, another one begins at 0."""
        self.engine_now = EngineMetrics()
        for name in self._closed_engines:
            self._closed_engines[name] = getattr(self.counts, name)

    def take_times(self) -> dict[str, Buckets]:
        """Times of the requests that finished since this was asked last."""
        with self._sampling:
            taken, self.times = self.times, {name: Buckets() for name in TIMES}
            for name, buckets in taken.items():
                self._sampled_times[name] += buckets
        return taken

    def end(self) -> Counts:
        """The counts of the whole attempt, as its end tells them too: making the report is no part of it."""
        self._end = time.monotonic()
        return self.now()

    def all_times(self) -> dict[str, Buckets]:
        """Times of all requests of the attempt; any thread may ask."""
        with self._sampling:
            found = {name: Buckets(buckets.counts) for name, buckets in self._sampled_times.items()}
            for name, buckets in self.times.items():
                found[name] += Buckets(buckets.counts)
        return found

    def now(self) -> Counts:
        """The counts with the times up to this moment."""
        at = self._end or time.monotonic()
        first = self._first or at
        last_input = max(first, self._last_input or at)
        last_output = max(first, self._last_output or at) if self._last_input else at
        self.counts.total_s = at - self._begin
        # The engine is asked now and then: what came out of it since was generated too.
        self.counts.generated_tokens = max(self.counts.generated_tokens, self.counts.completion_tokens)
        self.counts.steady_s = min(last_input, last_output) - first
        self.counts.drain_s = max(0.0, last_output - last_input)
        self.counts.peak_rss_bytes = peak_rss_bytes()
        return dataclasses.replace(self.counts)

    def seen(self) -> Counts:
        """`now` for other threads: changes nothing."""
        other = copy.copy(self)
        other.counts = dataclasses.replace(self.counts)
        return other.now()


def peak_rss_bytes() -> int:
    """The most memory this process ever had."""
    try:
        # Not ru_maxrss, where it can be helped: that of a child begins with its parent's.
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Telemetry:
    """telemetry-<shard>-<attempt>.jsonl: what an attempt did, as it does it. A start with nothing to do leaves none."""

    def __init__(self, path: Path, **start: Any) -> None:
        """start: values of the first event. Every call raises OutputError where the file cannot be written."""
        self._path = path
        self._start = start
        self._sampled = 0.0
        self._stream: TextIO | None = None
        self._writer: jsonlines.Writer | None = None
        self._gpus = GpuWatch(())

    def engine(self, info: EngineInfo) -> None:
        """An engine has started: from now on its GPUs are looked at."""
        if info.gpus != self._gpus.names:
            self._gpus.close()
            self._gpus = GpuWatch(info.gpus)
        self.event("engine", **dataclasses.asdict(info), nvml=self._gpus.found)

    def event(self, name: str, **values: Any) -> None:
        try:
            if self._writer is None:
                self._stream = open_append(self._path, records=True)
                self._writer = jsonlines.Writer(self._stream, flush=True)
                self._write("start", self._start)
            self._write(name, values)
        except OSError as e:
            raise output_error(self._path, e) from e

    def _write(self, name: str, values: dict[str, Any]) -> None:
        assert self._writer is not None
        line = {"event": name, "at": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        self._writer.write(json.loads(json.dumps(line, default=str)))

    def sample(self, stats: Stats, metrics: EngineMetrics) -> None:
        stats.engine(metrics)
        stats.gpus = self._gpus.read()
        self._sampled = time.monotonic()
        counts = {k: round(v, 3) for k, v in dataclasses.asdict(stats.now()).items()}
        engine = {"running": metrics.running, "waiting": metrics.waiting, "kv_cache_usage": metrics.kv_cache_usage}
        memory = {"rss_bytes": psutil.Process().memory_info().rss, "engine_rss_bytes": metrics.rss_bytes}
        times = {name: buckets.told() | {"buckets": buckets.to_json()} for name, buckets in stats.take_times().items()}
        shared = stats.shared.told()
        self.event("sample", counts=counts, **engine, **memory, times=times, gpus=stats.gpus, shared=shared)

    def rest(self, stats: Stats) -> None:
        """Tell what finished since the last sample, where no engine is left to be asked."""
        if any(len(buckets) for buckets in stats.times.values()):
            self.sample(stats, EngineMetrics())

    @property
    def due(self) -> bool:
        return time.monotonic() - self._sampled >= SAMPLE_S

    def close(self, stats: Stats, status: int, **told: Any) -> None:
        """Tell the end, where there was a beginning. told: what else the report says that no row and no count does."""
        self._gpus.close()
        if self._writer is not None:
            # Not rounded: a report made anew has the figures of the one that was written.
            self.event("end", exit_status=status, **told, counts=dataclasses.asdict(stats.now()))
        if self._stream is not None:
            self._stream.close()


def read_telemetry(path: Path) -> Iterator[dict[str, Any]]:
    """The events of an attempt; lines that a kill cut short, or that hold no event, are left out."""
    with path.open("rb") as stream:
        for line in stream:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def last_told(path: Path) -> tuple[Counts, dict[str, Any] | None]:
    """(the last counts an attempt told, zeros where it told none; its end, or None where a kill left it without)."""
    last: dict[str, Any] = {}
    end = None
    for event in read_telemetry(path):
        last = event.get("counts", last)
        end = event if event.get("event") == "end" else None
    return counts_from(last), end


def counts_from(told: Mapping[str, Any]) -> Counts:
    """Those of an event; names of other versions are left out."""
    known = {f.name for f in dataclasses.fields(Counts)}
    return Counts(**{name: value for name, value in told.items() if name in known})


def counts_of(path: Path) -> Counts:
    return last_told(path)[0]
