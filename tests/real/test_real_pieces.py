"""Real vLLM: long documents in pieces beside short ones, which do not wait for them. With -s the figures are told."""

import pytest
from helpers_real import ON_SHARED, real_engine
from helpers_run import by_id, record, start, write_job, write_jsonl

pytestmark = ON_SHARED
LONG, SHORT = 2, 20


def long_text(n):
    places = ("quay wall", "lock gate", "grain store", "fish market", "north pier", "customs house")
    return "\n\n".join(
        f"On day {day} the harbour board of town {n} met about the {places[day % 6]}. It agreed to spend {day * 7} "
        f"crowns on it, and to look at it again in {day % 12 + 1} months, when the winter is over."
        for day in range(50)
    )


@pytest.mark.parametrize("policy", ["map_reduce", pytest.param("refine", marks=pytest.mark.long)])
def test_short_documents_finish_while_long_ones_are_under_way(tmp_path, out, model_folder, lent, policy):
    documents = [record(f"long-{n}", text=long_text(n)) for n in range(LONG)] + [record(n) for n in range(SHORT)]
    job = write_job(
        tmp_path,
        [write_jsonl(tmp_path / "a.jsonl", documents)],
        engine=real_engine(model_folder, max_model_len=640),
        sampling={"max_tokens": 24},
        long_documents={"policy": policy, "overlap_tokens": 16},
    )
    assert start(job).exit_status == 0
    found = by_id(out)
    assert len(found) == LONG + SHORT
    assert {row["status"] for row in found.values()} == {"ok"}
    long = [row for (_, name), row in found.items() if name.startswith("dlong")]
    short = [row for (_, name), row in found.items() if not name.startswith("dlong")]
    assert {tuple(row["flags"][:1]) for row in long} == {({"map_reduce": "map_reduced", "refine": "refined"}[policy],)}
    assert all(row["pieces"] >= 4 and row["requests"] >= row["pieces"] and row["depth"] >= 1 for row in long)
    assert all((row["pieces"], row["requests"], row["depth"]) == (0, 1, 0) for row in short)
    first = min(row["finished_at"] for row in long)
    begin = min(row["finished_at"] for row in short)
    seconds = [(row["finished_at"] - begin).total_seconds() for row in (*short, *long)]
    print(
        f"\n{policy}: pieces {[row['pieces'] for row in long]}, requests {[row['requests'] for row in long]}, "
        f"depth {[row['depth'] for row in long]}; the last short one after {max(seconds[:SHORT]):.1f} s, long ones "
        f"after {sorted(seconds[SHORT:])}; before these: {sum(row['finished_at'] < first for row in short)}"
    )
    assert sum(row["finished_at"] < first for row in short) >= SHORT // 2
