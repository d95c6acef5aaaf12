"""Several engines behind one: each in a process of its own (worker.py), each request goes where the least is in flight.

The loop sees one engine with more room. Documents, rows and parts stay in the run's process, so that nothing of the
commit protocol knows how many engines there are, and all of them are busy until the last documents.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from batchgen.data import Completion, Request
from batchgen.engines import processes, worker
from batchgen.engines.base import Engine, EngineInfo, EngineMetrics, Limits
from batchgen.engines.streams import standard_streams_to
from batchgen.errors import BatchgenError, EngineError, ReplicaDiedError
from batchgen.fsio import open_append

_POLL_S = 0.2
# A worker looks after its engine itself; only one that cannot even do that is the loop's affair, later.
_MARGIN_S = 30.0
_CLOSE_S = 5.0  # an engine that closes by itself leaves no shared memory behind
_TRIES = 3  # deaths of one engine without a finished request in between: it is left out
log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of the engines runs. label: for people; environment: of its process; make: must be picklable."""

    label: str
    environment: dict[str, str]
    make: Callable[[], Engine]


@dataclass(slots=True)
class _Worker:
    """limits: None until it is ready. beat: the last sign of work. deaths: since its last finished request."""

    place: Place
    process: Any
    pipe: Connection
    limits: Limits | None = None
    info: EngineInfo | None = None
    in_flight: set[str] = field(default_factory=set)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    exposition: str | None = None
    beat: float = field(default_factory=time.monotonic)
    deaths: int = 0


