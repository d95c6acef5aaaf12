"""validate: every fault at once, each with place and key; bad records are warnings; nothing is written."""

import gzip
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers_run import SENTENCE, command, record, start, write_job, write_jsonl

from batchgen.executors import validation
from batchgen.storage.rundir import RunDirectory


def look(job, *sets, quick=False):
    """The value, checked for what holds always; the folder is left as it was."""
    before = {path: path.stat().st_mtime_ns for path in job.parent.rglob("*")}
    found, status = validation.validate(job, sets, quick=quick)
    assert {path: path.stat().st_mtime_ns for path in job.parent.rglob("*")} == before
    assert found["valid"] == (not found["faults"]) == (status == 0)
    for one in found["faults"] + found["warnings"]:
        assert one.keys() - {"key"} == {"place", "fault"}
        assert one["place"]
        assert one["fault"]
    json.dumps(found, allow_nan=False)
    text = validation.text(found)
    assert all(one["fault"] in text for one in found["faults"])
    return found, status


def told(findings, name=""):
    """(last part of the place, key, sentence), of those whose place or key holds `name`."""
    return [
        (one["place"].rpartition("/")[2], one.get("key"), one["fault"])
        for one in findings
        if name in one["place"] or name in one.get("key", "")
    ]


def edit(job, **sections):
    value = yaml.safe_load(job.read_text()) | sections
    job.write_text(yaml.safe_dump(value, sort_keys=False))


@pytest.fixture
def job(tmp_path):
    """A job that is valid, with 30 documents in three files."""
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(10)))
    write_jsonl(tmp_path / "in/b.jsonl", map(record, range(10, 20)))
    pq.write_table(pa.Table.from_pylist([record(n) for n in range(20, 30)]), tmp_path / "in/c.parquet")
    return write_job(tmp_path, [tmp_path / "in/*"])


def test_a_job_that_is_valid(job, out):
    found, status = look(job)
    assert (status, found["faults"], found["warnings"]) == (0, [], [])
    assert [(one["rows"], one["exact"]) for one in found["files"]] == [(10, True)] * 3
    assert (found["rows"], found["rows_are_exact"], found["backend"], found["output"]) == (30, True, "fake", str(out))
    assert found["max_prompt_tokens"] == 2048 - 64
    assert found["ids"] == {"read": 30, "duplicates": 0}
    assert found["sample"]["documents"] == 30
    tokens = found["sample"]["prompt_tokens"]
    assert 100 < tokens["p50"] <= tokens["p90"] <= tokens["max"] < 300
    assert (found["sample"]["truncated"], found["sample"]["reasons"]) == (0, {})
    assert not out.exists()


def test_every_fault_is_in_the_list(job, tmp_path):
    (tmp_path / "in/d.parquet").write_bytes(b"PAR1 no footer")
    pq.write_table(pa.table({"id": ["x"], "body": ["y"]}), tmp_path / "in/e.parquet")
    (tmp_path / "in/f.csv").write_text("a,b\n")
    (tmp_path / "file").write_text("")
    edit(
        job,
        input=[
            {"path": str(tmp_path / "in/*"), "id_field": "id", "keep": ["title"]},
            {"path": str(tmp_path / "none/*"), "keep": ["title"]},
            {"path": str(tmp_path / "in/a.jsonl"), "keep": ["title"]},
        ],
        prompt={"system": "About {{ title }}.", "user": "{{ titel }}\n{{ text }}"},
        engine={"backend": "fake", "args": {"max_model_len": 512, "max_num_seq": 4}},
        sampling={"max_tokens": 512, "top_pp": 1},
        output={"dir": str(tmp_path / "file/out")},
    )
    found, status = look(job)
    faults = told(found["faults"])
    lines = job.read_text().splitlines()

    def at(marker):
        return f"job.yaml, line {next(n for n, line in enumerate(lines, 1) if marker in line)}"

    assert status == 78
    for place, key, words in [
        (at("titel"), "prompt.user", "{{ titel }}"),
        (at("max_num_seq"), "engine.args.max_num_seq", "did you mean 'max_num_seqs'?"),
        (at("top_pp"), "sampling.top_pp", "did you mean 'top_p'?"),
        (at("max_tokens"), "sampling.max_tokens", "leaves no room"),
        ("out", None, "is no folder"),
        (at("none/*"), "input.1.path", "no file matches"),
        ("a.jsonl", None, "input.0 and input.2 mean this file"),
        ("d.parquet", None, "no readable Parquet file"),
        ("e.parquet", None, "has no column 'text' (text_field); it has: id, body"),
        ("f.csv", None, "not a format"),
    ]:
        assert [one for one in faults if one[:2] == (place, key) and words in one[2]], (place, key, words, faults)
    # What can be looked at was looked at all the same.
    assert found["ids"]["read"] == 30
    assert [one["path"].rpartition("/")[2] for one in found["files"]] == ["a.jsonl", "b.jsonl", "c.parquet"]


