"""The figures of a report agree: in all its forms, with the parts on disk, and with telemetry.

`SHOWN` has a function for each form that a person reads: the figures in it, by their key in report.json.
"""

import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers_nvml import Gpu, install
from helpers_run import record, rows, start, write_job, write_jsonl
from prometheus_client.parser import text_string_to_metric_families

from batchgen.reporting import report as reports
from batchgen.reporting.stats import read_telemetry

PAGE = Path(__file__).parents[2] / "docs/report.md"
LONG = " ".join(f"In the year {n} the harbour was dredged." for n in range(250))
TELLS = "{gpus: 2, running: 4, waiting: 3, kv_cache_usage: 0.75, queue_s: 1, ttft_s: 1.5, tpot_s: 0.02, preemptions: 2}"
ANSWERS = [{"match": "day 3 ", "text": "Cut short, as the settings say.", "finish_reason": "length"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with packs, pieces, failed, skipped, edited and repeated documents, in three attempts."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        install(patch, Gpu("GPU-a"), Gpu("GPU-b", busy=40))
        documents = [record(n) for n in range(40)]
        documents += [
            record(50, text=LONG),
            record(51, text=LONG + LONG),
            record(52, text=""),
            record(53, text="short"),
        ]
        lines = write_jsonl(folder / "a.jsonl", [*documents, record(7)])
        lines.write_text(lines.read_text() + "no record\n")
        job = write_job(
            folder, [lines], checkpoint={"rows": 5}, answers={"retry_max_tokens": 290}, failures={"max": 9},
            long_documents={"policy": "map_reduce"}, report={"cost": {"currency": "CHF", "per_gpu_hour": 2.5}},
            metrics={"textfile": str(folder / "run.prom")},
        )  # fmt: skip
        sets = [
            f"engine.fake.tells={TELLS}", f"engine.fake.answers={json.dumps(ANSWERS)}", "packing.mode=true",
            "engine.fake.fail_on=day 5 ", "engine.fake.docs_per_s=200", "packing.max_documents=3",
            "engine.args.max_model_len=4096", "sampling.max_tokens=200",
        ]  # fmt: skip
        start(job, *sets, limit=12)
        start(job, *sets, limit=10)
        documents[2] = record(2, text="The edited minutes of day 2 tell of a crane that fell into the harbour basin.")
        lines = write_jsonl(folder / "a.jsonl", [*documents, record(7)])
        lines.write_text(lines.read_text() + "no record\n")
        assert start(job, *sets).exit_status == 0
    return folder / "out"


@pytest.fixture(scope="module")
def told(run):
    return json.loads((run / "report.json").read_text())


@pytest.fixture(scope="module")
def found(run):
    return rows(run)


def figure(report, key):
    at = report
    for name in key.split("."):
        at = at[name]
    return at


# In report.md


def labels() -> dict[str, str]:
    """The table of docs/report.md: what stands before a figure in report.md, and its key."""
    return dict(re.findall(r"^\| ([^|`]+) \| `([\w.]+)` \|", PAGE.read_text(), flags=re.MULTILINE))


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def in_markdown(run) -> dict[str, str]:
    text, keys, found = (run / "report.md").read_text(), labels(), {}
    for first, *values in cells(text):
        if first in keys and len(values) == 2:
            both = zip(("attempt", "run"), values, strict=True)
            found |= {f"{scope}.{keys[first]}": value for scope, value in both if value}
    documents = cells(text)[2]
    names = ("total", "ok", "failed", "skipped", "pending")
    found |= {f"documents.{name}": value for name, value in zip(names, documents, strict=True)}
    for kind, row in (("document_chars", "characters of a"), ("prompt_tokens", "tokens of a prompt"),
                      ("completion_tokens", "tokens of an answer")):  # fmt: skip
        line = next(one for one in cells(text) if one[0].startswith(row))
        found |= {
            f"lengths.{kind}.{name}": value for name, value in zip(("p10", "p50", "p90", "max"), line[1:], strict=True)
        }
    for key, row in (("total", "GPU hours"), ("per_1000_documents", "1,000 ok"),
                     ("per_million_prompt_tokens", "a million prompt"),
                     ("per_million_output_tokens", "a million output")):  # fmt: skip
        found[f"cost.{key}"] = next(one[1] for one in cells(text) if row in one[0])
    return found


# For Prometheus

METRICS = {
    "attempt.requests": "requests_total",
    "attempt.packs": "packs_total",
    "attempt.preemptions": "preemptions_total",
    "attempt.prefix_cache.queries": "prefix_cache_queries_total",
    "attempt.prefix_cache.hits": "prefix_cache_hits_total",
    "attempt.documents.read": "documents_read_total",
    "attempt.documents.done_before": "documents_done_before",
    "attempt.rates.docs_per_s": "documents_per_second",
    "attempt.rates.prompt_tokens_per_s": "prompt_tokens_per_second",
    "attempt.rates.output_tokens_per_s": "output_tokens_per_second",
    "attempt.latency.queue.count": "queue_time_seconds_count",
    "attempt.latency.ttft.count": "time_to_first_token_seconds_count",
    "attempt.latency.tpot.count": "time_per_output_token_seconds_count",
    **{f"attempt.documents.{one}": f"documents_total {one}" for one in ("ok", "failed", "skipped")},
    **{f"attempt.tokens.{one}": f"tokens_total {one}" for one in ("prompt", "cached", "output", "reasoning")},
    **{
        f"attempt.seconds.{one}": f"phase_seconds {one}"
        for one in ("engine_start", "steady", "drain", "commit", "starved", "encode")
    },
    "exit_status": "exit_status",
}


def in_metrics(run) -> dict[str, str]:
    """Those of the last attempt."""
    told = {}
    for family in text_string_to_metric_families((run.parent / "run.prom").read_text()):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in {"run", "shard"}]
            told[" ".join([sample.name.removeprefix("batchgen_"), *labels])] = sample.value
    return {key: f"{told[name]:.2f}" for key, name in METRICS.items() if name in told}


# form → (what is shown in it, how many figures at least)
SHOWN = {"report.md": (in_markdown, 80), "metrics.textfile": (in_metrics, len(METRICS))}


def is_shown(value, text) -> bool:
    """Whether a person who reads `text` reads `value`: to the last digit that stands there."""
    if value is None or (isinstance(value, dict) and not value["count"]):
        return text == "–"
    if isinstance(value, dict):  # times of requests
        return [float(one.replace(",", "")) for one in text.split(" / ")] == [value["p50_ms"], value["p95_ms"]]
    number = text.replace(",", "")
    percent = number.endswith("%")
    number = number.rstrip("%")
    places = len(number.partition(".")[2])
    return math.isclose(value * (100 if percent else 1), float(number), abs_tol=0.5001 * 10**-places)


@pytest.mark.parametrize("form", SHOWN)
def test_what_a_person_reads_is_what_report_json_says(run, told, form):
    read, least = SHOWN[form]
    shown = read(run)
    assert len(shown) >= least
    for key, text in shown.items():
        value = figure(told, key)
        if key.endswith("_bytes") and value is not None:
            value /= 1 << 20  # shown in MiB
        assert is_shown(value, text), (key, value, text)


def test_every_line_of_the_markdown_is_on_the_page(run):
    """Each figure of both scopes has its line in docs/report.md, and each line there stands in report.md."""
    pairs = {first for first, *values in cells((run / "report.md").read_text()) if len(values) == 2}
    heads = {"", "seconds", "milliseconds, p50 / p95", "peak memory, MiB", "GPUs (2)", "---"}
    assert pairs - heads == {*labels(), "documents done"}


# The parts on disk


def test_documents_are_those_of_the_rows(told, found):
    documents = told["documents"]
    status = Counter(row["status"] for row in found)
    assert {name: documents[name] for name in ("ok", "failed", "skipped")} == dict(status)
    assert (documents["total"], documents["pending"]) == (len(found), 0)
    assert documents["reasons"] == Counter(
        f"{row['status']}: {row['error_type']}" for row in found if row["error_type"]
    )
    assert documents["flags"] == Counter(flag for row in found for flag in row["flags"])
    ways = Counter("map_reduce" if "map_reduced" in row["flags"] else "whole" for row in found if row["requests"])
    assert {way: costs["documents"] for way, costs in documents["ways"].items() if costs["documents"]} == ways
    for name in ("requests", "prompt_tokens", "completion_tokens"):
        assert sum(costs[name] for costs in documents["ways"].values()) == sum(row[name] for row in found)
    assert told["packing"]["documents"] == sum(row["pack_size"] > 1 for row in found) > 0


def test_lengths_and_histograms_are_those_of_the_rows(told, found):
    whole = [row for row in found if row["status"] == "ok" and not row["pieces"]]
    lengths = {
        "document_chars": [row["document_chars"] for row in found if row["document_chars"]],
        "prompt_tokens": [row["prompt_tokens"] // max(1, row["requests"]) for row in whole],
        "completion_tokens": [row["completion_tokens"] - row["dropped_tokens"] for row in whole],
    }
    assert set(lengths) == set(told["lengths"]) == set(told["histograms"])
    for name, values in lengths.items():
        shares = (0.1, 0.5, 0.9, 1.0)
        wanted = [int(np.quantile(values, share, method="inverted_cdf")) for share in shares]
        assert [told["lengths"][name][one] for one in ("p10", "p50", "p90", "max")] == wanted
        histogram = told["histograms"][name]
        counted = [sum(low <= one < high for one in values) for low, high in pairwise(histogram["edges"])]
        assert histogram["counts"] == counted
        assert sum(counted) == len(values)


def test_tokens_of_the_run_are_those_of_the_rows_and_of_rows_that_were_replaced(run, told, found):
    """One document was edited: its first row is gone, and what that took is counted all the same."""
    tokens, ended = told["run"]["tokens"], ends(run)
    for key, name in (("prompt", "prompt_tokens"), ("cached", "cached_tokens"), ("output", "completion_tokens")):
        spent = sum(end["counts"][name] for end in ended)
        assert tokens[key] == spent >= sum(row[name] for row in found)
    kept = sum(row["completion_tokens"] - row["dropped_tokens"] for row in found if row["status"] == "ok")
    assert tokens["wasted"] == tokens["output"] - kept
    done = [sum(end["counts"][name] for end in ended) for name in ("ok", "failed", "skipped")]
    assert sum(done) == len(found) + 1


# Telemetry


def ends(run):
    return [list(read_telemetry(path))[-1] for path in sorted(run.glob("telemetry-*"))]


def test_figures_of_the_attempt_are_its_own(run, told):
    last = ends(run)[-1]["counts"]
    attempt = told["attempt"]
    assert (attempt["number"], told["run"]["attempts"]) == (3, 3)
    assert attempt["requests"] == last["requests"]
    working = last["steady_s"] + last["drain_s"]
    rates = attempt["rates"]
    for rate, name in (("docs_per_s", "ok"), ("prompt_tokens_per_s", "prompt_tokens"),
                       ("output_tokens_per_s", "generated_tokens")):  # fmt: skip
        assert rates[rate] == pytest.approx(last[name] / working, rel=0.01)
    assert attempt["documents"]["done_before"] == last["done_before"] > 0


def test_rates_of_the_run_divide_by_all_of_its_time(run, told):
    every = [end["counts"] for end in ends(run)]
    working = sum(one["steady_s"] + one["drain_s"] for one in every)
    assert told["run"]["rates"]["docs_per_s"] == pytest.approx(sum(one["ok"] for one in every) / working, rel=0.01)
    samples = [one for path in run.glob("telemetry-*") for one in read_telemetry(path) if one["event"] == "sample"]
    assert told["run"]["latency"]["ttft"]["count"] == sum(one["times"]["ttft_s"]["count"] for one in samples) > 0


def test_costs_are_those_of_all_attempts(run, told, found):
    cost, seconds = told["cost"], told["run"]["gpu"]["gpu_seconds"]
    assert seconds == pytest.approx(2 * sum(end["counts"]["total_s"] for end in ends(run)), abs=1)
    total = seconds / 3600 * 2.5
    ok = sum(row["status"] == "ok" for row in found)
    assert cost["total"] == pytest.approx(total, rel=1e-4)
    assert cost["per_1000_documents"] == pytest.approx(total / ok * 1000, rel=1e-4)
    assert cost["per_million_output_tokens"] == pytest.approx(total / told["run"]["tokens"]["output"] * 1e6, rel=1e-4)


def test_the_report_made_anew_has_the_same_figures(run, told):
    from batchgen.executors import inspection

    anew = inspection.report(run)
    assert {**anew, "at": None, "attempt": None, "run": None, "cost": None} == {
        **told, "at": None, "attempt": None, "run": None, "cost": None,
    }  # fmt: skip
    text = reports.markdown(anew)
    assert [one for one in cells(text) if one[0] == "requests"] == [
        ["requests", f"{told['attempt']['requests']:,}", f"{told['run']['requests']:,}"]
    ]
