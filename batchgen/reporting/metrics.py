"""Metrics of a start, for Prometheus: served while it goes, or as a file for node_exporter's textfile collector.

docs/metrics.md lists them. Counters begin at 0 with each start. Numbers are those of the report.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from batchgen import __version__
from batchgen.engines import exposition
from batchgen.engines.base import EngineMetrics
from batchgen.errors import BUG, BatchgenError, ConfigError
from batchgen.reporting.buckets import PER_DOUBLING, Buckets
from batchgen.reporting.serving import Ports, serving
from batchgen.reporting.stats import Counts, Stats

if TYPE_CHECKING:
    from prometheus_client import Metric

TEXTFILE_S = 15.0
_DOUBLINGS = range(-10, 13)  # 1 ms to more than an hour
_TIMES = (
    ("queue_s", "queue_time", "How long requests waited inside of the engine."),
    ("ttft_s", "time_to_first_token", "From entering the engine to the first token, waiting included."),
    ("tpot_s", "time_per_output_token", "Time for each token after the first, one value a request."),
)
log = logging.getLogger("batchgen")


@dataclass(slots=True)
class RunMetrics:
    """What is told of one start; a collector of prometheus-client. Any thread may ask it.

    run: the job's name. shard: as names of the run's files have it. expected: documents the start is about, None where
    nobody knows. ended: the exit status, None before the end.
    """

    stats: Stats
    run: str
    shard: str
    attempt: int | None = None
    expected: int | None = None
    ended: int | None = None
    began: float = field(default_factory=time.time)

    def collect(self) -> "Iterator[Metric]":
        """Those of batchgen, then vLLM's own."""
        yield from self.own()
        yield from exposition.Here.collect()
        yield from exposition.merged(self.stats.engine_now.exposition)

    def own(self) -> "Iterator[Metric]":
        counts, engine = self.stats.seen(), self.stats.engine_now
        about = {(__version__, str(self.attempt or "")): 1}
        yield self._gauge("info", "The version and the number of the attempt, as labels.", about, "version", "attempt")
        yield from self._moments()
        yield from self._documents(counts)
        yield from self._work(counts)
        yield from self._times()
        yield from self._engine(counts, engine)
        yield from self._gpus()
        yield from self._commits()

    def _moments(self) -> "Iterator[Metric]":
        now = time.time()
        yield self._gauge("running", "1 while the run goes, 0 after its end.", int(self.ended is None))
        yield self._gauge("start_time_seconds", "When this start began, as Unix time.", self.began)
        yield self._gauge("update_time_seconds", "When these metrics were made, as Unix time.", now)
        if self.ended is not None:
            yield self._gauge("end_time_seconds", "When this start ended, as Unix time.", now)
            yield self._gauge("exit_status", "The exit status of this start; not there before its end.", self.ended)

    def _documents(self, counts: Counts) -> "Iterator[Metric]":
        done = {("ok",): counts.ok, ("failed",): counts.failed, ("skipped",): counts.skipped}
        yield self._counter("documents", "Documents that this start gave a row, by status.", done, "status")
        reasons = {tuple(one.split(": ", 1)): count for one, count in sorted(self.stats.reasons.copy().items())}
        yield self._counter("errors", "Documents of this start without a summary, by error type.", reasons, "status",
                            "error_type")  # fmt: skip
        if self.expected is not None:
            yield self._gauge("documents_expected", "Documents that there are, as far as known.", self.expected)
        yield self._gauge("documents_done_before", "Documents met that had a row before.", counts.done_before)
        yield self._counter("documents_read", "Documents read from the input.", counts.read)
        seconds = counts.steady_s + counts.drain_s
        output = max(counts.generated_tokens, counts.completion_tokens)
        for name, words, count in (
            ("documents", "Summaries", counts.ok),
            ("prompt_tokens", "Prompt tokens", counts.prompt_tokens),
            ("output_tokens", "Output tokens", output),
        ):
            rate = count / seconds if seconds > 0 else 0.0
            yield self._gauge(f"{name}_per_second", f"{words} a second, since the engine was first ready.", rate)

    def _work(self, counts: Counts) -> "Iterator[Metric]":
        yield self._counter("requests", "Requests that the engine has answered.", counts.requests)
        yield self._counter("packs", "Answered requests for several documents.", counts.packs)
        yield self._gauge("requests_in_flight", "Requests that the engine has and has not answered.",
                          self.stats.in_flight)  # fmt: skip
        tokens = {
            ("prompt",): counts.prompt_tokens,
            ("cached",): counts.cached_tokens,
            ("output",): max(counts.generated_tokens, counts.completion_tokens),
            ("reasoning",): counts.reasoning_tokens,
            ("kept",): counts.kept_tokens,
        }
        yield self._counter("tokens", "Tokens: prompt, of these cached; output, of these reasoning, and kept in "
                            "summaries.", tokens, "kind")  # fmt: skip
        phases = {
            ("engine_start",): counts.engine_start_s,
            ("steady",): counts.steady_s,
            ("drain",): counts.drain_s,
            ("commit",): counts.commit_s,
            ("starved",): counts.starved_s,
            ("encode",): counts.encode_s,
        }
        yield self._gauge("phase_seconds", "Where the time of this start went.", phases, "phase")

    def _times(self) -> "Iterator[Metric]":
        from prometheus_client.core import HistogramMetricFamily

        times = self.stats.all_times()
        for key, name, words in _TIMES:
            if buckets := times[key]:
                family = HistogramMetricFamily(f"batchgen_{name}_seconds", words, labels=("run", "shard"))
                family.add_metric((self.run, self.shard), _doublings(buckets), buckets.about())
                yield family

    def _gpus(self) -> "Iterator[Metric]":
        for name, words, key in (
            ("gpu_utilization_ratio", "Share of the time in which the GPU computed, 0 to 1.", "utilization"),
            ("gpu_memory_used_bytes", "Memory of the GPU that is in use, by whomever.", "memory_used_bytes"),
            ("gpu_power_watts", "What the GPU draws.", "power_w"),
        ):
            told = {(one["gpu"],): one[key] for one in self.stats.gpus or () if one[key] is not None}
            if told:
                yield self._gauge(name, words, told, "gpu")

    def _engine(self, counts: Counts, engine: EngineMetrics) -> "Iterator[Metric]":
        for name, words, count in (
            ("engine_starts", "Engines that started.", counts.engine_starts),
            ("engine_deaths", "Engines that died and were started again.", counts.engine_deaths),
            ("preemptions", "Requests that the engine put back, to be computed again.", counts.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counts.prefix_cache_hits),
        ):
            yield self._counter(name, words, count)
        for name, words, value in (
            ("requests_running", "Requests that the engine runs.", engine.running),
            ("requests_waiting", "Requests that wait inside of the engine.", engine.waiting),
            ("kv_cache_usage_ratio", "Share of the KV cache that is in use, 0 to 1.", engine.kv_cache_usage),
        ):
            if value is not None:
                yield self._gauge(name, words, value)
        memory = {("run",): psutil.Process().memory_info().rss}
        if engine.rss_bytes is not None:
            memory["engine",] = engine.rss_bytes
        yield self._gauge("resident_memory_bytes", "Memory of the run's process, and of its engine's.", memory,
                          "process")  # fmt: skip

    def _commits(self) -> "Iterator[Metric]":
        yield self._counter("commits", "Parts that were written.", self.stats.commits)
        yield self._counter("committed_rows", "Rows in the parts that were written.", self.stats.committed_rows)
        if self.stats.committed_at is not None:
            yield self._gauge("last_commit_time_seconds", "When the last part was on disk, as Unix time.",
                              self.stats.committed_at)  # fmt: skip

    def _gauge(self, name: str, words: str, values: Any, *labels: str) -> "Metric":
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily(f"batchgen_{name}", words, labels=("run", "shard", *labels)), values)

    def _counter(self, name: str, words: str, values: Any, *labels: str) -> "Metric":
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily(f"batchgen_{name}", words, labels=("run", "shard", *labels)), values)

    def _filled(self, family: Any, values: Any) -> "Metric":
        """values: a number, or numbers by the values of the labels besides `run` and `shard`."""
        for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric((self.run, self.shard, *labels), value)
        filled: Metric = family
        return filled


