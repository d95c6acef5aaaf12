"""A run in shards: each document once, whoever does it, and with any number of them from one start to the next."""

import json
import re
import threading
import time

import pytest
import yaml
from helpers_data import document
from helpers_run import SENTENCE, by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.data import Completion
from batchgen.errors import FingerprintError, LockedError
from batchgen.executors import identity, inspection, local, validation
from batchgen.executors.checking import check
from batchgen.executors.local import Options
from batchgen.executors.packing import Packing
from batchgen.job import jobfile
from batchgen.lifecycle import Stop
from batchgen.reporting.stats import Stats
from batchgen.shards import Shard
from batchgen.sources import dataset
from batchgen.storage import rundir
from batchgen.storage.kept_answers import KeptAnswers
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.strikes import Strikes
from batchgen.workflows.auto import Turn

COUNT = 60


@pytest.fixture
def job(tmp_path):
    inputs = [
        write_jsonl(tmp_path / "in/a.jsonl", map(record, range(40))),
        write_jsonl(tmp_path / "in/b.jsonl", map(record, range(40, COUNT))),
    ]
    return write_job(tmp_path, inputs, checkpoint={"rows": 7})


def all_shards(job, count, *sets, **options):
    return [start(job, *sets, shard=Shard(number, count), **options) for number in range(count)]


def sent(outcomes):
    """Requests of these starts."""
    return sum(one.report["attempt"]["requests"] for one in outcomes)


def test_shards_together_do_each_document_once(job, out):
    outcomes = all_shards(job, 4)
    assert {one.exit_status for one in outcomes} == {0}
    assert len(by_id(out)) == len(rows(out)) == COUNT
    assert sent(outcomes) == COUNT
    for one in outcomes:
        told = one.report["documents"]
        assert told["pending"] == 0
        assert told["total"] == told["ok"] > 0
    assert sent(all_shards(job, 4)) == 0


@pytest.mark.parametrize("counts", [(4, 3, 1), (1, 4), pytest.param((2, 5, 2), marks=pytest.mark.long)])
def test_with_another_number_of_shards_a_run_goes_on_without_repeats(job, out, counts):
    done = 0
    for count in counts[:-1]:
        done += sent(all_shards(job, count, limit=5))
    assert 0 < done < COUNT
    done += sent(all_shards(job, counts[-1]))
    assert done == COUNT
    assert len(by_id(out)) == len(rows(out)) == COUNT
    assert sent(all_shards(job, 2)) == 0


def test_an_empty_shard_ends_well_with_a_report_of_no_documents(tmp_path, out):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", [record(0)])])
    outcomes = all_shards(job, 3)
    assert [one.report["documents"]["total"] for one in outcomes] == [1, 0, 0]
    assert {one.exit_status for one in outcomes} == {0}
    assert len(by_id(out)) == 1


def test_a_second_start_of_a_shard_and_another_number_of_them_are_refused(job, out):
    out.mkdir()
    with RunDirectory(out, Shard(1, 3)):
        with pytest.raises(LockedError, match=r"another process holds this shard of the run: shard 1/3: pid "):
            start(job, shard=Shard(1, 3))
        for other in (Shard(), Shard(1, 4), Shard(0, 2)):
            with pytest.raises(LockedError, match=r"at work in 3 shards, .* shard 1/3: pid "):
                start(job, shard=other)
        assert start(job, shard=Shard(0, 3)).exit_status == 0
    with RunDirectory(out), pytest.raises(LockedError, match="at work undivided, so no shard 0/3"):
        start(job, shard=Shard(0, 3))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("4/4", "the last one of 4 is 3/4"),
        ("0/0", "N is 1 to"),
        ("1", "write it like 0/4"),
        ("-1/4", "write it like 0/4"),
    ],
)
def test_a_share_that_there_is_not_is_a_mistake_in_the_command(job, given, says):
    done = command("run", job, "--shard", given)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize("words", [["--fresh"], ["--on-change", "new-run"]])
