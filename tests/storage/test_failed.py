"""failed.jsonl: at each end the failed documents whole, as an input of another run, and at little cost."""

import datetime as dt
import gzip
import json
import os
import subprocess
import sys
import threading
import time

import jsonlines
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import SENTENCE, by_id, record, rows, start, stop_after_a_part, write_job, write_jsonl

from batchgen import fsio
from batchgen.errors import OutputError
from batchgen.lifecycle import Stop
from batchgen.reporting import html
from batchgen.sources.jsonl import JsonlSource
from batchgen.sources.parquet import ParquetSource
from batchgen.storage import failed

NO_TEXT = "field 'text' is no text but int"


def listed(out):
    """The lines, each known to be ASCII."""
    return [json.loads(line) for line in (out / "failed.jsonl").read_text(encoding="ascii").split("\n")[:-1]]


def one_input(path, **more):
    return {"path": str(path), "id_field": "id", "keep": ["title"]} | more


def failing(tmp_path, count=12, **sections):
    """A run in which documents 3 and 7 failed with the engine and 5 has a number as text."""
    data = [record(n, more={"tags": ["ä", {"n": n}], "none": None}) for n in range(count)]
    data[5]["text"] = 5
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", data)], checkpoint={"rows": 4}, **sections)
    return job, data


def fail(n):
    """The setting with which the request of this document fails."""
    return f"engine.fake.fail_on=day {n} and"


def test_a_line_is_the_record_whole_with_reason_and_place(tmp_path, out):
    job, data = failing(tmp_path)
    outcome = start(job, fail(3))
    assert outcome.exit_status == 3
    found = listed(out)
    assert [{name: value for name, value in one.items() if name != "batchgen"} for one in found] == [data[3], data[5]]
    row = by_id(out)["str", "d3"]
    told = ("error_type", "error", "source", "place", "doc_key")
    assert found[0]["batchgen"] == {name: row[name] for name in told}
    assert found[0]["batchgen"]["error_type"] == "request_failed"
    assert found[1]["batchgen"]["error"] == f"line 6: {NO_TEXT}"
    assert outcome.report["notes"]["failed documents"] == str(out / "failed.jsonl")
    assert f"- failed documents: {out}/failed.jsonl" in (out / "report.md").read_text()


def test_the_list_is_an_input_of_another_run(tmp_path, out):
    job, _ = failing(tmp_path)
    start(job, fail(3))
    (tmp_path / "other").mkdir()
    other = write_job(tmp_path / "other", [out / "failed.jsonl"])
    assert start(other, fail(3)).exit_status == 3
    again = {row["id"]: row for row in rows(tmp_path / "other/out")}
    assert set(again) == {"d3", "d5"}
    was = by_id(out)["str", "d3"]
    assert {again["d3"][name] == was[name] for name in ("doc_key", "content_hash", "title", "id_type")} == {True}
    # And once more: the reason is the latest, and stands once.
    assert listed(tmp_path / "other/out")[0]["batchgen"]["source"] == str(out / "failed.jsonl")


def test_there_is_no_list_where_nothing_failed_and_an_old_one_goes(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    outcome = start(job)
    assert (outcome.exit_status, outcome.report["notes"]["failed documents"]) == (0, None)
    assert not (out / "failed.jsonl").exists()
    start(job, fail(3), fresh=True)
    assert [one["id"] for one in listed(out)] == ["d3"]
    assert start(job, retry=frozenset()).exit_status == 0
    assert not (out / "failed.jsonl").exists()


def test_lines_that_are_no_records_are_given_as_they_are(tmp_path, out):
    path = write_jsonl(tmp_path / "a.jsonl", [record(0)])
    with path.open("ab") as stream:
        stream.write(b'{"id": "d1", "text": \n[1, "\xc3\xa4"]\n{"\xff\xed\xa0\x80": "caf\xc3\xa9"\n')
    start(write_job(tmp_path, [path]))
    assert [one["raw"] for one in listed(out)] == [
        '{"id": "d1", "text":',
        '[1, "ä"]',
        '{"\\xff\\xed\\xa0\\x80": "café"',
    ]
    assert {one["batchgen"]["error_type"] for one in listed(out)} == {"bad_json"}
    assert [set(one) for one in listed(out)] == [{"raw", "batchgen"}] * 3


def test_a_line_that_is_too_long_is_told_without_it(tmp_path, out, monkeypatch):
    monkeypatch.setattr("batchgen.sources.streams.MAX_LINE_BYTES", 400)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, text="x" * 500)])
    start(write_job(tmp_path, [path]))
    (one,) = listed(out)
    assert set(one) == {"batchgen"}
    assert one["batchgen"]["error_type"] == "record_too_large"


