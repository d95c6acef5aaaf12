"""gz and zst: all of it is read, and what a cut file still holds is kept."""

import gzip
import json

import pytest
from helpers_data import packed
from helpers_run import by_id, command, record, rows, same_rows, start, write_job, write_jsonl

LONG = " The tide tables of the past year were read aloud and approved by all who were present."


def lines(records):
    return b"".join(json.dumps(one).encode() + b"\n" for one in records)


def many(count, first=0):
    return [record(n, text=f"{n:05d} " + record(n)["text"] + LONG * 20) for n in range(first, first + count)]


@pytest.fixture(params=[("gzip", ".gz"), ("zstd", ".zst")], ids=["gz", "zst"])
def packing(request):
    return request.param


def test_all_members_are_read(tmp_path, out, packing):
    """google-research-datasets/natural-questions#24"""
    kind, ending = packing
    data = packed(lines(map(record, range(3))), kind) + packed(lines(map(record, range(3, 6))), kind)
    (tmp_path / f"a.jsonl{ending}").write_bytes(data)
    outcome = start(write_job(tmp_path, [tmp_path / f"a.jsonl{ending}"]))
    assert (outcome.exit_status, outcome.report["documents"]["total"]) == (0, 6)
    assert set(by_id(out)) == {("str", f"d{n}") for n in range(6)}


def test_files_with_the_wrong_ending_are_read_as_what_they_are(tmp_path, out):
    write_jsonl(tmp_path / "in/plain.jsonl.gz", [record(0)])
    (tmp_path / "in/packed.jsonl").write_bytes(gzip.compress(lines(map(record, range(1, 4)))))
    assert start(write_job(tmp_path, [tmp_path / "in"])).exit_status == 0
    assert set(by_id(out)) == {("str", f"d{n}") for n in range(4)}


@pytest.mark.parametrize("id_field", ["id", None])
def test_a_cut_file_is_told_its_records_are_kept_and_none_is_done_again(tmp_path, out, packing, id_field):
    """BioJulia/Libz.jl#9"""
    kind, ending = packing
    path = tmp_path / f"in/b.jsonl{ending}"
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(1000, 1003)))
    write_jsonl(tmp_path / "in/c.jsonl", map(record, range(1003, 1006)))
    whole = packed(lines(many(400)), kind)
    path.write_bytes(whole[: len(whole) * 2 // 3])
    item = {"path": str(tmp_path / "in"), "id_field": id_field, "keep": ["id", "title"]}
    item["keep"] = {"id": "name", "title": "title"}
    job = write_job(tmp_path, [item])
    outcome = start(job)
    assert outcome.exit_status == 65
    assert outcome.report["exit_status"] == 65
    (told,) = outcome.report["notes"]["input files with errors"]
    kept = [row for row in rows(out) if row["source"] == str(path)]
    assert told.startswith(f"{path}: the {kind} stream is cut short after {len(kept)} records")
    assert 200 < len(kept) < 400
    assert {row["name"] for row in kept} == {f"d{n}" for n in range(len(kept))}
    assert len(rows(out)) == len(kept) + 6  # all other files are done
    assert all(row["status"] == "ok" for row in rows(out))
    # The same again costs nothing and is still no success.
    again = start(job)
    assert (again.exit_status, again.report["attempt"]["requests"]) == (65, 0)
    path.write_bytes(whole)
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["requests"] == 400 - len(kept)
    assert outcome.report["documents"]["ok"] == 406
    before = {row["doc_key"]: row for row in kept}
    assert [row for row in rows(out) if row["doc_key"] in before] == sorted(kept, key=lambda row: row["doc_key"])
    same_rows(kept, [row for row in rows(out) if row["doc_key"] in before])


def test_the_command_line_says_which_file_is_cut(tmp_path):
    whole = gzip.compress(lines(many(50)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    job = write_job(tmp_path, [tmp_path / "a.jsonl.gz"])
    done = command("run", job)
    assert done.returncode == 65
    assert f"{tmp_path / 'a.jsonl.gz'}: the gzip stream is cut short after" in done.stderr
    assert "finished:" not in done.stderr


def test_a_file_cut_before_its_first_record_is_told_and_the_others_are_done(tmp_path, out, packing):
    kind, ending = packing
    write_jsonl(tmp_path / "in/a.jsonl", [record(0)])
    (tmp_path / f"in/b.jsonl{ending}").write_bytes(packed(lines(many(3)), kind)[:20])
    outcome = start(write_job(tmp_path, [tmp_path / "in"]))
    assert outcome.exit_status == 65
    assert "after 0 records" in outcome.report["notes"]["input files with errors"][0]
    assert set(by_id(out)) == {("str", "d0")}


def test_a_packed_file_that_grew_costs_only_what_is_new(tmp_path, out, packing):
    kind, ending = packing
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packed(lines(map(record, range(5))), kind))
    job = write_job(tmp_path, [{"path": str(path), "keep": ["title"]}])
    start(job)
    path.write_bytes(path.read_bytes() + packed(lines(map(record, range(5, 8))), kind))
    outcome = start(job)
    assert (outcome.exit_status, outcome.report["attempt"]["requests"]) == (0, 3)
    assert len(rows(out)) == 8


def test_a_bad_line_of_a_packed_file_is_told_with_its_place(tmp_path, out, packing):
    kind, ending = packing
    data = lines(map(record, range(3))) + b"\n{\n" + lines([record(3)])
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed(data, kind))
    assert start(write_job(tmp_path, [tmp_path / f"a.jsonl{ending}"])).exit_status == 3
    (bad,) = [row for row in rows(out) if row["status"] == "failed"]
    assert bad["place"] == f"byte {data.index(b'{' + bytes([10]))}"
    assert bad["error"].startswith("line 5: ")