def test_a_shard_moves_no_run_aside(job, words):
    done = command("run", job, "--shard", "0/2", *words)
    assert done.returncode == 2
    assert "moves no run aside" in done.stderr


def test_the_command_line_tells_whose_report_it_is(job, out):
    done = command("run", job, "--shard", "0/2", "--json")
    assert done.returncode == 0
    assert "shard 0/2: finished: " in done.stderr
    assert str(out / "report-00000of00002.md") in done.stderr
    assert json.loads(done.stdout) == json.loads((out / "report-00000of00002.json").read_text())
    assert not (out / "report.json").exists()


def test_a_shard_that_starts_while_another_plans_waits_for_it(job, out, caplog, monkeypatch):
    monkeypatch.setattr(rundir, "_SAID_S", 0.1)
    caplog.set_level("INFO", "batchgen")
    planning = RunDirectory(out, Shard(0, 2))
    planning.__enter__()
    with planning.alone():
        other = threading.Thread(target=start, args=(job,), kwargs={"shard": Shard(1, 2)}, daemon=True)
        other.start()
        time.sleep(0.5)
        assert not (out / "plan.json").exists()
    other.join(30)
    assert "waiting for another shard" in caplog.text
    assert (out / "report-00001of00002.json").exists()
    planning.__exit__(None, None, None)


# What belongs to all shards


def test_other_settings_are_refused_while_a_shard_is_at_work_though_there_is_no_row_yet(job, out):
    start(job, limit=1, shard=Shard(0, 2))
    with RunDirectory(out, Shard(1, 2)):
        with pytest.raises(FingerprintError, match="other settings"):
            start(job, "sampling.max_tokens=9", shard=Shard(0, 2))
        with pytest.raises(
            LockedError, match=r"shard 1/2 of this run is at work under its old settings: shard 1/2: pid"
        ):
            start(job, "sampling.max_tokens=9", shard=Shard(0, 2), on_change="keep")
    assert start(job, "sampling.max_tokens=9", shard=Shard(0, 2), on_change="keep").exit_status == 0


def test_settings_of_a_shard_that_has_no_row_yet_bind_the_others(job, out):
    with RunDirectory(out, Shard(1, 2)) as held:
        identity.settle(check(jobfile.load(job, ())), held, fresh=False, on_change="refuse")
        with pytest.raises(FingerprintError, match="other settings"):
            start(job, "sampling.max_tokens=9", shard=Shard(0, 2))


def edit(path, n):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[n]["text"] = "Another text of about the same length, which tells of other things. " * 2
    write_jsonl(path, records)


@pytest.mark.parametrize("n", [20, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 39))])
def test_an_edited_document_is_done_again_wherever_its_old_row_is(job, out, tmp_path, n):
    """The file is cut anew, so its documents can be in other shares than before."""
    all_shards(job, 3)
    before = by_id(out)
    edit(tmp_path / "in/a.jsonl", n)
    assert sent(all_shards(job, 3)) == 1
    now = by_id(out)
    assert len(now) == len(rows(out)) == COUNT
    assert {id_ for id_, row in now.items() if row != before[id_]} == {("str", f"d{n}")}


def test_documents_that_move_to_another_file_keep_their_rows(job, out, tmp_path):
    all_shards(job, 3)
    before = rows(out)
    records = [json.loads(line) for line in (tmp_path / "in/a.jsonl").read_text().splitlines()]
    write_jsonl(tmp_path / "in/b.jsonl", [*records[::-1], *map(record, range(40, COUNT))])
    write_jsonl(tmp_path / "in/a.jsonl", [])
    assert sent(all_shards(job, 3)) == 0
    assert rows(out) == before


