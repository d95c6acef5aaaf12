"""Answers that reach max_tokens: flagged, or asked for once more where the job allows; never taken for whole.

vllm-project/vllm#8350: what was cut passed as whole, since nobody looked at finish_reason first.
"""

import threading

import pytest
from helpers_run import by_id, command, record, rows, same_rows, start, write_job, write_jsonl

from batchgen.engines.fake import FakeEngine
from batchgen.errors import EngineError
from batchgen.lifecycle import Stop

LONG = "The board met in Alder Hall and wants forty metres of new wall, paid for over three years."  # 90 tokens
SHORT = "A wall is renewed."


def job(tmp_path, *, count=6, long=(1, 4), **sections):
    """Documents of which some have a long answer, all others a short one; 40 tokens are allowed."""
    told = [{"match": f"day {n} ", "text": LONG} for n in long] + [{"match": "quay", "text": SHORT}]
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": {"answers": told}}
    path = write_jsonl(tmp_path / "a.jsonl", map(record, range(count)))
    sections = {"sampling": {"max_tokens": 40}, "checkpoint": {"rows": 3}} | sections
    return write_job(tmp_path, [path], engine=engine, **sections)


def test_a_cut_answer_is_flagged_and_never_plainly_ok(tmp_path, out):
    report = start(job(tmp_path)).report
    found = by_id(out)
    for n in range(6):
        row = found["str", f"d{n}"]
        cut = n in (1, 4)
        assert (row["status"], row["finish_reason"], row["requests"]) == ("ok", "length" if cut else "stop", 1)
        assert row["flags"] == (["summary_cut"] if cut else [])
        assert row["summary"] == (LONG[:40].strip() if cut else SHORT)
    assert report["documents"]["flags"] == {"summary_cut": 2}
    assert report["run"]["tokens"]["wasted"] == 0


def test_with_more_room_it_is_sent_once_more(tmp_path, out):
    done = command("run", job(tmp_path, answers={"retry_max_tokens": 100}))
    assert done.returncode == 0
    found = by_id(out)
    for n in (1, 4):
        row = found["str", f"d{n}"]
        assert (row["summary"], row["flags"], row["finish_reason"]) == (LONG, [], "stop")
        assert (row["requests"], row["attempts"]) == (2, 1)
        assert (row["completion_tokens"], row["dropped_tokens"]) == (40 + len(LONG), 40)
    assert {found["str", f"d{n}"]["requests"] for n in (0, 2, 3, 5)} == {1}
    report = start(job(tmp_path, answers={"retry_max_tokens": 100})).report
    assert report["run"]["requests"] == 8
    assert report["run"]["tokens"]["output"] == 2 * (40 + len(LONG)) + 4 * len(SHORT)
    assert report["run"]["tokens"]["wasted"] == 80
    assert report["lengths"]["completion_tokens"]["max"] == len(LONG)
    assert report["lengths"]["prompt_tokens"]["max"] < 200  # of one prompt, not of two


def test_cut_again_the_longer_text_is_kept_and_flagged(tmp_path, out):
    start(job(tmp_path, answers={"retry_max_tokens": 60}))
    row = by_id(out)["str", "d1"]
    assert (row["summary"], row["flags"], row["requests"]) == (LONG[:60].strip(), ["summary_cut"], 2)


def test_the_second_request_stays_within_the_context(tmp_path, out):
    """The prompt leaves room for 50 tokens; without any more than at first there is no second request."""
    prompt = max(row["prompt_tokens"] for row in _rows_of(tmp_path, out))
    path = job(tmp_path, answers={"retry_max_tokens": 1000})
    for room, requests in ((50, 2), (40, 1)):
        start(path, f"engine.args.max_model_len={prompt + room}", fresh=True)
        row = by_id(out)["str", "d1"]
        assert (row["summary"], row["requests"]) == (LONG[:room].strip(), requests)
        assert "document_truncated" not in row["flags"]


def _rows_of(tmp_path, out):
    start(job(tmp_path))
    return rows(out)


