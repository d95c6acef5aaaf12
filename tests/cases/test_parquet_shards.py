"""Folders of Parquet files by many writers: schemas that differ, files that are broken, columns that come late."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.errors import InputError


def texts(*numbers):
    return [record(n)["text"] for n in numbers]


def table(*numbers):
    return pa.table({"id": [f"d{n}" for n in numbers], "text": texts(*numbers)})


# Schemas that differ.


@pytest.fixture
def shards(tmp_path):
    """Six files of one data set; the text column of the last has another name."""
    folder = tmp_path / "shards"
    folder.mkdir()
    files = {
        "0": table(*range(4)).append_column("lang", pa.nulls(4)),
        "1": table(*range(4, 8)).append_column("lang", pa.array(["en"] * 4)),
        "2": pa.table({"text": texts(*range(8, 12)), "page": [1, 2, 3, 4], "id": [f"d{n}" for n in range(8, 12)]}),
        "3": pa.table({"id": [12, 13, 14, 15], "text": pa.array(texts(*range(12, 16)), pa.large_string()),
                       "lang": ["en", None, "cy", "en"]}),
        "4": table().cast(pa.schema([("id", pa.string()), ("text", pa.string())])),
        "5": pa.table({"id": ["d20", "d21"], "body": texts(20, 21)}),
    }  # fmt: skip
    for name, one in files.items():
        pq.write_table(one, folder / f"part-{name}.parquet")
    return folder


def test_a_file_without_the_text_column_is_found_before_anything_starts(tmp_path, out, shards, monkeypatch):
    """pandas-dev/pandas#55731"""
    monkeypatch.setattr("batchgen.executors.starting.Starter.engine", None)
    with pytest.raises(InputError, match=r"part-5\.parquet: has no column 'text' \(text_field\); it has: id, body"):
        start(write_job(tmp_path, [shards]))
    assert rows(out) == []


def test_columns_are_found_by_name_in_each_file_and_types_met_file_by_file(tmp_path, out, shards):
    """apache/arrow#35569"""
    item = {"path": str(shards), "id_field": "id", "keep": ["lang", "page"], "on_error": "skip"}
    outcome = start(write_job(tmp_path, [item], prompt={"user": "{{ lang }} {{ text }}"}))
    assert outcome.exit_status == 65
    assert [told.split(": ")[0] for told in outcome.report["notes"]["input files with errors"]] == [
        str(shards / "part-5.parquet")
    ]
    found = by_id(out)
    assert set(found) == {("str", f"d{n}") for n in range(12)} | {("int", str(n)) for n in range(12, 16)}
    assert all(row["status"] == "ok" and row["flags"] == [] for row in found.values())
    assert [found["str", f"d{n}"]["lang"] for n in (0, 4, 8)] == [None, "en", None]
    assert [found["int", str(n)]["lang"] for n in range(12, 16)] == ["en", None, "cy", "en"]
    assert [found["str", f"d{n}"]["page"] for n in (7, 8, 11)] == [None, 1, 4]
    schema = pq.read_schema(min(out.glob("summaries/*")))
    assert (schema.field("lang").type, schema.field("page").type) == (pa.string(), pa.int64())


# Files that are broken.


@pytest.fixture
def broken(tmp_path):
    """Two good files; one without a footer, one of no bytes, one with a bad page in row group 1; and no inputs."""
    folder = tmp_path / "broken"
    folder.mkdir()
    pq.write_table(table(*range(10)), folder / "part-0.parquet", compression="zstd")
    pq.write_table(table(*range(40, 50)), folder / "part-4.parquet", compression="zstd")
    pq.write_table(table(*range(10, 20)), folder / "part-1.parquet")
    whole = (folder / "part-1.parquet").read_bytes()
    (folder / "part-1.parquet").write_bytes(whole[:-60])
    (folder / "part-2.parquet").write_bytes(b"")
    bad = folder / "part-3.parquet"
    pq.write_table(table(*range(1000, 3000)), bad, compression="zstd", row_group_size=1000, use_dictionary=False)
    offset = pq.read_metadata(bad).row_group(1).column(1).data_page_offset + 200
    raw = bytearray(bad.read_bytes())
    raw[offset : offset + 400] = bytes(400)
    bad.write_bytes(raw)
    for name in ("_SUCCESS", ".part-9.parquet.crc", "part-10.parquet.tmp"):
        (folder / name).write_bytes(b"PAR1")
    return folder


