"""The done index against a plain dict: any visits, many keys, keys that look alike; and what it costs in memory."""

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.storage.index import DoneIndex, IndexBuilder, KeySet, Visit


class Model:
    """What the index promises, in the plainest way."""

    def __init__(self, rows):
        self.content = {key: content for key, content, _ in rows}
        self.seen = {key for key, _, seen in rows if seen}

    def visit(self, key, content):
        if key in self.seen:
            return Visit.DUPLICATE
        self.seen.add(key)
        if key not in self.content:
            return Visit.NEW
        return Visit.DONE if self.content[key] == content else Visit.EDITED

    def unseen(self):
        return set(self.content) - self.seen


def built(keys, content, seen, part=1 << 20):
    """The index of rows that came in parts of this size."""
    builder = IndexBuilder()
    for n in range(0, len(keys), part):
        builder.add(keys[n : n + part], content[n : n + part], seen[n : n + part].astype(np.uint32))
    return builder.index([False, True])


def index(rows):
    """rows: (key, content, seen)."""
    rows = list(rows)
    keys = np.frombuffer(b"".join(key for key, _, _ in rows), np.uint8).reshape(-1, 16)
    content = np.frombuffer(b"".join(content for _, content, _ in rows), np.uint8).reshape(-1, 8)
    return built(keys, content, np.array([seen for *_, seen in rows], dtype=np.bool_))


def check(rows, visits):
    model, real = Model(rows), index(rows)
    assert real.done == len(rows)
    assert set(real.unseen()) == model.unseen()
    for key, content in visits:
        assert real.visit(key, content) is model.visit(key, content)
    unseen = list(real.unseen())
    assert len(unseen) == len(set(unseen))
    assert set(unseen) == model.unseen()


# Few enough keys that they meet again; equal in the first byte, the first eight, or the last eight; the extremes.
HALVES = st.sampled_from([bytes(8), b"\xff" * 8, b"\x00" * 7 + b"\x01", b"\x80" + bytes(7), b"\x7f" + b"\xff" * 7])
KEYS = st.builds(lambda hi, lo: hi + lo, HALVES, HALVES) | st.binary(min_size=16, max_size=16)
CONTENT = st.sampled_from([bytes(8), b"\xff" * 8, b"\x80" + bytes(7), b"contents"])
ROWS = st.lists(st.tuples(KEYS, CONTENT, st.booleans()), max_size=30, unique_by=lambda one: one[0])


