"""What the loop is given: in the order of a window, never held back, a bounded number ahead, and all of it."""

import contextlib
import itertools
import threading
import time
from array import array
from types import SimpleNamespace

import pytest
from helpers_config import document
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data import Prepared
from batchgen.feeding import reader
from batchgen.feeding.line import Reading
from batchgen.feeding.order import WINDOW
from batchgen.feeding.reader import ReadAhead
from batchgen.reporting.stats import Stats


class Prompts:
    """A prompt of as many tokens as the text has characters, different from every other one."""

    @staticmethod
    def prepare(documents):
        return [
            Prepared(one, array("i", [int.from_bytes(one.key, "big"), *one.text.encode()[1:]])) for one, _ in documents
        ]


@contextlib.contextmanager
def ahead_of(documents, *, gathers=False):
    """A started reader of these documents."""
    line = SimpleNamespace(
        workflow=SimpleNamespace(gathers=gathers),
        stats=Stats(),
        documents=lambda line, reading: iter(documents),
        prompts=Prompts,
        committer=SimpleNamespace(files={"a.jsonl": SimpleNamespace(input=0)}),
        job=SimpleNamespace(answers=SimpleNamespace(retry_max_tokens=None), sampling=SimpleNamespace(max_tokens=64)),
    )
    with ReadAhead(line, Reading()) as ahead:
        yield ahead


def documents(lengths):
    return (document("x" * length, n=n) for n, length in enumerate(lengths))


def take(ahead, count=None):
    """The numbers of so many documents, or of all."""
    found = []
    end = time.monotonic() + 20
    while not ahead.ended and len(found) != count and time.monotonic() < end:
        one = ahead.take(wait_s=0.1)
        if one is not None:
            found.append(int.from_bytes(one.document.key, "big"))
    return found


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, WINDOW, 3 * WINDOW + 100])
def test_every_document_is_given_once_and_then_it_has_ended(count):
    with ahead_of(documents([5] * count)) as ahead:
        assert sorted(take(ahead)) == list(range(count))
        assert ahead.ended
        assert ahead.take(wait_s=0.0) is None


def test_without_anything_in_common_the_order_is_that_of_the_input():
    with ahead_of(documents(range(5, 5 + 3 * WINDOW))) as ahead:
        # Before the reader has met the end: what is left then goes longest first.
        assert take(ahead, WINDOW // 2) == list(range(WINDOW // 2))


def test_when_the_reader_has_met_the_end_all_that_is_left_goes_longest_first():
    lengths = [5 + n * 37 % 997 for n in range(WINDOW - 100)]
    with ahead_of(documents(lengths)) as ahead:
        first = take(ahead, 3)
        until(ahead._read.is_set)
        rest = [lengths[n] for n in take(ahead)]
    assert len(first) + len(rest) == len(lengths)
    assert rest == sorted(rest, reverse=True)


def test_the_reader_waits_for_the_loop():
    met = itertools.count()
    given_out = [0]

    def count():
        for one in documents([5] * 20 * WINDOW):
            given_out[0] = next(met)
            yield one

    with ahead_of(count()) as ahead:
        done = 0
        for taken in (1, WINDOW, 2 * WINDOW):
            take(ahead, taken)
            last, done = -1, done + taken
            while given_out[0] != last:  # until it stands still
                last = given_out[0]
                time.sleep(0.2)
            assert last < done + 2 * WINDOW + 200


def test_a_slow_source_is_not_waited_for(monkeypatch):
    """A document whose window is not full, nor its batch, is given when the loop has nothing else."""
    monkeypatch.setattr(reader, "_BATCH_S", 0.0)
    monkeypatch.setattr(reader, "_COUNTED", 1)  # before the first batch
    goes_on = threading.Event()

    def slow():
        yield from documents([9, 5, 7])
        goes_on.wait(20)
        yield document("x" * 30, n=3)

    with ahead_of(slow()) as ahead:
        assert sorted(take(ahead, 3)) == [0, 1, 2]
        assert ahead.take(wait_s=0.0) is None
        assert not ahead.ended
        goes_on.set()
        assert take(ahead) == [3]


def test_documents_that_were_read_before_a_fault_come_before_it(monkeypatch):
    monkeypatch.setattr(reader, "_COUNTED", 1)

    def faulty():
        yield from documents([5] * 100)
        raise ValueError("the mount is gone")

    with ahead_of(faulty()) as ahead:
        assert len(take(ahead, 64)) == 64  # whole batches
        for _ in range(2):
            with pytest.raises(ValueError, match="the mount is gone"):
                take(ahead, 1)
        assert not ahead.ended


def test_a_workflow_that_gathers_gets_documents_as_they_were_read():
    lengths = [5 + n % 7 for n in range(WINDOW + 100)]
    with ahead_of(documents(lengths), gathers=True) as ahead:
        assert take(ahead) == list(range(WINDOW + 100))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 60), max_size=300), st.integers(1, 40), st.integers(1, 100))
def test_nothing_is_held_back_or_far_from_its_place(lengths, batch, pause):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_BATCH", batch)
        patch.setattr(reader, "WINDOW", 50)
        patch.setattr(reader, "_BATCHES_AHEAD", 50 // batch + 1)
        with ahead_of(documents(lengths)) as ahead:
            found = []
            while not ahead.ended:
                found += take(ahead, 1)
                if len(found) % pause == 0:
                    time.sleep(0.0005)
    assert sorted(found) == list(range(len(lengths)))
    far = 2 * (50 + batch) + (50 // batch + 2) * batch
    assert all(abs(at - n) <= far for at, n in enumerate(found))