def test_an_id_in_two_shares_has_a_row_of_each_until_a_start_over_all(tmp_path, out):
    records = [record(0), record(1), record(1, text=SENTENCE.format(n=9)), record(3)]
    # Files of about one size go to the shards in turn.
    job = write_job(tmp_path, [write_jsonl(tmp_path / f"in/{n}.jsonl", [one]) for n, one in enumerate(records)])
    for _ in range(2):
        all_shards(job, 2)
    assert len([row for row in rows(out) if row["id"] == "d1"]) == 2
    found = inspection.status(out)
    assert (found["ok"], found["pending"]) == (3, 1)
    assert start(job).exit_status == 3
    first, second = sorted((row for row in rows(out) if row["id"] == "d1"), key=lambda row: row["source"])
    assert (first["status"], second["error_type"]) == ("ok", "duplicate_id")
    assert len(rows(out)) == 4
    assert inspection.status(out)["pending"] == 0
    all_shards(job, 2)
    assert len([row for row in rows(out) if row["id"] == "d1"]) == 2


def test_rows_of_documents_that_are_gone_are_moved_by_a_start_over_all(job, out, tmp_path):
    all_shards(job, 2)
    write_jsonl(tmp_path / "in/b.jsonl", map(record, range(40, 50)))
    told = [one.report["documents"] for one in all_shards(job, 2)]
    assert len(rows(out)) == COUNT
    assert sum(one["ok"] for one in told) == sum(one["total"] for one in told) == COUNT - 10
    assert [one["pending"] for one in told] == [0, 0]
    assert not any((out / "orphans").glob("part-*"))
    outcome = start(job)
    assert outcome.report["notes"]["orphans"] == 10
    assert len(rows(out)) == COUNT - 10


def test_new_files_and_longer_ones_move_nothing_between_shards(job, out, tmp_path):
    all_shards(job, 3)
    with (tmp_path / "in/a.jsonl").open("a") as stream:
        stream.writelines(json.dumps(record(n)) + "\n" for n in range(100, 110))
    write_jsonl(tmp_path / "in/c.jsonl", map(record, range(110, 120)))
    spec = yaml.safe_load(job.read_text())
    spec["input"].append({"path": str(tmp_path / "in/c.jsonl"), "id_field": "id", "keep": ["title"]})
    job.write_text(yaml.safe_dump(spec))
    outcomes = all_shards(job, 3)
    assert sent(outcomes) == 20
    assert len(by_id(out)) == len(rows(out)) == COUNT + 20


def test_without_a_plan_the_parts_of_all_shards_are_looked_through(job, out, caplog):
    all_shards(job, 3)
    (out / "plan.json").unlink()
    caplog.set_level("INFO", "batchgen")
    assert sent(all_shards(job, 3)) == 0
    assert "parts of other shards were looked through" in caplog.text
    assert len(rows(out)) == COUNT


def test_a_damaged_part_is_set_aside_by_the_shard_that_wrote_it(job, out, tmp_path):
    all_shards(job, 2)
    parts = sorted((out / "summaries").glob("part-*-00001of00002-*"))
    parts[0].write_bytes(b"")
    edit(tmp_path / "in/a.jsonl", 1)
    start(job, shard=Shard(0, 2))
    assert parts[0].exists()
    outcome = start(job, shard=Shard(1, 2))
    assert "moved to damaged/" in outcome.report["notes"]["damaged parts"][0]
    all_shards(job, 2)
    assert len(by_id(out)) == len(rows(out)) == COUNT


def test_shards_retry_each_what_failed_in_its_share(job, out):
    outcomes = all_shards(job, 3, "engine.fake.fail_every=4")
    failed = sum(one.report["documents"]["failed"] for one in outcomes)
    assert failed > 5
    again = all_shards(job, 3, retry=frozenset())
    assert sent(again) == failed
    assert len(by_id(out)) == len(rows(out)) == COUNT
    assert {row["status"] for row in rows(out)} == {"ok"}
    assert sent(all_shards(job, 3)) == 0


