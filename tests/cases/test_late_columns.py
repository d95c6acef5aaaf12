"""Columns that are empty for a long time: a schema taken from the first rows drops them or dies.

The fault is that of marin-community/marin#5142, apache/arrow#34397, apache/arrow#40124 and Parcels-code/Parcels#2713.
"""

import json
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_run import by_id, record, rows, start, write_job, write_jsonl
from killed_child import Cue, status_of

FIRST, LAST = 60, 5
MORE = {"court": "Harbour court", "meta": {"pages": 3, "signed": ["a", None]}}


@pytest.fixture(params=["parquet", "jsonl"])
def job(request, tmp_path):
    """Plain documents, then some with two more fields, then one that fails."""
    last = [record(FIRST + n, **MORE) for n in range(LAST)]
    path = write_jsonl(tmp_path / "a.jsonl", [*map(record, range(FIRST)), *last, record(99, text=7)])
    one = {"path": str(path), "id_field": "id", "keep": ["title", *MORE]}
    output = {"dir": str(tmp_path / "out"), "format": request.param}
    return write_job(tmp_path, [one], output=output, checkpoint={"rows": 7})


def test_fields_that_come_late_are_in_the_output_with_every_value(job, out):
    assert start(job).exit_status == 3
    found = by_id(out)
    assert len(found) == FIRST + LAST + 1
    for n in range(FIRST):
        assert [found["str", f"d{n}"][name] for name in MORE] == [None, None]
    for n in range(FIRST, FIRST + LAST):
        row = found["str", f"d{n}"]
        meta = row["meta"] if isinstance(row["meta"], dict) else json.loads(row["meta"])
        assert ({"court": row["court"], "meta": meta}, row["flags"]) == (MORE, [])
    assert found["str", "d99"]["error_type"] == "text_type"


def test_columns_of_nothing_but_nulls_have_their_declared_type(job, out):
    start(job, limit=7)
    for path in out.glob("summaries/*.parquet"):
        schema = pq.read_schema(path)
        assert [schema.field(name).type for name in ("error_type", "error", "court", "meta")] == [pa.string()] * 4
    start(job)
    assert {row["error_type"] for row in rows(out)} == {None, "text_type"}


@pytest.mark.parametrize("nth", [6, 11])
def test_after_a_kill_every_part_can_be_opened(job, out, nth):
    cue = Cue("batchgen.fsio:Path.replace@before", nth)
    assert status_of(job.parent, "run", job, cues=(cue,)) == -signal.SIGKILL
    for path in out.glob("summaries/*.parquet"):
        assert pq.read_table(path).num_rows
    for path in out.glob("summaries/*.jsonl"):
        assert all(json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
    assert len(rows(out)) > 0
    start(job)
    assert len(by_id(out)) == FIRST + LAST + 1