@pytest.mark.parametrize("feed", ["rolling", "generate"])
def test_both_feeds_ask_again(tmp_path, out, feed):
    start(job(tmp_path, count=30, long=range(0, 30, 3), answers={"retry_max_tokens": 100}), f"engine.feed={feed}")
    assert sorted(row["requests"] for row in rows(out)) == [1] * 20 + [2] * 10
    assert sum(row["summary"] == LONG for row in rows(out)) >= 10
    assert not any(row["flags"] for row in rows(out))


@pytest.mark.parametrize("die_after", [5, 6, 9, 13])
def test_an_engine_that_dies_between_the_first_and_the_second_answer(tmp_path, out, die_after):
    path = job(tmp_path, count=12, long=range(0, 12, 2), answers={"retry_max_tokens": 100})
    (tmp_path / "calm").mkdir()
    start(path, f"output.dir={tmp_path / 'calm/out'}")
    assert start(path, f"engine.fake.die_after={die_after}", "failures.strikes=9").exit_status == 0
    same_rows(rows(out), rows(tmp_path / "calm/out"), but=("finished_at", "attempts", "cached_tokens"))
    assert max(row["attempts"] for row in rows(out)) > 1


def test_a_document_whose_second_request_kills_engines_keeps_its_first_answer(tmp_path, out, monkeypatch):
    poll = FakeEngine.poll

    def dies_of_room(self):
        if any(request.max_tokens == 100 for request in self._waiting):
            raise EngineError("out of memory")
        return poll(self)

    monkeypatch.setattr(FakeEngine, "poll", dies_of_room)
    outcome = start(job(tmp_path, count=20, long=[3], answers={"retry_max_tokens": 100}))
    assert outcome.exit_status == 0
    row = by_id(out)["str", "d3"]
    assert (row["status"], row["summary"], row["flags"]) == ("ok", LONG[:40].strip(), ["summary_cut"])
    assert len(by_id(out)) == 20


@pytest.mark.parametrize("feed", ["rolling", "generate"])
def test_after_a_signal_there_is_no_second_request_and_the_document_is_the_next_starts(
    tmp_path, out, monkeypatch, feed
):
    stop, sent = Stop(), []
    poll, submit = FakeEngine.poll, FakeEngine.submit

    def stopping(self):
        found = poll(self)
        stop.request("SIGTERM")
        return found

    def counting(self, request):
        sent.append((request.max_tokens, stop.requested))
        submit(self, request)

    path = job(tmp_path, count=8, long=(0, 1, 2, 3), answers={"retry_max_tokens": 100})
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "poll", stopping)
        patch.setattr(FakeEngine, "submit", counting)
        assert start(path, f"engine.feed={feed}", stop=stop).exit_status == 75
    assert [one for one in sent if one[1]] == []
    assert (40, None) in sent
    first = rows(out)
    assert {row["id"] for row in first}.isdisjoint({"d0", "d1", "d2", "d3"})  # cut, and not asked for again
    assert len(first) == 4
    outcome = start(path, f"engine.feed={feed}")
    assert (outcome.exit_status, outcome.report["documents"]["pending"]) == (0, 0)
    found = by_id(out)
    assert len(found) == 8
    assert all(found["str", f"d{n}"]["summary"] == LONG for n in range(4))
    assert [row for row in rows(out) if row in first] == first


def test_a_signal_while_second_requests_run_lets_them_finish(tmp_path, out):
    stop = Stop()
    path = job(tmp_path, count=40, long=range(40), answers={"retry_max_tokens": 100})
    threading.Timer(0.5, stop.request, ["SIGTERM"]).start()
    assert start(path, "engine.fake.docs_per_s=40", stop=stop).exit_status == 75
    done = rows(out)
    assert 0 < len(done) < 40
    assert {row["requests"] for row in done} == {2}
    assert start(path).exit_status == 0
    assert {row["summary"] for row in rows(out)} == {LONG}
    assert len(by_id(out)) == 40


@pytest.mark.parametrize("tokens", [40, 39])
def test_no_more_room_is_a_mistake_that_is_told_with_its_line(tmp_path, out, tokens):
    path = job(tmp_path, answers={"retry_max_tokens": tokens})
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "retry_max_tokens" in text)
    done = command("run", path)
    assert done.returncode == 78
    assert f"job.yaml, line {line}: answers.retry_max_tokens: must be above sampling.max_tokens (40)" in done.stderr
    assert not out.exists()
