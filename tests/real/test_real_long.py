"""The long acceptance runs on real vLLM; `make test-all` only. Figures are printed: run with -s to see them."""

import json
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from helpers_real import kill_group, real_engine, requests_finished, run_to_end, started, wait_for
from helpers_run import by_id, record, rows, same_rows, start, write_job, write_jsonl

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1800)]
SHARED = Path(__file__).parents[2].parent / "shared" / "data"
TEXT = "The ferry company of {n} Bay sold {n} boats on day {n} and will close its office in the old harbour this year."


def test_three_kills_at_different_moments(tmp_path, out, model_folder):
    documents, rows_a_part, seqs = 120, 8, 8
    write_jsonl(tmp_path / "a.jsonl", [record(n, text=TEXT.format(n=n)) for n in range(documents)])
    job = write_job(
        tmp_path,
        [tmp_path / "a.jsonl"],
        engine=real_engine(model_folder, max_num_seqs=seqs),
        checkpoint={"rows": rows_a_part, "interval_s": 2},
        sampling={"max_tokens": 32},
    )
    committed = []
    for moment in (1, 4, 9):  # parts on disk when the kill comes
        with started(job) as child:
            wait_for(lambda: len(list(out.glob("summaries/part-*"))) >= moment, timeout=400, child=child)  # noqa: B023
            time.sleep(0.1 * moment)
            kill_group(child)
        now = rows(out)
        assert [row for row in now if row in committed] == committed
        committed = now
    assert run_to_end(job) == 0
    assert len(by_id(out)) == documents
    assert [row for row in rows(out) if row in committed] == committed
    repeated = requests_finished(out) - documents
    print(f"\n3 kills, {documents} documents: {repeated} finished requests repeated; {len(committed)} rows kept")
    # At a kill there is less than a part of finished rows in memory, and what one step finished on top.
    assert 0 <= repeated < 3 * (rows_a_part + seqs)


def test_both_feeds_give_the_same_ids_and_statuses(tmp_path, model_folder):
    write_jsonl(tmp_path / "a.jsonl", [*map(record, range(40)), record(40, text=""), record(41, text=5)])
    job = write_job(
        tmp_path,
        [tmp_path / "a.jsonl"],
        engine=real_engine(model_folder, max_num_seqs=8),
        sampling={"max_tokens": 24},
        failures={"max": 1},
    )
    found = {}
    for feed in ("rolling", "generate"):
        folder = tmp_path / feed
        assert run_to_end(job, "--set", f"engine.feed={feed}", "--set", f"output.dir={folder}") == 0
        found[feed] = {key: row["status"] for key, row in by_id(folder).items()}
    assert found["rolling"] == found["generate"]
    assert len(found["rolling"]) == 42


def test_changed_inputs_and_settings_on_the_real_engine(tmp_path, out, model_folder):
    first = [record(1, id=1), record(2, id="1"), record(4), record(5, id="d4"), record(3)]
    path = write_jsonl(tmp_path / "in/a.jsonl", first)
    gone = write_jsonl(tmp_path / "in/b.jsonl", [record(6), record(7)])
    job = write_job(tmp_path, [tmp_path / "in/*.jsonl"], engine=real_engine(model_folder), sampling={"max_tokens": 24})
    assert run_to_end(job) == 3  # the second d4 is a duplicate
    before = rows(out)
    assert len(before) == 7
    assert [row["error_type"] for row in before if row["status"] == "failed"] == ["duplicate_id"]

    write_jsonl(path, [*first[:4], record(3, text=TEXT.format(n=3)), record(8)])
    gone.unlink()
    assert run_to_end(job) == 3
    report = json.loads((out / "report.json").read_text())
    assert report["attempt"]["requests"] == 2  # the edited one and the appended one
    assert (report["notes"]["edited documents"], report["notes"]["orphans"]) == (1, 2)
    after = rows(out)
    assert {row["id"] for row in after} == {"1", "d3", "d4", "d8"}
    assert len(after) == 6
    assert sum(row in before for row in after) == 4  # the untouched ones

    assert run_to_end(job, "--set", "prompt.system=Be brief.") == 78
    assert "prompt.system" in Path(f"{job}.err").read_text()
    assert rows(out) == after
    assert run_to_end(job, "--set", "prompt.system=Be brief.", "--on-change", "new-run") == 3
    assert len(rows(out)) == 6
    assert len({row["fingerprint"] for row in rows(out)} | {row["fingerprint"] for row in after}) == 2


def peps(folder: Path, **engine):
    if not SHARED.exists():
        pytest.skip("needs ../shared/data, documents for measuring that are not part of the project")
    inputs = [
        {"path": str(SHARED / "peps.parquet"), "id_field": "id", "keep": ["title"]},
        # The abstracts have the ids of the documents: they are documents of their own only by their place.
        {"path": str(SHARED / "pep_abstracts.jsonl"), "keep": ["title"]},
    ]
    return write_job(folder, inputs, **engine)


def test_all_peps_and_abstracts_through_the_fake_engine(tmp_path, out):
    job = peps(tmp_path)
    assert start(job).exit_status == 0
    report = json.loads((out / "report.json").read_text())
    counts = report["documents"]
    print(f"\n{counts}")
    assert counts["total"] == 701 + 616 == counts["ok"] + counts["skipped"]
    assert len(rows(out)) == 1317
    everything = rows(out)
    assert start(job).report["attempt"]["requests"] == 0
    same_rows(rows(out), everything)


def test_forty_peps_and_abstracts_through_real_vllm(tmp_path, out, model_folder):
    job = peps(tmp_path, engine=real_engine(model_folder, max_num_seqs=32), sampling={"max_tokens": 32})
    assert run_to_end(job, "--limit", "40") == 0
    report = json.loads((out / "report.json").read_text())["documents"]
    print(f"\n{report}")
    assert report["ok"] + report["skipped"] == 40
    assert report["pending"] == 1317 - 40
    assert ds.dataset(out / "summaries").count_rows() == 40
