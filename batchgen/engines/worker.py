"""One engine in a process of its own: requests come in over a pipe, completions go out (pool.py is the other end).

The process lives as long as the run that started it. Signals are the run's affair alone, as in vLLM's own processes.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from batchgen.data import Completion, Request
from batchgen.engines import exposition, vllm_plugin
from batchgen.engines.base import Engine, EngineInfo, EngineMetrics, Limits
from batchgen.engines.watchdog import Watchdog
from batchgen.errors import BatchgenError, EngineError
from batchgen.lifecycle import Stop

_TELL_S = 1.0  # signs of work and metrics come this often at least
_EXPOSE_S = 5.0  # a text of some hundred lines, on the thread that feeds


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a worker: its engine has started."""

    limits: Limits
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class News:
    """What has finished since the last one, maybe nothing. metrics, exposition: None where the last ones still do."""

    completions: list[Completion]
    metrics: EngineMetrics | None = None
    exposition: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests."""

    custom_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    """Empty the prefix cache; answered by Forgotten."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """done: nothing is in the prefix cache any more."""

    done: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """make: makes the engine. environment: set before it is made. stall_s: seconds without a sign of work.

    exposes: vLLM's own metrics are wanted too.
    """

    make: Callable[[], Engine]
    environment: Mapping[str, str]
    stall_s: float
    logs: Path
    exposes: bool = False


# To the run: Ready first, at last the error that ended the engine.
FromRun = Request | Abort | ForgetPrefixes
ToRun = Ready | News | Forgotten | BatchgenError


def main(pipe: Connection, settings: Settings) -> None:
    """The process: until the pipe is closed or the engine dies."""
    vllm_plugin.live_with(os.getppid())
    os.environ.update(settings.environment)
    try:
        engine = settings.make()
    except BatchgenError as e:
        pipe.send(e)
        return
    try:
        pipe.send(Ready(engine.limits, engine.info))
        with Watchdog(Stop(), stall_s=settings.stall_s, grace_s=0, logs=settings.logs) as watchdog:
            watchdog.watch(engine)
            _work(pipe, engine, exposes=settings.exposes)
    except EngineError as e:
        pipe.send(e)
    finally:
        engine.close()


def _work(pipe: Connection, engine: Engine, *, exposes: bool) -> None:
    inbox: queue.SimpleQueue[FromRun | None] = queue.SimpleQueue()
    # A thread of its own takes messages in: a run that writes to a full pipe would wait for a step of the engine.
    threading.Thread(target=_receive, args=(pipe, inbox), name="inbox", daemon=True).start()
    in_flight: set[str] = set()
    told = exposed = 0.0
    while True:
        while not in_flight or not inbox.empty():
            message = inbox.get()
            if message is None:
                return
            if isinstance(message, Request):
                in_flight.add(message.custom_id)
                engine.submit(message)
            elif isinstance(message, ForgetPrefixes):
                forget = getattr(engine, "forget_prefixes", None)  # the fake engine has no cache
                pipe.send(Forgotten(forget is None or forget()))
            else:
                in_flight.difference_update(message.custom_ids)
                engine.abort(message.custom_ids)
        completions = engine.poll()
        in_flight.difference_update(one.custom_id for one in completions)
        due = time.monotonic() - told > _TELL_S
        if completions or due:
            now = due or not in_flight
            text = exposition.text() if exposes and time.monotonic() - exposed > _EXPOSE_S else None
            pipe.send(News(completions, engine.metrics() if now else None, text))
            told = time.monotonic() if now else told
            exposed = exposed if text is None else time.monotonic()


def _receive(pipe: Connection, inbox: "queue.SimpleQueue[FromRun | None]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
