"""Whole runs on the fake engine: what ends how, and that the sums add up."""

import errno
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import by_id, command, record, rows, same_rows, start, write_job, write_jsonl

from batchgen.errors import ConfigError, EngineError, FingerprintError, InputError, LockedError, OutputError
from batchgen.lifecycle import Stop
from batchgen.storage.rundir import RunDirectory


def sums(report):
    documents = report["documents"]
    return {name: documents[name] for name in ("total", "ok", "failed", "skipped", "pending")}


def test_each_document_ends_in_one_row_and_the_sums_add_up(tmp_path, out):
    data = [*map(record, range(20)), record(20, text=""), record(21, text="n/a"), record(22, text=7), {"id": "d23"}]
    write_jsonl(tmp_path / "a.jsonl", data)
    outcome = start(write_job(tmp_path, [tmp_path / "a.jsonl"]))
    assert outcome.exit_status == 3
    assert sums(outcome.report) == {"total": 24, "ok": 20, "failed": 2, "skipped": 2, "pending": 0}
    found = by_id(out)
    assert len(found) == 24
    assert found["str", "d20"]["error_type"] == "empty"
    assert found["str", "d21"]["error_type"] == "short"
    assert found["str", "d22"]["error_type"] == "text_type"
    assert found["str", "d23"]["error_type"] == "missing_text"
    assert all(found["str", f"d{n}"]["status"] == "ok" for n in range(20))
    # The fake's text comes from the middle of the prompt, so each summary belongs to its own document.
    assert all(f"{n}" in found["str", f"d{n}"]["summary"] for n in range(10, 20))


def test_a_second_start_does_nothing_and_leaves_every_part_alone(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))
    job = write_job(tmp_path, [tmp_path / "a.jsonl"])
    start(job)
    before = {path: path.read_bytes() for path in out.glob("summaries/*")}
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["documents"]["done_before"] == 10
    assert outcome.report["attempt"]["requests"] == 0
    assert outcome.report["run"]["requests"] == 10
    assert {path: path.read_bytes() for path in out.glob("summaries/*")} == before


def test_failures_max_decides_on_the_exit_status(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))
    job = write_job(
        tmp_path, [tmp_path / "a.jsonl"], engine={"backend": "fake", "fake": {"fail_every": 5}}, failures={"max": 2}
    )
    assert start(job).exit_status == 0
    outcome = start(job, "failures.max=1")
    assert outcome.exit_status == 3
    assert outcome.report["documents"]["reasons"] == {"failed: request_failed": 2}
    assert "2 documents failed" in outcome.reason


def test_both_feeds_give_the_same_rows(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(50)))
    job = write_job(tmp_path, [tmp_path / "a.jsonl"])
    start(job, "engine.feed=rolling", f"output.dir={tmp_path / 'rolling'}")
    start(job, "engine.feed=generate", f"output.dir={tmp_path / 'generate'}")
    same_rows(rows(tmp_path / "rolling"), rows(tmp_path / "generate"))


def test_limit_stops_after_n_and_goes_on_later(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))
    job = write_job(tmp_path, [tmp_path / "a.jsonl"])
    outcome = start(job, limit=4)
    assert outcome.exit_status == 0
    assert sums(outcome.report) == {"total": 10, "ok": 4, "failed": 0, "skipped": 0, "pending": 6}
    assert start(job, limit=4).report["documents"]["ok"] == 8
    assert sums(start(job).report) == {"total": 10, "ok": 10, "failed": 0, "skipped": 0, "pending": 0}
    assert len(by_id(out)) == 10


