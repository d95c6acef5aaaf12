"""Inputs of four shapes in one job on real vLLM: every row is accounted for."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
from helpers_real import ON_SHARED, real_engine
from helpers_run import by_id, record, rows, start, write_job, write_jsonl

pytestmark = ON_SHARED


def test_four_inputs_of_four_shapes(tmp_path, out, model_folder, lent):
    def item(where, **more):
        return where | {"id_field": "id", "keep": ["title"]} | more

    write_jsonl(tmp_path / "a.jsonl", [record(0), record(1), record(2, text=""), record(3, id=None)])
    packed = "".join(json.dumps(record(n)) + "\n" for n in range(10, 14))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(packed.encode()) + gzip.compress(b"{\n"))
    pq.write_table(pa.Table.from_pylist([record(n, id=n) for n in range(20, 24)]), tmp_path / "c.parquet")
    for n in (0, 1):
        body = [{"id": f"d{30 + n}", "title": "T", "body": {"text": record(30 + n)["text"]}}, record(40 + n, body=None)]
        write_jsonl(tmp_path / f"d/{n}.jsonl", body)
    inputs = [
        item({"path": str(tmp_path / "a.jsonl")}),
        item({"path": str(tmp_path / "b.jsonl.gz")}),
        item({"path": str(tmp_path / "c.parquet")}),
        item({"dataset": {"path": "json", "data_files": f"{tmp_path}/d/*.jsonl"}}, text_field="body.text"),
    ]
    job = write_job(
        tmp_path,
        inputs,
        engine=real_engine(model_folder),
        sampling={"max_tokens": 16},
    )
    assert start(job).exit_status == 3  # some documents are broken on purpose
    found = by_id(out)
    report = json.loads((out / "report.json").read_text())
    done = {key for key, row in found.items() if row["status"] == "ok"}
    strings = {("str", f"d{n}") for n in (0, 1, 10, 11, 12, 13, 30, 31)}
    assert done == strings | {("int", str(n)) for n in range(20, 24)}
    assert all(found[key]["summary"] and found[key]["completion_tokens"] > 0 for key in done)
    assert report["documents"]["reasons"] == {
        "failed: bad_json": 1, "failed: missing_id": 1, "failed: missing_text": 2, "skipped: empty": 1,
    }  # fmt: skip
    assert len(rows(out)) == report["documents"]["total"] == len(done) + 5
    assert report["documents"]["pending"] == 0
    assert report["attempt"]["requests"] == len(done)
    places = {row["source"].rsplit("/", 1)[-1].partition("#")[0]: row["place"].split()[0] for row in rows(out)}
    assert places == {"a.jsonl": "byte", "b.jsonl.gz": "byte", "c.parquet": "row", "train": "shard"}
    assert start(job).report["attempt"]["requests"] == 0