def test_what_failed_is_retried_with_another_number_of_shards(job, out):
    outcomes = all_shards(job, 3, "engine.fake.fail_every=4")
    failed = sum(one.report["documents"]["failed"] for one in outcomes)
    assert sent(all_shards(job, 2, retry=frozenset())) == failed
    assert len(by_id(out)) == len(rows(out)) == COUNT


# What is told of all of them


def test_the_report_of_all_shards_adds_up_what_each_tells(job, out):
    outcomes = all_shards(job, 4, "engine.fake.fail_every=9", "failures.max=99")
    whole = inspection.write_report(out)
    assert whole == json.loads((out / "report.json").read_text())
    assert (out / "report.md").read_text().count("| 0/4 |") == 1
    for key in ("ok", "failed", "skipped", "pending", "total"):
        assert whole["documents"][key] == sum(one.report["documents"][key] for one in outcomes)
    assert whole["documents"]["ok"] + whole["documents"]["failed"] == len(rows(out)) == COUNT
    for scope in ("attempt", "run"):
        for key in ("prompt", "output"):
            assert whole[scope]["tokens"][key] == sum(one.report["attempt"]["tokens"][key] for one in outcomes)
    tokens = sum(row["prompt_tokens"] for row in rows(out))
    assert whole["run"]["tokens"]["prompt"] == tokens
    assert (whole["exit_status"], whole["run"]["attempts"], len(whole["shards"])) == (0, 4, 4)
    listed = [json.loads(line)["id"] for line in (out / "failed.jsonl").read_text().splitlines()]
    assert sorted(listed) == sorted(row["id"] for row in rows(out) if row["status"] == "failed")


def test_rates_of_earlier_attempts_do_not_show_in_the_latest(job, out):
    first = start(job, "engine.fake.docs_per_s=30", limit=8, shard=Shard(0, 2))
    second = start(job, shard=Shard(0, 2))
    slow, fast = (one.report["attempt"]["rates"]["docs_per_s"] for one in (first, second))
    assert fast > 3 * slow
    both = second.report
    assert both["run"]["documents"]["ok"] == both["documents"]["ok"]
    assert both["attempt"]["documents"]["ok"] == both["documents"]["ok"] - 8
    start(job, shard=Shard(1, 2))
    whole = inspection.report(out)
    assert whole["attempt"]["documents"]["ok"] == COUNT - 8
    assert whole["attempt"]["rates"]["docs_per_s"] > 3 * slow
    assert whole["run"]["documents"]["ok"] == COUNT


def test_status_tells_each_shard_and_the_sum(job, out):
    start(job, shard=Shard(0, 3))
    start(job, shard=Shard(1, 3), limit=3)
    with RunDirectory(out, Shard(2, 3)):
        found = inspection.status(out)
        assert (found["running"], found["reason"], found["exit_status"]) == (
            "1 of 3 shards",
            "running: 1 of 3 shards",
            None,
        )
        assert found["shards"][2]["running"].startswith("pid ")
        text = inspection.status_text(found)
        assert re.search(r"0/3: \d+ done, [\d,.]+ docs/s; finished \(exit status 0\)", text)
        assert re.search(r"2/3: 0 done; pid \d+ on ", text)
    found = inspection.status(out)
    assert found["ok"] == len(rows(out))
    assert found["pending"] == COUNT - found["ok"]
    assert "shards have no end; shard 2/3: nothing was sent or written yet" in found["reason"]
    assert [one["done"] for one in found["shards"]][1:] == [3, 0]


def test_the_end_of_all_shards_is_the_worst_of_theirs(job, out):
    start(job, shard=Shard(0, 2))
    start(job, "engine.fake.fail_every=3", shard=Shard(1, 2))
    found = inspection.report(out)
    assert found["exit_status"] == 3
    assert found["reason"].startswith("shard 1/2: finished, ")


