"""Figures of turns: unequal work is refused, ratios are of one round."""

import dataclasses

import pytest

from batchgen.bench.figures import Turn, UnequalWorkError, refuse_unequal, table, told

OURS = Turn(
    contestant="batchgen", round=1, seconds=2.0, documents=8, prompt_tokens=800, output_tokens=80, first_s=0.5,
    peak_bytes=64 << 20, commits=3, before_s=0.25, after_s=0.125, starved=0.01,
)  # fmt: skip
OTHER = Turn(contestant="generate", round=1, seconds=4.0, documents=8, prompt_tokens=800, output_tokens=80, first_s=4.0)


def turned(turn, round_, seconds):
    return dataclasses.replace(turn, round=round_, seconds=seconds)


@pytest.mark.parametrize(
    ("name", "figures"), [("documents", "8 documents, generate 9"), ("prompt_tokens", "800 prompt tokens, generate 9"),
                          ("output_tokens", "80 output tokens, generate 9")],
)  # fmt: skip
def test_unequal_work_is_refused_with_both_figures(name, figures):
    refuse_unequal([OURS, OTHER], fixed=True)
    with pytest.raises(UnequalWorkError, match=f"round 1: batchgen did {figures};"):
        refuse_unequal([OURS, OTHER, dataclasses.replace(OTHER, **{name: 9})], fixed=True)


def test_with_real_lengths_answers_may_differ():
    refuse_unequal([OURS, dataclasses.replace(OTHER, output_tokens=79)], fixed=False)
    with pytest.raises(UnequalWorkError):
        refuse_unequal([OURS, dataclasses.replace(OTHER, prompt_tokens=799)], fixed=False)


def test_ratios_are_of_turns_of_one_round():
    # A machine that becomes slower by half each round: the medians of times would tell 1.0 of nothing.
    turns = [turned(one, n, one.seconds * n) for n in (1, 2, 3) for one in (OURS, OTHER)]
    turns[3] = turned(OTHER, 2, 4.4)
    found = told(turns, {"device": "none"}, {})
    assert found["ratios"] == {
        "generate": {
            "median": pytest.approx(2.0), "min": pytest.approx(1.1), "max": pytest.approx(2.0),
            "rounds": pytest.approx([2.0, 1.1, 2.0]),
        }
    }  # fmt: skip
    ours = found["contestants"]["batchgen"]
    assert (ours["docs_per_s"], ours["prompt_tokens_per_s"], ours["output_tokens_per_s"]) == (2.0, 200.0, 20.0)
    assert found["contestants"]["generate"]["peak_bytes"] is None
    assert len(found["turns"]) == 6


def test_the_table_is_aligned_and_tells_who_is_missing():
    found = told([OURS, OTHER], {"device": "none", "engine_args": {"a": 1, "b": 2}}, {"ray-data": "no module ray"})
    lines = table(found).splitlines()
    assert lines[0] == "device       none"
    assert lines[1] == "engine args  a 1, b 2"
    head, ours, other = lines[3:6]
    assert ours.split() == ["batchgen", "4.00", "400", "40", "0.50", "64", "3", "-"]
    assert other.split() == ["generate", "2.00", "200", "20", "4.00", "-", "-", "2.000", "[2.000–2.000]"]
    assert head.index("docs/s") + len("docs/s") == ours.index("4.00") + len("4.00") == other.index("2.00") + 4
    assert lines[-1] == "ray-data is not in the table: no module ray"
    assert "0.25 s of its run before the first request, 0.12 s after the last durable row" in lines[-2]
