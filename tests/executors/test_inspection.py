"""status and report of a run in every state it can be found in; neither changes anything."""

import json
import signal
import time

import pytest
from helpers_run import command, record, start, write_job, write_jsonl
from killed_child import Cue, begin, end, status_of, talk

from batchgen.errors import ConfigError
from batchgen.executors import inspection
from batchgen.reporting.ends import NOTES
from batchgen.storage.rundir import RunDirectory


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))], checkpoint={"rows": 3})


def both(out):
    """status and report, as plain JSON without NaN; the folder is left as it was."""
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    status, report = inspection.status(out), inspection.report(out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    json.dumps([status, report], allow_nan=False)
    assert inspection.status_text(status)
    documents = report["documents"]
    for key in ("ok", "failed", "skipped", "total", "total_is_exact"):
        assert status[key] == documents[key]
    assert (status["exit_status"], status["reason"]) == (report["exit_status"], report["reason"])
    return status, report


def timeless(report):
    """A report without what depends on the moment it was made at."""
    value = json.loads(json.dumps(report))
    del value["at"]
    for scope in ("attempt", "run"):
        for key in ("total", "steady", "drain"):
            del value[scope]["seconds"][key]
        for key in ("rates", "starved_share", "memory"):
            del value[scope][key]
    return value


@pytest.mark.parametrize(
    ("sets", "options", "status"),
    [
        ([], {}, 0),
        ([], {"limit": 4}, 0),
        (["engine.fake.fail_every=4"], {}, 3),
        (["engine.fake.die_after=7", "engine.fake.lives=1"], {}, 69),
    ],
)
def test_after_an_end_the_report_made_anew_is_the_one_that_was_written(job, out, sets, options, status):
    outcome = start(job, *sets, **options)
    assert outcome.exit_status == status
    told, report = both(out)
    assert timeless(report) == timeless(json.loads((out / "report.json").read_text()))
    assert (told["exit_status"], told["reason"]) == (status, outcome.reason)
    assert set(report["notes"]) == set(NOTES)
    assert told["running"] is None
    assert told["parts"] == len(list(out.glob("summaries/*")))


def test_documents_that_were_met_edited_are_pending_in_the_report(job, out, tmp_path):
    start(job)
    write_jsonl(
        tmp_path / "a.jsonl", [record(n, text=f"An edited text about harbour {n}, long enough.") for n in range(10)]
    )
    written = start(job, "engine.fake.die_after=2", "engine.fake.lives=1").report
    assert written["documents"]["pending"] > 0
    assert both(out)[1]["documents"] == written["documents"]


def test_a_start_with_nothing_to_do_leaves_the_report_that_of_the_latest_work(job, out):
    start(job)
    start(job)
    status, report = both(out)
    assert (status["attempts"], report["attempt"]["number"], report["attempt"]["requests"]) == (1, 1, 10)
    assert (status["pending"], report["reason"]) == (0, "finished")


def test_orphans_that_a_start_without_work_moved_are_told(job, out, tmp_path):
    start(job)
    write_jsonl(tmp_path / "a.jsonl", map(record, range(7)))
    written = start(job).report
    _, report = both(out)
    assert (report["documents"], report["notes"]) == (written["documents"], written["notes"])
    assert (report["documents"]["total"], report["notes"]["orphans"]) == (7, 3)


@pytest.mark.parametrize(
    ("point", "nth", "ok"),
    [
        ("batchgen.storage.checkpoint:load@after", 1, 0),
        ("batchgen.storage.rundir:RunDirectory.write_run@after", 1, 0),
        ("batchgen.storage.checkpoint:Committer.commit@after", 2, 3),
        ("batchgen.reporting.report:write@before", 1, 10),
    ],
)
def test_a_run_that_was_killed(job, out, point, nth, ok):
    assert status_of(job.parent, "run", job, cues=(Cue(point, nth),)) == -signal.SIGKILL, talk(job.parent)
    assert not (out / "report.json").exists()
    status, report = both(out)
    assert status["ok"] >= ok
    assert status["exit_status"] is None
    assert status["reason"] == ("killed" if status["attempts"] else "nothing was sent or written yet")
    if (out / "plan.json").exists():
        assert (status["total"], status["pending"]) == (10, 10 - status["ok"])
    else:
        assert (status["total"], status["pending"], status["total_is_exact"]) == (None, None, False)
        assert "documents not counted yet: 0 ok" in inspection.status_text(status)
    if status["attempts"]:
        assert set(report["notes"].values()) == {None}
        assert report["attempt"]["number"] == 1
    shown = command("report", out)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"# test: {status['reason']}\n")
    assert "None" not in shown.stdout
    assert start(job).exit_status == 0
    assert both(out)[0]["reason"] == "finished"


