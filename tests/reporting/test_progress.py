"""A bar on a terminal, few plain lines elsewhere, all on stderr."""

import io
import re
import sys

import pytest

from batchgen.data import Completion
from batchgen.plan import Plan
from batchgen.reporting import progress as progress_module
from batchgen.reporting import stats as stats_module
from batchgen.reporting.progress import Progress
from batchgen.reporting.stats import Stats
from batchgen.sources.base import FileFacts


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Stream(io.StringIO):
    def __init__(self, *, terminal):
        super().__init__()
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stats_module, "time", clock)
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def stderr(monkeypatch):
    """Puts a stream that is a terminal, or none, in the place of stderr."""

    def use(*, terminal, term="xterm"):
        stream = Stream(terminal=terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", term)
        return stream

    return use


def plan(rows, *, exact=True):
    return Plan((FileFacts("a.jsonl", 0, 1, 1, rows, exact, {}),), (), rows, exact)


def some_run(clock, progress, *, seconds=95, rate=2):
    """A run of so many seconds, with an update every half second."""
    stats = Stats()
    stats.engine_started(0)
    for n in range(seconds * rate):
        clock.now += 1 / rate
        stats.completed(Completion(f"r{n}", prompt_tokens=100, completion_tokens=10))
        stats.counts.ok += 1
        progress.update(stats)
    return stats


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "dumb"), (False, "dumb")])
def test_without_a_terminal_there_are_few_plain_lines(clock, stderr, capsys, terminal, term):
    stream = stderr(terminal=terminal, term=term)
    progress = Progress(plan(400))
    progress.close(some_run(clock, progress))
    text = stream.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    lines = text.splitlines()
    assert len(lines) == 4  # at 30, 60 and 90 seconds, and at the end
    assert all(re.match(r"\d\d:\d\d:\d\d \d+/400 documents \(\d+%\), 2\.0 docs/s, ", line) for line in lines)
    assert lines[-1].endswith("190/400 documents (48%), 2.0 docs/s, 200 tok/s in, 20 tok/s out, 0 failed, 0:01:45 left")
    assert text.endswith("\n")
    assert capsys.readouterr().out == ""


def test_on_a_terminal_there_is_a_bar(clock, stderr, capsys):
    stream = stderr(terminal=True)
    progress = Progress(plan(400))
    progress.close(some_run(clock, progress, seconds=10))
    text = stream.getvalue()
    assert "\r" in text
    assert "20/400" in text
    assert capsys.readouterr().out == ""


def test_what_was_done_before_moves_the_bar_and_not_the_rate(clock, stderr):
    stream = stderr(terminal=False)
    progress = Progress(plan(400))
    stats = some_run(clock, progress, seconds=20)
    stats.counts.done_before = 300
    progress.close(stats)
    assert " 340/400 documents (85%), 2.0 docs/s," in stream.getvalue()
    assert stream.getvalue().endswith(", 0:00:30 left\n")


def test_a_short_run_has_one_line_and_one_with_nothing_to_do_none(clock, stderr):
    stream = stderr(terminal=False)
    progress = Progress(plan(4))
    progress.close(some_run(clock, progress, seconds=2))
    assert len(stream.getvalue().splitlines()) == 1
    assert "4/4 documents (100%)" in stream.getvalue()
    assert "left" not in stream.getvalue()

    stream = stderr(terminal=False)
    progress = Progress(plan(4))
    progress.update(Stats())
    progress.close(Stats())
    assert stream.getvalue() == ""


def test_on_a_terminal_nothing_to_do_shows_nothing(stderr):
    stream = stderr(terminal=True)
    Progress(plan(4)).close(Stats())
    assert stream.getvalue() == ""


def test_the_same_line_is_not_said_twice(clock, stderr):
    stream = stderr(terminal=False)
    progress = Progress(plan(4))
    stats = some_run(clock, progress, seconds=2)
    stats.no_more_documents()
    for _ in range(10):
        clock.now += 40
        progress.update(stats)
    progress.close(stats)
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "exact", "shown"), [(0, True, " 2/0 documents, "), (9, False, " 2/~9 documents (22%), ")]
)
def test_a_total_that_is_not_known_is_no_fault(clock, stderr, rows, exact, shown):
    stream = stderr(terminal=False)
    progress = Progress(plan(rows, exact=exact))
    progress.close(some_run(clock, progress, seconds=1))
    assert shown in stream.getvalue()


def test_before_the_first_completion_there_is_no_rate(clock, stderr):
    stream = stderr(terminal=False)
    progress = Progress(plan(9))
    stats = Stats()
    stats.counts.failed = 3
    for _ in range(3):
        progress.update(stats)
        clock.now += 31
    assert re.fullmatch(r"\d\d:\d\d:\d\d 3/9 documents \(33%\), 3 failed\n", stream.getvalue())
