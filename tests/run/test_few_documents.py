"""How many documents an engine is started for: known before, or counted by the reader; never too few."""

import json

import pytest
from helpers_run import record, start, write_job, write_jsonl

from batchgen.executors.starting import Starter


@pytest.fixture
def told(monkeypatch):
    """What each engine was started for, in order."""
    found = []
    engine = Starter.engine

    def watched(self, lives, documents=None):
        started = engine(self, lives, documents)
        found.append(self.at_most)
        return started

    monkeypatch.setattr(Starter, "engine", watched)
    return found


def job(folder, count, *, text=None):
    more = {} if text is None else {"text": text}
    return write_job(folder, [write_jsonl(folder / "a.jsonl", [record(n, **more) for n in range(count)])])


@pytest.mark.parametrize(("count", "known"), [(1, 1), (256, 256), (257, 257)])
def test_a_few_documents_are_counted_before_the_engine_starts(tmp_path, told, count, known):
    start(job(tmp_path, count))
    assert told == [known]


def test_documents_that_are_no_records_are_not_counted(tmp_path, told):
    path = job(tmp_path, 5)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("{torn\n")
    start(path)
    assert told == [5]


def test_a_limit_and_a_retry_say_how_many_there_are(tmp_path, told):
    path = job(tmp_path, 300)
    start(path, "engine.fake.fail_every=100", limit=280)
    start(path)
    start(path, retry=frozenset())
    assert told == [280, 20, 2]


def test_edited_documents_count_although_they_have_rows(tmp_path, told):
    path = job(tmp_path, 300)
    start(path)
    job(tmp_path, 300, text="Another text, of the quay walls and of what they cost.")
    start(path)
    assert told == [300, 300]


def test_an_engine_that_is_started_again_is_that_of_before(tmp_path, told):
    start(job(tmp_path, 9), "engine.fake.die_after=5")
    assert told == [9, 9]


def test_run_json_tells_the_profile_and_what_it_filled(tmp_path, out):
    start(job(tmp_path, 3), "engine.profile=low_memory")
    engine = json.loads((out / "run.json").read_text())["engine"]
    assert (engine["profile"], engine["args"]["max_num_batched_tokens"], engine["max_num_seqs"]) == (
        "low_memory", 2048, 4,
    )  # fmt: skip
    again = start(job(tmp_path, 4), "engine.profile=throughput")
    assert (again.exit_status, again.report["documents"]["ok"]) == (0, 4)


@pytest.mark.parametrize("policy", ["map_reduce", "refine"])
def test_documents_in_pieces_are_not_counted_since_each_can_be_many_requests(tmp_path, told, policy):
    start(job(tmp_path, 5), f"long_documents.policy={policy}")
    assert told == [None]
