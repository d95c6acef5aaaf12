"""Whole runs of packs on the fake engine: rows, report, resume, engines that die, and the choice of `auto`."""

import json
import time

import pytest
from helpers_packs import PLACES, number, strangers, text_of
from helpers_run import by_id, rows, start, stop_after_a_part, watch_requests, write_job, write_jsonl

from batchgen.errors import FingerprintError, Interrupted
from batchgen.job import jobfile
from batchgen.reporting.stats import read_telemetry

PACKING = {"mode": "on", "max_documents": 4, "max_document_tokens": 400}
SLOW_PROMPT = {"system": "You write summaries.", "user": "{{ text }}"}


@pytest.fixture
def job(tmp_path):
    """Makes the job of so many canary documents."""

    def make(documents, *, long=(), **sections):
        data = [
            {"id": f"d{n}", "text": text_of(n) + (" And so on." * 60 if n in long else "")} for n in range(documents)
        ]
        path = write_jsonl(tmp_path / "a.jsonl", data)
        given = {
            "prompt": SLOW_PROMPT,
            "packing": PACKING,
            "engine": {"backend": "fake", "args": {"max_model_len": 8192, "max_num_seqs": 4}},
            "sampling": {"max_tokens": 300},
        }
        return write_job(tmp_path, [{"path": str(path), "id_field": "id"}], **given | sections)

    return make


def sizes(out):
    return [row["pack_size"] for row in rows(out)]


@pytest.mark.parametrize("feed", ["rolling", "generate"])
def test_short_documents_share_requests_and_long_ones_do_not(job, out, feed):
    report = start(job(len(PLACES), long=[2, 7]), f"engine.feed={feed}").report
    found = by_id(out)
    assert {key[1]: row["pack_size"] for key, row in found.items()} == {
        f"d{n}": 1 if n in {2, 7} else 4 if len(PLACES) == n else found["str", f"d{n}"]["pack_size"] for n in range(12)
    }
    assert sorted(sizes(out)) == [1, 1, 2, 2] + [4] * 8
    for n in range(len(PLACES)):
        row = found["str", f"d{n}"]
        assert (row["status"], row["requests"], row["attempts"], row["pack_fallback"]) == ("ok", 1, 1, None)
        if row["pack_size"] > 1:
            assert PLACES[n] in row["summary"]
            assert not strangers(row["summary"], n, len(PLACES))
    assert report["packing"] == {
        "mode": "on", "decision": None, "documents": 10, "fallbacks": {}, "wasted_tokens": 0,
    }  # fmt: skip
    assert (report["attempt"]["packs"], report["attempt"]["requests"]) == (3, 5)
    for column, told in (("prompt_tokens", "prompt"), ("completion_tokens", "output")):
        assert sum(row[column] for row in found.values()) == report["attempt"]["tokens"][told]
    assert report["attempt"]["tokens"]["wasted"] == 0


def script(*items):
    told = [{"label": f"<{n}>", "summary": text_of(m)} for n, m in items]
    return f"engine.fake.answers={json.dumps([{'match': 'separate requests', 'text': json.dumps(told)}])}"


def test_what_a_pack_got_wrong_is_told_by_row_and_report(job, out):
    """Of four, two are swapped and one is missing."""
    report = start(job(4), script((1, 0), (2, 2), (3, 1), (9, 3))).report
    found = {key[1]: row for key, row in by_id(out).items()}
    assert {name: (row["pack_size"], row["pack_fallback"]) for name, row in found.items()} == {
        "d0": (4, None), "d1": (1, "foreign"), "d2": (1, "foreign"), "d3": (1, "missing"),
    }  # fmt: skip
    assert {row["status"] for row in found.values()} == {"ok"}
    assert report["packing"]["fallbacks"] == {"foreign": 2, "missing": 1}
    assert report["packing"]["documents"] == 1
    wasted = sum(row["dropped_tokens"] for row in found.values())
    assert report["packing"]["wasted_tokens"] == report["attempt"]["tokens"]["wasted"] == wasted > 0
    assert (report["attempt"]["packs"], report["attempt"]["pack_extras"]) == (1, 1)
    for column, told in (("prompt_tokens", "prompt"), ("completion_tokens", "output")):
        assert sum(row[column] for row in found.values()) == report["attempt"]["tokens"][told]
    text = (out / "report.md").read_text()
    assert "sent alone after a pack, foreign: 2" in text
    assert "requests with several documents | 1 | 1" in text


