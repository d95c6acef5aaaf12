"""The input changes between two starts: new rows are done, changed ones again, gone ones told; nothing by position.

NousResearch/hermes-agent#95322: a resume by row number skipped documents that were never done.
"""

import pyarrow.dataset as ds
from helpers_run import by_id, record, rows, start, write_job, write_jsonl


def test_rows_that_were_inserted_edited_and_removed(tmp_path, out):
    path = write_jsonl(tmp_path / "a.jsonl", map(record, range(8)))
    job = write_job(tmp_path, [path])
    start(job, limit=5)  # d0 to d4
    before = by_id(out)
    edited = record(3, text="The board met again and decided to wait with the wall until the next year.")
    after = [record(100), record(0), record(1), record(2), edited, record(5), record(6), record(7), record(101)]
    write_jsonl(path, after)

    outcome = start(job)
    assert outcome.exit_status == 0
    found = by_id(out)
    assert {one for _, one in found} == {f"d{n}" for n in (0, 1, 2, 3, 5, 6, 7, 100, 101)}
    assert {row["status"] for row in found.values()} == {"ok"}
    # New rows at the top and at the end, and those that were left when the first start ended.
    assert outcome.report["attempt"]["requests"] == 6
    # Only the edited document was done again; its old summary is gone.
    assert outcome.report["notes"]["edited documents"] == 1
    assert found["str", "d3"]["summary"] != before["str", "d3"]["summary"]
    assert all(found["str", f"d{n}"] == before["str", f"d{n}"] for n in (0, 1, 2))
    # The deleted one is not kept as if it were current: told, and moved.
    assert outcome.report["notes"]["orphans"] == 1
    assert ds.dataset(out / "orphans").to_table().column("id").to_pylist() == ["d4"]
    # Each summary belongs to its own document: the fake engine answers with a piece of the prompt.
    assert all(str(n) in found["str", f"d{n}"]["summary"] for n in (100, 101))
    assert start(job).report["attempt"]["requests"] == 0
    assert len(rows(out)) == 9
