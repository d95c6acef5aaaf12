"""Documents go to the engine in another order than they are read; nothing else of a run may notice."""

import itertools

import pytest
from helpers_run import SENTENCE, by_id, rows, same_rows, start, watch_requests, write_job, write_jsonl

from batchgen.feeding import feed, order, reader

TITLES = [f"Minutes of the {name} board, as they were taken down at the time" for name in ("harbour", "market", "mill")]


@pytest.fixture
def read_first(monkeypatch):
    """The engine takes its time to start: the reader has met the end by then."""
    monkeypatch.setattr(feed, "_PAUSES_S", (0.5,))


def records(count, *, of=0):
    """Of all lengths, in no order, with three titles in turns."""
    return [
        {"id": f"d{of + n}", "title": TITLES[n % 3], "text": f"{n} " + SENTENCE.format(n=n) * (1 + n * 7 % 5)}
        for n in range(count)
    ]


def job(tmp_path, *counts, **sections):
    inputs = [
        write_jsonl(tmp_path / f"{n}.jsonl", records(count, of=1000 * n)) for n, count in enumerate(counts, start=1)
    ]
    return write_job(tmp_path, inputs, checkpoint={"rows": 7}, **sections)


def titles_of(requests):
    return [next(n for n, title in enumerate(TITLES) if title in bytes(
        i for i in one.prompt_ids if i < 256).decode()) for one in requests]  # fmt: skip


def test_documents_with_one_beginning_meet_in_the_engine_and_the_longest_go_first(tmp_path, monkeypatch, read_first):
    seen = watch_requests(monkeypatch)
    assert start(job(tmp_path, 60)).exit_status == 0
    after = titles_of(seen)[1:]  # the first one started the engine
    assert sum(a != b for a, b in itertools.pairwise(after)) == 2
    lengths = [len(one.prompt_ids) for one in seen[1:]]
    for title in range(3):
        own = [length for length, found in zip(lengths, after, strict=True) if found == title]
        assert own == sorted(own, reverse=True)


def test_rows_are_those_of_a_run_in_the_order_of_the_input(tmp_path, out, monkeypatch, read_first):
    start(job(tmp_path, 60, 40))
    found = rows(out)
    monkeypatch.setattr(reader, "ordered", lambda window, last: list(window))
    start(job(tmp_path, 60, 40), fresh=True)
    same_rows(found, rows(out))


def test_a_limit_means_the_first_documents_of_the_input(tmp_path, out, read_first):
    path = job(tmp_path, 40, 20)
    for limit, done in ((10, 10), (25, 35), (10, 45)):
        start(path, limit=limit)
        ids = [f"d{1000 + n}" for n in range(40)] + [f"d{2000 + n}" for n in range(20)]
        assert {found for _, found in by_id(out)} == set(ids[:done])


def test_files_are_known_whole_and_counted_in_whatever_order_their_documents_ended(
    tmp_path, out, monkeypatch, read_first
):
    path = job(tmp_path, 30, 20, 10)
    start(path)
    opened = []

    def watched(job, number, source, original=reader.open_source):
        opened.append(source)
        return original(job, number, source)

    monkeypatch.setattr(reader, "open_source", watched)
    outcome = start(path)
    assert opened == []
    assert outcome.report["documents"] | {"reasons": 0, "flags": 0, "ways": 0} == {
        "total": 60, "total_is_exact": True, "ok": 60, "failed": 0, "skipped": 0, "pending": 0, "reasons": 0,
        "flags": 0, "ways": 0,
    }  # fmt: skip


def test_a_run_that_is_stopped_in_the_middle_of_a_window_goes_on_with_the_rest(tmp_path, out, monkeypatch, read_first):
    from helpers_run import stop_after_a_part

    with pytest.MonkeyPatch.context() as patch:
        assert start(job(tmp_path, 50, 50), stop=stop_after_a_part(patch)).exit_status == 75
    before = len(rows(out))
    assert 7 <= before < 100
    seen = watch_requests(monkeypatch)
    assert start(tmp_path / "job.yaml").exit_status == 0
    assert len(by_id(out)) == 100
    assert len(seen) == 100 - before


def test_a_window_is_as_large_as_what_the_reader_keeps_ready():
    assert order.WINDOW == reader._BATCHES_AHEAD * reader._BATCH
