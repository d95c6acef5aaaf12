"""report.json and report.md: documents from the rows, times and tokens from telemetry, nulls where nothing ran."""

import dataclasses
import json
import math

import pyarrow as pa
import pytest
from helpers_config import document

from batchgen.data import COPIED, DOCUMENT_TRUNCATED, MAP_REDUCED, SUMMARY_CUT, Record
from batchgen.engines.base import EngineMetrics
from batchgen.errors import OutputError
from batchgen.reporting import report
from batchgen.reporting.rows import read_rows
from batchgen.reporting.stats import Counts, Stats, Telemetry
from batchgen.sinks.base import DamagedPartError
from batchgen.sinks.parquet import ParquetSink
from batchgen.storage.rundir import RunDirectory

# 100 s of an attempt, worked out by hand below.
COUNTS = Counts(
    read=12, done_before=2, ok=7, failed=2, skipped=1, requests=9, prompt_tokens=900, cached_tokens=288,
    completion_tokens=170, generated_tokens=200, kept_tokens=140, reasoning_tokens=55, prefix_cache_queries=900,
    prefix_cache_hits=300, preemptions=4,
    total_s=100.0, engine_start_s=12.5, steady_s=60.0, drain_s=20.0, commit_s=1.25, starved_s=3.0,
    encode_s=4.5, loop_cpu_s=7.5,
    peak_rss_bytes=300 << 20, engine_peak_rss_bytes=5 << 30,
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    directory.summaries.mkdir(parents=True)
    directory.write_run({})
    return directory


def sink():
    return ParquetSink({"title": pa.string()}, owner="0")


def records():
    """7 ok with 20 tokens each and prompts of 100 to 106, 2 failed, 1 skipped."""
    flags = [(SUMMARY_CUT,), (SUMMARY_CUT, COPIED), (DOCUMENT_TRUNCATED,), (), (), (), ()]
    ok = [
        Record(
            document("x", n=n),
            "ok",
            summary="s",
            flags=flags[n],
            prompt_tokens=100 + n,
            completion_tokens=20,
            requests=1,
        )
        for n in range(7)
    ]
    rest = [
        Record(document("x", n=7), "failed", error_type="request_failed", error="e", completion_tokens=30, requests=1),
        Record(document("x", n=8), "failed", error_type="bad_json", error="e"),
        Record(document("", n=9), "skipped", error_type="empty", error="e"),
    ]
    return ok + rest


def write_part(run, rows, number=1, attempt=1):
    sink().write_part(run.part(attempt, number, ".parquet"), rows, fingerprint="f", footer={"files": {}})


def scope(run, **more):
    values = {
        "rows": read_rows(run, sink()), "stale": 0,
        "name": "demo", "attempt": 2, "counts": COUNTS, "exit_status": 0, "reason": "finished", "total_rows": 12,
        "total_exact": True, "notes": {},
    }  # fmt: skip
    return report.Scope(**values | more)


def strict(text):
    """JSON as a strict reader takes it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def ways(*values):
    return dict(zip(("documents", "requests", "prompt_tokens", "completion_tokens"), values, strict=True))


def test_documents_in_pieces_have_a_way_of_their_own_and_no_length(run):
    long = {"flags": (MAP_REDUCED, SUMMARY_CUT), "requests": 9, "pieces": 8, "depth": 1}
    more = Record(document("x", n=11), "ok", summary="s", prompt_tokens=900, completion_tokens=180, **long)
    failed = Record(document("x", n=12), "failed", error_type="not_reduced", error="e", prompt_tokens=50, **long)
    write_part(run, [*records(), more, failed])
    built = report.build(run, scope(run))
    assert built["documents"]["ways"]["map_reduce"] == ways(2, 18, 950, 180)
    assert built["lengths"]["prompt_tokens"]["max"] == 106
    assert "| map_reduce | 2 | 18 | 950 | 180 |" in report.markdown(built)


def test_a_worked_example(run):
    write_part(run, records()[:4])
    write_part(run, records()[4:], number=2)
    built = report.build(run, scope(run))
    assert built["documents"] == {
        "total": 12, "total_is_exact": True, "ok": 7, "failed": 2, "skipped": 1, "pending": 2,
        "reasons": {"failed: bad_json": 1, "failed: request_failed": 1, "skipped: empty": 1},
        "flags": {"copied": 1, "document_truncated": 1, "summary_cut": 2},
        "ways": {
            "whole": ways(7, 7, 619, 150), "truncated": ways(1, 1, 102, 20), "map_reduce": ways(0, 0, 0, 0),
            "refine": ways(0, 0, 0, 0),
        },
    }  # fmt: skip
    attempt = built["attempt"]
    assert attempt["number"] == 2
    assert attempt["documents"] == {"read": 12, "done_before": 2, "ok": 7, "failed": 2, "skipped": 1}
    assert attempt["requests"] == 9
    assert attempt["tokens"] == {"prompt": 900, "cached": 288, "output": 200, "reasoning": 55, "wasted": 60}
    assert attempt["seconds"] == {
        "total": 100.0, "engine_start": 12.5, "steady": 60.0, "drain": 20.0, "commit": 1.25, "starved": 3.0,
        "encode": 4.5, "loop_cpu": 7.5, "tail": 0.0,
    }  # fmt: skip
    # Over the 80 seconds in which the engine worked.
    assert attempt["rates"] == {"docs_per_s": 0.087, "prompt_tokens_per_s": 11.25, "output_tokens_per_s": 2.5}
    assert attempt["prefix_cache"] == {"queries": 900, "hits": 300, "hit_share": 0.32}  # cached of prompt tokens
    assert attempt["preemptions"] == 4
    assert attempt["starved_share"] == 0.0375  # of the same 80 seconds
    assert attempt["memory"] == {"peak_rss_bytes": 314572800, "engine_peak_rss_bytes": 5368709120}
    text = report.markdown(built)
    assert "| share of steady and drain time | 3.8% | 3.8% |\n" in text
    assert "| batchgen's own process | 300 | 300 |\n| the engine's processes | 5,120 | 5,120 |\n" in text
    assert built["lengths"] == {
        "document_chars": {"p10": 1, "p50": 1, "p90": 1, "max": 1},  # of nine: one has no text
        "prompt_tokens": {"p10": 100, "p50": 103, "p90": 106, "max": 106},
        "completion_tokens": {"p10": 20, "p50": 20, "p90": 20, "max": 20},
    }


def test_a_row_of_two_requests_has_one_prompt_and_one_answer_that_is_kept(run):
    twice = {"prompt_tokens": 200, "completion_tokens": 25, "dropped_tokens": 15, "requests": 2}
    write_part(run, [Record(document("x", n=n), "ok", summary="s", **twice) for n in range(3)])
    built = report.build(run, scope(run))
    assert built["lengths"]["prompt_tokens"]["max"] == 100
    assert built["lengths"]["completion_tokens"]["max"] == 10
    assert built["run"]["tokens"]["wasted"] == 200 - 3 * 10


def test_notes_of_other_peoples_making_do_no_harm_where_they_are_shown(run):
    note = "a\x1b[2J\u202e\x9b31m.jsonl: cannot be read"
    report.write(run, report.build(run, scope(run, reason=note, notes={"input files with errors": [note]})))
    for path in (run.report_json, run.report_md):
        assert not set("\x1b\u202e\x9b") & set(path.read_text())
    assert r"a\u001b[2J\u202e\u009b31m.jsonl: cannot be read" in run.report_md.read_text()
    assert strict(run.report_json.read_text())["notes"] == {"input files with errors": [note]}


def test_the_whole_run_is_the_sum_of_its_attempts(run):
    write_part(run, records())
    earlier = Telemetry(run.telemetry(1))
    stats = Stats()
    stats.counts = dataclasses.replace(COUNTS, kept_tokens=15, generated_tokens=50, completion_tokens=40)
    earlier.sample(stats, EngineMetrics(generation_tokens=50))
    earlier.close(stats, 75)
    # What this attempt has told of itself counts once.
    told = Telemetry(run.telemetry(2))
    told.sample(stats, EngineMetrics(generation_tokens=50))
    told.close(stats, 0)
    built = report.build(run, scope(run))
    assert built["run"]["attempts"] == 2
    assert built["run"]["requests"] == 18
    assert built["run"]["tokens"]["prompt"] == 1800
    # 250 were generated, 140 stand in ok rows: the 15 of before are in rows that newer ones have replaced.
    assert (built["run"]["tokens"]["output"], built["run"]["tokens"]["wasted"]) == (250, 110)
    assert built["attempt"]["tokens"]["wasted"] == 60
    assert built["run"]["seconds"]["engine_start"] == 25.0


def test_without_documents_rates_and_lengths_are_null(run):
    built = report.build(run, scope(run, counts=Counts(total_s=0.2), total_rows=0, attempt=1))
    assert built["documents"] == {
        "total": 0, "total_is_exact": True, "ok": 0, "failed": 0, "skipped": 0, "pending": 0, "reasons": {},
        "flags": {}, "ways": dict.fromkeys(("whole", "truncated", "map_reduce", "refine"), ways(0, 0, 0, 0)),
    }  # fmt: skip
    for where in ("attempt", "run"):
        assert set(built[where]["rates"].values()) == {None}
        assert built[where]["prefix_cache"]["hit_share"] is None
        assert built[where]["tokens"] == {"prompt": 0, "cached": 0, "output": 0, "reasoning": 0, "wasted": 0}
    assert set(built["lengths"]["prompt_tokens"].values()) == {None}
    assert set(built["engine"].values()) == {None}
    report.write(run, built)
    assert strict(run.report_json.read_text())["lengths"]["completion_tokens"]["p50"] is None
    assert "No engine was started." in run.report_md.read_text()


def test_a_rate_of_zero_is_no_null(run):
    counts = Counts(failed=5, requests=5, total_s=20, steady_s=10)
    rates = report.build(run, scope(run, counts=counts))["attempt"]["rates"]
    assert rates == {"docs_per_s": 0.0, "prompt_tokens_per_s": 0.0, "output_tokens_per_s": 0.0}


def test_only_failed_documents_have_no_lengths(run):
    write_part(run, records()[7:])
    built = report.build(run, scope(run))
    assert (built["documents"]["ok"], built["documents"]["failed"]) == (0, 2)
    assert set(built["lengths"]["completion_tokens"].values()) == {None}


def test_a_part_that_vanishes_between_two_looks_is_left_out(run):
    class Vanishing(ParquetSink):
        def read(self, path, columns):
            if "status" in columns and path == run.part(1, 2, ".parquet"):
                raise DamagedPartError("gone")
            return super().read(path, columns)

    write_part(run, records()[:7])
    write_part(run, records()[7:], number=2)
    assert read_rows(run, Vanishing({}, owner="0")).status == {"ok": 7}


def test_of_two_rows_for_one_document_the_newer_counts(run):
    write_part(run, records())
    newer = Record(document("y", n=7), "ok", summary="s", prompt_tokens=200, completion_tokens=11)
    write_part(run, [newer], attempt=2)
    rows = read_rows(run, sink())
    assert (rows.status, rows.superseded) == ({"ok": 8, "failed": 1, "skipped": 1}, 1)
    assert rows.reasons == {"failed: bad_json": 1, "skipped: empty": 1}
    assert rows.kept_tokens == 7 * 20 + 11


def test_edited_documents_that_have_only_their_old_row_are_pending(run):
    write_part(run, records())
    assert report.build(run, scope(run, total_rows=10))["documents"]["pending"] == 0
    assert report.build(run, scope(run, total_rows=10, stale=3))["documents"]["pending"] == 3


def test_a_damaged_part_is_left_out(run):
    write_part(run, records())
    run.part(1, 2, ".parquet").write_bytes(b"PAR1 no more")
    assert read_rows(run, sink()).count == 10


def test_more_rows_than_were_planned_are_no_negative_number(run):
    write_part(run, records())
    assert report.build(run, scope(run, total_rows=3))["documents"]["pending"] == 0


def engine_of(run, **more):
    engine = {
        "backend": "vllm", "device": "H200", "max_num_seqs": 256, "kv_cache_tokens": 1000000,
        "kv_cache_max_concurrency": 244.14, "args": {"model": "m", "max_model_len": 4096},
        "versions": {"vllm": "0.32.0"},
    } | more  # fmt: skip
    run.write_run({"engine": engine})


def test_the_engine_and_the_versions_are_told(run):
    engine_of(run)
    built = report.build(run, scope(run))
    assert built["engine"]["args"] == {"model": "m", "max_model_len": 4096}
    assert built["versions"]["vllm"] == "0.32.0"
    assert "batchgen" in built["versions"]


@pytest.mark.parametrize(
    "engine", [None, {}, {"device": None, "kv_cache_tokens": None, "max_num_seqs": None}, {"args": None}]
)
@pytest.mark.parametrize("counts", [Counts(), COUNTS], ids=["nothing", "something"])
def test_markdown_shows_every_report(run, engine, counts):
    if engine is not None:
        engine_of(run, **engine)
    notes = {"damaged parts": ["a: b", "c: d"], "orphans": 0, "edited documents": 3, "input files with errors": []}
    text = report.markdown(report.build(run, scope(run, counts=counts, notes=notes, reason="--limit 5 reached")))
    assert text.startswith("# demo: --limit 5 reached\n")
    assert "- damaged parts: a: b; c: d\n" in text
    assert "- edited documents: 3\n" in text
    assert "orphans" not in text
    assert "input files" not in text
    assert "None" not in text
    assert "nan" not in text
    assert ("| docs/s | – | – |" in text) == (counts == Counts())


def test_tables_of_the_markdown_are_tables(run):
    write_part(run, records())
    engine_of(run)
    text = report.markdown(report.build(run, scope(run, total_exact=False)))
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 6
    for rows in blocks:
        assert len({row.count("|") for row in rows}) == 1, rows
        assert set(rows[1]) <= set("|-:")
    assert blocks[0][2] == "| about 12 | 7 | 2 | 1 | 2 |"
    assert "- flag summary_cut: 2\n" in text
    assert "- KV cache 1,000,000 tokens: 244.1 documents of the longest kind at once\n" in text
    assert "- max_model_len: 4096\n" in text


def test_what_is_written_is_what_was_built(run):
    write_part(run, records())
    built = report.build(run, scope(run, reason="fertig \u2013 \u00fc"))
    report.write(run, built)
    assert strict(run.report_json.read_text(encoding="utf-8")) == built
    assert run.report_md.read_text(encoding="utf-8") == report.markdown(built)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_refused_and_the_old_report_stays(run, value):
    built = report.build(run, scope(run))
    report.write(run, built)
    old = run.report_json.read_bytes()
    built["attempt"]["rates"]["docs_per_s"] = value
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write(run, built)
    assert run.report_json.read_bytes() == old


def test_a_report_that_cannot_be_written_is_told(run, monkeypatch):
    built = report.build(run, scope(run))
    run.report_json = run.summaries / "file" / "report.json"
    (run.summaries / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        report.write(run, built)


def test_output_tokens_without_a_summary_are_told_by_their_cause(run):
    tokens = [
        Record(document("x", n=0), "ok", summary="s", completion_tokens=100, dropped_tokens=30),  # tried again longer
        Record(document("x", n=1), "ok", summary="s", completion_tokens=50, dropped_tokens=20, pack_fallback="missing"),
        Record(document("x", n=2), "failed", error_type="no_answer", completion_tokens=40, dropped_tokens=15,
               pack_fallback="cut"),
        Record(document("x", n=3), "failed", error_type="no_answer", completion_tokens=7),
        Record(document("x", n=4), "ok", summary="s", completion_tokens=64, flags=(SUMMARY_CUT,)),
    ]  # fmt: skip
    write_part(run, tokens)
    counts = Counts(completion_tokens=261, generated_tokens=300, total_s=9)
    built = report.build(run, scope(run, counts=counts))
    assert built["wasted"] == {"retries": 30, "fallbacks": 35, "failed": 32, "unfinished": 39, "cut": 64}
    del built["wasted"]["cut"]  # that is in a summary
    assert sum(built["wasted"].values()) == built["run"]["tokens"]["wasted"]


@pytest.mark.parametrize(
    ("value", "shown"), [(17830.0, "17,830"), (139.3, "139.3"), (0.05477, "0.05477"), (1215.0, "1,215")]
)
def test_times_are_shown_with_the_digits_that_are_known(value, shown):
    assert report._milliseconds(value) == shown
