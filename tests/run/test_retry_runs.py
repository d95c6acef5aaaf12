"""`retry-failed`: which documents are done again, that one row is left, and that a cut retry goes on."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import by_id, record, rows, same_rows, start, stop_after_a_part, write_job, write_jsonl

from batchgen.errors import ConfigError, FingerprintError
from batchgen.executors.retry import OF_RECORDS
from batchgen.sources.jsonl import JsonlSource
from batchgen.storage.index import IndexBuilder
from batchgen.storage.strikes import Strikes

ALL: frozenset[str] = frozenset()
COUNT = 24


def fails(words):
    """The setting with which requests fail whose prompt holds these words; `day 1` are those of 1 and of 10 to 19."""
    return f"engine.fake.fail_on={words}"


def job_of(tmp_path, data, **sections):
    path = write_jsonl(tmp_path / "a.jsonl", data)
    return write_job(tmp_path, [path], **{"checkpoint": {"rows": 5}} | sections)


@pytest.fixture(params=["parquet", "jsonl"])
def job(request, tmp_path, out):
    """A finished run in which eleven requests failed, in each format."""
    output = {"dir": str(out), "format": request.param}
    found = job_of(tmp_path, map(record, range(COUNT)), output=output)
    assert start(found, fails("day 1")).report["documents"]["failed"] == 11
    return found


def status(out):
    return {row["id"]: row["status"] for row in by_id(out).values()}


def failed(out):
    return {id_ for id_, one in status(out).items() if one == "failed"}


ONES = {"d1", *(f"d{n}" for n in range(10, 20))}


def test_failed_documents_are_done_again_and_leave_one_row_each(job, tmp_path, out):
    before = by_id(out)
    outcome = start(job, retry=ALL)
    assert (outcome.exit_status, outcome.reason) == (0, "11 tried again")
    assert outcome.report["attempt"]["requests"] == outcome.report["attempt"]["documents"]["read"] == 11
    documents = outcome.report["documents"]
    assert (documents["ok"], documents["failed"], documents["pending"], documents["total"]) == (COUNT, 0, 0, COUNT)
    assert len(rows(out)) == COUNT
    assert all(row == before[key] for key, row in by_id(out).items() if row["id"] not in ONES)
    start(job, f"output.dir={tmp_path / 'calm'}")
    same_rows(rows(out), rows(tmp_path / "calm"))
    assert not (out / "failed.jsonl").exists()
    assert not list(out.glob("retry-*"))


def test_what_fails_again_has_the_new_row(job, out):
    was = by_id(out)["str", "d14"]
    outcome = start(job, fails("day 14"), retry=ALL)
    assert (outcome.exit_status, failed(out)) == (3, {"d14"})
    assert outcome.reason == "11 tried again, 1 documents failed (failures.max is 0)"
    now = by_id(out)["str", "d14"]
    assert now["finished_at"] != was["finished_at"]
    assert [json.loads(line)["id"] for line in (out / "failed.jsonl").read_text().splitlines()] == ["d14"]
    assert start(job, retry=ALL).report["attempt"]["requests"] == 1
    assert len(rows(out)) == COUNT


def test_a_plain_run_leaves_failed_documents_alone_before_and_after(job, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(JsonlSource, "read", None)
        assert start(job).report["attempt"]["requests"] == 0
        start(job, fails("day 14"), retry=ALL)
        # The file is known whole, though each part that said so first may be gone.
        assert start(job).report["attempt"]["requests"] == 0
    assert failed(out) == {"d14"}


def test_files_stay_known_as_whole_when_all_their_rows_are_replaced(tmp_path, out, monkeypatch):
    job = job_of(tmp_path, map(record, range(9)))
    start(job, fails("day"))
    first = sorted((out / "summaries").iterdir())
    start(job, retry=ALL)
    assert not set(first) & set((out / "summaries").iterdir())
    monkeypatch.setattr(JsonlSource, "read", None)
    assert start(job).exit_status == 0


def test_a_retry_with_nothing_to_do_starts_nothing_and_leaves_no_trace(tmp_path, out, monkeypatch):
    job = job_of(tmp_path, [*map(record, range(5)), record(6, text=7)])
    start(job)
    before = sorted(path.name for path in out.iterdir())
    monkeypatch.setattr("batchgen.executors.starting.Starter.engine", None)
    outcome = start(job, retry=ALL)
    assert (outcome.exit_status, outcome.report["attempt"]["documents"]["read"]) == (3, 0)
    assert outcome.reason == "0 tried again, 1 documents failed (failures.max is 0)"
    assert sorted(path.name for path in out.iterdir()) == before


# Which ones.


def test_documents_whose_record_is_at_fault_are_tried_again_only_when_named(tmp_path, out, caplog):
    data = [*map(record, range(5)), record(6, text=7), {"id": "d7"}, record(1), {"text": "no id"}]
    job = job_of(tmp_path, data)
    start(job, fails("day 3"))
    before = rows(out)
    with caplog.at_level("INFO", logger="batchgen"):
        start(job, retry=ALL)
    now = rows(out)
    assert [row["id"] for row, was in zip(now, before, strict=True) if row != was] == ["d3"]
    assert "duplicate_id 1, missing_id 1, missing_text 1, text_type 1" in caplog.text
    start(job, retry=frozenset({"text_type", "missing_text"}))
    again = rows(out)
    assert {row["id"] for row, was in zip(again, now, strict=True) if row != was} == {"d6", "d7"}
    same_rows(again, now)


@pytest.mark.parametrize("kind", sorted(OF_RECORDS - {"record_too_large", "bad_value"}))
def test_records_at_fault_that_are_named_have_the_same_row_again(tmp_path, out, kind):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [*map(record, range(5)), record(6, text=7), {"id": "d7"}, record(1), {"text": "x"}, record(9, id=1.5)],
    )
    with path.open("a") as stream:
        stream.write("{\n")
    job = write_job(tmp_path, [path])
    start(job)
    before = rows(out)
    outcome = start(job, retry=frozenset({kind}))
    assert outcome.report["attempt"]["documents"]["failed"] == 1
    same_rows(rows(out), before)
    assert sum(now != then for now, then in zip(rows(out), before, strict=True)) == 1


def test_with_types_only_those_are_tried_again(tmp_path, out):
    job = job_of(tmp_path, [*map(record, range(8)), record(9, text=7)])
    start(job, fails("day 3"), "engine.fake.die_on=day 5")
    assert {row["error_type"] for row in rows(out) if row["error_type"]} == {
        "request_failed", "engine_died", "text_type",
    }  # fmt: skip
    start(job, retry=frozenset({"engine_died"}))
    assert failed(out) == {"d3", "d9"}
    assert start(job, retry=frozenset({"no_such_type"})).report["attempt"]["requests"] == 0
    assert failed(out) == {"d3", "d9"}


def test_what_the_settings_made_fail_is_tried_again_under_others(tmp_path, out):
    data = [*map(record, range(3)), record(4, title="long " * 500)]
    job = job_of(tmp_path, data)
    start(job)
    assert by_id(out)["str", "d4"]["error_type"] == "prompt_too_long"
    assert start(job, retry=ALL).report["attempt"]["documents"]["read"] == 0
    wider = "engine.args.max_model_len=8192"
    with pytest.raises(FingerprintError, match="max_prompt_tokens"):
        start(job, wider, retry=ALL)
    outcome = start(job, wider, retry=ALL, on_change="keep")
    assert (outcome.exit_status, outcome.report["attempt"]["documents"]["read"]) == (0, 1)
    assert len({row["fingerprint"] for row in rows(out)}) == 2
    # Named, it is tried again under the same settings too.
    start(job, fresh=True)
    assert start(job, retry=frozenset({"prompt_too_long"})).report["attempt"]["documents"]["failed"] == 1


# New, edited, moved and deleted documents.


def test_new_and_edited_documents_are_left_for_run(job, tmp_path, out):
    edited = record(3, text="An edited text about the harbour, long enough to be summarized.")
    write_jsonl(
        tmp_path / "a.jsonl", [*(edited if n == 3 else record(n) for n in range(COUNT)), *map(record, (50, 51))]
    )
    before = by_id(out)
    outcome = start(job, retry=ALL)
    assert outcome.exit_status == 0
    assert (outcome.report["attempt"]["requests"], outcome.report["documents"]["pending"]) == (11, 2)
    assert by_id(out)["str", "d3"] == before["str", "d3"]
    assert len(rows(out)) == COUNT
    assert start(job).report["attempt"]["requests"] == 3
    assert len(rows(out)) == COUNT + 2
    assert by_id(out)["str", "d3"]["summary"] != before["str", "d3"]["summary"]


def test_documents_that_moved_are_found_wherever_they_are(job, tmp_path, out):
    """Also in another file; ids are who they are."""
    (tmp_path / "a.jsonl").unlink()
    numbers = [*range(COUNT, 40), *reversed(range(COUNT))]
    write_jsonl(tmp_path / "a.jsonl", map(record, numbers[:20]))
    write_jsonl(tmp_path / "b.jsonl", map(record, numbers[20:]))
    text = job.read_text().replace("a.jsonl", "*.jsonl")
    job.write_text(text)
    outcome = start(job, retry=ALL)
    assert (outcome.exit_status, outcome.report["attempt"]["requests"]) == (0, 11)
    assert failed(out) == set()
    assert len(rows(out)) == COUNT
    start(job)
    assert len(rows(out)) == 40


def test_an_id_that_stands_twice_by_now_is_done_once(tmp_path, out):
    job = job_of(tmp_path, map(record, range(6)))
    start(job, fails("day 3"))
    write_jsonl(tmp_path / "a.jsonl", [record(3), record(9), *map(record, range(6)), record(3)])
    assert start(job, retry=ALL).report["attempt"]["requests"] == 1
    assert len(rows(out)) == 6
    start(job)
    assert sorted(str(row["error_type"]) for row in rows(out)) == [*["None"] * 7, *["duplicate_id"] * 2]


@pytest.mark.parametrize("wanted", [ALL, frozenset({"request_failed"})])
def test_a_failed_document_that_was_edited_is_done_as_it_is_now(tmp_path, out, wanted):
    """One whose record was at fault too: it is another record."""
    job = job_of(tmp_path, [*map(record, range(5)), record(6, text=7)])
    start(job, fails("day 3"))
    new = "An edited text about the harbour, long enough to be summarized."
    write_jsonl(tmp_path / "a.jsonl", [record(n, text=new) if n == 3 else record(n) for n in (0, 1, 2, 3, 4, 6)])
    outcome = start(job, retry=wanted)
    assert (outcome.exit_status, outcome.report["attempt"]["requests"]) == (0, 2)
    assert failed(out) == set()
    assert len(rows(out)) == 6
    assert start(job).report["attempt"]["requests"] == 0


def test_without_ids_a_document_is_its_place(tmp_path, out):
    item = {"path": str(write_jsonl(tmp_path / "a.jsonl", map(record, range(6)))), "keep": ["title"]}
    job = write_job(tmp_path, [item], checkpoint={"rows": 2})
    start(job, fails("day 3"))
    before = rows(out)
    write_jsonl(tmp_path / "a.jsonl", [record(9, title="x", text="x" * 900), *map(record, range(6))])
    outcome = start(job, retry=ALL)
    assert outcome.report["attempt"]["requests"] == 0  # nothing begins at that place now
    assert rows(out) == before
    start(job)
    assert len(rows(out)) == 7


def test_documents_that_are_gone_keep_their_row_for_run_to_move(job, tmp_path, out, caplog):
    write_jsonl(tmp_path / "a.jsonl", (record(n) for n in range(COUNT) if n not in (12, 13)))
    with caplog.at_level("INFO", logger="batchgen"):
        outcome = start(job, retry=ALL)
    assert outcome.report["attempt"]["requests"] == 9
    assert failed(out) == {"d12", "d13"}
    assert "2 failed documents are not in the input any more" in caplog.text
    assert start(job).report["notes"]["orphans"] == 2
    assert failed(out) == set()


def test_an_input_that_cannot_be_read_costs_its_own_documents_only(tmp_path, out):
    tables = [pa.Table.from_pylist([record(n) for n in range(begin, begin + 5)]) for begin in (0, 5)]
    for name, table in zip("ab", tables, strict=True):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    inputs = [{"path": str(tmp_path / f"{name}.parquet"), "id_field": "id", "keep": ["title"]} for name in "ab"]
    job = write_job(tmp_path, inputs)
    start(job, fails("metres"))
    with pytest.MonkeyPatch.context() as patch:
        from batchgen.sources.parquet import InputError, ParquetSource

        fetch = ParquetSource.fetch

        def broken(self, places):
            if self._path.name == "a.parquet":
                raise InputError("a.parquet: row 0: cannot be read: snapped")
            return fetch(self, places)

        patch.setattr(ParquetSource, "fetch", broken)
        outcome = start(job, retry=ALL)
    assert outcome.exit_status == 65
    assert failed(out) == {f"d{n}" for n in range(5)}
    assert not list(out.glob("retry-*"))
    assert start(job, fails("day 3"), retry=ALL).report["attempt"]["requests"] == 5
    assert failed(out) == {"d3"}


# A retry that is cut short.


def test_the_same_command_goes_on_with_those_that_had_no_try(tmp_path, out, monkeypatch):
    """Those that failed again wait for the next retry: else one that is killed often would never come to an end."""
    job = job_of(tmp_path, map(record, range(COUNT)))
    start(job, fails("metres"))
    with monkeypatch.context() as patch:
        outcome = start(job, fails("day"), "lifecycle.grace_s=0", retry=ALL, stop=stop_after_a_part(patch))
    tried = outcome.report["attempt"]["requests"]
    assert outcome.exit_status == 75
    assert 0 < tried < COUNT
    assert outcome.report["documents"]["failed"] == COUNT
    assert start(job).report["attempt"]["requests"] == 0  # a plain run changes nothing about that
    outcome = start(job, retry=ALL)
    assert outcome.report["attempt"]["requests"] == COUNT - tried
    assert len(failed(out)) == tried
    assert not list(out.glob("retry-*"))
    assert start(job, retry=ALL).report["attempt"]["requests"] == tried
    assert (failed(out), len(rows(out))) == (set(), COUNT)


@pytest.mark.parametrize("change", ["types", "settings"])
def test_another_command_is_another_retry(tmp_path, out, change):
    job = job_of(tmp_path, map(record, range(COUNT)))
    start(job, fails("metres"))
    outcome = start(job, fails("day"), "engine.fake.die_after=9", "engine.fake.lives=1", retry=ALL)
    assert outcome.exit_status == 69
    assert 0 < outcome.report["attempt"]["requests"] < COUNT
    more = {"retry": frozenset({"request_failed"})} if change == "types" else {"retry": ALL, "on_change": "keep"}
    sets = ["sampling.max_tokens=32"] if change == "settings" else []
    assert start(job, *sets, **more).report["attempt"]["requests"] == COUNT
    assert failed(out) == set()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"attempts": 1}', b'{"attempts": ["x"]}', b"\xff"])
def test_a_note_that_cannot_be_read_is_none(tmp_path, out, data):
    job = job_of(tmp_path, map(record, range(4)))
    start(job, fails("metres"))
    (out / "retry-00000.json").write_bytes(data)
    assert start(job, retry=ALL).report["attempt"]["requests"] == 4


def test_an_incomplete_run_can_be_retried_and_goes_on(tmp_path, out):
    job = job_of(tmp_path, map(record, range(COUNT)))
    start(job, fails("metres"), limit=10)
    outcome = start(job, retry=ALL)
    assert (outcome.exit_status, outcome.report["documents"]["pending"]) == (0, COUNT - 10)
    assert outcome.report["attempt"]["requests"] == 10
    assert start(job).report["attempt"]["requests"] == COUNT - 10
    assert set(status(out).values()) == {"ok"}


# Strikes.


def strikes_of(out):
    path = out / "strikes-00000.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_strikes_of_those_that_are_tried_again_are_forgotten(tmp_path, out):
    job = job_of(tmp_path, map(record, range(8)))
    start(job, fails("day 5"))
    keys = {row["id"]: row["doc_key"] for row in rows(out)}
    strikes = Strikes(out / "strikes-00000.json", limit=2, owner="0")
    for _ in range(3):
        strikes.add([bytes.fromhex(keys[one]) for one in ("d5", "d1")])
    assert start(job, retry=ALL).exit_status == 0
    assert by_id(out)["str", "d5"]["attempts"] == 1  # a suspect would have been sent a second time, alone
    assert strikes_of(out) == {keys["d1"]: 3}


def test_a_retry_that_goes_on_forgets_no_strike(tmp_path, out):
    job = job_of(tmp_path, map(record, range(8)))
    start(job, fails("day 5"))
    key = by_id(out)["str", "d5"]["doc_key"]
    for count in (1, 2):
        kills = ["engine.fake.die_on=day 5", "engine.fake.lives=1"]
        assert start(job, *kills, retry=ALL).exit_status == 69
        assert strikes_of(out) == {key: count}


def test_a_document_that_kills_engines_again_fails_again_alone(tmp_path, out):
    job = job_of(tmp_path, map(record, range(12)))
    start(job, fails("metres"))
    outcome = start(job, "engine.fake.die_on=day 5", retry=ALL)
    assert (outcome.exit_status, failed(out)) == (3, {"d5"})
    assert by_id(out)["str", "d5"]["error_type"] == "engine_died"


# Where there is nothing to retry.


def test_without_a_run_there_is_nothing_to_retry(tmp_path, out):
    job = job_of(tmp_path, map(record, range(3)))
    with pytest.raises(ConfigError, match="there is no run yet"):
        start(job, retry=ALL)
    assert not out.exists()


def test_the_done_index_is_not_kept_in_memory_for_a_retry(job, monkeypatch):
    sizes = []
    index = IndexBuilder.index

    def counted(self, seen):
        found = index(self, seen)
        sizes.append(found.done)
        return found

    monkeypatch.setattr(IndexBuilder, "index", counted)
    start(job, retry=ALL)
    assert sizes[-1] == 11
