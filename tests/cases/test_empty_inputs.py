"""Inputs with nothing in them give a whole report, and no engine is started for them (modelscope/evalscope#1159)."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import command, record, start, write_job, write_jsonl

from batchgen.errors import InputError


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def parquet(path):
    pq.write_table(pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}), path)


EMPTY = {
    "zero_bytes.jsonl": (lambda path: path.write_text(""), (0, 0, 0), 0),
    "only_blank.jsonl": (lambda path: path.write_text("\n \n\r\n\n"), (0, 0, 0), 0),
    "zero_rows.parquet": (parquet, (0, 0, 0), 0),
    "all_bad.jsonl": (lambda path: path.write_text("{\n[\n1\n"), (3, 3, 0), 3),
    "all_empty_text.jsonl": (lambda path: write_jsonl(path, [record(n, text=" ") for n in range(2)]), (2, 0, 2), 0),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_whole_report_and_no_engine(tmp_path, out, monkeypatch, name):
    write, (total, failed, skipped), status = EMPTY[name]
    write(tmp_path / name)
    monkeypatch.setattr("batchgen.executors.starting.Starter.engine", None)
    inputs = [{"path": str(tmp_path / name), "id_field": "id"}]
    job = write_job(tmp_path, inputs, prompt={"user": "{{ text }}"})
    for number in range(2):  # the second has nothing left to do
        assert start(job).exit_status == status
        report = strict((out / "report.json").read_text())
        assert report["documents"] | {"reasons": 0, "ways": 0} == {
            "total": total, "total_is_exact": True, "ok": 0, "failed": failed, "skipped": skipped, "pending": 0,
            "reasons": 0, "flags": {}, "ways": 0,
        }  # fmt: skip
        for scope in ("attempt", "run"):
            assert set(report[scope]["rates"].values()) == {None}
            assert report[scope]["prefix_cache"]["hit_share"] is None
            assert report[scope]["requests"] == 0
        assert set(report["lengths"]["prompt_tokens"].values()) == {None}
        assert report["attempt"]["documents"]["done_before"] == (total if number else 0)
        assert "nan" not in (out / "report.md").read_text()
    assert not (out / "logs").exists()
    for words in (("status", out), ("report", out), ("validate", job)):
        done = command(*words, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        strict(done.stdout)
        assert command(*words).returncode == 0


def test_a_resume_with_nothing_left_says_all_done_before(tmp_path, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(4)))])
    start(job)
    monkeypatch.setattr("batchgen.executors.starting.Starter.engine", None)
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["documents"]["done_before"] == outcome.report["documents"]["total"] == 4
    assert set(outcome.report["attempt"]["rates"].values()) == {None}


@pytest.mark.parametrize("path", ["empty", "empty/*.jsonl", "none.jsonl"])
def test_no_file_is_an_error(tmp_path, out, path):
    (tmp_path / "empty").mkdir()
    job = write_job(tmp_path, [tmp_path / path])
    with pytest.raises(InputError, match="no file matches"):
        start(job)
    assert not (out / "report.json").exists()
    done = command("run", job)
    assert (done.returncode, done.stdout) == (65, "")
    assert "no file matches" in done.stderr.splitlines()[-1]