def test_ids_of_both_types_are_different_documents(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", [record(1, id=1), record(2, id="1")])
    start(write_job(tmp_path, [tmp_path / "a.jsonl"]))
    assert set(by_id(out)) == {("int", "1"), ("str", "1")}


def test_the_second_row_of_an_id_fails_alone_and_stays_so(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", [record(1), record(2), record(3, id="d1")])
    job = write_job(tmp_path, [tmp_path / "a.jsonl"])
    assert start(job).exit_status == 3
    found = rows(out)
    assert [(row["id"], row["error_type"]) for row in found if row["status"] == "failed"] == [("d1", "duplicate_id")]
    assert sum(row["status"] == "ok" for row in found) == 2
    outcome = start(job)
    assert outcome.report["attempt"]["requests"] == 0
    assert rows(out) == found


def test_documents_that_change_places_between_files_are_told_from_those_that_are_gone(tmp_path, out):
    def write(name, *numbers):
        write_jsonl(tmp_path / f"in/{name}.jsonl", map(record, numbers))

    write("a", 1)
    write("b", 2)
    job = write_job(tmp_path, [tmp_path / "in"])
    start(job)
    write("a", 2)
    write("b", 1, 3)
    start(job)
    write("b", 3)
    assert start(job).report["notes"]["orphans"] == 1
    assert sorted(by_id(out)) == [("str", "d2"), ("str", "d3")]


def test_a_duplicate_id_is_one_only_as_long_as_the_other_row_is_there(tmp_path, out):
    write_jsonl(tmp_path / "in/a.jsonl", [record(1), record(2)])
    write_jsonl(tmp_path / "in/b.jsonl", [record(1), record(3)])
    job = write_job(tmp_path, [tmp_path / "in"])
    assert start(job).exit_status == 3
    write_jsonl(tmp_path / "in/a.jsonl", [record(2)])
    assert start(job).exit_status == 0
    assert {row["id"]: row["status"] for row in rows(out)} == {"d1": "ok", "d2": "ok", "d3": "ok"}


def test_without_id_field_equal_texts_keep_their_own_rows(tmp_path, out):
    write_jsonl(tmp_path / "a.jsonl", [record(1), record(1), record(2)])
    job = write_job(tmp_path, [{"path": str(tmp_path / "a.jsonl"), "keep": ["title"]}])
    assert start(job).exit_status == 0
    assert len(rows(out)) == 3


def test_an_edited_document_replaces_its_row_and_only_it_is_done_again(tmp_path, out):
    path = write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))
    job = write_job(tmp_path, [path])
    start(job)
    before = by_id(out)
    write_jsonl(path, [record(n, text="An edited text about " + "the new harbour wall " * 4) if n == 3 else record(n)
                       for n in range(10)])  # fmt: skip
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["requests"] == 1
    assert outcome.report["notes"]["edited documents"] == 1
    after = by_id(out)
    assert [key for key in before if before[key] != after[key]] == [("str", "d3")]
    assert len(rows(out)) == 10


def test_a_kept_field_outside_the_prompt_makes_no_new_document(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))
    job = write_job(tmp_path, [{"path": str(path), "id_field": "id", "keep": ["title", "seen"]}])
    start(job)
    write_jsonl(path, [record(n, seen="today") for n in range(5)])
    assert start(job).report["attempt"]["requests"] == 0


def test_appended_and_reordered_rows_cost_only_what_is_new(tmp_path, out):
    path = write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))
    job = write_job(tmp_path, [path])
    start(job)
    write_jsonl(path, map(record, reversed(range(12))))
    outcome = start(job)
    assert outcome.report["attempt"]["requests"] == 2
    assert len(by_id(out)) == 12


def test_a_deleted_file_leaves_orphans_that_move_out(tmp_path, out):
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    gone = write_jsonl(tmp_path / "in/b.jsonl", map(record, range(5, 8)))
    job = write_job(tmp_path, [tmp_path / "in/*.jsonl"])
    start(job)
    gone.unlink()
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["notes"]["orphans"] == 3
    assert {row["id"] for row in rows(out)} == {f"d{n}" for n in range(5)}
    orphans = [row for path in out.glob("orphans/*.parquet") for row in pq.read_table(path).to_pylist()]
    assert {row["id"] for row in orphans} == {"d5", "d6", "d7"}