def test_all_files_without_a_footer_are_refused_before_anything_starts(tmp_path, out, broken):
    """astronomy-commons/hats-import#634"""
    done = command("run", write_job(tmp_path, [broken]))
    assert done.returncode == 65
    told = [line for line in done.stderr.splitlines() if str(broken) in line]
    assert [line.split(": ")[0].rsplit("/", 1)[1] for line in told] == ["part-1.parquet", "part-2.parquet"]
    assert all("no readable Parquet file: " in line for line in told)
    assert rows(out) == []


def test_with_skip_they_are_in_the_report_and_the_rest_is_done(tmp_path, out, broken):
    job = write_job(tmp_path, [{"path": str(broken), "id_field": "id", "on_error": "skip"}],
                    prompt={"user": "{{ text }}"})  # fmt: skip
    outcome = start(job)
    assert outcome.exit_status == 65
    told = outcome.report["notes"]["input files with errors"]
    assert [one.split(": ")[0].rsplit("/", 1)[1] for one in told] == [f"part-{n}.parquet" for n in (1, 2, 3)]
    assert all(": cannot be read: " in one or ": no readable Parquet file: " in one for one in told)
    assert outcome.report["documents"]["total_is_exact"] is False
    found = {int(row["id"][1:]) for row in rows(out)}
    # A page error in mid-run loses none of the rows before it.
    assert found >= {*range(10), *range(40, 50), *range(1000, 2000)}
    assert not found & set(range(10, 20))
    # Repaired, they cost only what was missing, and no row went to the orphans in between.
    pq.write_table(table(*range(10, 20)), broken / "part-1.parquet")
    pq.write_table(table(*range(20, 30)), broken / "part-2.parquet")
    pq.write_table(table(*range(1000, 3000)), broken / "part-3.parquet")
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["requests"] == 2040 - len(found)
    assert outcome.report["notes"]["input files with errors"] == []
    assert {int(row["id"][1:]) for row in rows(out)} == {*range(30), *range(40, 50), *range(1000, 3000)}


def test_the_rows_of_a_file_that_breaks_later_stay(tmp_path, out):
    """Nobody can say that its documents are gone."""
    folder = tmp_path / "in"
    write_jsonl(folder / "a.jsonl", [record(0)])
    pq.write_table(table(*range(1, 6)), folder / "b.parquet")
    job = write_job(tmp_path, [{"path": str(folder), "id_field": "id", "on_error": "skip"}],
                    prompt={"user": "{{ text }}"})  # fmt: skip
    assert start(job).exit_status == 0
    (folder / "b.parquet").write_bytes(b"")
    outcome = start(job)
    assert outcome.exit_status == 65
    assert len(rows(out)) == 6
    assert not any(out.glob("orphans/*"))
    assert start(job).exit_status == 65


def test_a_folder_of_nothing_but_unreadable_files_may_be_skipped_whole(tmp_path, out):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.parquet").write_bytes(b"")
    job = write_job(tmp_path, [{"path": str(tmp_path / "in"), "on_error": "skip"}], prompt={"user": "{{ text }}"})
    outcome = start(job)
    assert (outcome.exit_status, outcome.report["documents"]["total"]) == (65, 0)
    assert len(outcome.report["notes"]["input files with errors"]) == 1


def test_other_files_of_a_folder_are_told_on_the_command_line(tmp_path, broken):
    write_jsonl(tmp_path / "in/a.jsonl", [record(0)])
    (tmp_path / "in/notes.txt").write_text("no record")
    done = command("run", write_job(tmp_path, [tmp_path / "in"]))
    assert done.returncode == 0
    assert f"left out: {tmp_path / 'in/notes.txt'}" in done.stderr


