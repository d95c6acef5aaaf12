"""Whole runs over data sets: changes, errors, totals that nobody knows, and commits of the Hub.

The Hub is not reached: a local folder stands in its place, and its commit is made up.
"""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.errors import ConfigError, FingerprintError, InputError
from batchgen.executors import inspection, validation

FIRST, SECOND = "a" * 40, "b" * 40


def item(dataset, **more):
    return {"dataset": dataset, "id_field": "id", "keep": ["title"]} | more


def lines(folder, name, numbers, **more):
    return write_jsonl(folder / "in" / f"{name}.jsonl", [record(n, **more) for n in numbers])


def json_job(folder, **sections):
    return write_job(folder, [item({"path": "json", "data_files": f"{folder}/in/*.jsonl"})], **sections)


def report_of(out):
    return json.loads((out / "report.json").read_text())


def test_a_finished_run_imports_nothing_heavy_and_is_quick(tmp_path):
    lines(tmp_path, "a", range(6))
    pq.write_table(pa.Table.from_pylist([record(n) for n in range(6, 9)]), tmp_path / "b.parquet")
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist([record(n) for n in range(9, 12)]), tmp_path / "folder/train.parquet")
    inputs = [
        item({"path": "json", "data_files": f"{tmp_path}/in/*.jsonl"}),
        item({"path": "parquet", "data_files": f"{tmp_path}/b.parquet"}),
        item({"path": str(tmp_path / "folder")}),
    ]
    job = write_job(tmp_path, inputs)
    assert start(job).report["documents"]["ok"] == 12
    code = (
        "import sys, time\n"
        "from batchgen.cli import cli\n"
        f"cli.main(['run', {str(job)!r}, '--json'], standalone_mode=False)\n"
        "print([m for m in ('vllm', 'torch', 'transformers', 'datasets', 'huggingface_hub') if m in sys.modules],"
        " time.process_time())"  # not the clock: others may use the machine
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert modules == "[]"
    assert float(seconds) < 2


def test_only_the_rows_of_a_file_that_came_are_done(tmp_path, out):
    lines(tmp_path, "b", range(6))
    job = json_job(tmp_path)
    start(job)
    before = rows(out)
    lines(tmp_path, "a", range(6, 10))  # the shards that were there get other numbers
    report = start(job).report
    assert report["attempt"]["requests"] == 4
    assert (report["documents"]["total"], report["documents"]["pending"]) == (10, 0)
    assert [row for row in rows(out) if row in before] == before
    assert len(by_id(out)) == 10


def test_an_edited_row_is_done_again_and_one_that_is_gone_moves(tmp_path, out):
    lines(tmp_path, "a", range(6))
    job = json_job(tmp_path)
    start(job)
    lines(tmp_path, "a", range(5))
    write_jsonl(tmp_path / "in/b.jsonl", [record(7)])
    lines(tmp_path, "a", range(4))
    assert start(job).report["attempt"]["requests"] == 1
    assert {key[1] for key in by_id(out)} == {"d0", "d1", "d2", "d3", "d7"}
    lines(tmp_path, "a", range(4), text="Another text about the harbour, long enough to be sent once more.")
    assert start(job).report["attempt"]["requests"] == 4


def test_an_error_in_one_data_set_leaves_the_others_and_is_done_with_when_mended(tmp_path, out):
    lines(tmp_path, "a", range(5))
    broken = tmp_path / "in/b.jsonl"
    broken.write_text('{"id": "d5", "text": \n')
    pq.write_table(pa.Table.from_pylist([record(n) for n in range(10, 14)]), tmp_path / "c.parquet")
    inputs = [
        item({"path": "json", "data_files": f"{tmp_path}/in/*.jsonl"}),
        item({"path": "parquet", "data_files": f"{tmp_path}/c.parquet"}),
    ]
    job = write_job(tmp_path, inputs)
    outcome = start(job)
    assert outcome.exit_status == 65
    (told,) = outcome.report["notes"]["input files with errors"]
    assert re.search(r"^dataset:json/train#\w{8} \(input\.0\.dataset\): shard 1 row 0: cannot be read: ", told), told
    assert {key[1] for key in by_id(out)} == {f"d{n}" for n in (0, 1, 2, 3, 4, 10, 11, 12, 13)}
    assert not outcome.report["documents"]["total_is_exact"]
    write_jsonl(broken, map(record, range(5, 8)))
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["requests"] == 3
    assert outcome.report["documents"]["total_is_exact"]
    assert len(by_id(out)) == 12


def test_what_cannot_be_opened_is_told_for_all_data_sets_before_anything_is_done(tmp_path, out):
    lines(tmp_path, "a", range(3))
    files = f"{tmp_path}/in/*.jsonl"
    wrong = [
        item({"path": "json", "data_files": f"{tmp_path}/none.jsonl"}),
        item({"path": "json", "data_files": files, "split": "test"}),
        item({"path": "json", "data_files": [files]}, id_field="key"),
    ]
    job = write_job(tmp_path, [*wrong, item({"path": "json", "data_files": files})])
    with pytest.raises(InputError) as caught:
        start(job)
    told = str(caught.value).splitlines()
    assert [re.search(r"\(input\.(\d)\.dataset\)", one)[1] for one in told] == ["0", "1", "2"]
    for one, words in zip(
        told, ("no file matches", "Available splits: ['train']", "it has: id, title, text"), strict=True
    ):
        assert words in one
    assert rows(out) == []


def test_a_data_set_that_cannot_be_opened_is_skipped_where_the_job_says_so(tmp_path, out):
    lines(tmp_path, "a", range(3))
    none = item({"path": "json", "data_files": f"{tmp_path}/none.jsonl"}, on_error="skip")
    outcome = start(write_job(tmp_path, [none, item({"path": "json", "data_files": f"{tmp_path}/in/a.jsonl"})]))
    assert (outcome.exit_status, len(rows(out))) == (65, 3)
    (told,) = outcome.report["notes"]["input files with errors"]
    assert "(input.0.dataset): cannot be opened: no file matches" in told


def test_one_data_set_twice_is_refused_and_two_of_other_files_are_two(tmp_path, out):
    for name, numbers in (("a", range(3)), ("b", range(3, 6))):
        lines(tmp_path, name, numbers)
    one, other = ({"path": "json", "data_files": f"{tmp_path}/in/{name}.jsonl"} for name in "ab")
    with pytest.raises(ConfigError, match=r"input\.0 and input\.1 mean this data set"):
        start(write_job(tmp_path, [item(one), item(one)]))
    assert start(write_job(tmp_path, [item(one), item(other)])).report["documents"]["ok"] == 6
    assert len({row["source"] for row in rows(out)}) == 2


def test_a_total_that_nobody_knows_is_told_as_such_and_known_after_a_pass(tmp_path, out):
    lines(tmp_path, "a", range(9))
    job = json_job(tmp_path)
    assert "rows not counted yet" in validation.text(validation.validate(job, [], quick=False)[0])
    done = command("run", job, "--limit", 4)
    assert done.returncode == 0, done.stderr
    assert "documents of unknown number in 1 data set; 0 done before" in done.stderr
    assert re.search(r"\d\d:\d\d:\d\d 4 documents, ", done.stderr)
    documents = report_of(out)["documents"]
    assert (documents["total"], documents["total_is_exact"], documents["pending"]) == (4, False, 0)
    assert "| about 4 |" in (out / "report.md").read_text()
    assert "about 4 documents: 4 ok" in inspection.status_text(inspection.status(out))
    assert start(job).exit_status == 0
    documents = report_of(out)["documents"]
    assert (documents["total"], documents["total_is_exact"], documents["pending"]) == (9, True, 0)
    told = inspection.status(out)
    assert (told["total"], told["total_is_exact"], told["ok"], told["pending"]) == (9, True, 9, 0)


def test_a_text_that_is_none_and_an_id_that_is_missing_are_rows_as_anywhere(tmp_path, out):
    odd = [record(0), record(1, text=None), record(2, id=None), record(0), record(3, text="short")]
    write_jsonl(tmp_path / "in/a.jsonl", odd)
    report = start(json_job(tmp_path)).report
    assert report["documents"]["reasons"] == {
        "failed: duplicate_id": 1, "failed: missing_id": 1, "skipped: empty": 1, "skipped: short": 1,
    }  # fmt: skip
    assert {row["place"] for row in rows(out)} == {f"shard 0 row {n}" for n in range(5)}


# Commits of the Hub.


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """org/data on a Hub that is made up: `commits` by revision, `asked` the questions, `opened` what was opened."""
    import datasets

    hub = SimpleNamespace(commits={None: FIRST, "main": FIRST, "v2": SECOND}, asked=[], opened=[])
    real = datasets.load_dataset_builder

    def dataset_info(self, path, *, revision=None):
        hub.asked.append(revision)
        return SimpleNamespace(sha=hub.commits[revision])

    def load_dataset_builder(path, revision=None, **arguments):
        assert path == "org/data"
        if revision is None:
            return real(path, **arguments)
        hub.opened.append(revision)
        return real("json", data_files=f"{tmp_path}/in/*.jsonl", **arguments)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.chdir(tmp_path)
    lines(tmp_path, "a", range(5))
    return hub


def hub_job(folder, **dataset):
    return write_job(folder, [item({"path": "org/data"} | dataset)])


def test_the_commit_of_the_first_start_holds_for_the_run(tmp_path, out, hub):
    job = hub_job(tmp_path)
    assert start(job, limit=2).exit_status == 0
    assert (hub.asked, set(hub.opened)) == ([None], {FIRST})
    entry = json.loads((out / "plan.json").read_text())["files"]["dataset:org/data/train"]
    assert entry["revision"] == FIRST
    hub.commits[None] = SECOND
    hub.opened.clear()
    assert start(job).exit_status == 0
    assert (hub.asked, set(hub.opened)) == ([None], {FIRST})
    assert len(rows(out)) == 5
    hub.opened.clear()
    assert start(job).report["attempt"]["requests"] == 0
    assert (hub.asked, hub.opened) == ([None], [])  # known whole: neither the Hub nor the library is asked


def test_another_revision_in_the_job_is_refused_by_its_key(tmp_path, out, hub):
    start(hub_job(tmp_path, revision="main"))
    job = hub_job(tmp_path, revision="v2")
    with pytest.raises(FingerprintError) as caught:
        start(job)
    told = [line.strip() for line in str(caught.value).splitlines() if ".revision: " in line]
    assert told == [f'input[dataset:org/data/train].revision: "{FIRST}" → "{SECOND}"']
    assert start(hub_job(tmp_path, revision=FIRST)).report["attempt"]["requests"] == 0  # the same commit, spelt out
    lines(tmp_path, "a", range(7))
    hub.opened.clear()
    job = hub_job(tmp_path, revision="v2")
    assert start(job, on_change="keep").report["attempt"]["requests"] == 2
    assert set(hub.opened) == {SECOND}
    assert len(by_id(out)) == 7
    hub.commits["v2"] = "c" * 40
    assert start(job).report["attempt"]["requests"] == 0


def test_a_folder_that_is_gone_does_not_become_a_data_set_of_the_hub(tmp_path, hub):
    folder = write_jsonl(tmp_path / "org/data/train.jsonl", map(record, range(5)))
    start(hub_job(tmp_path))
    folder.rename(tmp_path / "gone.jsonl")
    folder.parent.rmdir()
    with pytest.raises(FingerprintError, match=f'revision: \\(not set\\) → "{FIRST}"'):
        start(hub_job(tmp_path))


def test_a_fresh_run_takes_the_commit_of_its_own_day(tmp_path, hub):
    job = hub_job(tmp_path)
    start(job)
    hub.commits[None] = SECOND
    hub.opened.clear()
    assert start(job, fresh=True).report["attempt"]["requests"] == 5
    assert set(hub.opened) == {SECOND}