def test_values_are_written_so_that_json_holds_them(tmp_path, out):
    path = tmp_path / "a.jsonl"
    deep = "[" * 300 + "]" * 300
    lines = [
        '{"id": "d0", "text": 7, "title": "half \\ud800 a", "x": [NaN, {"y": -Infinity, "z": 1e400}], "n": 1}',
        '{"id": "d1", "text": 7, "title": "\\u2028\\u0000\u2028", "x": 12345678901234567890123456789}',
        f'{{"id": "d2", "text": 7, "title": "deep", "x": {deep}}}',
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    start(write_job(tmp_path, [path]))
    assert "NaN" not in (out / "failed.jsonl").read_text()
    first, second, third = listed(out)
    assert (first["title"], first["x"], first["n"]) == ("half \ud800 a", [None, {"y": None, "z": None}], 1)
    assert (second["title"], second["x"]) == ("\u2028\0\u2028", 12345678901234567890123456789)
    assert third["x"] == json.loads(deep)
    with jsonlines.open(out / "failed.jsonl") as reader:
        assert [one["id"] for one in reader] == ["d0", "d1", "d2"]


def test_of_parquet_the_columns_that_the_job_reads_are_given_nested_as_they_are(tmp_path, out):
    table = pa.table({
        "doc": pa.array([{"id": n, "body": {"text": record(n)["text"]}} for n in range(9)]),
        "title": pa.array([f"t{n}".encode() for n in range(9)], pa.binary()),
        "day": pa.array([dt.date(2026, 1, n + 1) for n in range(9)]),
        "share": pa.array([float("nan")] * 9),
        "other": ["never read"] * 9,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    keep = {"title": "title", "day": "on", "share": "share"}
    item = {"path": str(tmp_path / "a.parquet"), "id_field": "doc.id", "text_field": "doc.body.text", "keep": keep}
    start(write_job(tmp_path, [item]), fail(3))
    (one,) = listed(out)
    assert one.pop("batchgen")["place"] == "row 3"
    assert one == {
        "doc": {"id": 3, "body": {"text": record(3)["text"]}}, "title": "t3", "day": "2026-01-04", "share": None,
    }  # fmt: skip


def test_packed_files_and_data_sets_are_read_forward_once(tmp_path, out, monkeypatch):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/c.jsonl", map(record, range(20, 30)))
    lines = "".join(json.dumps(record(n, text=7)) + "\n" for n in range(10))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    dataset = {"path": "json", "data_files": f"{tmp_path}/data/*.jsonl"}
    inputs = [one_input(tmp_path / "a.jsonl.gz"), {"dataset": dataset, "id_field": "id", "keep": ["title"]}]
    opened = []
    fetch = JsonlSource.fetch
    monkeypatch.setattr(JsonlSource, "fetch", lambda self, places: (opened.append(len(places)), fetch(self, places))[1])
    monkeypatch.setattr(html, "renew", lambda *_: None)  # report.html fetches some too
    start(write_job(tmp_path, inputs, checkpoint={"rows": 2}), fail(23))
    assert opened == [10]
    assert [one["id"] for one in listed(out)] == [*(f"d{n}" for n in range(10)), "d23"]
    assert {name: value for name, value in listed(out)[-1].items() if name != "batchgen"} == record(23)


def test_more_failed_documents_than_fit_into_memory_are_listed_bit_by_bit(tmp_path, out, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [record(n, text=n) for n in range(40)])
    monkeypatch.setattr(failed, "AT_ONCE", 7)
    start(write_job(tmp_path, [path], checkpoint={"rows": 3}))
    assert sorted(one["id"] for one in listed(out)) == sorted(f"d{n}" for n in range(40))


# Inputs that are not what they were.


def test_of_a_source_that_is_gone_or_changed_the_row_is_what_is_known(tmp_path, out):
    """A limit leaves rows of documents that are not there any more, and edited ones, as they are."""
    paths = [tmp_path / "in" / f"{name}.jsonl" for name in "abc"]
    for n, path in enumerate(paths):
        write_jsonl(path, [record(10 * n), record(10 * n + 1, id=10 * n + 1, text=7)])
    keep = {"title": "heading", "meta.year": "year"}
    job = write_job(tmp_path, [one_input(tmp_path / "in/*.jsonl", keep=keep)], prompt={"user": "{{ text }}"})
    start(job)
    assert [one["id"] for one in listed(out)] == [1, 11, 21]
    paths[0].unlink()
    write_jsonl(paths[1], [record(10), record(11, id=11)])
    write_jsonl(tmp_path / "in/a0.jsonl", map(record, range(50, 60)))
    start(job, limit=1)
    whole, *others = sorted(listed(out), key=lambda one: -one["id"])
    assert (whole["id"], whole["text"]) == (21, 7)
    assert "note" not in whole["batchgen"]
    assert [list(one) for one in others] == [["id", "title", "meta.year", "batchgen"]] * 2
    assert [(one["id"], one["title"]) for one in others] == [(11, "Minutes 11"), (1, "Minutes 1")]
    assert {one["batchgen"]["note"].split(":")[0] for one in others} == {"it is not at its place any more"}


def test_two_rows_of_one_place_are_both_listed(tmp_path, out):
    """A document moved, and another came where it was."""
    path = write_jsonl(tmp_path / "a.jsonl", [record(1, text=1), record(2, text=2)])
    job = write_job(tmp_path, [path])
    start(job)
    write_jsonl(path, [record(3, text=3), record(1, text=1), record(2, text=2)])
    start(job)
    found = {one["id"]: "note" in one["batchgen"] for one in listed(out)}
    assert found == {"d1": True, "d2": False, "d3": False} or found == {"d1": True, "d2": True, "d3": False}
    assert len({one["batchgen"]["place"] for one in listed(out)}) == 2


def test_a_row_that_no_longer_holds_is_not_listed(tmp_path, out):
    """An edited document has two rows as long as the end of its run is cut short."""
    path = write_jsonl(tmp_path / "a.jsonl", [record(n, text=n) for n in range(6)])
    job = write_job(tmp_path, [path], checkpoint={"rows": 2})
    start(job)
    edited = [record(n, text=f"{SENTENCE.format(n=n)} It took until the evening.") for n in range(4)]  # sent first
    write_jsonl(path, [*edited, *(record(n, text=n) for n in (4, 5)), *map(record, range(10, 40))])
    outcome = start(job, "engine.fake.die_after=12", "engine.fake.lives=1")
    assert outcome.exit_status == 69
    assert len([row for row in rows(out) if row["id"] == "d1"]) == 2
    assert [one["id"] for one in listed(out)] == ["d4", "d5"]


# When it is made.


@pytest.mark.parametrize("status", [0, 3, 65, 69, 75])
def test_each_end_has_a_list(tmp_path, out, monkeypatch, status):
    data = [record(n) for n in range(30)]
    data[0]["text"] = 7
    path = write_jsonl(tmp_path / "a.jsonl", data)
    inputs = [one_input(path)]
    if status == 65:
        (tmp_path / "b.parquet").write_bytes(b"none")
        inputs.append(one_input(tmp_path / "b.parquet", on_error="skip"))
    job = write_job(tmp_path, inputs, failures={"max": int(status == 0)}, checkpoint={"rows": 3})
    sets = ["engine.fake.die_after=7", "engine.fake.lives=1"] if status == 69 else []
    stop = stop_after_a_part(monkeypatch) if status == 75 else None
    assert start(job, *sets, "lifecycle.grace_s=0", stop=stop).exit_status == status
    assert [one["id"] for one in listed(out)] == ["d0"]


def test_a_list_that_holds_is_left_alone_and_no_input_is_opened(tmp_path, out, monkeypatch):
    job, _ = failing(tmp_path)
    start(job, fail(3))
    was = (out / "failed.jsonl").stat()
    monkeypatch.setattr(JsonlSource, "fetch", None)
    monkeypatch.setattr(JsonlSource, "read", None)
    outcome = start(job)
    assert (outcome.exit_status, outcome.report["notes"]["failed documents"]) == (3, str(out / "failed.jsonl"))
    assert (out / "failed.jsonl").stat().st_mtime_ns == was.st_mtime_ns


@pytest.mark.parametrize("make", [os.remove, lambda path: os.utime(path, (0, 0))], ids=["gone", "older"])
def test_a_list_that_is_gone_or_older_than_the_parts_is_made_anew(tmp_path, out, make):
    job, _ = failing(tmp_path)
    start(job, fail(3))
    was = listed(out)
    make(out / "failed.jsonl")
    start(job)
    assert listed(out) == was


def test_a_finished_run_with_failed_documents_imports_nothing_heavy(tmp_path, out):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/a.jsonl", [record(0), record(1, text="")])
    dataset = {"path": "json", "data_files": f"{tmp_path}/data/*.jsonl"}
    job = write_job(tmp_path, [{"dataset": dataset, "id_field": "id", "keep": ["title"]}])
    assert start(job, fail(0)).exit_status == 3
    code = (
        "import sys; from batchgen import cli; from batchgen.executors import local; from batchgen.job import jobfile;"
        "from batchgen.lifecycle import Stop; from pathlib import Path;"
        f"found = local.run(jobfile.load(Path({str(job)!r})), local.Options(), Stop());"
        "assert found.exit_status == 3; print(sorted({'datasets', 'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_few_failed_of_many_are_listed_without_reading_the_input(tmp_path, out, monkeypatch):
    data = pa.table({"id": [f"d{n}" for n in range(400)], "text": [record(n)["text"] for n in range(400)]})
    pq.write_table(data, tmp_path / "a.parquet", row_group_size=10)
    job = write_job(tmp_path, [{"path": str(tmp_path / "a.parquet"), "id_field": "id"}], prompt={"user": "{{ text }}"})
    start(job)
    (out / "failed.jsonl").unlink(missing_ok=True)
    groups = []
    batches = ParquetSource._batches

    def counted(self, file, group, row):
        groups.append(group)
        return batches(self, file, group, row)

    start(job, fail(123), fresh=True)
    monkeypatch.setattr(ParquetSource, "_batches", counted)
    (out / "failed.jsonl").unlink()
    start(job)
    assert [one["id"] for one in listed(out)] == ["d123"]
    assert groups == [12]


# When there is no time, or no room.


@pytest.mark.parametrize("hangs", ["for ever", "between lines"])
def test_a_run_that_is_told_to_stop_does_not_wait_for_the_list(tmp_path, out, monkeypatch, hangs):
    job, _ = failing(tmp_path, count=40)
    start(job, fail(3))
    assert (out / "failed.jsonl").exists()
    end = threading.Event()
    fetch = JsonlSource.fetch

    def slow(self, places):
        for one in fetch(self, places):
            end.wait(None if hangs == "for ever" else 0.3)
            yield one

    write_jsonl(tmp_path / "a.jsonl", [*(record(n, text=n) for n in range(60, 70)), *map(record, range(150))])
    with monkeypatch.context() as patch:
        patch.setattr(JsonlSource, "fetch", slow)
        patch.setattr(failed, "HURRY_S", 0.5)
        stop = stop_after_a_part(patch)
        outcome = start(job, "engine.fake.docs_per_s=5", "lifecycle.grace_s=0.1", stop=stop)
        assert time.monotonic() - stop.at < 3
        end.set()
    assert outcome.exit_status == 75
    assert "not listed, there was no time" in outcome.report["notes"]["failed documents"]
    assert not (out / "failed.jsonl").exists()  # it would be that of the end before
    time.sleep(0.2)
    assert not list(out.glob(".tmp-*failed*"))
    start(job)
    assert {one["id"] for one in listed(out)} == {"d3", *(f"d{n}" for n in range(60, 70))}


def test_a_signal_while_the_list_is_made_ends_that(tmp_path, out, monkeypatch):
    job, _ = failing(tmp_path)
    stop = Stop()
    monkeypatch.setattr(failed, "HURRY_S", 0.2)
    end = threading.Event()

    def hangs(self, places):
        stop.request("SIGTERM")
        end.wait()
        yield from ()

    with monkeypatch.context() as patch:
        patch.setattr(JsonlSource, "fetch", hangs)
        outcome = start(job, stop=stop)
        end.set()
    assert outcome.exit_status == 3  # all was done when the signal came
    assert "not listed" in outcome.report["notes"]["failed documents"]


def test_a_list_that_cannot_be_written_is_an_error_of_the_output(tmp_path, out, monkeypatch):
    job, _ = failing(tmp_path)
    atomic = fsio.atomic

    def full(path, *, owner):
        if path.name == "failed.jsonl":
            raise fsio.output_error(path, OSError(28, "No space left on device"))
        return atomic(path, owner=owner)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "atomic", full)
        outcome = start(job)
    assert outcome.exit_status == 74
    assert "failed.jsonl: cannot be written: No space left" in outcome.reason
    assert len(rows(out)) == 12
    assert start(job).exit_status == 3
    assert [one["id"] for one in listed(out)] == ["d5"]


def test_after_a_failed_write_nothing_more_is_tried(tmp_path, out, monkeypatch):
    job, _ = failing(tmp_path)
    monkeypatch.setattr("batchgen.storage.checkpoint.settle", lambda *_: (_ for _ in ()).throw(OutputError("no room")))
    start(job, fail(3))
    outcome = start(job, retry=frozenset())
    assert outcome.exit_status == 74
    assert outcome.report["notes"]["failed documents"].startswith("not listed, since the output")
