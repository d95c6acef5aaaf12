"""`--notify-command` runs at every end, knows how it was, and can do the run no harm."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers_run import command, record, rows, write_job, write_jsonl

from batchgen.cli import cli
from batchgen.commands import notify
from batchgen.lifecycle import Stop
from batchgen.storage.rundir import RunDirectory

TELL = 'printf "%s|%s|%s|%s" "$BATCHGEN_EXIT_STATUS" "$BATCHGEN_REPORT" "$BATCHGEN_JOB" "$BATCHGEN_REASON" > '


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))])


@pytest.fixture
def call(job, tmp_path):
    """Calls a command with a notify command that notes what it is told: (exit status, what was told)."""

    def call(*words, name="run"):
        note = tmp_path / "note"
        words = [name, str(job), *words, "--notify-command", TELL + str(note)]
        return cli.main(words, standalone_mode=False), note.read_text().split("|")

    return call


def test_it_is_told_the_report_and_the_status(call, job, out):
    status, told = call()
    assert status == 0
    assert told == ["0", str(out / "report.md"), str(job), "finished"]


def test_failed_documents_are_told(call):
    status, told = call("--set", "engine.fake.fail_every=2")
    assert status == 3
    assert told[0] == "3"
    assert told[3] == "finished, 3 documents failed (failures.max is 0)"


def test_retry_failed_has_it_too(call):
    call("--set", "engine.fake.fail_every=2")
    status, told = call(name="retry-failed")
    assert (status, told[0]) == (0, "0")


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["--set", "engine.feet=1"], 78, "engine.feet"),
        (["--set", "input.0.path=nothing.jsonl"], 65, "nothing.jsonl"),
    ],
)
def test_a_start_that_is_refused_is_told_without_a_report(call, caplog, words, status, why):
    found, told = call(*words)
    assert found == status
    assert told[:2] == [str(status), ""]
    assert why in told[3]
    assert why in caplog.text


def test_a_held_run_is_told_without_the_report_of_the_one_that_holds_it(call, out):
    call()
    with RunDirectory(out):
        status, told = call()
    assert status == 73
    assert told[:2] == ["73", ""]


def test_an_engine_that_dies_is_told_with_its_report(call, out):
    status, told = call("--set", "engine.fake.die_after=2", "--set", "engine.fake.lives=1")
    assert status == 69
    assert told[:2] == ["69", str(out / "report.md")]


def test_a_bug_is_told_after_its_traceback(call, monkeypatch, caplog):
    monkeypatch.setattr("batchgen.plan.make", None)
    status, told = call()
    assert (status, told[0]) == (1, "1")
    assert "Traceback" in caplog.text


@pytest.mark.long
def test_a_reader_of_stdout_that_has_gone_is_told(job, tmp_path):
    words = ["run", str(job), "--json", "--notify-command", TELL + str(tmp_path / "note")]
    child = subprocess.Popen(
        [sys.executable, "-m", "batchgen", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    child.stdout.close()
    assert child.wait(60) == 141
    assert (tmp_path / "note").read_text().startswith("141|")


def test_a_signal_is_told_once_all_is_written(job, out, tmp_path):
    words = ["run", str(job), "--set", "engine.fake.docs_per_s=1", "--set", "lifecycle.grace_s=0"]
    note = tmp_path / "note"
    child = subprocess.Popen(
        [sys.executable, "-m", "batchgen", *words, "--notify-command", TELL + str(note)], stderr=subprocess.DEVNULL
    )
    while not list(out.glob("telemetry-*")):
        time.sleep(0.02)
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 75
    assert note.read_text().startswith(f"75|{out}/report.md|")
    assert (out / "report.md").exists()


def test_its_failure_changes_no_status_and_is_told(job, out):
    done = command("run", job, "--json", "--notify-command", "echo what it says; exit 7")
    assert done.returncode == 0
    assert json.loads(done.stdout)["exit_status"] == 0  # results alone
    said, failed = done.stderr.splitlines()[-2:]
    assert said == "what it says"
    assert failed.endswith("--notify-command: failed: exit status 7")
    assert len(rows(out)) == 6


def test_the_run_is_free_when_it_is_told(job, tmp_path, monkeypatch):
    """What is to follow, another start too, can be called by it."""
    found = []
    monkeypatch.setattr(notify, "notify", lambda *_: found.append(RunDirectory(tmp_path / "out").is_held()))
    cli.main(["run", str(job), "--notify-command", "true"], standalone_mode=False)
    assert found == [False]


class Clock:
    """Time stands still until the command has started its child, and is `late` then."""

    def __init__(self, pid, late):
        self.pid, self.late = pid, late

    def monotonic(self):
        return self.late if self.pid.exists() and self.pid.read_text().endswith("\n") else 0.0

    def sleep(self, seconds):
        time.sleep(seconds)


@pytest.mark.parametrize(("late", "at"), [(notify.PATIENCE_S + 1, None), (notify.HURRIED_S + 1, 0.0)],
                         ids=["ever", "after a signal"])  # fmt: skip
def test_one_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch, caplog, late, at):
    stop, pid = Stop(), tmp_path / "pid"
    stop.at = at
    monkeypatch.setattr(notify, "time", Clock(pid, late))
    notify.notify(f"sleep 600 & echo $! > {pid}; wait", {}, stop)
    assert f"not done after {late:.0f} s, killed" in caplog.text
    end = time.monotonic() + 10  # whoever takes in orphans may be slow
    while psutil.pid_exists(number := int(pid.read_text())):
        if psutil.Process(number).status() == psutil.STATUS_ZOMBIE:
            break
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_a_signal_it_is_not_hurried(tmp_path, monkeypatch, caplog):
    pid = tmp_path / "pid"
    monkeypatch.setattr(notify, "time", Clock(pid, notify.HURRIED_S + 1))
    notify.notify(f"echo 1 > {pid}; sleep 0.2; exit 3", {}, Stop())
    assert "failed: exit status 3" in caplog.text


def test_a_reason_of_any_size_and_kind_reaches_it(job, tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "tell_error", lambda _: 1)  # pytest cannot show the log of it
    note = tmp_path / "note"

    def fails():
        raise ValueError("\0\ud800" + "long" * 100_000)

    status = notify.notifying(TELL + str(note), job=job, stop=Stop(), start=fails, tell=lambda _: 0)
    assert status == 1
    assert note.read_text().split("|")[3].startswith("\\u0000\\ud800longlong")


def test_without_it_errors_are_raised(job):
    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        notify.notifying(None, job=job, stop=Stop(), start=fails, tell=lambda _: 0)
