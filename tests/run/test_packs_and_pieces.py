"""Short documents in packs and long ones in pieces, in one run."""

import pytest
from helpers_run import SENTENCE, by_id, record, rows, start, stop_after_a_part, write_job, write_jsonl


def job(tmp_path, policy):
    long = [record(f"long-{n}", text=" ".join(SENTENCE.format(n=f"{n} {m}") for m in range(60))) for n in range(3)]
    short = [record(n, text=f"The board of {n} Bay sold {n} boats and bought {n + 100} others.") for n in range(20)]
    records = [*short[:10], *long, *short[10:]]
    return write_job(
        tmp_path,
        [write_jsonl(tmp_path / "a.jsonl", records)],
        engine={"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}},
        packing={"mode": "on", "max_documents": 4, "max_document_tokens": 400},
        long_documents={"policy": policy},
        checkpoint={"rows": 6},
        sampling={"max_tokens": 160},
    )


@pytest.mark.parametrize("policy", ["map_reduce", "refine"])
def test_each_takes_its_way_and_gets_one_row(tmp_path, out, policy, monkeypatch):
    path = job(tmp_path, policy)
    with monkeypatch.context() as patch:
        assert start(path, stop=stop_after_a_part(patch)).exit_status == 75
    outcome = start(path)
    assert outcome.exit_status == 0
    found = {row["id"]: row for row in by_id(out).values()}
    assert len(rows(out)) == len(found) == 23
    assert {row["status"] for row in found.values()} == {"ok"}
    long = [row for name, row in found.items() if name.startswith("dlong")]
    assert len(long) == 3
    assert all(row["pieces"] > 1 and row["pack_size"] == 1 for row in long)
    short = [row for row in found.values() if row not in long]
    assert all(row["pieces"] == 0 for row in short)
    assert any(row["pack_size"] > 1 for row in short)
    assert outcome.report["packing"]["documents"] == sum(row["pack_size"] > 1 for row in short)
    assert outcome.report["documents"]["ways"]["whole"]["documents"] == 20