def test_a_limited_or_broken_pass_makes_no_orphans(tmp_path, out):
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    job = write_job(tmp_path, [tmp_path / "in/*.jsonl"])
    start(job)
    write_jsonl(tmp_path / "in/0.jsonl", map(record, range(5, 9)))
    assert start(job, limit=2).report["notes"]["orphans"] == 0
    assert len(rows(out)) == 7


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("prompt.system=Be short.", "prompt.system"),
        ("sampling.max_tokens=32", "sampling.max_tokens"),
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("engine.args.dtype=float16", "engine.args.dtype"),
        ("engine.args.max_model_len=1024", "max_prompt_tokens"),
        ("input.0.min_chars=5", "min_chars"),
    ],
)
def test_a_changed_setting_is_refused_with_its_key(tmp_path, out, change, key):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    start(job, limit=3)
    before = rows(out)
    with pytest.raises(FingerprintError, match=key.replace(".", r"\.")) as caught:
        start(job, change)
    assert "--on-change" in str(caught.value)
    assert rows(out) == before


@pytest.mark.parametrize("change", ["engine.args.max_num_seqs=8", "engine.feed=generate", "checkpoint.rows=2"])
def test_a_setting_for_speed_goes_on(tmp_path, change):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    start(job, limit=3)
    assert start(job, change).report["documents"]["ok"] == 5


def test_on_change_keep_goes_on_and_marks_the_rows(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    start(job, limit=3)
    start(job, "prompt.system=Be short.", on_change="keep")
    marks = [row["fingerprint"] for row in rows(out)]
    assert len(marks) == 5
    assert sorted(map(marks.count, set(marks))) == [2, 3]
    run = json.loads((out / "run.json").read_text())
    assert {run["fingerprint_digest"], *run["earlier_fingerprints"]} == set(marks)


@pytest.mark.parametrize("option", [{"on_change": "new-run"}, {"fresh": True}])
def test_new_run_and_fresh_move_the_old_run_aside(tmp_path, out, option):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    start(job, limit=3)
    outcome = start(job, "prompt.system=Be short.", **option)
    assert outcome.report["documents"]["ok"] == 5
    (aside,) = (path for path in tmp_path.iterdir() if path.name.startswith("out."))
    assert len(rows(aside)) == 3
    assert len(rows(out)) == 5


def test_new_run_without_a_change_goes_on(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    start(job, limit=3)
    assert start(job, on_change="new-run").report["attempt"]["requests"] == 2


def test_a_damaged_part_is_set_aside_and_its_documents_done_again(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(10)))], checkpoint={"rows": 4})
    start(job)
    victim = min(out.glob("summaries/*"))
    victim.write_bytes(victim.read_bytes()[:-20])
    outcome = start(job)
    assert outcome.exit_status == 0
    assert victim.name in outcome.report["notes"]["damaged parts"][0]
    assert (out / "damaged" / victim.name).exists()
    assert len(by_id(out)) == 10


def test_one_broken_file_is_named_and_harms_no_other(tmp_path, out):
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    table = pa.Table.from_pylist([record(n) for n in range(5, 1005)])
    pq.write_table(table, tmp_path / "in/b.parquet", row_group_size=500, compression=None)
    raw = bytearray((tmp_path / "in/b.parquet").read_bytes())
    group = pq.ParquetFile(tmp_path / "in/b.parquet").metadata.row_group(1).column(2)
    begin = group.dictionary_page_offset or group.data_page_offset
    raw[begin : begin + 64] = b"\xff" * 64
    (tmp_path / "in/b.parquet").write_bytes(raw)
    job = write_job(tmp_path, [tmp_path / "in/*"])
    outcome = start(job)
    assert outcome.exit_status == 65
    assert "b.parquet" in outcome.report["notes"]["input files with errors"][0]
    assert {f"d{n}" for n in range(505)} <= {row["id"] for row in rows(out)}


