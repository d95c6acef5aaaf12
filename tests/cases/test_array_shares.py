"""Which documents a task of an array does: N is given, and never comes out of what the scheduler happens to count.

submitit and others have tasks whose TASK_COUNT is 2 when 1 and 3 of 0-3 are run again; arrays that begin at 1; arrays
with more tasks than there is work.
"""

import pytest
from helpers_run import by_id, command, record, rows, start, write_job, write_jsonl

from batchgen.shards import Shard


def job_of(folder, count):
    texts = [record(n, text=f"The harbour board met and agreed to repair pier {n:02}. " * 4) for n in range(count)]
    return write_job(folder, [write_jsonl(folder / "a.jsonl", texts)], checkpoint={"rows": 2})


def done_by(job, out, number, count):
    """Ids that this start of this shard did."""
    before = {id_ for _, id_ in by_id(out)}
    assert start(job, shard=Shard(number, count)).exit_status == 0
    return {id_ for _, id_ in by_id(out)} - before


def test_tasks_that_are_run_again_do_what_they_did_in_the_first_array(tmp_path):
    whole = [done_by(job_of(tmp_path, 16), tmp_path / "out", number, 4) for number in range(4)]
    assert set().union(*whole) == {f"d{n}" for n in range(16)}
    assert sum(map(len, whole)) == 16
    assert all(whole)
    # In another run 1 and 3 come first, as --array=1,3 has them.
    again = tmp_path / "again"
    again.mkdir()
    job = job_of(again, 16)
    assert [done_by(job, again / "out", number, 4) for number in (1, 3)] == [whole[1], whole[3]]


@pytest.mark.parametrize("count", [3, 10])
def test_all_shards_together_do_all_documents_also_where_there_are_more_of_them(tmp_path, out, count):
    job = job_of(tmp_path, 7)
    found = [done_by(job, out, number, count) for number in range(count)]
    assert sum(map(len, found)) == len(set().union(*found)) == len(rows(out)) == 7


@pytest.mark.parametrize("given", ["3/3", "7/3"])
def test_an_index_that_begins_at_1_or_ends_too_late_is_refused_and_nothing_is_written(tmp_path, out, given):
    done = command("run", job_of(tmp_path, 7), "--shard", given)
    assert done.returncode == 2
    assert "K counts from 0" in done.stderr
    assert not out.exists()


def test_a_share_of_nothing_ends_well_and_says_so(tmp_path, out):
    done = command("run", job_of(tmp_path, 1), "--shard", "2/3")
    assert done.returncode == 0
    assert "shard 2/3: finished: 0 documents: 0 ok, 0 failed, 0 skipped" in done.stderr
    assert (out / "report-00002of00003.json").exists()
