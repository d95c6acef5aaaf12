"""`report A B`: two runs side by side. Nothing is started, and nothing is written in either."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.errors import BatchgenError
from batchgen.executors.inspection import open_run
from batchgen.reporting import html, page
from batchgen.reporting import report as reports
from batchgen.reporting.rows import Rows, read_rows
from batchgen.reporting.samples import Sample, read_places
from batchgen.sinks.base import DamagedPartError, Sink, unhex
from batchgen.storage.rundir import RunDirectory

# What is compared of report.json, besides what it has of costs.
FIGURES = (
    "documents.ok", "documents.failed", "documents.skipped", "run.rates.docs_per_s", "run.rates.prompt_tokens_per_s",
    "run.rates.output_tokens_per_s", "run.seconds.engine_start", "run.seconds.steady", "run.seconds.drain",
    "run.tokens.prompt", "run.tokens.cached", "run.tokens.output", "run.tokens.wasted", "run.prefix_cache.hit_share",
    "run.preemptions", "run.starved_share", "run.latency.ttft.p50_ms", "run.latency.ttft.p95_ms",
    "run.latency.tpot.p50_ms", "run.latency.tpot.p95_ms", "run.gpu.utilization", "run.gpu.power_w",
    "run.memory.peak_rss_bytes", "lengths.document_chars.p50", "lengths.prompt_tokens.p50",
    "lengths.completion_tokens.p50",
)  # fmt: skip
_EXAMPLES = 8
_NOT_SETTINGS = ("name", "output.dir")  # they differ wherever there are two runs


@dataclass(frozen=True, slots=True)
class _Run:
    directory: RunDirectory
    known: Mapping[str, Any]
    sink: Sink
    rows: Rows
    report: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "_Run":
        directory, known, sink = open_run(path)
        rows = read_rows(directory, sink)
        return cls(directory, known, sink, rows, reports.afresh(directory, rows))


@dataclass(frozen=True, slots=True)
class Pair:
    """A document that both runs have a row of; the one of `a` knows the document, where that is still there."""

    a: Sample
    b: Sample


def compare(a: Path, b: Path) -> tuple[dict[str, Any], list[Pair]]:
    """(what differs, with the keys of `report A B --json`; the documents of its examples).

    Raises ConfigError where a folder is no run directory.
    """
    runs = _Run.open(a), _Run.open(b)
    texts, pairs = _texts(*runs)
    found = {
        "runs": [
            {name: one.report[name] for name in ("name", "run_dir", "exit_status", "reason")} for one in runs
        ],
        "settings": list(_settings(*runs)),
        "figures": list(_figures(*(one.report for one in runs))),
        "texts": texts | {
            "examples": [
                {
                    "id": pair.a.row["id"], "source": pair.a.row["source"], "place": pair.a.row["place"],
                    "a": pair.a.row["summary"], "b": pair.b.row["summary"],
                }
                for pair in pairs
            ]
        },
    }  # fmt: skip
    return found, pairs


def _settings(a: _Run, b: _Run) -> Iterator[dict[str, Any]]:
    """What differs of the jobs, of what makes texts, and of what the engines turned out to be."""
    made = [dict(_flat(one.known.get("fingerprint") or {})) for one in (a, b)]
    makes_texts = {key for key in made[0].keys() | made[1].keys() if made[0].get(key) != made[1].get(key)}
    told = [_told(one) for one in (a, b)]
    for key in sorted(told[0].keys() | told[1].keys() | makes_texts):
        values = [some.get(key, prints.get(key)) for some, prints in zip(told, made, strict=True)]
        if values[0] != values[1] and key not in _NOT_SETTINGS:
            yield {"key": key, "a": values[0], "b": values[1], "makes_texts": key in makes_texts}


def _told(run: _Run) -> dict[str, Any]:
    engine = run.report["engine"]
    in_force = {f"engine.args.{name}": value for name, value in (engine["args"] or {}).items()}
    more = {"engine.device": engine["device"], "engine.replicas": engine["replicas"]}
    versions = {f"versions.{name}": value for name, value in run.report["versions"].items()}
    return dict(_flat(run.known.get("job") or {})) | in_force | more | versions


def _flat(value: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, below in value.items():
        key = f"{at}.{name}".lstrip(".")
        if isinstance(below, Mapping) and below:
            yield from _flat(below, key)
        elif isinstance(below, list) and below and all(isinstance(one, Mapping) for one in below):
            for number, one in enumerate(below):
                yield from _flat(one, f"{key}.{number}")
        else:
            yield key, below


def _figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    costs = [f"cost.{name}" for name, value in (a.get("cost") or {}).items() if isinstance(value, int | float)]
    for name in (*FIGURES, *costs):
        values = [page.reach(one, name) for one in (a, b)]
        if values != [None, None]:
            ratio = round(values[1] / values[0], 4) if values[0] and values[1] is not None else None
            yield {"figure": name, "a": values[0], "b": values[1], "ratio": ratio}


# Of each row: hashes of its document, of that document's content, and of the summary (0 for none); where it stands.
_ROW = np.dtype([("key", "S16"), ("content", "S8"), ("text", "u8"), ("part", "i4"), ("row", "i4")])


def _read_texts(run: _Run) -> NDArray[np.void]:
    """The rows that hold, part by part: 40 bytes each."""
    found = [np.empty(0, _ROW)]
    for number, path in enumerate(run.directory.parts(run.sink.suffix)):
        try:
            table = run.sink.read(path, ["doc_key", "content_hash", "status", "summary"])
        except DamagedPartError:  # the reports tell of it
            continue
        old: Collection[str] = run.rows.old.get(path, ())
        holds = np.array([key not in old for key in table.column("doc_key").to_pylist()], np.bool_)
        ok = pc.equal(table.column("status"), "ok").to_pylist()
        rows = np.empty(len(table), _ROW)
        rows["key"] = unhex(table.column("doc_key"), 16).view("S16").ravel()
        rows["content"] = unhex(table.column("content_hash"), 8).view("S8").ravel()
        rows["text"] = [
            _digest(summary) if is_ok else 0
            for is_ok, summary in zip(ok, table.column("summary").to_pylist(), strict=True)
        ]
        rows["part"], rows["row"] = number, np.arange(len(table))
        found.append(rows[holds])
    return np.concatenate(found)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) or 1


def _texts(a: _Run, b: _Run) -> tuple[dict[str, int], list[Pair]]:
    """How many documents have which texts, and some that have different ones, or else equal ones."""
    one, other = _read_texts(a), _read_texts(b)
    _, of_a, of_b = np.intersect1d(one["key"], other["key"], assume_unique=True, return_indices=True)
    only_a, only_b = len(one) - len(of_a), len(other) - len(of_b)
    one, other = one[of_a], other[of_b]
    unchanged = one["content"] == other["content"]
    both_ok = unchanged & (one["text"] != 0) & (other["text"] != 0)
    same = both_ok & (one["text"] == other["text"])
    different = both_ok & ~same
    found = {
        "both": len(one),
        "only_a": only_a,
        "only_b": only_b,
        "edited": int((~unchanged).sum()),
        "both_ok": int(both_ok.sum()),
        "same": int(same.sum()),
        "different": int(different.sum()),
    }
    # In the order of the keys, which are hashes: as good as drawn at random.
    shown = np.flatnonzero(different if different.any() else same)[:_EXAMPLES]
    return found, [Pair(*pair) for pair in zip(_samples(a, one[shown]), _samples(b, other[shown]), strict=True)]


def _samples(run: _Run, rows: NDArray[np.void]) -> list[Sample]:
    parts = run.directory.parts(run.sink.suffix)
    return read_places(run.sink, [(parts[part], int(row)) for part, row in zip(rows["part"], rows["row"], strict=True)])


def markdown(found: Mapping[str, Any]) -> str:
    """The same for a person."""
    return page.text("compare.md", found=found)


def as_html(found: Mapping[str, Any], pairs: list[Pair], a: Path) -> bytes:
    """The page of two runs. Documents of the examples are looked up where `a` has them."""
    directory, known, _ = open_run(a)
    for look_up in html.look_ups(directory, known, [pair.a for pair in pairs]):
        try:
            look_up()
        except BatchgenError:  # they are told as missing
            continue
    return page.render("compare.html", found=found, pairs=pairs)
