"""What a run says while it goes: plain lines in a file, a bar on a terminal, results alone on stdout.

tqdm/tqdm#750: progress bars filled a scheduler's log with 30 MB of carriage returns.
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from helpers_run import command, record, write_job, write_jsonl

DOCUMENTS = 1000
# Lines come every 0.2 seconds here instead of every 30, so that a test sees several.
SOONER = "import batchgen.reporting.progress as p; p.LINE_S = 0.2\nfrom batchgen.cli import main\nmain()\n"
LINE = re.compile(r"\d\d:\d\d:\d\d (\d+)/1000 documents \((\d+)%\), [\d.]+ docs/s, .* failed(, \d+:\d\d:\d\d left)?")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    path = write_jsonl(folder / "a.jsonl", map(record, range(DOCUMENTS)))
    return write_job(folder, [path], engine={"backend": "fake", "fake": {"docs_per_s": 1000}})


def run_into(job, stream, *more, env=None):
    words = [sys.executable, "-c", SOONER, "run", str(job), "--fresh", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stream, env=os.environ | (env or {}))


def check_plain(text):
    assert "\r" not in text
    assert "\x1b" not in text
    assert len(text.encode()) < 20_000
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in text.splitlines())
    lines = [line for line in text.splitlines() if "documents (" in line]
    assert len(lines) > 2
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert lines[-1].endswith("0 failed")
    assert "1000/1000 documents (100%)" in lines[-1]
    assert all(line.endswith(" left") for line in lines[:-1])


def test_a_file_gets_few_plain_lines_while_the_run_goes(job, tmp_path):
    with (tmp_path / "log").open("wb") as stream:
        child = run_into(job, stream)
        seen = False
        while child.poll() is None:
            time.sleep(0.05)
            seen |= "documents (" in (tmp_path / "log").read_text()
        assert child.stdout.read() == b""
        child.stdout.close()
    assert child.returncode == 0
    assert seen, "a reader that waits for lines saw none before the end"
    check_plain((tmp_path / "log").read_text())


def test_by_default_a_line_comes_every_30_seconds(job):
    from batchgen.reporting import progress

    assert progress.LINE_S == 30
    done = command("run", job, "--fresh")
    assert sum("documents (" in line for line in done.stderr.splitlines()) == 1  # the last, after a second


def on_terminal(job, term, columns=100):
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = run_into(job, theirs, env={"TERM": term})
    os.close(theirs)
    text = b""
    while True:
        try:
            if not select.select([ours], [], [], 60)[0]:
                break
            block = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        text += block
    os.close(ours)
    assert child.stdout.read() == b""
    child.stdout.close()
    assert child.wait() == 0
    return text.decode()


@pytest.mark.parametrize("columns", [100, 0])  # a terminal nobody has given a size has 0
def test_a_terminal_gets_a_bar(job, columns):
    text = on_terminal(job, "xterm", columns)
    assert "\r" in text.replace("\r\n", "\n")
    assert "1000/1000" in text
    assert "finished: 1,000 documents" in text.splitlines()[-1]


def test_a_dumb_terminal_gets_plain_lines(job):
    text = on_terminal(job, "dumb").replace("\r\n", "\n")
    assert "\r" not in text
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if LINE.fullmatch(line)]
    assert len(lines) > 2
    assert "1000/1000 documents (100%)" in lines[-1]


def test_stdout_holds_the_report_alone(job):
    done = command("run", job, "--fresh", "--json")
    assert json.loads(done.stdout)["documents"]["ok"] == DOCUMENTS


def test_the_last_line_tells_how_many_failed_and_where_they_are(tmp_path, out):
    data = [*map(record, range(20)), record(20, text=7), {"id": "d21"}]
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", data)])
    done = command("run", job)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "2 failed" in last
    assert f"{out}/failed.jsonl" in last
    assert f"{out}/report.md" in last
