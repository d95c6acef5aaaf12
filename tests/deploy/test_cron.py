"""Debian's cron starts a run of 90 seconds every minute: one writer, 73 for the others, all done at the end."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers_run import by_id, record, rows, write_job, write_jsonl

from batchgen.reporting.stats import read_telemetry

TOP = Path(__file__).parents[2]
DOCUMENTS = 180  # at two a second
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def cron(tmp_path):
    """Debian's cron with a crontab of root's own; what was there before is there again at the end."""
    if shutil.which("cron") is None:
        pytest.skip("cron is not there (apt-get install cron)")
    if os.geteuid() != 0:
        pytest.skip("only root can start cron")
    before = subprocess.run(["crontab", "-l"], capture_output=True)

    def install(text: str) -> None:
        (tmp_path / "crontab").write_text(text)
        subprocess.run(["crontab", "-n", tmp_path / "crontab"], check=True, capture_output=True)
        subprocess.run(["crontab", tmp_path / "crontab"], check=True)

    there = any(one.info["name"] == "cron" for one in psutil.process_iter(["name"]))
    daemon = None if there else subprocess.Popen(["cron", "-f"], stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        assert daemon is None or daemon.poll() is None, "cron does not run"
        yield install
    finally:
        if before.returncode == 0:
            subprocess.run(["crontab", "-"], input=before.stdout, check=True)
        else:
            subprocess.run(["crontab", "-r"], check=True)
        if daemon is not None:
            daemon.terminate()
            daemon.wait(10)


def own_line() -> str:
    (found,) = [one for one in (TOP / "deploy/crontab").read_text().splitlines() if one and not one.startswith("#")]
    return found


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    write_jsonl(folder / "data/a.jsonl", map(record, range(DOCUMENTS)))
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": {"docs_per_s": 2}}
    write_job(folder, ["data/a.jsonl"], engine=engine, checkpoint={"interval_s": 5}, output={"dir": "outputs/nightly"})
    (folder / "jobs").mkdir()
    (folder / "job.yaml").rename(folder / "jobs/summarize.yaml")
    (folder / ".venv/bin").mkdir(parents=True)
    script = folder / ".venv/bin/batchgen"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="{TOP}" {sys.executable} -m batchgen "$@"\nstatus=$?\necho "status $status" >&2\n'
        "exit $status\n"
    )
    script.chmod(0o755)
    return folder


def holder(out: Path) -> int | None:
    """The process that says to hold the run."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(min(out.glob("locks/*.holder.json")).read_text())["pid"]
    return None


def statuses(log: Path) -> list[int]:
    return (
        [int(one) for one in re.findall(r"^status (\d+)$", log.read_text(), flags=re.MULTILINE)] if log.exists() else []
    )


def test_starts_every_minute_of_a_run_of_ninety_seconds(cron, site):
    out, log = site / "outputs/nightly", site / "cron.log"
    line = own_line().replace("/srv/batchgen", str(site)).replace("15 1 * * *", "* * * * *")
    assert line != own_line()
    cron(f"{line}\n")
    begin, killed, writers = time.monotonic(), None, set()
    # Until it was killed once, an overlap was met, and a start found nothing to do.
    while not (killed and 73 in statuses(log) and statuses(log)[-1:] == [0] and statuses(log).count(0) >= 2):
        assert time.monotonic() - begin < 600, log.read_text()
        if pid := holder(out):
            writers.add(pid)
            if not killed and len(rows(out)) >= 20:
                os.kill(pid, signal.SIGKILL)
                killed = pid
        time.sleep(0.5)
    found = statuses(log)
    assert set(found) == {137, 73, 0}
    assert found.count(137) == 1
    assert len(by_id(out)) == DOCUMENTS
    assert {row["status"] for row in by_id(out).values()} == {"ok"}
    check_one_writer(out, killed)
    check_lines(log.read_text())
    assert killed in writers


def check_one_writer(out: Path, killed: int) -> None:
    """Attempts follow each other in time, and no attempt did what another had committed."""
    del killed
    times = []
    for path in sorted(out.glob("telemetry-*")):
        events = list(read_telemetry(path))
        times.append((events[0]["at"], events[-1]["at"]))
    assert len(times) == 2  # a start that gives way, or has nothing to do, leaves none
    assert times[0][1] < times[1][0]
    done = [sum(event["rows"] for event in read_telemetry(path) if event["event"] == "commit")
            for path in sorted(out.glob("telemetry-*"))]  # fmt: skip
    assert sum(done) == DOCUMENTS
    assert min(done) > 0


def check_lines(text: str) -> None:
    assert "\r" not in text
    assert "\x1b" not in text
    assert all(re.match(r"(\d\d:\d\d:\d\d |status \d+$|Killed$)", line) for line in text.splitlines()), text
    starts = re.split(r"(?<=\n)", text)
    for at, line in enumerate(starts):
        if line == "status 73\n":
            assert "another process holds this run: pid" in starts[at - 1]