# Columns that come late, and a kill.

LATE = [record(n, meta=None) for n in range(1200)] + [
    record(n, meta={"page": n}, court="High") for n in range(1200, 1210)
]
KEPT = {"meta": "meta", "court": "court", "title": "title"}


def test_kept_fields_that_appear_late_are_in_the_output(tmp_path, out):
    """marin-community/marin#5142"""
    data = b"".join(json.dumps(one).encode() + b"\n" for one in LATE)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    job = write_job(tmp_path, [{"path": str(tmp_path / "a.jsonl.gz"), "id_field": "id", "keep": KEPT}],
                    checkpoint={"rows": 500})  # fmt: skip
    assert start(job).exit_status == 0
    found = by_id(out)
    assert len(found) == 1210
    assert [json.loads(found["str", f"d{n}"]["meta"]) for n in range(1200, 1210)] == [
        {"page": n} for n in range(1200, 1210)
    ]
    assert {found["str", f"d{n}"]["court"] for n in range(1200, 1210)} == {"High"}
    assert {(row["meta"], row["court"]) for key, row in found.items() if int(key[1][1:]) < 1200} == {(None, None)}
    # Columns that are null in every row of a part have their declared types there as well.
    schemas = [pq.read_schema(part) for part in sorted(out.glob("summaries/*"))]
    assert len(schemas) == 3
    assert {
        tuple(schema.field(name).type for name in ("error", "error_type", "court", "meta")) for schema in schemas
    } == {(pa.string(),) * 4}


def test_types_of_kept_columns_are_those_of_all_files(tmp_path, out):
    """The first file has neither value nor type for them; one part is written before the last file is read."""
    folder = tmp_path / "in"
    folder.mkdir()
    first = table(*range(6)).append_column("meta", pa.nulls(6))
    late = table(*range(6, 9)).append_column("meta", pa.array([{"page": n} for n in range(3)]))
    pq.write_table(first, folder / "a.parquet")
    pq.write_table(late.append_column("court", pa.array([7, 8, 9], pa.int16())), folder / "b.parquet")
    pq.write_table(table(9).append_column("court", pa.array([2**40])), folder / "c.parquet")
    job = write_job(tmp_path, [{"path": str(folder), "id_field": "id", "keep": ["meta", "court"]}],
                    prompt={"user": "{{ text }}"}, checkpoint={"rows": 2})  # fmt: skip
    assert start(job).exit_status == 0
    for part in out.glob("summaries/*"):
        schema = pq.read_schema(part)
        assert (schema.field("meta").type, schema.field("court").type) == (
            pa.struct([("page", pa.int64())]),
            pa.int64(),
        )
    found = by_id(out)
    assert [found["str", f"d{n}"]["meta"] for n in (0, 7)] == [None, {"page": 1}]
    assert [found["str", f"d{n}"]["court"] for n in (0, 6, 9)] == [None, 7, 2**40]


def test_after_a_kill_every_parquet_file_of_the_output_opens(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", LATE)
    job = write_job(
        tmp_path, [{"path": str(tmp_path / "a.jsonl"), "id_field": "id", "keep": KEPT}], checkpoint={"rows": 50},
        engine={"backend": "fake", "args": {"max_model_len": 2048}, "fake": {"docs_per_s": 400}},
    )  # fmt: skip
    child = subprocess.Popen([sys.executable, "-m", "batchgen", "run", str(job)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(out.glob("summaries/part-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    parts = [path for path in out.rglob("*.parquet") if not path.name.startswith(".tmp-")]
    assert len(parts) >= 3
    assert 0 < sum(pq.read_table(part).num_rows for part in parts) < len(LATE)
    assert start(job, "engine.fake.docs_per_s=null").exit_status == 0
    assert len(by_id(out)) == len(LATE)
