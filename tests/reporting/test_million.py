"""The report of a million rows: its time, its memory, the size of its page."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_pages import Page
from helpers_run import record, start, write_job, write_jsonl

from batchgen.storage.rundir import RunDirectory

ROWS, PARTS = 2000, 500
LOOK = """
import json, sys, time
from batchgen.reporting.stats import peak_rss_bytes
from batchgen.executors import pages
from pathlib import Path
begin = time.monotonic()
size = pages.write(Path(sys.argv[1]), None, Path(sys.argv[2]))
print(json.dumps({"seconds": time.monotonic() - begin, "peak": peak_rss_bytes(), "size": size}))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_report_of_a_million_rows(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(ROWS)))], checkpoint={"rows": ROWS},
                    failures={"max": ROWS})  # fmt: skip
    start(job, "engine.fake.fail_every=50")
    run = RunDirectory(tmp_path / "out")
    (first,) = run.parts(".parquet")
    multiply(run, pq.read_table(first))
    page = tmp_path / "page.html"
    done = subprocess.run([sys.executable, "-c", LOOK, run.path, page], capture_output=True, text=True, check=True)
    took = json.loads(done.stdout)
    figures = Page(page.read_text(encoding="utf-8")).figures
    assert figures["documents.ok"] + figures["documents.failed"] == ROWS * PARTS
    assert took["seconds"] < 20
    assert took["peak"] < 1 << 30
    assert took["size"] < 3 << 20


def multiply(run, table):
    """Further parts with the rows of this one, each of a document of its own with a length of its own."""
    rng = np.random.default_rng(7)
    for number in range(2, PARTS + 1):
        keys = [hashlib.blake2b(f"{number} {n}".encode(), digest_size=16).hexdigest() for n in range(len(table))]
        lengths = rng.lognormal(6.5, 0.8, len(table)).astype(np.int32)
        more = table
        for name, values in (("doc_key", pa.array(keys)), ("prompt_tokens", pa.array(lengths))):
            at = more.column_names.index(name)
            more = more.set_column(at, more.schema.field(name), values.cast(more.schema.field(name).type))
        pq.write_table(more.replace_schema_metadata(table.schema.metadata), run.part(1, number, ".parquet"))