def test_all_keys_that_are_wrong_are_told_with_line_and_key(job):
    edit(job, checkpoint={"rows": 0}, failures={"maxx": 1})
    found, status = look(job)
    assert status == 78
    keys = {one["key"]: one for one in found["faults"]}
    assert set(keys) == {"checkpoint.rows", "failures.maxx"}
    assert all("job.yaml, line " in one["place"] for one in keys.values())
    assert "did you mean 'max'?" in keys["failures.maxx"]["fault"]
    assert found["files"] is found["sample"] is None


def test_a_set_is_the_place_of_its_fault(job):
    found, _ = look(job, "engine.fed=rolling")
    assert told(found["faults"]) == [("--set engine.fed", "engine.fed", "unknown key; did you mean 'feed'?")]
    assert "--set engine.fed: unknown key" in validation.text(found)


@pytest.mark.parametrize(
    ("assignment", "key", "words"),
    [
        ("output.dir={a: b: c}", "output.dir", "the value is no valid YAML"),
        ("input.7.path=x: y", "input.7.path", "no entry 7 in a list of 1"),
        ("engine.feed", "engine.feed", "a key and a value are wanted"),
    ],
)
def test_a_set_whose_value_is_at_fault_is_told_by_its_key(job, assignment, key, words):
    found, _ = look(job, assignment)
    assert [(place, name, fault[: len(words)]) for place, name, fault in told(found["faults"])] == [
        (f"--set {key}", key, words)
    ]


@pytest.mark.parametrize("text", ["", "[", "\xff", "- a", "name: a\nname: b\n"])
def test_a_file_that_is_no_job_is_one_fault(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text, encoding="latin-1")
    found, status = look(tmp_path / "job.yaml")
    assert status == 78
    assert all("job.yaml" in one["place"] for one in found["faults"])


def test_bad_records_are_warnings_with_the_place_of_the_first(job, tmp_path):
    lines = [record(n) for n in range(100, 150)] + [{"id": f"e{n}", "body": "x"} for n in range(20)]
    path = write_jsonl(tmp_path / "in/z.jsonl", [*lines, {"id": "n", "text": 7}, {"text": SENTENCE}])
    with path.open("a") as stream:
        stream.write("\n{nonsense\n")
    found, status = look(job)
    assert (status, found["faults"]) == (0, [])
    assert told(found["warnings"]) == [
        ("z.jsonl, line 51", None, "no field 'text'; it has: id, body (20 of 73 looked at)"),
        ("z.jsonl, line 71", None, "field 'text' is no text but int (1 of 73 looked at)"),
        ("z.jsonl, line 72", None, "no id in field 'id'; it has: text"),
        (
            "z.jsonl, line 74",
            None,
            "Expecting property name enclosed in double quotes (at character 1)",
        ),
    ]
    assert found["sample"]["reasons"] == {
        "failed: bad_json": 1, "failed: missing_id": 1, "failed: missing_text": 20, "failed: text_type": 1,
    }  # fmt: skip


