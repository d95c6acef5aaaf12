"""`export`: the newest row of each document, whole or not at all, in every format, while a run changes its parts."""

import csv
import datetime as dt
import io
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import document, hexes, placed, record
from helpers_run import command, rows, start, write_job, write_jsonl
from helpers_run import record as input_record

from batchgen.errors import ConfigError, OutputError
from batchgen.executors import export as exporting
from batchgen.executors.export import Wish, export, format_of
from batchgen.job.config import COLUMNS
from batchgen.sinks import open_sink
from batchgen.storage.rundir import RunDirectory

AT = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
FORMATS = ["parquet", "jsonl"]


class Run:
    """A run directory that is filled part by part."""

    def __init__(self, path, form, kept):
        self.directory = RunDirectory(path)
        self.sink = open_sink(form, owner="00000", kept=kept)
        self.parts = 0
        self.directory.write_run(
            {"name": "test", "job": {"output": {"format": form}}, "fingerprint": {"columns": list(kept)}}
        )

    def files(self, *sources):
        plan = {"files": {one: {} for one in sources}, "gone": [], "splits": [], "kept": {}}
        self.directory.plan_json.write_text(json.dumps(plan))

    def add(self, *records):
        self.parts += 1
        path = self.directory.part(1, self.parts, self.sink.suffix)
        self.sink.write_part(path, records, fingerprint="f00d", footer={})
        return path

    def export(self, out, **more):
        return export(self.directory.path, Wish(out, more.pop("format", format_of(out)), **more))


@pytest.fixture(params=FORMATS)
def form(request):
    return request.param


@pytest.fixture
def run(tmp_path, form):
    return Run(tmp_path / "run", form, {"title": pa.string(), "year": pa.int64()})


def lines(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def ids(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).column("id").to_pylist()
    if path.suffix == ".csv":
        return [row["id"] for row in csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""))]
    return [row["id"] for row in lines(path)]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_all_rows_of_all_parts_with_all_columns(run, tmp_path, ending):
    run.add(*[record(document(n, keep={"title": f"T{n}", "year": n})) for n in range(3)])
    run.add(record(document(3), "failed", error_type="bad_json"))
    out = tmp_path / f"all.{ending}"
    told = run.export(out)
    assert ids(out) == ["d0", "d1", "d2", "d3"]
    assert told == {
        "run_dir": str(run.directory.path), "path": str(out), "format": ending, "rows": 4, "bytes": out.stat().st_size,
    }  # fmt: skip
    names = {
        "parquet": lambda: pq.read_schema(out).names,
        "jsonl": lambda: list(lines(out)[0]),
        "csv": lambda: out.read_bytes().decode().split("\r\n")[0].split(","),
    }[ending]()
    assert names == ["id", "id_type", "title", "year", *COLUMNS[2:]]
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("run", out.name)] == []


def test_values_of_jsonl_are_those_of_a_part(run, tmp_path):
    run.add(
        record(document(0, id="7", id_type="int", keep={"title": "é\u2028", "year": None}), flags=("copied",)),
        record(placed(document(1, id=None, id_type=None)), "failed", error="no id"),
    )
    run.export(tmp_path / "a.jsonl")
    first, second = lines(tmp_path / "a.jsonl")
    assert [first[name] for name in ("id", "title", "year", "flags")] == [7, "é\u2028", None, ["copied"]]
    assert dt.datetime.fromisoformat(first["finished_at"]).tzinfo is not None
    assert [second[name] for name in ("id", "id_type", "status", "error")] == [None, None, "failed", "no id"]
    assert (tmp_path / "a.jsonl").read_bytes().isascii()


