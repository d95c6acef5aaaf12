"""Runs whose pages show everything, and what a page holds."""

import json
from html.parser import HTMLParser
from pathlib import Path

from helpers_run import record, start, write_job, write_jsonl

HOSTILE = (
    "<script>alert(1)</script><img src=http://x.invalid/a onerror=alert(2)></style>\x1b[2J\u202e & text of others. "
)
TELLS = {
    "gpus": 1, "running": 7, "waiting": 3, "kv_cache_usage": 0.5, "preemptions": 2,
    "ttft_s": 0.2, "tpot_s": 0.01, "queue_s": 0.1,
}  # fmt: skip


def fast(monkeypatch):
    """Samples and plots over time within a second."""
    monkeypatch.setattr("batchgen.reporting.stats.SAMPLE_S", 0.02)
    monkeypatch.setattr("batchgen.reporting.series.LEAST_S", 0.05)
    monkeypatch.setattr("batchgen.reporting.series.BIN_S", 0.02)
    monkeypatch.setattr("batchgen.reporting.why.LEAST_S", 0.05)


def resumed(folder: Path) -> Path:
    """A run of two attempts with failures of several kinds, and texts and ids that are no friends of a page."""
    records = [record(n, text=HOSTILE * (n % 2) + f"The board met in hall {n}. " * (1 + n % 30)) for n in range(60)]
    records[4] |= {"id": '"><b onload=alert(3)>', "title": "{{ title }}"}
    records[5] |= {"text": ""}
    records[6] |= {"text": 7}
    records[7] |= {"title": HOSTILE}
    job = write_job(
        folder,
        [write_jsonl(folder / "in" / "a&b <i>.jsonl", records)],
        checkpoint={"rows": 6},
        failures={"max": 99},
        report={"cost": {"currency": "€", "per_gpu_hour": 360.0}},
    )
    sets = [f"engine.fake.tells={json.dumps(TELLS)}", "engine.fake.docs_per_s=150", "engine.fake.fail_every=9",
            r"engine.fake.copies=(?s)<script.{80}"]  # fmt: skip
    start(job, *sets, limit=30)
    start(job, *sets)
    return folder / "out"


def one_document(folder: Path) -> Path:
    start(write_job(folder, [write_jsonl(folder / "a.jsonl", [record(1)])]))
    return folder / "out"


def empty(folder: Path) -> Path:
    start(write_job(folder, [write_jsonl(folder / "a.jsonl", [])]))
    return folder / "out"


class Page(HTMLParser):
    """What a page holds. figures: raw values by name; tags: names of all elements; text: what a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.figures: dict[str, object] = {}
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._hidden = 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._hidden += tag in ("style", "script")
        found = dict(attrs)
        if name := found.get("data-figure"):
            value = json.loads(found["data-value"])
            assert self.figures.setdefault(name, value) == value

    def handle_endtag(self, tag):
        self._hidden -= tag in ("style", "script")

    def handle_data(self, data):
        self.text += "" if self._hidden else data


def page_of(out: Path) -> Page:
    return Page((out / "report.html").read_text(encoding="utf-8"))
