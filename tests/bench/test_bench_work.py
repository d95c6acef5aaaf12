"""The work: documents of the job with their prompts, the same ones for everybody."""

import json

import pytest
from helpers_run import record, write_job, write_jsonl

from batchgen.bench.work import make, mark
from batchgen.errors import InputError
from batchgen.job import jobfile


def made(tmp_path, records, *, documents, tokens=None, **sections):
    write_jsonl(tmp_path / "in/a.jsonl", records)
    job = write_job(tmp_path, [tmp_path / "in/a.jsonl"], **sections)
    folder = tmp_path / "work"
    folder.mkdir()
    return make(jobfile.load(job), folder, documents=documents, tokens=tokens)


def test_documents_come_over_again_with_ids_of_their_own(tmp_path):
    records = [record(0), record(1, text=""), record(2), record(3, text=7), record(4)]
    work = made(tmp_path, records, documents=7)
    rows = [json.loads(line) for line in (tmp_path / "work/documents.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"d{n}" for n in range(7)]
    assert [row["title"] for row in rows] == [f"Minutes {n}" for n in (0, 2, 4, 0, 2, 4, 0)]
    assert (len(work.prompts), work.distinct) == (7, 3)
    assert list(work.prompts[0]) == list(work.prompts[3]) != list(work.prompts[1])
    assert "Minutes 2\nThe harbour board" in bytes(one for one in work.prompts[1] if one < 256).decode()


def test_documents_are_cut_to_the_room_beside_the_answer(tmp_path):
    work = made(tmp_path, [record(n, text="word " * 900) for n in range(3)], documents=3, tokens=48)
    assert {len(ids) for ids in work.prompts} == {2048 - 48}


def test_a_fixed_length_leaves_nothing_to_the_model(tmp_path):
    sections = {"answers": {"retry_max_tokens": 128}, "sampling": {"max_tokens": 64, "stop": ["."]}}
    sections["packing"] = {"mode": "on"}
    job = made(tmp_path, [record(0)], documents=1, tokens=9, **sections).job
    assert job.sampling.max_tokens == 9
    assert job.sampling.others == {"stop": ["."], "min_tokens": 9, "ignore_eos": True}
    assert job.answers.retry_max_tokens is None
    assert job.packing.mode == "off"


def test_a_run_goes_where_it_is_sent(tmp_path):
    metrics = {"textfile": "nightly.prom"}
    work = made(tmp_path, [record(0)], documents=1, output={"dir": "elsewhere", "format": "jsonl"}, metrics=metrics)
    job = work.into(tmp_path / "run").job
    assert (job.output.path, job.output.format) == (tmp_path / "run", "jsonl")
    assert job.metrics.textfile is None  # it is no run that anybody watches


def test_a_job_with_nothing_to_send_is_refused(tmp_path):
    with pytest.raises(InputError, match="none of the job's documents gets a prompt"):
        made(tmp_path, [record(0, text="")], documents=1)


def test_the_mark_is_of_all_prompts_in_any_order(tmp_path):
    work = made(tmp_path, map(record, range(3)), documents=3)
    assert work.mark == sum(mark(list(ids)) for ids in reversed(work.prompts)) % 2**64
    assert mark([1, 2]) != mark([2, 1])
