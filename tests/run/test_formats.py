"""Whole runs with parts of either format: the same rows, the same repairs, and never both in one run."""

import json

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers_run import by_id, command, record, rows, same_rows, start, write_job, write_jsonl

from batchgen.errors import ConfigError, FingerprintError
from batchgen.sinks import open_sink
from batchgen.sources.jsonl import JsonlSource


def job_of(tmp_path, *inputs, form="jsonl", **sections):
    output = {"dir": str(tmp_path / "out"), "format": form}
    return write_job(tmp_path, inputs, output=output, checkpoint={"rows": 4}, **sections)


def lines(out):
    paths = sorted(out.glob("summaries/*.jsonl"))
    return [json.loads(one) for path in paths for one in path.read_text(encoding="ascii").split("\n")[:-1]]


def test_both_formats_give_the_same_rows(tmp_path):
    data = [*map(record, range(9)), record(9, text=""), record(10, text=7), {"id": "d11"}, record(12, id=2**70)]
    write_jsonl(tmp_path / "a.jsonl", data)
    found = {}
    for form in ("parquet", "jsonl"):
        job = job_of(tmp_path, tmp_path / "a.jsonl", form=form)
        assert start(job, f"output.dir={tmp_path / form}").exit_status == 3
        found[form] = rows(tmp_path / form)
        assert {path.suffix for path in (tmp_path / form / "summaries").glob("part-*")} == {f".{form}"}
    same_rows(found["parquet"], found["jsonl"])
    assert len(found["jsonl"]) == 13


def test_ids_keep_their_type_and_kept_values_their_shape(tmp_path, out):
    more = {"year": 1999, "tags": ["a", {"b": None}], "big": 10**100}
    write_jsonl(tmp_path / "a.jsonl", [record(1, id=10**99, **more), record(2, id="007", **more)])
    one = {"path": str(tmp_path / "a.jsonl"), "id_field": "id", "keep": ["title", *more]}
    assert start(job_of(tmp_path, one)).exit_status == 0
    found = sorted(lines(out), key=lambda row: row["title"])
    assert [row["id"] for row in found] == [10**99, "007"]
    assert [row["id_type"] for row in found] == ["int", "str"]
    assert [{name: row[name] for name in more} for row in found] == [more, more]


def test_a_second_start_reads_no_input_and_leaves_every_file_alone(tmp_path, out, monkeypatch):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(10))))
    start(job)
    before = {path: path.read_bytes() for path in out.glob("summaries/*")}
    assert len(before) == 6  # three parts, each with its footer
    with monkeypatch.context() as patch:
        patch.setattr(JsonlSource, "read", None)
        outcome = start(job)
    assert (outcome.exit_status, outcome.report["attempt"]["requests"]) == (0, 0)
    assert outcome.report["run"]["requests"] == 10
    assert {path: path.read_bytes() for path in out.glob("summaries/*")} == before


def test_without_the_footers_the_input_is_read_and_nothing_is_done_again(tmp_path, out):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(10))))
    start(job)
    before = rows(out)
    for path in out.glob("summaries/.*"):
        path.unlink()
    outcome = start(job)
    assert (outcome.report["attempt"]["requests"], outcome.report["documents"]["ok"]) == (0, 10)
    assert outcome.report["notes"]["damaged parts"] == []
    assert rows(out) == before


def test_a_part_that_is_removed_is_made_again_whatever_its_footer_says(tmp_path, out):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(10))))
    start(job)
    before = rows(out)
    min(out.glob("summaries/part-*")).unlink()
    assert start(job).report["attempt"]["requests"] == 4
    same_rows(rows(out), before)


def test_edited_documents_and_files_that_are_gone(tmp_path, out):
    path = write_jsonl(tmp_path / "in/a.jsonl", map(record, range(6)))
    gone = write_jsonl(tmp_path / "in/b.jsonl", map(record, range(6, 9)))
    job = job_of(tmp_path, tmp_path / "in/*.jsonl")
    start(job)
    before = by_id(out)
    gone.unlink()
    write_jsonl(path, [record(n, text="An edited text about the harbour wall.") if n == 3 else record(n)
                       for n in range(6)])  # fmt: skip
    outcome = start(job)
    assert (outcome.exit_status, outcome.report["attempt"]["requests"]) == (0, 1)
    assert outcome.report["notes"]["orphans"] == 3
    after = by_id(out)
    assert {key for key in before if before[key] != after.get(key)} == {("str", f"d{n}") for n in (3, 6, 7, 8)}
    assert set(after) == {("str", f"d{n}") for n in range(6)}
    sink = open_sink("jsonl", owner="00000")
    moved = [row["id"] for path in out.glob("orphans/part-*") for row in sink.rows(path)]
    assert sorted(moved) == ["d6", "d7", "d8"]


@pytest.mark.parametrize("footer", [True, False])
def test_a_damaged_part_is_set_aside_with_its_footer_and_its_documents_done_again(tmp_path, out, footer):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(10))))
    start(job)
    before = rows(out)
    victim = min(out.glob("summaries/part-*"))
    beside = out / "summaries" / f".{victim.stem}.footer.json"
    if not footer:
        beside.unlink()
    victim.write_bytes(victim.read_bytes()[:-20])
    outcome = start(job)
    assert outcome.exit_status == 0
    assert "is torn; moved to damaged/" in outcome.report["notes"]["damaged parts"][0]
    assert {path.name for path in (out / "damaged").iterdir()} == {victim.name, *([beside.name] if footer else [])}
    assert not beside.exists()
    same_rows(rows(out), before)
    assert start(job).report["attempt"]["requests"] == 0


