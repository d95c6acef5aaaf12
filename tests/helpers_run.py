"""Whole runs for tests: small inputs, a job file on the fake engine, and the rows that came out."""

import contextlib
import json
from pathlib import Path

import helpers_forked
import psutil
import pyarrow.dataset as ds
import yaml

from batchgen.data import Request
from batchgen.engines import processes
from batchgen.engines.fake import FakeEngine
from batchgen.executors.ending import Outcome
from batchgen.executors.local import Options, run
from batchgen.job import jobfile
from batchgen.lifecycle import Stop
from batchgen.storage.checkpoint import Committer

SENTENCE = "The harbour board met on day {n} and agreed to repair {n} metres of quay wall before the winter."

command = helpers_forked.command


def record(n, **more):
    return {"id": f"d{n}", "title": f"Minutes {n}", "text": SENTENCE.format(n=n)} | more


def write_jsonl(path: Path, records) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")
    return path


def write_job(folder: Path, inputs, **sections) -> Path:
    """A job on the fake engine; inputs are paths or whole input sections; sections replace or add keys."""
    job = {
        "name": "test",
        "input": [
            {"path": str(one), "id_field": "id", "keep": ["title"]} if isinstance(one, str | Path) else one
            for one in inputs
        ],
        "prompt": {"system": "You write summaries.", "user": "{{ title }}\n{{ text }}\nSummarize this."},
        "engine": {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}},
        "sampling": {"max_tokens": 64},
        "output": {"dir": str(folder / "out")},
    } | sections
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def start(job: Path, *sets, stop=None, **options) -> Outcome:
    """One start of the job in this process. Raises BatchgenError where it cannot begin."""
    return run(jobfile.load(job, sets), Options(**options), stop or Stop())


def watch_requests(monkeypatch) -> list[Request]:
    """All requests that the fake engine is given from now on."""
    found: list[Request] = []
    submit = FakeEngine.submit

    def watched(self, request):
        found.append(request)
        submit(self, request)

    monkeypatch.setattr(FakeEngine, "submit", watched)
    return found


def stop_after_a_part(patch) -> Stop:
    """What asks a run to stop as soon as its first part is on disk."""
    stop = Stop()
    commit = Committer.commit

    def committed(self):
        rows = commit(self)
        if rows:
            stop.request("SIGTERM")
        return rows

    patch.setattr(Committer, "commit", committed)
    return stop


def rows(folder: Path) -> list[dict]:
    """All rows of a run, by plain pyarrow.dataset or line by line, sorted by key; ids as text."""
    summaries = folder / "summaries"
    if not any(summaries.glob("part-*")):
        return []
    if not any(summaries.glob("part-*.jsonl")):
        found = ds.dataset(summaries).to_table().to_pylist()
    else:
        found = [
            json.loads(line)
            for path in sorted(summaries.glob("part-*"))
            for line in path.read_bytes().split(b"\n")[:-1]
        ]
        for row in found:
            row["id"] = None if row["id"] is None else str(row["id"])
    return sorted(found, key=lambda row: row["doc_key"])


def by_id(folder: Path) -> dict:
    """Rows by (id_type, id); fails where an id has two rows."""
    found = {}
    for row in rows(folder):
        key = (row["id_type"], row["id"])
        assert key not in found or row["id"] is None, f"two rows for {key}"
        found[key] = row
    return found


def same_rows(one: list[dict], other: list[dict], *, but=("finished_at", "cached_tokens")) -> None:
    """Assert that two runs gave the same rows, apart from some columns."""
    strip = [[{k: v for k, v in row.items() if k not in but} for row in rows] for rows in (one, other)]
    assert strip[0] == strip[1]


def workers() -> list[psutil.Process]:
    """Processes that are engines of this one, or become some."""
    found = []
    for one in processes.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one] if "--multiprocessing-fork" in one.cmdline() else []
    return found