def test_all_ids_are_read_wherever_they_stand_but_not_with_quick(job, tmp_path):
    records = [record(n) for n in range(1000, 9000)]
    records[7000] = record(1)
    records[7001] = record(7001, id=None)
    write_jsonl(tmp_path / "in/z.jsonl", records)
    found, status = look(job)
    assert (status, found["ids"]) == (0, {"read": 8029, "duplicates": 1})
    (duplicate,) = [one for one in told(found["warnings"]) if "stood" in one[2]]
    assert duplicate[0] == "z.jsonl, line 7001"
    assert "the id 'd1' stood in " in duplicate[2]
    assert "a.jsonl, line 2" in duplicate[2]
    assert ("z.jsonl, line 7002", None, "no id in field 'id'") in told(found["warnings"])
    found, _ = look(job, quick=True)
    assert (found["ids"], found["warnings"]) == (None, [])
    assert "not read" in validation.text(found)


def test_duplicates_are_faults_where_the_job_refuses_them(job, tmp_path):
    write_jsonl(tmp_path / "in/z.jsonl", [record(1)] * 25)
    found, status = look(job, "input.0.on_duplicate=refuse")
    assert status == 65
    assert len(found["faults"]) == 21
    assert found["faults"][-1]["fault"] == "5 more rows have an id that stood before"
    assert look(job)[1] == 0


def test_a_file_that_breaks_off_is_a_fault(job, tmp_path):
    table = pa.Table.from_pylist([record(n) for n in range(1000, 3000)])
    path = tmp_path / "in/z.parquet"
    pq.write_table(table, path, row_group_size=500, compression=None)
    group = pq.ParquetFile(path).metadata.row_group(2).column(0)
    raw = bytearray(path.read_bytes())
    begin = group.dictionary_page_offset or group.data_page_offset
    raw[begin : begin + 64] = b"\xff" * 64
    path.write_bytes(raw)
    found, status = look(job)
    assert status == 65
    assert all(place == "z.parquet" for place, *_ in told(found["faults"]))
    assert "row 1000" in found["faults"][0]["fault"]
    assert look(job, quick=True)[1] == 0