@given(rows=ROWS, visits=st.lists(st.tuples(KEYS, CONTENT), max_size=60), again=st.booleans())
def test_any_visits_over_any_rows_are_told_as_a_dict_would(rows, visits, again):
    if again:
        visits = [*visits, *[(key, content) for key, content, _ in rows], *visits]
    check(rows, visits)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    first=st.integers(0, 1500),
    new=st.integers(600, 2500),
    bits=st.sampled_from([4, 12, 64]),
)
def test_keys_of_one_bucket_survive_its_merges(seed, first, new, bits):
    """All keys begin with one byte, so that they fill one bucket; few `bits` make their first halves alike."""
    dice = random.Random(seed)

    def key():
        shift = 56 - min(bits, 56)
        return b"\x07" + (dice.getrandbits(min(bits, 56)) << shift).to_bytes(7, "big") + dice.randbytes(8)

    rows = [(key(), dice.randbytes(8), dice.random() < 0.3) for _ in range(first if bits > 4 else min(first, 300))]
    fresh = [(key(), dice.randbytes(8)) for _ in range(new if bits > 4 else min(new, 700))]
    known = [(key, content if dice.random() < 0.5 else dice.randbytes(8)) for key, content, _ in rows]
    visits = fresh + known[: len(known) // 2] + dice.sample(fresh, len(fresh) // 3)
    dice.shuffle(visits)
    check(rows, visits)


def test_keys_that_share_their_first_eight_bytes_are_told_apart_after_merges():
    keys = [b"\xab" * 8 + n.to_bytes(8, "big") for n in range(700)]
    check([(key, b"contents", False) for key in keys[:100]], [(key, b"contents") for key in [*keys, *keys[::7]]])


def test_new_keys_over_all_buckets_are_found_again():
    dice = random.Random(1)
    keys = [dice.randbytes(16) for _ in range(100_000)]
    real = DoneIndex.empty()
    assert all(real.visit(key, b"contents") is Visit.NEW for key in keys)
    assert all(real.visit(key, b"contents") is Visit.DUPLICATE for key in keys[::10])
    assert list(real.unseen()) == []
    assert real.done == 0


def test_an_edited_document_is_one_once_and_then_a_duplicate():
    real = index([(b"k" * 16, b"contents", False)])
    assert real.visit(b"k" * 16, b"new text") is Visit.EDITED
    assert real.visit(b"k" * 16, b"contents") is Visit.DUPLICATE
    assert list(real.unseen()) == []


def test_a_row_of_a_whole_file_counts_as_seen():
    real = index([(b"a" * 16, b"contents", True), (b"b" * 16, b"contents", False)])
    assert list(real.unseen()) == [b"b" * 16]
    assert real.visit(b"a" * 16, b"contents") is Visit.DUPLICATE
    assert real.visit(b"b" * 16, b"contents") is Visit.DONE


def test_new_keys_do_not_stay_where_they_are_dear():
    """20,000 keys of one bucket: as objects in its dict they would take 170 bytes each."""
    numbers = range(20_000)
    tracemalloc.start()
    try:
        real = DoneIndex.empty()
        before, _ = tracemalloc.get_traced_memory()
        for n in numbers:
            real.visit(b"\x07" + n.to_bytes(15, "little"), n.to_bytes(8, "big"))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(numbers) < 30


def many(count, seed=0):
    dice = np.random.default_rng(seed)
    keys = dice.integers(0, 256, (count, 16), dtype=np.uint8)
    return keys, dice.integers(0, 256, (count, 8), dtype=np.uint8), np.zeros(count, np.bool_)


@pytest.mark.parametrize("new", [0, 60_000])
def test_a_million_keys_take_less_than_32_bytes_each(new):
    """60,000 new keys are 234 a bucket: nearly the most that wait in its dict, where they are dear, for a merge."""
    rows = many(1_000_000 - new)
    keys, contents, _ = many(new, seed=1)
    tracemalloc.start()
    try:
        real = built(*rows)
        for key, content in zip(keys, contents, strict=True):
            real.visit(key.tobytes(), content.tobytes())
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 1_000_000 < 32
    assert real.visit(rows[0][12345].tobytes(), rows[1][12345].tobytes()) is Visit.DONE


def test_loading_many_parts_has_no_peak_beside_the_index():
    """What is held while parts come in is 28 bytes a row, and it goes bucket by bucket as the index comes."""
    rows = many(500_000)
    tracemalloc.start()
    try:
        real = built(*rows, part=2_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert real.done == 500_000
    assert peak / 500_000 < 32 + 8  # 8: the 65,536 rows that are spread over the buckets at once


@given(rows=st.lists(KEYS, max_size=40), part=st.integers(1, 9))
def test_keys_with_several_rows_are_told(rows, part):
    keys = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)
    builder = IndexBuilder()
    for n in range(0, len(keys), part):
        some = keys[n : n + part]
        builder.add(some, np.zeros((len(some), 8), np.uint8), np.zeros(len(some), np.uint32))
    assert set(builder.repeated()) == {key for key in rows if rows.count(key) > 1}


@given(held=st.sets(KEYS, max_size=20), asked=st.lists(KEYS, max_size=20))
def test_a_set_of_keys_says_where_each_stands(held, asked):
    def array(keys):
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)

    keys = KeySet(array(held))
    assert list(keys) == sorted(held)
    order = sorted(held)
    assert keys.places(array(asked)).tolist() == [order.index(key) if key in held else -1 for key in asked]