def test_the_secret_stays_and_packs_are_the_same_in_each_run_of_it(job, out, monkeypatch):
    path = job(10)
    sent = watch_requests(monkeypatch)
    start(path)
    secret = json.loads((out / "run.json").read_text())["packing_secret"]
    assert len(bytes.fromhex(secret)) == 32
    first = {(tuple(one.prompt_ids), one.max_tokens, one.schema) for one in sent}
    for part in out.glob("summaries/part-*"):
        part.unlink()
    sent.clear()
    start(path)
    assert {(tuple(one.prompt_ids), one.max_tokens, one.schema) for one in sent} == first
    assert json.loads((out / "run.json").read_text())["packing_secret"] == secret
    start(path, fresh=True)
    assert json.loads((out / "run.json").read_text())["packing_secret"] != secret


def test_a_resume_packs_what_is_left(job, out, monkeypatch):
    path = job(40, checkpoint={"rows": 4})
    with pytest.MonkeyPatch.context() as patch:
        stop = stop_after_a_part(patch)
        outcome = start(path, "lifecycle.grace_s=0", stop=stop)
    assert outcome.exit_status == Interrupted.exit_status
    before = rows(out)
    assert 4 <= len(before) < 40
    report = start(path).report
    assert [row for row in rows(out) if row in before] == before
    assert len(by_id(out)) == 40
    assert set(sizes(out)) <= {4, (40 - len(before)) % 4}
    assert report["attempt"]["requests"] == -(-(40 - len(before)) // 4)
    assert start(path).report["attempt"]["requests"] == 0


def test_settings_of_packing_are_in_the_fingerprint_and_off_has_none(job, out):
    path = job(4)
    start(path)
    for change in ("packing.mode=false", "packing.mode=auto", "packing.max_documents=3", "packing.verify=labels"):
        with pytest.raises(FingerprintError, match=change.partition("=")[0].replace(".", r"\.")):
            start(path, change)
    start(path, "packing.mode=false", fresh=True)
    assert start(path, "packing.mode=false", "packing.max_documents=3").exit_status == 0


@pytest.mark.parametrize("strikes", [1, 2])
@pytest.mark.parametrize("feed", ["rolling", "generate"])
def test_a_document_that_kills_engines_fails_alone_and_not_its_neighbours(job, out, strikes, feed):
    poison = f"engine.fake.die_on={PLACES[5]}"
    done = start(job(12, failures={"strikes": strikes, "max": 1}), poison, f"engine.feed={feed}")
    found = {key[1]: row for key, row in by_id(out).items()}
    assert {name for name, row in found.items() if row["status"] == "failed"} == {"d5"}
    assert found["d5"]["error_type"] == "engine_died"
    assert {row["pack_fallback"] for row in found.values()} >= {"engine_died"}
    assert done.exit_status == 0
    assert {one["pack_fallback"] for one in found.values() if one["pack_size"] > 1} <= {None}


def test_a_suspect_of_an_earlier_start_is_not_packed_with_others(job, out):
    path = job(8, failures={"max": 1}, checkpoint={"rows": 1000})
    poison = f"engine.fake.die_on={PLACES[3]}"
    assert start(path, poison, "engine.fake.lives=1", "failures.strikes=1").exit_status != 0
    assert (out / "strikes-00000.json").exists()
    start(path, poison, "failures.strikes=1")
    found = {key[1]: row for key, row in by_id(out).items()}
    assert {name for name, row in found.items() if row["status"] == "failed"} == {"d3"}


def test_failed_documents_are_tried_again_alone(job, out):
    path = job(8)
    start(path, "engine.fake.fail_on=harbour board")
    assert {row["status"] for row in rows(out)} == {"failed"}
    assert {row["pack_fallback"] for row in rows(out)} == {"request_failed"}
    start(path, retry=frozenset())
    assert {(row["status"], row["pack_size"], row["pack_fallback"]) for row in rows(out)} == {("ok", 1, None)}


def test_a_slow_source_is_not_waited_for(job, out, monkeypatch):
    """Documents that come one by one are sent as they are, once nothing else is to be done."""
    from batchgen.feeding import feed, reader

    real, moments = reader.read_documents, []

    def slowly(line, reading):
        for n, document in enumerate(real(line, reading)):
            time.sleep([0, 0.2, 1.5, 0][n])
            if n == 2:
                moments.append(line.stats.counts.requests)
            yield document

    monkeypatch.setattr(reader, "_BATCH_S", 0.0)
    monkeypatch.setattr(reader, "_COUNTED_S", 0.1)
    monkeypatch.setattr(feed, "_HELD_S", 0.2)
    monkeypatch.setattr("batchgen.executors.local.read_documents", slowly)
    start(job(4))
    assert moments == [1]
    assert len(by_id(out)) == 4


# auto.


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level("INFO")


AUTO = PACKING | {"mode": "auto"}
DOCUMENTS = 16 + 3 * 16  # the least that both ways can be measured on: 4 documents for each of 4 sequences a turn
FORCED = {"on": "engine.fake.docs_per_s=150", "off": "engine.fake.output_tokens_per_s=20000"}


@pytest.mark.parametrize("choice", FORCED)
def test_auto_keeps_the_faster_way(job, out, caplog, choice):
    """Requests that cost time speak for packs; answers that cost time against them: those of packs are longer."""
    path = job(DOCUMENTS + 20, packing=AUTO)
    report = start(path, FORCED[choice]).report
    decision = json.loads((out / "run.json").read_text())["decisions"]["packing"]
    assert decision["mode"] == choice
    assert (decision["packed_docs_per_s"] > decision["single_docs_per_s"]) is (choice == "on")
    assert decision["documents"] == 16
    assert report["packing"]["decision"] == decision
    assert decision["why"] in (out / "report.md").read_text()
    assert f"packing is {choice} from here on" in caplog.text
    assert len(by_id(out)) == DOCUMENTS + 20
    assert {row["status"] for row in rows(out)} == {"ok"}
    assert "one document a prompt is expected to be faster" in caplog.text
    packed = sum(size > 1 for size in sizes(out))
    assert packed == 16 + (DOCUMENTS + 20 - 48 if choice == "on" else 0)


@pytest.mark.parametrize("choice", FORCED)
def test_what_auto_decided_is_obeyed_by_later_starts(job, out, choice):
    path = job(DOCUMENTS, packing=AUTO)
    start(path, FORCED[choice])
    decided = json.loads((out / "run.json").read_text())["decisions"]
    other = FORCED["off" if choice == "on" else "on"]
    write_jsonl(path.with_name("a.jsonl"), [{"id": f"d{n}", "text": text_of(n)} for n in range(DOCUMENTS + 80)])
    report = start(path, other).report
    assert json.loads((out / "run.json").read_text())["decisions"] == decided
    assert report["attempt"]["packs"] == (20 if choice == "on" else 0)


@pytest.mark.parametrize("documents", [3, 16, DOCUMENTS - 1])
def test_with_too_few_documents_auto_packs_none_and_decides_nothing(job, out, caplog, documents):
    report = start(job(documents, packing=AUTO), FORCED["on"]).report
    assert set(sizes(out)) == {1}
    assert report["packing"]["decision"] is None
    assert "decisions" not in json.loads((out / "run.json").read_text())
    assert ("too few to measure both ways" in caplog.text) is (documents >= 16)
    assert len(by_id(out)) == documents


@pytest.mark.parametrize("n", [3, 20, 40], ids=["warm-up", "single", "packed"])
def test_an_engine_that_dies_while_auto_measures_leaves_it_undecided(job, out, n):
    path = job(DOCUMENTS + 12, packing=AUTO, failures={"max": 1})
    report = start(path, f"engine.fake.die_on={number(n)} metres").report
    assert report["packing"]["decision"] is None
    found = {key[1]: row for key, row in by_id(out).items()}
    assert len(found) == DOCUMENTS + 12
    assert {name for name, row in found.items() if row["status"] == "failed"} == {f"d{n}"}
    assert report["attempt"]["packs"] <= 4


def test_without_a_prefix_cache_packs_are_expected_to_be_faster(job, caplog):
    start(job(4, packing=AUTO), "engine.args.enable_prefix_caching=false")
    assert "with the prefix cache off, packing is expected to be faster" in caplog.text


def test_fallbacks_count_against_packs(job, out):
    """Packs of which nothing is accepted lose, however fast their requests are."""
    path = job(DOCUMENTS, packing=AUTO)
    answers = [{"match": "separate requests", "text": "[]"}]
    start(path, f"engine.fake.answers={json.dumps(answers)}", FORCED["on"])
    decision = json.loads((out / "run.json").read_text())["decisions"]["packing"]
    assert decision["mode"] == "off"
    assert decision["fallbacks"] == {"unreadable": 16}


def test_refused_answers_are_kept_for_inspection(job, out):
    start(job(4), f"engine.fake.answers={json.dumps([{'match': 'separate requests', 'text': 'No list.'}])}")
    events = [one for path in out.glob("telemetry-*") for one in read_telemetry(path) if one["event"] == "pack_refused"]
    assert [(one["text"], one["refused"], one["documents"]) for one in events] == [("No list.", {"unreadable": 4}, 4)]


def test_packing_goes_with_nothing_that_shapes_answers_itself(job):
    from batchgen.errors import ConfigError

    for change in ("answers.reasoning_end=</think>", "sampling.structured_outputs={regex: a}"):
        with pytest.raises(ConfigError, match=r"packing\.mode"):
            jobfile.load(job(4), [change])