class EnginePool:
    """An engine made of several. A death of one raises ReplicaDiedError with what it had; that one starts again.

    Where none is left, or all were killed, EngineError is raised as by any engine. stall_s, logs, exposes: see
    worker.Settings.
    """

    def __init__(self, places: Sequence[Place], *, stall_s: float, logs: Path, exposes: bool = False) -> None:
        """Start all of them at once. Raises what the first one raised that did not start."""
        self._stall_s = stall_s
        self._logs = logs
        self._exposes = exposes
        self._killed: str | None = None
        self._waiting = False
        self._found: list[Completion] = []  # what came in before a replica's death was met
        self._gone = EngineMetrics()  # sums of engines that have ended
        self._workers: list[_Worker] = []
        try:
            for place in places:
                self._workers.append(self._start(place))
            while any(one.limits is None for one in self._workers):
                self._await_starts()
        except BaseException:  # also a signal's: no process of a start that was left may stay
            self.close()
            raise
        first = self._workers[0]
        assert first.info is not None
        gpus = dict.fromkeys(gpu for one in self._workers if one.info is not None for gpu in one.info.gpus)
        self.info = replace(first.info, replicas=len(self._workers), gpus=tuple(gpus))

    def _await_starts(self) -> None:
        for one in self._reporting():
            news = self._read(one)
            if isinstance(news, BatchgenError):
                raise news

    @property
    def limits(self) -> Limits:
        known = [one.limits for one in self._workers if one.limits is not None]
        return replace(known[0], in_flight=sum(one.in_flight for one in known))

    def _start(self, place: Place) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        settings = worker.Settings(place.make, place.environment, self._stall_s, self._logs, self._exposes)
        process = context.Process(target=worker.main, args=(theirs, settings), name=f"engine {place.label}")
        self._logs.mkdir(parents=True, exist_ok=True)
        # Python's resource tracker too: it begins with the first of them, and talks about what killed ones have left.
        with open_append(self._logs / "engines.log", records=False) as log_file, standard_streams_to(log_file):
            process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return _Worker(place, process, ours)

    def submit(self, request: Request) -> None:
        ready = [one for one in self._workers if one.limits is not None]
        if not ready:
            raise self._died()
        one = min(ready, key=lambda one: len(one.in_flight))
        if not one.in_flight:
            one.beat = time.monotonic()
        one.in_flight.add(request.custom_id)
        self._send(one, request)

    def _send(self, one: _Worker, message: worker.FromRun) -> None:
        try:
            one.pipe.send(message)
        except OSError:
            return  # it has ended: `poll` will meet the end of its pipe

    def poll(self) -> list[Completion]:
        if self._killed is not None:
            raise self._died()
        if not self._found and not any(one.in_flight for one in self._workers):
            return []
        for one in self._reporting():
            news = self._read(one)
            if isinstance(news, BatchgenError):
                self._fell(one, news)
            elif isinstance(news, worker.News):
                self._found += self._took(one, news)
        found, self._found = self._found, []
        return found

    def _reporting(self) -> list[_Worker]:
        """Those that have something to tell within a moment."""
        pipes = {one.pipe: one for one in self._workers}
        self._waiting = True
        try:
            return [pipes[pipe] for pipe in wait(list(pipes), timeout=_POLL_S) if isinstance(pipe, Connection)]
        finally:
            self._waiting = False

    def _read(self, one: _Worker) -> worker.ToRun:
        """A message, or the error that ended the worker."""
        one.beat = time.monotonic()
        try:
            message: worker.ToRun = one.pipe.recv()
        except (EOFError, OSError):
            one.process.join(_POLL_S)
            return EngineError(f"engine {one.place.label}: its process has ended ({one.process.exitcode})")
        if isinstance(message, worker.Ready):
            one.limits, one.info = message.limits, message.info
        return message

    def _took(self, one: _Worker, news: worker.News) -> list[Completion]:
        one.metrics = news.metrics or one.metrics
        one.exposition = news.exposition or one.exposition
        if news.completions:
            one.deaths = 0
        wanted = [done for done in news.completions if done.custom_id in one.in_flight]  # others were aborted
        one.in_flight.difference_update(done.custom_id for done in wanted)
        return wanted

    def _fell(self, one: _Worker, death: BatchgenError) -> None:
        """An engine has ended: start it again beside the others. Raises ReplicaDiedError, or EngineError at the end."""
        if self._killed is not None:
            raise self._died() from death
        self._workers.remove(one)
        self._gone = _sum([self._gone, one.metrics])
        _end(one)
        if one.deaths + 1 < _TRIES:
            again = self._start(one.place)
            again.deaths = one.deaths + 1
            self._workers.append(again)
        else:
            log.error("engine %s: %s; it is left out, %s go on", one.place.label, death, len(self._workers))
        if not any(other.limits for other in self._workers):
            raise EngineError(str(death)) from death
        if one.in_flight:
            raise ReplicaDiedError(str(death), frozenset(one.in_flight)) from death
        log.error("engine %s: %s; it had nothing in flight", one.place.label, death)

    def _died(self) -> EngineError:
        return EngineError(f"the engines ended: {self._killed or 'none is left'}")

    def abort(self, custom_ids: Sequence[str]) -> None:
        gone = set(custom_ids)
        for one in self._workers:
            if theirs := one.in_flight & gone:
                one.in_flight -= theirs
                self._send(one, worker.Abort(tuple(theirs)))

    def forget_prefixes(self) -> bool:
        """Empty the prefix caches of all, for `batchgen bench`; False where one could not. Nothing may be in flight."""
        ready = [one for one in self._workers if one.limits is not None]
        for one in ready:
            self._send(one, worker.ForgetPrefixes())
        answers = [self._read(one) for one in ready]
        if any(isinstance(answer, BatchgenError) for answer in answers):
            raise EngineError("an engine died between two turns")
        return all(isinstance(answer, worker.Forgotten) and answer.done for answer in answers)

    def metrics(self) -> EngineMetrics:
        told = _sum([self._gone, *(one.metrics for one in self._workers)])
        engines = sum(one.metrics.rss_bytes or 0 for one in self._workers)
        own = processes.memory([found for one in self._workers for found in _known(one.process.pid)])
        texts = {one.place.label: one.exposition for one in self._workers if one.exposition is not None}
        return replace(told, rss_bytes=engines + own, exposition=texts)

    def pulse(self) -> float | None:
        beats = [one.beat for one in self._workers if one.in_flight]
        return min(beats) + _MARGIN_S if beats and self._waiting else None

    def kill(self, why: str) -> None:
        self._killed = why
        for one in list(self._workers):
            _end(one)

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for one in workers:
            one.pipe.close()  # asks it to end
        end = time.monotonic() + _CLOSE_S
        for one in workers:
            one.process.join(max(0.0, end - time.monotonic()) if one.limits and not one.in_flight else 0.0)
            _end(one)


def _end(one: _Worker) -> None:
    """Kill a worker and its engine's processes; nothing of theirs is wanted any more."""
    below = processes.children(one.process.pid)
    one.process.kill()
    processes.end([*below, *_known(one.process.pid)])
    one.process.join()


def _known(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def _sum(metrics: Sequence[EngineMetrics]) -> EngineMetrics:
    """Counters and requests added up; the use of the KV cache is a mean over those that tell it. No memory."""

    def total(name: str) -> int | None:
        told = [value for one in metrics if (value := getattr(one, name)) is not None]
        return sum(told) if told else None

    counters = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions")
    uses = [one.kv_cache_usage for one in metrics if one.kv_cache_usage is not None]
    sums: dict[str, Any] = {name: total(name) for name in (*counters, "running", "waiting")}
    return EngineMetrics(
        **sums,
        kv_cache_usage=sum(uses) / len(uses) if uses else None,
    )