def test_reports_of_another_number_of_shards_are_not_added_up(job, out):
    all_shards(job, 3, "engine.fake.fail_every=9")
    all_shards(job, 2)
    assert not list(out.glob("*of00003.json*"))
    assert [one["shard"] for one in inspection.report(out)["shards"]] == ["0/2", "1/2"]
    start(job)
    assert inspection.report(out)["shards"] == []
    assert not list(out.glob("report-*"))


# What is decided once for all


def test_of_two_shards_that_measure_packing_the_first_decides_for_both(tmp_path, out, caplog):
    records = [record(n) for n in range(200)]
    job = write_job(
        tmp_path, [write_jsonl(tmp_path / "a.jsonl", records)],
        packing={"mode": "auto", "max_documents": 2}, checkpoint={"rows": 20},
    )  # fmt: skip
    caplog.set_level("INFO", "batchgen")
    all_shards(job, 2)
    decided = json.loads((out / "run.json").read_text())["decisions"]["packing"]
    assert "packing: as decided before" in caplog.text
    # A shard that had begun to measure when another decided takes that.
    with RunDirectory(out, Shard(0, 2)) as held:
        checked = check(jobfile.load(job, ()))
        packing = Packing(checked, held, Stats(), None, frame=lambda _: (), left=lambda: None)
        other = "off" if decided["mode"] == "on" else "on"
        held.write_run(held.read_run() | {"decisions": {"packing": decided | {"mode": other}}})
        assert packing._decide(Turn(packing=False, wanted=9), Turn(packing=True, wanted=9)) is (other == "on")
        assert held.read_run()["decisions"]["packing"]["mode"] == other


def test_pieces_and_strikes_of_another_number_of_shards_are_found(job, out):
    with RunDirectory(out, Shard(1, 4)) as run:
        kept = KeptAnswers(run, fingerprint="f", interval_s=0)
        kept.keep(document(1), b"p", [Completion("x", text="kept")])
        kept.write()
        Strikes(run.strikes_json, limit=1, owner=run.owner).add([document(2).key])
    with RunDirectory(out, Shard(0, 2)) as run:
        (found,) = KeptAnswers(run, fingerprint="f", interval_s=0).find(document(1), b"p")
        assert found.text == "kept"
        strikes = Strikes(run.strikes_json, limit=1, owner=run.owner, others=run.of_other_counts(run.path, "strikes"))
        assert strikes.suspects([document(2).key])
    all_shards(job, 2)
    assert len(list(out.glob("pieces/*"))) == len(list(out.glob("strikes-*"))) == 1
    start(job)
    assert not list(out.glob("pieces/*"))
    assert not list(out.glob("strikes-*"))


def test_shards_that_begin_a_run_together_have_one_commit_of_a_data_set(tmp_path, out, monkeypatch):
    """The Hub gets a new commit between the looks of two shards."""
    job = write_job(tmp_path, [{"dataset": {"path": "some/where"}, "id_field": "id", "keep": ["title"]}])
    commits = iter(["a" * 40, "b" * 40])
    monkeypatch.setattr(dataset, "_commit", lambda *_: next(commits))
    file = jobfile.load(job, ())
    looks = [check(file), check(file)]
    for number, checked in enumerate(looks):
        with RunDirectory(out, Shard(number, 2)) as run, run.alone():
            attempt = local._Attempt(checked, Options(shard=Shard(number, 2)), Stop(), run, None, lambda: check(file))
            attempt._settle_identity()
            assert attempt.job.input[0].dataset.revision == "a" * 40


def test_a_job_whose_run_is_at_work_in_shards_is_told_so(job, out):
    start(job, shard=Shard(0, 2), limit=1)
    with RunDirectory(out, Shard(1, 2)):
        found, status = validation.validate(job, (), quick=True)
    assert status == 73
    assert "another process holds this run: shard 1/2: pid " in found["faults"][0]["fault"]
