"""What a person sees while a run goes: a bar on a terminal, otherwise one plain line now and then."""

import os
import sys
import time
from datetime import datetime
from typing import Any

from tqdm import tqdm

from batchgen.plan import Plan
from batchgen.reporting.eta import Eta
from batchgen.reporting.stats import Stats

LINE_S = 30.0


class Progress:
    """Shows documents done of all; writes to stderr only. Times are local, rates are of this attempt."""

    def __init__(self, plan: Plan, total: int | None = None, *, limit: int | None = None) -> None:
        """total: documents this start is about, where it is not about all of the plan. limit: it does no more."""
        self._is_part = total is not None or limit is not None
        self._limit = limit
        self._eta = Eta()
        self._total = plan.rows if total is None else total
        self._about = "" if plan.exact or total is not None else "~"
        self._next: float | None = None
        self._said: str | None = None
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bar: Any = None

    def update(self, stats: Stats) -> None:
        self._eta.saw(time.monotonic(), self._done(stats) - stats.counts.done_before)
        if self._terminal:
            if self._bar is None:
                has_size = _columns() > 0
                # What was done before moves the bar, not the rate.
                self._bar = tqdm(
                    total=self._total or None,
                    initial=stats.counts.done_before,
                    bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
                    dynamic_ncols=has_size,
                    ncols=None if has_size else 80,
                    mininterval=0.5,
                )
            self._bar.update(self._done(stats) - self._bar.n)
            self._bar.set_postfix_str(self._joined(self._left(stats), self._speeds(stats)), refresh=False)
        elif self._next is None or time.monotonic() >= self._next:
            if self._next is not None:
                self._line(stats)
            self._next = time.monotonic() + LINE_S

    def close(self, stats: Stats) -> None:
        if self._bar is not None:
            self._bar.update(self._done(stats) - self._bar.n)
            self._bar.set_postfix_str(self._joined(self._left(stats), self._speeds(stats)), refresh=False)
            self._bar.close()
        elif not self._terminal and stats.counts.requests:
            self._line(stats)

    @staticmethod
    def _joined(*parts: str) -> str:
        return ", ".join(part for part in parts if part)

    @staticmethod
    def _done(stats: Stats) -> int:
        counts = stats.counts
        return counts.done_before + counts.ok + counts.failed + counts.skipped

    def _line(self, stats: Stats) -> None:
        done = self._done(stats)
        share = f" ({done / self._total:.0%})" if self._total else ""
        # An estimate that turned out too low, or none at all, says nothing.
        unknown = self._about and done >= self._total
        of = " documents" if unknown else f"/{self._about}{self._total} documents{share}"
        line = self._joined(f"{done}{of}", self._speeds(stats), self._left(stats))
        if line != self._said:
            self._said = line
            clock = datetime.now().astimezone().strftime("%H:%M:%S")
            sys.stderr.write(f"{clock} {line}\n")
            sys.stderr.flush()

    def _left(self, stats: Stats) -> str:
        """When it will be through, or why nobody can say."""
        counts, done = stats.counts, self._done(stats)
        documents: int | None = self._total - done if self._total else None
        about = bool(self._about)
        if stats.all_read and not self._is_part:
            documents, about = counts.read - done, False
        if self._limit is not None:
            within = max(0, self._limit - (done - counts.done_before))
            if documents is None or within <= documents or (about and documents <= 0):
                documents, about = within, False
        return self._eta.text(documents, about=about)

    @staticmethod
    def _speeds(stats: Stats) -> str:
        counts = stats.now()
        seconds = counts.steady_s + counts.drain_s
        if not seconds:
            return f"{counts.failed} failed"
        ok = counts.ok / seconds
        tokens_in, tokens_out = counts.prompt_tokens / seconds, counts.completion_tokens / seconds
        return f"{ok:.1f} docs/s, {tokens_in:,.0f} tok/s in, {tokens_out:,.0f} tok/s out, {counts.failed} failed"


def _columns() -> int:
    """Of the terminal; 0 where nobody has given it a size: tqdm would show nothing there."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0