def test_an_unreadable_file_is_refused_before_any_work(tmp_path, out):
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    (tmp_path / "in/b.parquet").write_bytes(b"PAR1 no footer")
    (tmp_path / "in/c.parquet").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        start(write_job(tmp_path, [tmp_path / "in/*"]))
    assert "b.parquet" in str(caught.value)
    assert "c.parquet" in str(caught.value)
    assert not rows(out)


def test_an_engine_that_dies_ends_with_69_and_the_next_start_goes_on(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(20)))])
    outcome = start(job, "engine.fake.die_after=8", "engine.fake.lives=1")
    assert outcome.exit_status == EngineError.exit_status == 69
    committed = rows(out)
    assert 4 <= len(committed) <= 8
    assert start(job).exit_status == 0
    assert len(by_id(out)) == 20
    assert [row for row in rows(out) if row in committed] == committed


def test_a_stop_commits_what_has_finished_and_ends_with_75(tmp_path, out, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(50)))], checkpoint={"rows": 5})
    stop = Stop()

    def commit_then_stop(self, *args, original=RunDirectory.part):
        stop.request("SIGTERM")
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "part", commit_then_stop)
        outcome = start(job, stop=stop)
    assert outcome.exit_status == 75
    assert 5 <= len(rows(out)) < 50
    assert start(job).exit_status == 0
    assert len(by_id(out)) == 50


def test_a_held_run_is_refused_and_says_who_holds_it(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(5)))])
    with RunDirectory(out), pytest.raises(LockedError, match="pid"):
        start(job)


def test_nothing_to_send_starts_no_engine(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [record(1, text=""), record(2, text=" ")])
    job = write_job(tmp_path, [tmp_path / "a.jsonl"])
    monkeypatch.setattr("batchgen.executors.starting.Starter.engine", None)
    outcome = start(job)
    assert outcome.exit_status == 0
    assert outcome.report["attempt"]["rates"]["docs_per_s"] is None


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_gives_a_whole_report(tmp_path, out, content):
    (tmp_path / "a.jsonl").write_text(content)
    outcome = start(write_job(tmp_path, [tmp_path / "a.jsonl"]))
    assert outcome.exit_status == 0
    assert sums(json.loads((out / "report.json").read_text()))["total"] == 0


def test_a_prompt_without_room_for_a_document_is_refused(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", [record(1)])])
    with pytest.raises(ConfigError, match="max_tokens"):
        start(job, "engine.args.max_model_len=64")


def test_status_and_validate_tell_the_same_sums(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))])
    assert command("run", job, "--limit", 4).returncode == 0
    told = json.loads(command("status", out, "--json").stdout)
    assert (told["total"], told["ok"], told["pending"], told["running"]) == (6, 4, 2, None)
    assert json.loads(command("validate", job, "--json").stdout)["rows"] == 6
    changed = json.loads(command("validate", job, "--json", "--set", "sampling.max_tokens=9").stdout)
    told = [(fault["key"], fault["fault"].split(":")[0]) for fault in changed["faults"]]
    assert told == [("max_prompt_tokens", "1984 → 2039"), ("sampling.max_tokens", "64 → 9")]