def test_values_of_csv_survive_quotes_line_ends_and_lists(run, tmp_path):
    text = 'a "b",\r\n;\n\r \u2028 =1+1'
    run.add(
        record(document(0, id=text, keep={"title": "=cmd()", "year": 5}), summary=text, flags=("a", "b")), record(1)
    )
    run.export(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as stream:
        first, second = csv.DictReader(stream)
    assert [first[name] for name in ("id", "summary", "title", "year")] == [text, text, "=cmd()", "5"]
    assert json.loads(first["flags"]) == ["a", "b"]
    assert [second[name] for name in ("title", "year", "error", "flags")] == ["", "", "", "[]"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ([("1", "int"), ("-9223372036854775808", "int"), (None, None)], [1, -(2**63), None]),
        ([("1", "int"), ("9223372036854775808", "int")], ["1", "9223372036854775808"]),
        ([("1", "int"), ("1", "str")], ["1", "1"]),
        ([("1", "str")], ["1"]),
        ([(None, None)], [None]),
    ],
)
def test_ids_of_parquet_are_integers_where_all_of_them_are(run, tmp_path, given, written):
    for n, (one, kind) in enumerate(given):
        run.add(record(document(n, id=one, id_type=kind)))
    run.export(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column("id").to_pylist() == written
    assert table.schema.field("id").type == (pa.int64() if any(type(one) is int for one in written) else pa.string())
    assert table.column("id_type").to_pylist() == [kind for _, kind in given]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_of_two_rows_with_one_key_the_one_in_the_later_part_is_written(run, tmp_path, ending):
    run.add(*[record(document(n), summary="old") for n in range(3)])
    run.add(record(document(1), summary="new"), record(3))
    out = tmp_path / f"a.{ending}"
    assert run.export(out)["rows"] == 4
    assert ids(out) == ["d0", "d2", "d1", "d3"]
    assert "new" in str(pq.read_table(out).to_pylist() if ending == "parquet" else out.read_text())


def test_failed_rows_alone_and_only_while_they_are_the_newest(run, tmp_path):
    run.add(record(0), record(document(1), "failed", error_type="x"), record(document(2), "failed", error_type="x"))
    run.add(record(1), record(document(0), "failed", error_type="y"), record(document(3), "skipped"))
    run.export(tmp_path / "a.jsonl", failed=True)
    assert ids(tmp_path / "a.jsonl") == ["d2", "d0"]


def test_in_order_rows_stand_as_their_documents_in_the_input(run, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_CHUNK", 7)
    run.files("z.jsonl", "a.parquet", "gone.jsonl")
    wanted = [("z.jsonl", f"byte {n * 9}") for n in range(30)] + [("a.parquet", f"row {n}") for n in range(30)]
    wanted += [("gone.jsonl", "byte 0"), ("moved.jsonl", "byte 3")]
    numbers = sorted(range(len(wanted)), key=lambda n: document(n).key)  # any order
    made = [record(document(n, source=wanted[n][0], place=wanted[n][1])) for n in numbers]
    for begin in range(0, len(made), 11):
        run.add(*made[begin : begin + 11])
    run.export(tmp_path / "a.jsonl", in_order=True)
    assert [(row["source"], row["place"]) for row in lines(tmp_path / "a.jsonl")] == wanted
    run.export(tmp_path / "b.jsonl")
    assert ids(tmp_path / "b.jsonl") == [f"d{n}" for n in numbers]


def test_a_run_without_rows_gives_a_file_without_rows(run, tmp_path):
    assert run.export(tmp_path / "a.parquet")["rows"] == 0
    assert pq.read_schema(tmp_path / "a.parquet").names == ["id", "id_type", "title", "year", *COLUMNS[2:]]
    run.export(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == b""
    run.export(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().split(",")[:4] == ["id", "id_type", "title", "year"]


def test_kept_values_of_jsonl_parts_get_a_type_that_holds_them(tmp_path):
    run = Run(tmp_path / "run", "jsonl", dict.fromkeys("abcd"))
    run.add(record(document(0, keep={"a": 1, "b": 1, "c": [1, {"x": None}], "d": None})))
    run.add(record(document(1, keep={"a": 2.5, "b": "x", "c": None, "d": True})))
    run.export(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet").select(list("abcd"))
    assert table.to_pydict() == {"a": [1.0, 2.5], "b": ["1", "x"], "c": ['[1, {"x": null}]', None], "d": [None, True]}
    assert table.schema.field("d").type == pa.bool_()


def test_kept_values_of_parquet_parts_of_two_types_get_the_wider(tmp_path):
    run = Run(tmp_path / "run", "parquet", {"k": pa.int32()})
    run.add(record(document(0, keep={"k": 1})))
    run.sink = open_sink("parquet", owner="00000", kept={"k": pa.int64()})
    run.add(record(document(1, keep={"k": 2**40})))
    run.export(tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").column("k") == pa.chunked_array([[1, 2**40]])
    run.export(tmp_path / "a.jsonl")
    assert [row["k"] for row in lines(tmp_path / "a.jsonl")] == [1, 2**40]


def test_what_json_has_no_word_for_is_text(tmp_path):
    run = Run(tmp_path / "run", "parquet", {"day": pa.date32(), "raw": pa.binary(), "x": pa.float64()})
    run.add(record(document(0, keep={"day": dt.date(2020, 2, 29), "raw": b"\xff", "x": float("nan")})))
    run.export(tmp_path / "a.jsonl")
    (row,) = lines(tmp_path / "a.jsonl")
    assert (row["day"], row["raw"], row["x"], row["flags"]) == ("2020-02-29", "/w==", None, ["kept_field_unfit"])


# Nothing half, nothing overwritten.


def test_a_file_that_is_there_is_left_alone_unless_forced(run, tmp_path):
    run.add(record(0))
    out = tmp_path / "a.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        run.export(out)
    assert out.read_text() == "mine"
    run.export(out, force=True)
    assert ids(out) == ["d0"]


def test_places_that_are_no_files_of_ones_own_are_refused(run, tmp_path):
    run.add(record(0))
    with pytest.raises(ConfigError, match="among the parts"):
        run.export(run.directory.summaries / "all.jsonl")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match="no plain file"):
        run.export(tmp_path / "folder.csv", force=True)
    with pytest.raises(ConfigError, match="needs a file"):
        run.export(None, format="parquet")
    with pytest.raises(ConfigError, match="run directory"):
        export(tmp_path, Wish(tmp_path / "a.csv", "csv"))
    with pytest.raises(ConfigError, match="--format"):
        format_of(tmp_path / "a.txt")


def test_an_export_that_fails_leaves_the_old_file_and_no_rest(run, tmp_path, monkeypatch):
    run.add(record(0))
    run.export(tmp_path / "a.jsonl")
    before = (tmp_path / "a.jsonl").read_bytes()
    run.add(record(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "_chunk", full)
    with pytest.raises(OutputError, match="No space left on device"):
        run.export(tmp_path / "a.jsonl", force=True)
    assert (tmp_path / "a.jsonl").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.jsonl"}


def test_a_damaged_part_is_told_not_left_out(run, tmp_path):
    run.add(record(0))
    path = run.add(record(1))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(OutputError, match=rf"{path.name}: a part is damaged.*[Ss]tart the run again"):
        run.export(tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


# While the run goes.


@pytest.mark.parametrize("moment", ["while the rows are noted", "while they are written"])
@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_parts_that_change_or_vanish_meanwhile_cost_no_row_and_double_none(run, tmp_path, monkeypatch, moment, ending):
    """The run ends: documents 1 and 2 were edited, their old rows go; part 2 loses all its rows and is removed."""
    monkeypatch.setattr(exporting, "_CHUNK", 2)
    first = run.add(*[record(document(n), summary="old") for n in range(6)])
    second = run.add(*[record(document(n), summary="old") for n in (6, 7)])
    calls = []

    def settle(self, number, look, original=exporting._Parts._read):
        calls.append(number)
        found = original(self, number, look)
        if len(calls) == (1 if moment == "while the rows are noted" else 3):
            run.add(*[record(document(n), summary="new") for n in (1, 2, 6, 7)])
            run.sink.drop(first, hexes(1, 2), to=None)
            run.sink.drop(second, hexes(6, 7), to=None)
        return found

    monkeypatch.setattr(exporting._Parts, "_read", settle)
    out = tmp_path / f"a.{ending}"
    assert run.export(out)["rows"] == 8
    assert sorted(ids(out)) == [f"d{n}" for n in range(8)]
    assert len(calls) > 4  # it began again


def test_a_run_that_never_rests_is_told(run, tmp_path, monkeypatch):
    path = run.add(*map(record, range(40)))
    monkeypatch.setattr(exporting, "_TRIES", 3)
    monkeypatch.setattr(exporting.time, "sleep", lambda _: None)
    gone = iter(range(40))

    def restless(self, number, look, original=exporting._Parts._read):
        run.sink.drop(path, hexes(next(gone)), to=None)
        return original(self, number, look)

    monkeypatch.setattr(exporting._Parts, "_read", restless)
    with pytest.raises(OutputError, match="rewriting its parts"):
        run.export(tmp_path / "a.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


# The command line.


@pytest.fixture
def finished(tmp_path, form):
    """A whole run of 12 documents, one of them failed, in both formats."""
    write_jsonl(tmp_path / "a.jsonl", [*map(input_record, range(11)), input_record(11, text=7)])
    job = write_job(
        tmp_path, [tmp_path / "a.jsonl"], checkpoint={"rows": 4}, output={"dir": str(tmp_path / "out"), "format": form}
    )
    start(job)
    return tmp_path


def test_the_command_writes_a_file_and_tells_it(finished):
    done = command("export", finished / "out", finished / "b.csv", "--sort", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["rows"], told["bytes"]) == (0, 12, (finished / "b.csv").stat().st_size)
    assert ids(finished / "b.csv") == [f"d{n}" for n in range(12)]
    assert "12 rows" in done.stderr
    again = command("export", finished / "out", finished / "b.csv")
    assert (again.returncode, again.stdout) == (78, "")
    assert "--force" in again.stderr


def test_dash_is_stdout(finished):
    done = command("export", finished / "out", "-", "--failed")
    assert done.returncode == 0
    (row,) = map(json.loads, done.stdout.splitlines())
    assert (row["id"], row["error_type"]) == ("d11", "text_type")
    done = command("export", finished / "out", "-", "--format", "csv", "--sort")
    assert [row["id"] for row in csv.DictReader(io.StringIO(done.stdout, newline=""))] == [f"d{n}" for n in range(12)]
    assert command("export", finished / "out", "-", "--json").returncode == 2
    assert command("export", finished / "out", "-", "--format", "parquet").returncode == 78


def test_a_reader_that_has_seen_enough_ends_it(finished):
    call = [sys.executable, "-m", "batchgen", "export", str(finished / "out"), "-"]
    child = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert b"Traceback" not in child.stderr.read()
    child.stderr.close()
    assert child.wait() == 141


def test_a_whole_run_comes_out_as_it_is(finished, form):
    command("export", finished / "out", finished / "b.jsonl")
    found = sorted(lines(finished / "b.jsonl"), key=lambda row: row["doc_key"])
    want = rows(finished / "out")
    for row in want:
        if form == "parquet":
            row["finished_at"] = row["finished_at"].isoformat(timespec="microseconds")
    assert found == want
