"""Two rows with one id: neither is overwritten, and a job can refuse to start (OpenCerts/certificate-cli#31)."""

import json

import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.errors import InputError, Interrupted
from batchgen.executors import duplicates
from batchgen.lifecycle import Stop


@pytest.fixture
def job(tmp_path):
    """8 rows in two files: an id twice in one file, one in both, and three rows without an id."""
    write_jsonl(tmp_path / "in/a.jsonl", [record(1, id="1"), record(2, id="2"), record(3, id="2")])
    no_id = record(6)
    del no_id["id"]
    last = [record(4, id="1"), record(5, id="3"), no_id, record(7, id=""), record(8, id=None)]
    write_jsonl(tmp_path / "in/b.jsonl", last)
    return write_job(tmp_path, [tmp_path / "in/*.jsonl"])


REFUSE = "input.0.on_duplicate=refuse"


def test_every_row_is_accounted_for_and_none_is_overwritten(job, out):
    outcome = start(job)
    assert outcome.exit_status == 3
    documents = outcome.report["documents"]
    assert documents["total"] == documents["ok"] + documents["failed"] == len(rows(out)) == 8
    # The first row of an id is the one that is summarized; missing, empty and null ids fare alike.
    assert documents["reasons"] == {"failed: duplicate_id": 2, "failed: missing_id": 3}
    ok = {row["id"]: row["place"] for row in rows(out) if row["status"] == "ok"}
    assert set(ok) == {"1", "2", "3"}
    assert ok["1"] == "byte 0"


def test_refused_before_anything_is_sent_with_both_places(job, out, tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.executors.starting.Starter.engine", None)
    with pytest.raises(InputError) as caught:
        start(job, REFUSE)
    told = str(caught.value)
    a, b = tmp_path / "in/a.jsonl", tmp_path / "in/b.jsonl"
    assert f"{a}, line 3: '2' stood in {a}, line 2" in told
    assert f"{b}, line 1: '1' stood in {a}, line 1" in told
    assert rows(out) == []
    assert not (out / "report.json").exists()
    assert list(out.glob("telemetry-*")) == []


def test_validate_tells_them_beforehand(job):
    done = command("validate", job, "--json", "--set", REFUSE)
    assert done.returncode == 65
    faults = [(one["place"].rpartition("/")[2], one["fault"]) for one in json.loads(done.stdout)["faults"]]
    assert [place for place, _ in faults] == ["a.jsonl, line 3", "b.jsonl, line 1"]
    assert "a.jsonl, line 2" in faults[0][1]
    assert command("validate", job).returncode == 0


def test_without_an_id_field_rows_are_known_by_their_place(job, tmp_path, out):
    inputs = [{"path": str(tmp_path / "in/*.jsonl"), "keep": ["title"], "on_duplicate": "refuse"}]
    assert start(write_job(tmp_path, inputs)).exit_status == 0
    assert [row["status"] for row in rows(out)] == ["ok"] * 8


def test_a_refused_start_leaves_the_run_as_it_was(tmp_path, out):
    path = write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    job = write_job(tmp_path, [tmp_path / "in/*.jsonl"])
    start(job, REFUSE)
    before = {path: path.read_bytes() for path in [*out.glob("summaries/*"), out / "report.json"]}
    added = write_jsonl(tmp_path / "in/b.jsonl", [record(9), record(3)])
    with pytest.raises(InputError, match=r"b\.jsonl, line 2: 'd3' stood in .*a\.jsonl, line 4"):
        start(job, REFUSE)
    assert {path: path.read_bytes() for path in [*out.glob("summaries/*"), out / "report.json"]} == before
    write_jsonl(added, [record(9)])
    assert start(job, REFUSE).exit_status == 0
    assert len(by_id(out)) == 6
    assert path.exists()


def test_ids_are_read_only_when_there_is_something_to_do_and_only_where_asked(tmp_path, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    looks = []
    original = duplicates.find
    monkeypatch.setattr(duplicates, "find", lambda *a, **more: (looks.append(1), original(*a, **more))[1])
    start(job, limit=2)
    assert looks == []
    start(job, REFUSE)
    assert looks == [1]
    start(job, REFUSE)
    assert looks == [1]


def test_a_signal_leaves_the_look_at_once_and_nothing_is_lost(job, out, monkeypatch):
    stop = Stop()
    monkeypatch.setattr(duplicates, "find", lambda *_, **__: stop.request("SIGTERM"))
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        start(job, REFUSE, stop=stop)
    assert rows(out) == []
