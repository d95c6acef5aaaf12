"""`status --watch`: in one place on a terminal, plain lines elsewhere, until nobody works on the run any more."""

import io
import os
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from helpers_run import record, start, write_job, write_jsonl

from batchgen.errors import ConfigError
from batchgen.executors import inspection, watching
from batchgen.lifecycle import Stop
from batchgen.reporting.live import Live


class Screen(io.StringIO):
    """A terminal, as far as moving up and clearing goes."""

    def isatty(self):
        return True

    def shown(self):
        """The lines that a person sees at last."""
        lines, text = [], self.getvalue()
        for up, words in re.findall(r"(?:\x1b\[(\d+)F\x1b\[J)?([^\x1b]*)", text):
            lines = lines[: len(lines) - int(up or 0)]
            lines += words.splitlines()
        return lines


def found(**more):
    return {
        "name": "test", "run_dir": "out", "began": "-", "running": "pid 7", "exit_status": None, "reason": "running",
        "total": 60, "total_is_exact": True, "ok": 20, "failed": 1, "skipped": 0, "pending": 39, "reasons": {},
        "parts": 3, "damaged_parts": [], "attempts": 1,
    } | more  # fmt: skip


@pytest.fixture
def watch(monkeypatch, tmp_path):
    """Watches a run that goes through these states; a look takes no time."""

    def at(stream, states, *, going=None, columns=100, rows=30, seconds=watching.LOOK_S):
        left = list(states)
        now = [1000.0]
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(watching.inspection, "status", lambda path: left.pop(0) if len(left) > 1 else left[0])
        monkeypatch.setattr(watching, "live", lambda run: going)
        monkeypatch.setattr(watching.shutil, "get_terminal_size", lambda: os.terminal_size((columns, rows)))
        monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))

        def sleep(_):
            now[0] += seconds

        watching.watch(tmp_path, sleep=sleep)
        return stream

    monkeypatch.setenv("TERM", "xterm")
    return at


END = found(running=None, exit_status=0, reason="finished", ok=59, pending=0)
GOING = Live(docs_per_s=3.0, running=4, unwritten=9)


def test_on_a_terminal_it_is_redrawn_in_one_place(watch):
    screen = watch(Screen(), [found(), found(ok=21), END], going=GOING)
    assert screen.shown() == inspection.status_text(END).splitlines()
    text = screen.getvalue()
    assert text.count("\x1b[") == 4
    assert "  [##########....................] 35% in parts, 9 more are done, 0:00:10 left\n" in text
    assert "  3.0 docs/s; 4 running\n" in text


def test_before_the_engine_tells_anything_it_says_so(watch):
    text = watch(Screen(), [found(total=None, pending=None), END]).getvalue()
    assert "  no end in sight yet: the engine starts, or a file is read\n" in text


def test_no_line_is_longer_than_the_terminal_and_none_is_above_its_edge(watch):
    long = found(reasons={f"failed: reason {n} " + "x" * 99: n for n in range(40)})
    text = watch(Screen(), [long, long, END], columns=40, rows=12).getvalue()
    first = text.split("\x1b", 1)[0].splitlines()
    assert len(first) == 11
    assert max(map(len, first)) <= 39
    assert "\x1b[11F" in text


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "dumb")])
def test_elsewhere_it_writes_plain_lines_now_and_then(watch, monkeypatch, terminal, term):
    stream = Screen() if terminal else io.StringIO()
    monkeypatch.setenv("TERM", term)
    text = watch(stream, [*([found()] * 30), *([found(ok=30)] * 10), END], going=GOING).getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    told = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines[: -len(inspection.status_text(END).splitlines())]]
    assert told == [
        "21/60 documents (35%), 1 failed; 9 more are done, 0:00:10 left; 3.0 docs/s; 4 running",
        "31/60 documents (52%), 1 failed; 9 more are done, 0:00:10 left; 3.0 docs/s; 4 running",
    ]
    assert text.endswith(inspection.status_text(END) + "\n")


def test_names_of_others_move_no_terminal(watch):
    text = watch(Screen(), [found(name="a\x1b[2Jb"), END]).getvalue()
    assert "\x1b[2J" not in text


def test_a_run_that_nobody_works_on_is_shown_once(watch):
    assert watch(io.StringIO(), [END]).getvalue() == inspection.status_text(END) + "\n"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no run directory"):
        watching.watch(tmp_path)


def test_a_real_run_is_watched_to_its_end(tmp_path, out, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(30)))], checkpoint={"rows": 5})
    stop = Stop()
    run = threading.Thread(target=lambda: start(job, "engine.fake.docs_per_s=20", stop=stop))
    run.start()
    while not has_begun(out):
        time.sleep(0.01)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(watching, "LOOK_S", 0.1)
    watching.watch(out)
    run.join()
    assert screen.shown()[1] == "  30 documents: 30 ok, 0 failed, 0 skipped, 0 pending"
    assert screen.shown()[-1] == "  not running; last: finished (exit status 0)"
    assert " docs/s, " in screen.getvalue()


def has_begun(out):
    """Whether the run has begun to write documents."""
    return (out / "run.json").exists() and any(out.glob("telemetry-*"))
