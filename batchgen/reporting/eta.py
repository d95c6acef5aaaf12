"""When a run will be through, from how fast its documents finished of late; or why nobody can say."""

from collections import deque

WINDOW_S = 120.0  # of late: a stretch of long documents shows, a single one does not
_APART_S = 1.0


class Eta:
    """Follows how many documents of this attempt are done. Moments and times are seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._latest = (0.0, 0)
        self._moved = 0.0  # when one finished last

    def saw(self, now: float, done: int) -> None:
        if not self._seen or done > self._latest[1]:
            self._moved = now
        self._latest = (now, done)
        if not self._seen or now - self._seen[-1][0] >= _APART_S:
            self._seen.append(self._latest)
        while len(self._seen) > 1 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    def left_s(self, documents: int) -> float | None:
        """Seconds for so many more; None while none has finished of late."""
        if not self._seen:
            return None
        (begin, before), (now, done) = self._seen[0], self._latest
        return documents * (now - begin) / (done - before) if done > before else None

    def text(self, documents: int | None, *, about: bool) -> str:
        """`1:02:03 left`, or why that cannot be said; nothing where nothing is left.

        documents: those left, None where nobody knows. about: it is an estimate, which turned out too low where it is
        not above 0.
        """
        if documents is None:
            return "no end in sight: nobody knows how many documents there are"
        if documents <= 0:
            return "no end in sight: there are more documents than estimated" if about else ""
        seconds = self.left_s(documents)
        if seconds is not None:
            return f"{'about ' if about else ''}{clock(seconds)} left"
        if self._latest[1]:
            return f"no end in sight: nothing has finished for {clock(self._latest[0] - self._moved)}"
        return "no end in sight yet: no document has finished"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:45."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
