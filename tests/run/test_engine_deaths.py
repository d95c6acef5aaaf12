"""Engines that die or hang: every document ends in one row, and only the one that kills engines fails."""

import json

import pytest
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

from batchgen.errors import EngineError
from batchgen.feeding.feed import DEATHS
from batchgen.lifecycle import Stop

POISON = "the sealed box under the pier"


def poisoned(n, text=POISON):
    return record(n, text=f"The harbour board of day {n} found {text} and opened it in the morning.")


def job(tmp_path, records, **fake):
    inputs = [write_jsonl(tmp_path / "a.jsonl", records)]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": fake, "stall_s": 0.6}
    return write_job(tmp_path, inputs, engine=engine, checkpoint={"rows": 6})


def mixed(*poisons, count=30):
    return [poisoned(n) if n in poisons else record(n) for n in range(count)]


def test_a_dying_engine_is_started_again_and_the_run_finishes(tmp_path, out):
    outcome = start(job(tmp_path, map(record, range(30)), die_after=11))
    assert outcome.exit_status == 0
    assert {row["status"] for row in by_id(out).values()} == {"ok"}
    assert len(by_id(out)) == 30
    assert set(outcome.report["notes"]["engine deaths"]) == {
        "the fake engine died after 11 completions, as its settings say"
    }  # fmt: skip
    assert outcome.report["attempt"]["tokens"]["output"] >= 30 * 24  # counted over all engines


def test_rows_are_those_of_a_run_in_which_nothing_died(tmp_path, out):
    from helpers_run import same_rows

    (tmp_path / "calm").mkdir()
    start(job(tmp_path, map(record, range(30)), die_after=13))
    start(job(tmp_path / "calm", map(record, range(30))))
    calm = [row | {"source": str(tmp_path / "a.jsonl")} for row in rows(tmp_path / "calm/out")]
    same_rows(rows(out), calm, but=("finished_at", "attempts", "cached_tokens"))
    assert max(row["attempts"] for row in rows(out)) > 1
    assert {row["attempts"] for row in calm} == {1}


@pytest.mark.parametrize("poisons", [(13,), (0,), (29,), (5, 6), (0, 10, 20), tuple(range(24, 30))])
def test_a_document_that_kills_engines_fails_alone(tmp_path, out, poisons):
    outcome = start(job(tmp_path, mixed(*poisons), die_on=POISON))
    found = by_id(out)
    assert len(found) == 30
    failed = [row for row in found.values() if row["status"] == "failed"]
    assert {row["id"] for row in failed} == {f"d{n}" for n in poisons}
    assert {row["error_type"] for row in failed} == {"engine_died"}
    assert all("tried alone" in row["error"] for row in failed)
    assert all(row["attempts"] >= 3 for row in failed)
    assert outcome.exit_status == 3
    assert not (out / "strikes-00000.json").exists()


def test_a_hanging_engine_is_ended_and_its_stacks_are_kept(tmp_path, out):
    start(job(tmp_path, mixed(3), hang_on=POISON))
    found = by_id(out)
    assert found["str", "d3"]["error_type"] == "engine_died"
    assert "no sign of work for 0.6 s" in found["str", "d3"]["error"]
    assert [row["status"] for row in found.values()].count("ok") == 29
    assert "hang" in (out / "logs/stacks-run.txt").read_text() or "poll" in (out / "logs/stacks-run.txt").read_text()


def test_strikes_are_kept_over_starts(tmp_path, out):
    path = job(tmp_path, mixed(2), die_on=POISON)
    assert start(path, "engine.fake.lives=1").exit_status == EngineError.exit_status
    strikes = json.loads((out / "strikes-00000.json").read_text())
    assert set(strikes.values()) == {1}
    assert start(path, "engine.fake.lives=1").exit_status == EngineError.exit_status
    assert start(path).exit_status == 3
    assert len(by_id(out)) == 30


def test_engines_that_die_without_finishing_anything_end_the_run(tmp_path, out):
    outcome = start(job(tmp_path, map(record, range(5)), die_after=0))
    assert outcome.exit_status == 69
    assert f"{DEATHS} engines in a row" in outcome.reason
    assert rows(out) == []


def test_a_lone_document_that_kills_engines_fails_too(tmp_path, out):
    assert start(job(tmp_path, [poisoned(0)], die_on=POISON)).exit_status == 3
    assert by_id(out)["str", "d0"]["error_type"] == "engine_died"


def test_an_engine_that_dies_while_stopping_strikes_nobody(tmp_path, out, monkeypatch):
    from batchgen.engines.fake import FakeEngine

    stop = Stop()

    def die(self):
        stop.request("SIGTERM")
        raise EngineError("killed by the same signal")

    monkeypatch.setattr(FakeEngine, "poll", die)
    outcome = start(job(tmp_path, map(record, range(5))), stop=stop)
    assert outcome.exit_status == 75
    assert not (out / "strikes-00000.json").exists()


def test_a_hanging_engine_does_not_outlast_the_grace(tmp_path, out):
    stop = Stop()
    path = job(tmp_path, mixed(12), hang_on=POISON)
    import threading
    import time

    threading.Timer(0.4, stop.request, ["SIGTERM"]).start()
    begin = time.monotonic()
    outcome = start(path, "engine.stall_s=300", "lifecycle.grace_s=1", stop=stop)
    assert outcome.exit_status == 75
    assert time.monotonic() - begin < 8
    assert 0 < len(rows(out)) < 30
    assert start(path, "engine.fake.hang_on=null").exit_status == 0
    assert len(by_id(out)) == 30