def test_packed_files_are_looked_at_like_others_and_a_cut_one_is_a_fault(job, tmp_path):
    whole = gzip.compress(b"".join(json.dumps(record(n)).encode() + b"\n" for n in [*range(1000, 4000), 1]))
    (tmp_path / "in/y.jsonl.gz").write_bytes(whole)
    found, status = look(job)
    assert (status, found["ids"]) == (0, {"read": 3031, "duplicates": 1})
    assert told(found["warnings"], "y.jsonl")[0][0] == "y.jsonl.gz, line 3001"
    (tmp_path / "in/z.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    found, status = look(job)
    assert status == 65
    assert [place for place, *_ in told(found["faults"])] == ["z.jsonl.gz"]


def test_files_that_a_run_does_without_are_told(job, tmp_path):
    (tmp_path / "in/x.parquet").write_bytes(b"")
    (tmp_path / "in/notes.txt").write_text("mine")
    found, status = look(job, f"input.0.path={tmp_path / 'in'}", "input.0.on_error=skip")
    assert status == 65  # as the run's own end
    assert [place for place, *_ in told(found["faults"])] == ["x.parquet"]
    assert "notes.txt" in told(found["warnings"])[0][2]
    assert found["rows"] == 30


def test_the_sample_tells_what_will_be_cut_and_skipped(job, tmp_path):
    write_jsonl(
        tmp_path / "in/z.jsonl", [record(100, text="long " * 2000), record(101, text=""), record(102, text="no")]
    )
    sample = look(job)[0]["sample"]
    assert (sample["documents"], sample["truncated"]) == (33, 1)
    assert sample["prompt_tokens"]["max"] == 1984
    assert sample["reasons"] == {"skipped: empty": 1, "skipped: short": 1}
    text = validation.text(look(job)[0])
    assert "longest 1,984 of 1,984 tokens" in text
    assert "truncated: 1 of these" in text
    found = look(job, "long_documents.policy=map_reduce")[0]
    assert (found["sample"]["truncated"], found["sample"]["in_pieces"]) == (0, 1)
    assert "in pieces: 1 of these" in validation.text(found)


def test_prompts_of_pieces_are_looked_at(job):
    found, status = look(job, "long_documents.piece=none")
    assert status == 78
    assert "long_documents.piece must hold {{ text }} exactly once" in found["faults"][0]["fault"]


def test_a_prompt_that_fails_on_values_is_a_warning(job):
    found, status = look(job, "prompt.user='{{ title / 2 }} {{ text }}'")
    assert status == 0
    assert "unsupported operand" in found["warnings"][0]["fault"]
    assert found["sample"]["prompt_tokens"] == {"p50": None, "p90": None, "max": None}
    assert "none to send" in validation.text(found)


def test_the_sample_is_spread_and_bounded(tmp_path):
    for n in range(30):
        write_jsonl(tmp_path / f"in/{n:02}.jsonl", [record(1000 * n + k) for k in range(300)])
    write_jsonl(tmp_path / "in/99.jsonl", [record(10**6 + k, text=SENTENCE.format(n=k) * 4) for k in range(300)])
    job = write_job(tmp_path, [tmp_path / "in/*"])
    for quick in (False, True):
        sample = look(job, quick=quick)[0]["sample"]
        assert 900 <= sample["documents"] <= 1000
        assert sample["prompt_tokens"]["max"] > 2 * sample["prompt_tokens"]["p50"]  # the last file is in it too


def test_records_are_looked_at_all_over_a_file(tmp_path):
    lines = [record(n) for n in range(5000)]
    for n in range(3000, 5000):
        lines[n]["body"] = lines[n].pop("text")
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", lines)])
    (warning,) = look(job)[0]["warnings"]
    assert "no field 'text'; it has: id, title, body (400 of 1,000 looked at)" in warning["fault"]
    assert look(job, quick=True)[0]["warnings"] == []


def test_files_without_records_and_kept_fields_that_nobody_has_are_warnings(job, tmp_path):
    (tmp_path / "in/y.jsonl").write_text("")
    (tmp_path / "in/z.jsonl").write_text("\n\n")
    found, status = look(job, "input.0.keep=[title, autor]")
    assert status == 0
    assert [one[0] for one in told(found["warnings"]) if one[2] == "holds no records"] == ["y.jsonl", "z.jsonl"]
    (kept,) = told(found["warnings"], "keep")
    assert kept[1:] == ("input.0.keep", "no record that was looked at has a value for 'autor'")


# The output folder.


def test_a_folder_of_others_is_a_fault(job, out):
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    found, status = look(job)
    assert status == 78
    assert "is no run directory (it holds thesis.tex)" in found["faults"][0]["fault"]


def test_a_run_that_is_held_is_a_fault(job, out):
    with RunDirectory(out):
        found, status = look(job)
    assert status == 73
    assert told(found["faults"])[0][0] == "out"
    assert "another process holds this run: pid " in found["faults"][0]["fault"]
    assert look(job)[1] == 0


def test_a_folder_that_cannot_be_written_is_a_fault(job, out, monkeypatch):
    monkeypatch.setattr(validation.os, "access", lambda *_: False)
    found, status = look(job)
    assert status == 74
    assert told(found["faults"]) == [("out", None, f"cannot be written: no permission in {out.parent}")]


def test_a_textfile_without_a_folder_is_a_fault(job, tmp_path):
    found, status = look(job, f"metrics.textfile={tmp_path / 'nowhere/it.prom'}")
    assert status == 78
    assert found["faults"][0]["key"] == "metrics.textfile"
    assert str(tmp_path / "nowhere") in found["faults"][0]["fault"]
    assert look(job, f"metrics.textfile={tmp_path / 'it.prom'}")[1] == 0
    assert not (tmp_path / "it.prom").exists()


def test_settings_that_a_start_would_refuse_are_faults(job):
    start(job, limit=3)
    found, status = look(job, "sampling.max_tokens=9")
    assert status == 78
    assert {one["key"] for one in found["faults"]} == {"max_prompt_tokens", "sampling.max_tokens"}
    assert look(job)[1] == 0


def test_settings_of_a_start_that_made_no_row_bind_nobody(job, tmp_path):
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    (tmp_path / "in/a.jsonl").write_text("")
    start(job)
    assert look(job, "sampling.max_tokens=9")[1] == 0


# The model.


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "does not hold weights"),
        (
            {
                "a-1.safetensors": "",
                "model.safetensors.index.json": json.dumps({"weight_map": {"x": "a-2.safetensors"}}),
            },
            "does not hold 1 of its weight files (a-2.safetensors)",
        ),
    ],
)
def test_weights_that_are_not_there_are_a_fault(job, tmp_path, model_folder, files, words):
    model = tmp_path / "model"
    model.mkdir()
    for path in model_folder.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).symlink_to(path)
    for name, text in files.items():
        (model / name).write_text(text)
    found, status = look(job, "engine.backend=vllm", f"engine.args.model={model}")
    assert status == 78
    assert [one for one in found["faults"] if words in one["fault"]]
    assert found["sample"]["documents"] == 30  # the tokenizer is there