def test_a_finished_run_imports_nothing_heavy_and_is_quick(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))])
    start(job)
    code = (
        "import sys, time; t = time.process_time()\n"
        "from batchgen.cli import cli\n"
        f"cli.main(['run', {str(job)!r}, '--json'], standalone_mode=False)\n"
        "print([m for m in ('vllm', 'torch', 'transformers', 'datasets') if m in sys.modules], time.process_time() - t)"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, seconds = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert modules == "[]"
    assert float(seconds) < 2


def test_whole_files_are_not_opened_again(tmp_path, monkeypatch):
    for n in range(4):
        write_jsonl(tmp_path / f"in/{n}.jsonl", [record(10 * n + k) for k in range(5)])
    job = write_job(tmp_path, [tmp_path / "in/*.jsonl"])
    start(job)
    opened = []
    from batchgen.sources.jsonl import JsonlSource

    for name in ("read", "facts"):
        original = getattr(JsonlSource, name)
        monkeypatch.setattr(
            JsonlSource,
            name,
            lambda self, *a, original=original: (opened.append(self._path.name), original(self, *a))[1],
        )
    write_jsonl(tmp_path / "in/9.jsonl", [record(99)])
    outcome = start(job)
    assert outcome.report["attempt"]["requests"] == 1
    assert outcome.report["documents"]["total"] == 21
    assert set(opened) == {"9.jsonl"}


def test_a_duplicate_of_a_document_in_a_whole_file_is_still_a_duplicate(tmp_path, out):
    write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    job = write_job(tmp_path, [tmp_path / "in/*.jsonl"])
    start(job)
    write_jsonl(
        tmp_path / "in/b.jsonl", [record(3, text="Another text under an id that is taken, long enough to send.")]
    )
    outcome = start(job)
    assert outcome.exit_status == 3
    assert outcome.report["documents"]["reasons"] == {"failed: duplicate_id": 1}
    assert len(rows(out)) == 6


def test_edited_documents_count_once_wherever_a_run_ends(tmp_path, out):
    path = write_jsonl(tmp_path / "a.jsonl", map(record, range(50)))
    job = write_job(tmp_path, [path], checkpoint={"rows": 4})
    start(job)
    write_jsonl(path, [record(n, text=f"An edited text about harbour wall number {n}.") for n in range(50)])
    outcome = start(job, "engine.fake.die_after=10", "engine.fake.lives=1")
    assert outcome.exit_status == 69
    counts = sums(outcome.report)
    assert (counts["total"], counts["ok"]) == (50, 50)
    assert 0 < counts["pending"] <= 42  # met, and still with their old row
    told = json.loads(command("status", out, "--json").stdout)
    assert (told["total"], told["ok"]) == (50, 50)
    assert sums(start(job).report) == {"total": 50, "ok": 50, "failed": 0, "skipped": 0, "pending": 0}
    assert len(by_id(out)) == 50


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
def test_a_folder_with_other_things_is_refused_and_left_as_it_is(tmp_path, out, options):
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    (out / ".tmp-00000-mine").write_text("mine too")
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", [record(1)])])
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        start(job, **options)
    assert sorted(path.name for path in out.iterdir()) == [".tmp-00000-mine", "thesis.tex"]


def test_other_kept_fields_are_refused_also_with_keep(tmp_path, out):
    path = write_jsonl(tmp_path / "a.jsonl", [record(n, lang="en") for n in range(5)])
    job = write_job(tmp_path, [path])
    start(job, limit=2)
    with pytest.raises(FingerprintError, match="kept fields"):
        start(job, "input.0.keep=[title, lang]", on_change="keep")
    assert len(rows(out)) == 2


def test_summaries_load_with_datasets(tmp_path, out, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(9)))], checkpoint={"rows": 4})
    start(job)
    import datasets

    found = datasets.load_dataset(str(out / "summaries"), split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(found["id"]) == sorted(f"d{n}" for n in range(9))
    assert found[0]["title"].startswith("Minutes")


def test_settings_of_a_start_that_made_no_row_bind_nobody(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(3)))])
    long = " ".join(["instruction"] * 400)
    outcome = start(job, f"prompt.system={long}")
    assert (outcome.exit_status, rows(out)) == (78, [])
    assert start(job).exit_status == 0


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path, out, monkeypatch):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))])
    start(job)

    def broken(path, **_):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("batchgen.sinks.parquet.pq.ParquetFile", broken)
        with pytest.raises(OutputError, match="Input/output error"):
            start(job)
    assert not (out / "damaged").exists()
    assert start(job).report["attempt"]["requests"] == 0


def test_an_input_that_is_added_changes_no_fingerprint(tmp_path, out):
    one, two = (write_jsonl(tmp_path / f"{name}.jsonl", [record(n)]) for n, name in enumerate("ab"))
    start(write_job(tmp_path, [one]))
    assert start(write_job(tmp_path, [one, two])).exit_status == 0
    assert len({row["fingerprint"] for row in rows(out)}) == 1
