"""A run in shards: each document once, whoever does it, and with any number of them from one start to the next."""

import json

import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.errors import LockedError
from batchgen.shards import Shard
from batchgen.storage.rundir import RunDirectory

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


@pytest.mark.parametrize("counts", [(4, 3, 1), (1, 4), (2, 5, 2)])
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
