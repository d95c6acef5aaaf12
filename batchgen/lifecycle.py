"""Signals and the deadline: the first asks the run to stop, a second signal leaves at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from batchgen.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# A launcher that forwards a signal which reached us already sends it twice within a moment.
_ECHO_S = 0.5


class Stop:
    """`requested` names what asked to stop (a signal, the deadline), `at` is when (time.monotonic); None until then."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.at: float | None = None
        self._raising = False

    def install(self) -> None:
        """Catch the signals from here on; one that was ignored before (nohup) stays ignored."""
        for one in _SIGNALS:
            if signal.getsignal(one) is not signal.SIG_IGN:
                signal.signal(one, self._handle)

    def set_deadline(self, seconds: float) -> None:
        """Ask to stop so many seconds from now."""
        self.alarm()
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))

    def alarm(self) -> Callable[[], None]:
        """What any thread may call when the deadline has come. To be asked for on the main thread."""
        signal.signal(signal.SIGALRM, lambda *_: self.request("the deadline"))
        main = threading.main_thread().ident
        assert main is not None
        return lambda: signal.pthread_kill(main, signal.SIGALRM)

    def _handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.request(name)
        elif self.requested != name or time.monotonic() - (self.at or 0) > _ECHO_S:
            os._exit(128 + number)  # committed parts are whole at any moment

    def request(self, reason: str) -> None:
        """Ask to stop; the first reason holds."""
        if self.requested is None:
            self.requested, self.at = reason, time.monotonic()
        if self._raising:
            self._raising = False
            raise self.interrupted()

    def interrupted(self) -> Interrupted:
        return Interrupted(f"stopped by {self.requested}; the same command goes on")

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """While this is entered a request raises Interrupted at once: for work that may be left anywhere.

        Libraries catch what is raised inside of them, or cannot let it through: it is raised again at the end.
        """
        if self.requested is not None:
            raise self.interrupted()
        self._raising = True
        try:
            yield
        except Exception as e:
            if self.at is None or isinstance(e, Interrupted):
                raise
            raise self.interrupted() from e
        finally:
            self._raising = False
        if self.at is not None:
            raise self.interrupted()