def test_a_model_without_tokenizer_or_template_is_a_fault_and_the_files_are_read(job, tmp_path, model_folder):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048, "model_type": "llama"}))
    found, status = look(job, f"engine.args.model={model}")
    assert status == 78
    assert "has no chat template" in found["faults"][0]["fault"]
    found, status = look(job, f"engine.args.model={model}", "prompt.mode=completion")
    assert status == 78
    assert "holds no tokenizer" in found["faults"][0]["fault"]
    assert (found["sample"], found["ids"]["read"]) == (None, 30)


def test_a_prompt_that_leaves_no_room_is_a_fault(job):
    found, status = look(job, f"prompt.system={'instruction ' * 400}")
    assert status == 78
    assert found["faults"][0]["place"].endswith("job.yaml, line 7")
    assert found["faults"][0]["key"] == "prompt"
    assert "the prompt without any document takes" in found["faults"][0]["fault"]


# On the command line.


def test_the_command_line_gives_data_or_text(job):
    done = command("validate", job, "--json", "--set", "input.0.on_duplicate=refuse")
    assert (done.returncode, done.stderr) == (0, "")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(done.stdout, parse_constant=refuse)["valid"] is True
    done = command("validate", job, "--quick", "--set", "input.0.path=none/*.jsonl")
    assert (done.returncode, done.stderr) == (65, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith("job.yaml: 1 fault")
    assert lines[-2] == "faults:"
    assert lines[-1].startswith("  --set input.0.path: none/*.jsonl: no file matches")


def test_long_lists_are_cut_for_a_person_and_whole_as_data(tmp_path):
    for n in range(100):
        (tmp_path / f"{n:03}.jsonl").write_text("")
    found, _ = look(write_job(tmp_path, [tmp_path / "*.jsonl"]))
    assert len(found["warnings"]) == len(found["files"]) == 100
    text = validation.text(found).splitlines()
    assert len(text) < 100
    assert sum("and 60 more; --json lists all" in line for line in text) == 2
    assert max(map(len, text)) < 200
    assert not any(isinstance(value, float) and math.isnan(value) for value in found.values())
