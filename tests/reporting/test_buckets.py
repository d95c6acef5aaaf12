"""Times in buckets: quantiles are right within what is said, and parts add up. Edges of histograms are fixed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.reporting.buckets import Buckets, edges

SECONDS = st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=200)


def of(seconds):
    found = Buckets()
    for one in seconds:
        found.add(one)
    return found


@given(SECONDS, st.sampled_from([0.5, 0.95]))
def test_a_quantile_is_right_within_two_and_a_quarter_percent(seconds, share):
    exact = np.quantile(seconds, share, method="inverted_cdf")
    assert of(seconds).quantile(share) == pytest.approx(exact, rel=0.0222)


@given(SECONDS, SECONDS)
def test_buckets_of_two_add_up_also_through_json(a, b):
    both = of(a)
    both += Buckets.from_json(json.loads(json.dumps(of(b).to_json())))
    assert both.counts == of(a + b).counts
    assert len(both) == len(a + b)


def test_what_is_told_is_in_milliseconds():
    assert of([0.1] * 94 + [3.0] * 6).told() == {
        "count": 100,
        "p50_ms": pytest.approx(100, rel=0.0222),
        "p95_ms": pytest.approx(3000, rel=0.0222),
    }
    assert of([]).told() == {"count": 0, "p50_ms": None, "p95_ms": None}


def test_no_time_at_all_is_a_short_time():
    assert of([0.0]).quantile(0.5) == pytest.approx(1e-6, rel=0.03)


@given(st.integers(0, 1 << 31), st.integers(0, 1 << 31))
def test_edges_hold_all_and_are_those_of_any_other_run(a, b):
    least, most = sorted((a, b))
    found = edges(least, most)
    assert found[0] <= least
    assert found[-2] <= most < found[-1]
    assert found == sorted(set(found))
    everything = edges(0, 1 << 32)
    at = everything.index(found[0])
    assert everything[at : at + len(found)] == found


def test_edges_of_small_numbers_are_the_numbers():
    assert edges(0, 7) == list(range(9))
    assert edges(3, 3) == [3, 4]
    wide = [b / a for a, b in zip(edges(32, 100_000), edges(32, 100_000)[1:], strict=False)]
    assert max(wide) < 1.12
