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
    lines = stream.getvalue().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        f"3/9 documents (33%), 3 failed, no end in sight: nothing has finished for {time}"
        for time in ("0:00:31", "0:01:02")
    ]


def last_line(stream):
    return stream.getvalue().splitlines()[-1].partition(" ")[2]


def test_the_end_is_told_from_how_fast_documents_finish_of_late(clock, stderr):
    """The first minutes were ten times as fast; requests of documents in pieces are more than documents."""
    stream = stderr(terminal=False)
    progress = Progress(plan(10_000))
    stats = some_run(clock, progress, seconds=100, rate=20)
    for n in range(200):
        clock.now += 1
        stats.counts.ok += 2
        stats.completed(Completion(f"late-{n}"))
        progress.update(stats)
    progress.close(stats)
    assert last_line(stream).endswith(", 1:03:20 left")  # of the 10,000, 7,600 at 2 a second


@pytest.mark.parametrize(
    ("rows", "exact", "why"),
    [
        (0, False, "no end in sight: nobody knows how many documents there are"),
        (10, False, "no end in sight: there are more documents than estimated"),
        (400, False, "about 0:03:10 left"),
        (400, True, "0:03:10 left"),
        (20, True, "0 failed"),
    ],
)
def test_why_there_is_no_end_in_sight(clock, stderr, rows, exact, why):
    stream = stderr(terminal=False)
    progress = Progress(plan(rows, exact=exact))
    progress.close(some_run(clock, progress, seconds=10))
    assert last_line(stream).endswith(f", {why}")


def test_before_a_document_has_finished_nobody_can_say(clock, stderr):
    stream = stderr(terminal=False)
    progress = Progress(plan(9))
    stats = Stats()
    for _ in range(2):
        progress.update(stats)
        clock.now += 31
    assert last_line(stream).endswith("0/9 documents (0%), 0 failed, no end in sight yet: no document has finished")


def test_an_estimate_ends_when_the_reader_has_met_the_end(clock, stderr):
    stream = stderr(terminal=False)
    progress = Progress(plan(900, exact=False))
    stats = some_run(clock, progress, seconds=10)
    stats.counts.read = 40
    stats.no_more_documents()
    progress.close(stats)
    assert last_line(stream).endswith(", 0:00:10 left")


@pytest.mark.parametrize(("limit", "left"), [(30, ", 0:00:05 left"), (20, ", 0 failed"), (500, ", 0:03:10 left")])
@pytest.mark.parametrize("ended", [False, True])
def test_a_limit_ends_the_run_sooner(clock, stderr, limit, left, ended):
    stream = stderr(terminal=False)
    progress = Progress(plan(400), limit=limit)
    stats = some_run(clock, progress, seconds=10)
    stats.counts.read = 30
    if ended:
        stats.no_more_documents()
    progress.close(stats)
    assert last_line(stream).endswith(left)


def test_the_bar_tells_it_first(clock, stderr):
    """What does not fit on the terminal is cut off at its end."""
    stream = stderr(terminal=True)
    progress = Progress(plan(400))
    progress.close(some_run(clock, progress, seconds=10))
    assert re.search(r"20/400 \[\d\d:\d\d, 0:03:10 left, 2.0 docs/s", stream.getvalue())
