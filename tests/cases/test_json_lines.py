"""JSON Lines as other tools leave them: byte order marks, odd separators, broken lines, types that come late."""

import json

import pyarrow.dataset as ds
import pytest
from helpers_run import SENTENCE, by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.errors import InputError
from batchgen.reporting.stats import read_telemetry
from batchgen.storage.rundir import RunDirectory

BOM = b"\xef\xbb\xbf"


def lines(*records, ascii_only=True):
    return b"".join(json.dumps(one, ensure_ascii=ascii_only).encode() + b"\n" for one in records)


# Byte order marks and UTF-16.


@pytest.mark.parametrize("joined", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_first_key_or_text(tmp_path, out, joined):
    """wbolster/jsonlines#68"""
    data = BOM + lines(*map(record, range(3))) + (BOM + lines(record(3)) if joined else b"")
    (tmp_path / "a.jsonl").write_bytes(data)
    job = write_job(tmp_path, [tmp_path / "a.jsonl"])
    assert start(job).exit_status == 0
    assert set(by_id(out)) == {("str", f"d{n}") for n in range(4 if joined else 3)}
    assert not any("\ufeff" in str(value) for row in rows(out) for value in row.values())
    # The same documents without the mark are the same documents.
    write_jsonl(tmp_path / "a.jsonl", map(record, range(4 if joined else 3)))
    assert start(job).report["attempt"]["requests"] == 0


def test_a_utf16_file_is_one_error_that_names_it(tmp_path, out):
    (tmp_path / "a.jsonl").write_bytes(lines(*map(record, range(3))).decode().encode("utf-16"))
    done = command("run", write_job(tmp_path, [tmp_path / "a.jsonl"]))
    assert done.returncode == 65
    told = [line for line in done.stderr.splitlines() if "a.jsonl" in line]
    assert len(told) == 1
    assert "UTF-16" in told[0]
    assert rows(out) == []


# Separators inside of texts.

SEPARATORS = {"nel": "\x85", "ls": "\u2028", "ps": "\u2029", "vt": "\x0b", "ff": "\x0c", "fs": "\x1c"}


def test_records_end_at_lf_only_in_the_input_the_output_and_our_own_files(tmp_path, out):
    """huggingface/tau#354"""
    data = [
        {"id": name, "text": f"before {mark} after the mark {name} in this line"} for name, mark in SEPARATORS.items()
    ]
    path = tmp_path / "a\u2028b.jsonl"  # so that our own files hold one
    path.write_bytes(lines(*data, ascii_only=False))
    assert len(path.read_text(encoding="utf-8").splitlines()) > len(data)
    job = write_job(tmp_path, [{"path": str(path), "id_field": "id", "keep": {"text": "whole"}}],
                    prompt={"user": "{{ text }}"})  # fmt: skip
    assert start(job).exit_status == 0
    found = ds.dataset(out / "summaries").to_table().to_pylist()
    assert {row["id"]: row["whole"] for row in found} == {one["id"]: one["text"] for one in data}
    assert [row["source"] for row in found] == [str(path)] * len(data)
    # What this run wrote beside, read back: the second start knows every document and every file.
    assert start(job).report["attempt"]["requests"] == 0
    (telemetry,) = RunDirectory(out).telemetries()
    assert len(list(read_telemetry(telemetry))) == telemetry.read_bytes().count(b"\n")


# Lines that are no records.

MESSY = [
    json.dumps(record(0)), "", "   ", json.dumps(record(1)), "\t", '{"id": "cut", "text": "no end', "[1, 2, 3]",
    '"just a string"', "null", "17", json.dumps(record(2)), '{"id": "notext"}', '{"id": "nulltext", "text": null}',
    '{"id": "inttext", "text": 12}', '{"id": "twice", "text": "a", "text": "b"}', json.dumps(record(3)),
    "not json at all", json.dumps(record(4)), json.dumps(record(5)),
]  # fmt: skip
BAD = {6: "bad_json", 7: "bad_json", 8: "bad_json", 9: "bad_json", 10: "bad_json", 12: "missing_text", 14: "text_type",
       15: "bad_json", 17: "bad_json"}  # fmt: skip


@pytest.mark.parametrize(("end", "tail"), [("\n", ""), ("\r\n", "\r\n\r\n\r\n")])
def test_each_line_is_a_document_a_failed_record_or_blank(tmp_path, out, end, tail):
    """vllm-project/vllm#7132"""
    data = (end.join(MESSY) + tail).encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    outcome = start(write_job(tmp_path, [tmp_path / "a.jsonl"]))
    assert outcome.exit_status == 3
    found = rows(out)
    assert {row["id"] for row in found if row["status"] == "ok"} == {f"d{n}" for n in range(6)}
    # Every bad line with file, physical line and reason.
    bad = [row for row in found if row["status"] == "failed"]
    assert {int(row["error"].split(":")[0].removeprefix("line ")): row["error_type"] for row in bad} == BAD
    assert all(row["source"] == str(tmp_path / "a.jsonl") and row["error"].split(": ")[1] for row in bad)
    assert [row["error"] for row in bad if "twice" in row["error"]] == ["line 15: key 'text' stands twice"]
    # A text that is null is an empty document.
    assert [(row["id"], row["error_type"]) for row in found if row["status"] == "skipped"] == [("nulltext", "empty")]
    blank = sum(not line.strip() for line in data.split(b"\n")[: len(data.split(b"\n")) - (1 if tail else 0)])
    physical = len(data.split(b"\n")) - (1 if tail else 0)
    assert blank == (5 if tail else 3)
    assert len(found) + blank == physical
    assert outcome.report["documents"]["total"] == len(found)


# Fields that nobody asked for, and types that change on the way.


def late_types():
    """Null and empty at first; text, numbers, new fields later."""
    yield from (record(n, source=None, tags=[]) for n in range(200))
    yield from (record(n, source="register", tags=["quay"]) for n in range(200, 205))
    yield record(205, extra={"page": 3})
    yield record(206, source=17)


@pytest.mark.parametrize("files", [1, 2])
def test_fields_that_the_job_does_not_name_can_have_any_type(tmp_path, out, files):
    """huggingface/datasets#7222"""
    data = list(late_types())
    edges = [0, 207] if files == 1 else [0, 10, 207]
    for n in range(files):
        write_jsonl(tmp_path / "in" / f"{n}.jsonl", data[edges[n] : edges[n + 1]])
    assert start(write_job(tmp_path, [tmp_path / "in"])).exit_status == 0
    assert len(by_id(out)) == 207


@pytest.mark.parametrize("files", [1, 2])
def test_a_kept_field_takes_no_type_from_the_first_records_or_the_first_file(tmp_path, out, files):
    data = list(late_types())
    edges = [0, 207] if files == 1 else [0, 200, 207]
    for n in range(files):
        write_jsonl(tmp_path / "in" / f"{n}.jsonl", data[edges[n] : edges[n + 1]])
    item = {"path": str(tmp_path / "in"), "id_field": "id", "keep": ["title", "source", "tags", "extra"]}
    item["keep"] = {name: name if name != "source" else "origin" for name in item["keep"]}
    assert start(write_job(tmp_path, [item])).exit_status == 0
    found = by_id(out)
    assert found["str", "d0"]["origin"] is None
    assert found["str", "d200"]["origin"] == "register"
    assert json.loads(found["str", "d206"]["origin"]) == 17
    assert json.loads(found["str", "d200"]["tags"]) == ["quay"]
    assert json.loads(found["str", "d205"]["extra"]) == {"page": 3}
    assert all(row["flags"] == [] for row in found.values())


# Whole JSON documents.


def test_json_files_in_a_folder_are_read_as_json_lines_and_arrays_refused_with_the_way_out(tmp_path, out):
    write_jsonl(tmp_path / "in/a.json", map(record, range(3)))
    job = write_job(tmp_path, [tmp_path / "in"])
    assert start(job).exit_status == 0
    assert len(by_id(out)) == 3
    (tmp_path / "in/b.json").write_text(json.dumps([record(n) for n in range(3, 9)], indent=2))
    with pytest.raises(InputError, match=r"b\.json: .*jq -c '\.\[\]'"):
        start(job)
    (tmp_path / "in/b.json").write_bytes(lines(*[json.loads(json.dumps(record(n))) for n in range(3, 9)]))
    assert start(job).exit_status == 0
    assert len(by_id(out)) == 9


def test_text_of_odd_characters_goes_through_the_whole_run(tmp_path, out):
    odd = {"nul": "\\u0000", "half": "\\ud83d", "pair": "\\ud83d\\ude00", "bom": "\\ufeff", "esc": "\\u001b[2J"}
    data = [f'{{"id": "{name}", "text": "{SENTENCE.format(n=1)}{mark}"}}' for name, mark in odd.items()]
    (tmp_path / "a.jsonl").write_text("\n".join(data))
    item = {"path": str(tmp_path / "a.jsonl"), "id_field": "id", "keep": {"text": "whole"}}
    assert start(write_job(tmp_path, [item], prompt={"user": "{{ text }}"})).exit_status == 0
    found = {row["id"]: row["whole"][-1] for row in rows(out)}
    assert found == {"nul": "\x00", "half": "\ufffd", "pair": "\U0001f600", "bom": "\ufeff", "esc": "J"}
