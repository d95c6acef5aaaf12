"""Looks at the engine from outside the loop: a `poll` that hangs is ended, whatever it hangs in."""

import faulthandler
import logging
import threading
import time
from pathlib import Path
from typing import Self

from batchgen.engines.base import Engine
from batchgen.fsio import open_append
from batchgen.lifecycle import Stop

_LOOK_S = 0.25
log = logging.getLogger("batchgen")


class Watchdog:
    """Kills an engine that is dead, that shows no sign of work for `stall_s`, or whose time to drain is over.

    stall_s, grace_s: seconds. logs: the folder where stacks of this process go when an engine has stalled.
    """

    def __init__(self, stop: Stop, *, stall_s: float, grace_s: float, logs: Path) -> None:
        self._stop = stop
        self._stall_s = stall_s
        self._grace_s = grace_s
        self._logs = logs
        self._engine: Engine | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def watch(self, engine: Engine | None) -> None:
        """Look at this engine from now on, or at none."""
        self._engine = engine

    def _run(self) -> None:
        while not self._left.wait(_LOOK_S):
            engine = self._engine
            since = None if engine is None else engine.pulse()
            if engine is None or since is None:
                continue
            why = self._why(time.monotonic(), since)
            if why is not None:
                self._engine = None
                engine.kill(why)

    def _why(self, now: float, since: float) -> str | None:
        """Why an engine that shows no sign of work since then is to be killed, or None."""
        if self._stop.at is not None and now - self._stop.at > self._grace_s:
            return f"stopped by {self._stop.requested}, and lifecycle.grace_s ({self._grace_s:g} s) is over"
        if since == float("-inf"):
            return "its process is gone"
        if now - since > self._stall_s:
            self._dump()
            return f"no sign of work for {self._stall_s:g} s (engine.stall_s); stacks are in {self._logs}"
        return None

    def _dump(self) -> None:
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with open_append(self._logs / "stacks-run.txt", records=False) as stream:
                faulthandler.dump_traceback(stream, all_threads=True)
        except OSError as e:  # the stacks only help to understand; the engine has to go anyway
            log.warning("the stacks cannot be written: %s", e)