def _doublings(buckets: Buckets) -> list[tuple[str, float]]:
    """Cumulated, at edges that are the same for every run."""
    at = [(2.0**n, PER_DOUBLING * n) for n in _DOUBLINGS]
    below = [(str(edge), float(sum(count for n, count in buckets.counts.items() if n < end))) for edge, end in at]
    return [*below, ("+Inf", float(len(buckets)))]


class _Own:
    """batchgen's own metrics alone."""

    def __init__(self, metrics: RunMetrics) -> None:
        self.collect = metrics.own


@contextlib.contextmanager
def exposing(metrics: RunMetrics, ports: Ports | None, textfile: Path | None) -> Iterator[None]:
    """Serve them, and write them now and then and at the end. Raises ConfigError where that cannot be."""
    with contextlib.ExitStack() as stack:
        if textfile is not None:
            stack.enter_context(_writing(own_file(textfile, metrics.shard), metrics))
        if ports is not None:
            stack.enter_context(serving(ports, metrics))
        try:
            yield
        except BaseException as e:
            metrics.ended = e.exit_status if isinstance(e, BatchgenError) else BUG
            raise


def own_file(textfile: Path, shard: str) -> Path:
    """Where a shard writes: shards of a run may share a folder, and each would replace what the others tell."""
    return textfile if "of" not in shard else textfile.with_stem(f"{textfile.stem}-{shard}")


@contextlib.contextmanager
def _writing(path: Path, metrics: RunMetrics) -> Iterator[None]:
    if fault := _write(path, metrics):
        raise ConfigError(
            f"metrics.textfile: {fault}; it stands in the folder of node_exporter's --collector.textfile.directory"
        )
    end = threading.Event()

    def write_now_and_then() -> None:
        told = False
        while not end.wait(TEXTFILE_S):
            fault = _write(path, metrics)
            if fault and not told:
                log.warning("metrics.textfile: %s; the run goes on", fault)
            told = bool(fault)

    thread = threading.Thread(target=write_now_and_then, name="textfile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        if fault := _write(path, metrics):
            log.warning("metrics.textfile: %s", fault)


def _write(path: Path, metrics: RunMetrics) -> str | None:
    """Replace the file as a whole; what is wrong where that cannot be."""
    from prometheus_client import write_to_textfile

    try:
        # Not fsio's: its temporary files end like the file, and the collector would read half of one.
        write_to_textfile(str(path), _Own(metrics))
    except OSError as e:
        return f"{path}: cannot be written: {e.strerror or e}"
    return None
