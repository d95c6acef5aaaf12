"""Lengths add up part by part to what all of them are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.reporting.lengths import Lengths

PARTS = st.lists(st.lists(st.integers(0, 1 << 28), max_size=30), max_size=6)


@given(PARTS)
def test_quantiles_and_histogram_are_those_of_all_values(parts):
    lengths = Lengths()
    for part in parts:
        lengths.add(np.array(part, np.int32))
    every = sorted(one for part in parts for one in part)
    found, told = lengths.quantiles(), lengths.histogram()
    assert sum(told["counts"]) == len(every)
    if not every:
        assert set(found.values()) == {None}
        return
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0)):
        assert found[name] == np.quantile(every, share, method="inverted_cdf")
    counted, _ = np.histogram(every, bins=told["edges"])
    assert told["counts"] == counted.tolist()
    assert told["counts"][0] > 0
    assert told["counts"][-1] > 0


def test_a_length_of_a_gigabyte_needs_no_gigabyte():
    lengths = Lengths()
    lengths.add(np.array([1 << 28, 5], np.int32))
    assert lengths.values.nbytes == 16
    assert lengths.quantiles()["max"] == 1 << 28


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_no_lengths_are_no_fault(kind):
    lengths = Lengths()
    lengths.add(np.zeros(0, kind))
    assert lengths.histogram() == {"edges": [], "counts": []}
