"""Signals: the first asks the run to stop, and it commits what has finished; the second leaves at once."""

import os
import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """`requested` names the signal that asked to stop, or is None."""

    def __init__(self) -> None:
        self.requested: str | None = None

    def install(self) -> None:
        for one in _SIGNALS:
            signal.signal(one, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested is not None:
            os._exit(128 + number)  # committed parts are whole at any moment
        self.requested = signal.Signals(number).name