def test_a_run_that_goes_on(job, out):
    child = begin(job.parent, "run", job, "--set", "engine.fake.docs_per_s=4")
    try:
        until = time.monotonic() + 30
        while not list(out.glob("summaries/part-*")) and time.monotonic() < until:
            time.sleep(0.05)
        status, report = inspection.status(out), inspection.report(out)
    finally:
        child.terminate()
        end(child)
    assert status["running"].startswith(f"pid {child.pid} on ")
    assert (status["exit_status"], status["reason"]) == (None, "running")
    assert 0 < status["ok"] < 10
    assert report["reason"] == "running"
    assert report["attempt"]["requests"] > 0
    assert child.exitcode == 75
    assert both(out)[0]["reason"].startswith("stopped by SIGTERM")


def test_damaged_parts_are_told_and_their_rows_are_pending(job, out):
    start(job)
    victim = min(out.glob("summaries/*"))
    rows = inspection.status(out)["ok"]
    victim.write_bytes(victim.read_bytes()[:-20])
    status, report = both(out)
    assert status["pending"] == rows - status["ok"] > 0
    assert status["damaged_parts"][0].startswith(f"{victim.name}: ")
    assert report["notes"]["damaged parts"] == status["damaged_parts"]
    assert victim.name in inspection.status_text(status)
    assert victim.exists()


def test_a_total_that_was_estimated_is_counted_once_the_parts_hold_the_file_whole(job, out, monkeypatch):
    monkeypatch.setattr("batchgen.sources.jsonl._COUNT_BYTES", 10)
    monkeypatch.setattr("batchgen.sources.jsonl._SAMPLE_BYTES", 100)
    start(job, limit=2)
    status, _ = both(out)
    assert status["total_is_exact"] is False
    assert "  about " in inspection.status_text(status)
    start(job)
    status, _ = both(out)
    assert (status["total"], status["total_is_exact"], status["pending"]) == (10, True, 0)


def test_an_empty_run(tmp_path, out):
    (tmp_path / "a.jsonl").write_text("")
    start(write_job(tmp_path, [tmp_path / "a.jsonl"]))
    status, report = both(out)
    assert (status["total"], status["pending"], status["parts"], status["attempts"]) == (0, 0, 0, 0)
    assert set(report["run"]["rates"].values()) == {None}
    assert "not running; last: finished (exit status 0)" in inspection.status_text(status)


def test_a_run_without_a_plan_that_can_be_read(job, out):
    start(job)
    (out / "plan.json").write_text("{")
    assert both(out)[0]["total"] is None


@pytest.mark.parametrize("names", [[], ["thesis.tex"]])
def test_a_folder_that_is_no_run_is_refused(out, names):
    out.mkdir()
    for name in names:
        (out / name).write_text("")
    for look in (inspection.status, inspection.report):
        with pytest.raises(ConfigError, match="is no run directory"):
            look(out)


def test_telemetry_whose_last_line_is_torn_counts_as_far_as_it_goes(job, out):
    start(job)
    path = RunDirectory(out).telemetries()[-1]
    path.write_bytes(path.read_bytes()[:-10])
    status, report = both(out)
    assert status["reason"] == "killed"
    assert report["attempt"]["requests"] == 10


def test_a_run_that_belongs_to_nobody_is_not_locked_by_a_look(job, out):
    start(job)
    run = RunDirectory(out)
    with run:
        assert RunDirectory(out).is_held()
        assert RunDirectory(out).is_held()
    assert not RunDirectory(out).is_held()
    with run:
        pass