@pytest.mark.parametrize(("old", "new"), [("parquet", "jsonl"), ("jsonl", "parquet")])
def test_another_format_is_refused_with_the_ways_out(tmp_path, out, old, new):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(6))), form=old)
    start(job, limit=3)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "locks" not in path.parts}
    for options in ({}, {"on_change": "keep"}, {"on_change": "new-run"}):
        with pytest.raises(ConfigError, match=f"output.format: {old} .*export.*--fresh"):
            start(job, f"output.format={new}", **options)
    done = command("validate", job, "--set", f"output.format={new}")
    assert (done.returncode, done.stderr) == (78, "")
    assert f"output.format: {old}" in done.stdout
    assert {path: path.read_bytes() for path in before} == before
    # A change of the text comes first, and with the ways on that it has.
    with pytest.raises(FingerprintError):
        start(job, f"output.format={new}", "prompt.system=Be short.")
    assert start(job, f"output.format={new}", fresh=True).report["documents"]["ok"] == 6
    assert {path.suffix for path in out.glob("summaries/part-*")} == {f".{new}"}


def test_a_new_run_may_have_another_format(tmp_path, out):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(6))), form="parquet")
    start(job, limit=3)
    start(job, "output.format=jsonl", "prompt.system=Be short.", on_change="new-run")
    assert {path.suffix for path in out.glob("summaries/part-*")} == {".jsonl"}
    assert len(rows(out)) == 6


def test_a_format_without_a_part_binds_nobody(tmp_path, out):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(3))), form="parquet")
    start(job, "engine.fake.die_after=0")
    assert start(job, "output.format=jsonl").exit_status == 0
    assert {path.suffix for path in out.glob("summaries/part-*")} == {".jsonl"}


def test_parts_of_two_formats_are_refused_by_every_command(tmp_path, out):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(3))))
    start(job)
    (out / "summaries/part-00001-00000-000009.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match="two formats"):
        start(job)
    for words in (("status", out), ("report", out), ("export", out, tmp_path / "x.csv")):
        done = command(*words)
        assert (done.returncode, done.stdout) == (78, ""), words
        assert "two formats" in done.stderr
    done = command("validate", job)
    assert (done.returncode, done.stderr) == (78, "")
    assert "two formats" in done.stdout


def test_status_counts_both_formats(tmp_path, out):
    job = job_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", map(record, range(6))))
    start(job, limit=5)
    told = json.loads(command("status", out, "--json").stdout)
    assert [told[name] for name in ("total", "ok", "pending", "parts")] == [6, 5, 1, 2]


# Types of kept fields over several starts.


def parquet(path, numbers, years):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: [record(n)[name] for n in numbers] for name in ("id", "title", "text")}
    pq.write_table(pa.table(columns | {"year": years}), path)


def kept(out, first, second, tmp_path, form="parquet"):
    """Years of a run of one file, and then of two, read with the schema of the newest part; flagged ids."""
    one = {"path": str(tmp_path / "in/*.parquet"), "id_field": "id", "keep": ["title", "year"]}
    job = job_of(tmp_path, one, form=form)
    parquet(tmp_path / "in/a.parquet", range(3), first)
    start(job)
    before = {path: path.read_bytes() for path in out.glob("summaries/*")}
    parquet(tmp_path / "in/b.parquet", range(3, 6), second)
    assert start(job).exit_status == 0
    assert {path: path.read_bytes() for path in before} == before
    schema = pq.read_schema(max(out.glob("summaries/*")))
    found = ds.dataset(out / "summaries", schema=schema).to_table().sort_by("id").to_pylist()
    return [row["year"] for row in found], [row["id"] for row in found if row["flags"]]


def test_a_wider_type_of_a_later_file_loses_nothing(tmp_path, out):
    years, flagged = kept(out, pa.array([1, None, 3], pa.int32()), pa.array([2**40, 5, None], pa.int64()), tmp_path)
    assert (years, flagged) == ([1, None, 3, 2**40, 5, None], [])


def test_text_after_numbers_loses_nothing(tmp_path, out):
    years, flagged = kept(out, pa.array([1, None, 3]), pa.array(["about 1900", "5", None]), tmp_path)
    assert (years, flagged) == (["1", None, "3", "about 1900", "5", None], [])


def test_a_type_that_no_reader_could_join_stays_and_what_does_not_fit_is_flagged(tmp_path, out):
    years, flagged = kept(out, pa.array([[1], None, [3]]), pa.array(["x", "y", None]), tmp_path)
    assert (years, flagged) == ([[1], None, [3], None, None, None], ["d3", "d4"])


def test_a_column_that_is_null_at_first_has_its_type_and_takes_what_comes(tmp_path, out):
    """apache/arrow#34397: a type taken from the first rows refuses, or drops, what comes later."""
    years, flagged = kept(out, pa.nulls(3), pa.array(["x", "y", None]), tmp_path)
    assert (years, flagged) == ([None, None, None, "x", "y", None], [])
    for path in out.glob("summaries/*"):
        assert not any(pa.types.is_null(kind) for kind in pq.read_schema(path).types)
