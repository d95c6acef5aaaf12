"""Several engines behind one: what a death of one costs, and that none is left behind.

What every engine promises is in tests/contract; here are whole pools of fake engines in processes of their own.
"""

import os
import signal
import time
from functools import partial

import psutil
import pytest
from helpers_pool import make, told
from helpers_run import workers

from batchgen.data import Request
from batchgen.engines import pool as pools
from batchgen.engines.pool import EnginePool, Place
from batchgen.engines.start_faults import StartError
from batchgen.errors import EngineError, ReplicaDiedError
from batchgen.models.tokenizer import BytesTokenizer

PATIENCE_S = 30


@pytest.fixture
def start(tmp_path):
    """Starts a pool of fake engines, one a mapping of faults; closed at the end."""
    made, before = [], workers()

    def start(*faults, stall_s=60.0):
        places = [Place(str(n), {"REPLICA": str(n)}, partial(make, one)) for n, one in enumerate(faults)]
        made.append(EnginePool(places, stall_s=stall_s, logs=tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.close()
    assert not psutil.wait_procs(set(workers()) - set(before), timeout=5)[1]


def requests(count, text="harbour board"):
    return [Request(f"r{n}", BytesTokenizer().encode_batch([f"{text} {n}" + " and so on" * 5])[0], 16)
            for n in range(count)]  # fmt: skip


def finish(engine, wanted, lost=()):
    """ids of all completions until `wanted` have come or were lost."""
    found, gone, end = [], set(lost), time.monotonic() + PATIENCE_S
    while len(found) + len(gone) < wanted:
        assert time.monotonic() < end, (found, gone)
        try:
            found += [one.custom_id for one in engine.poll()]
        except ReplicaDiedError as e:
            gone |= e.lost
    return found, gone


def pids(engine):
    return [one.process.pid for one in engine._workers]


def test_work_is_spread_over_all_of_them(start):
    engine = start({}, {}, {})
    assert engine.info.replicas == 3
    assert engine.limits.in_flight == 24
    for one in requests(24):
        engine.submit(one)
    assert [len(one.in_flight) for one in engine._workers] == [8, 8, 8]
    found, gone = finish(engine, 24)
    assert sorted(found) == sorted(one.custom_id for one in requests(24))
    assert not gone
    time.sleep(0.1)
    assert engine.metrics().generation_tokens == 24 * 16
    assert engine.metrics().rss_bytes > 3 * (10 << 20)


def test_what_a_killed_one_had_is_told_and_the_others_go_on(start):
    engine = start({}, {"docs_per_s": 1})
    victim = pids(engine)[1]
    for one in requests(16):
        engine.submit(one)
    os.kill(victim, signal.SIGKILL)
    found, gone = finish(engine, 16)
    assert len(gone) == 8
    assert set(found) == {one.custom_id for one in requests(16)} - gone
    assert victim not in pids(engine)
    end = time.monotonic() + PATIENCE_S
    while len([one for one in engine._workers if one.limits]) < 2:  # it starts again beside the others
        assert time.monotonic() < end
        for one in requests(1):
            engine.submit(one)
        finish(engine, 1)


def test_completions_that_came_with_a_death_are_not_lost(start):
    engine = start({}, {})
    for one in requests(16):
        engine.submit(one)
    time.sleep(1)  # all have answered, nothing is read yet
    for pid in pids(engine):
        os.kill(pid, signal.SIGKILL)
    found, _ = finish(engine, 16)
    assert sorted(found) == sorted(one.custom_id for one in requests(16))


def test_one_that_dies_again_and_again_is_left_out(start, monkeypatch):
    monkeypatch.setattr(pools, "_TRIES", 2)
    engine = start({}, {"die_on": "poison"})
    end = time.monotonic() + PATIENCE_S
    while len(engine._workers) == 2:
        assert time.monotonic() < end
        for one in requests(8, text="poison"):
            engine.submit(one)
        finish(engine, 8)
    assert len(engine._workers) == 1
    assert engine.limits.in_flight == 8


def test_where_none_is_left_the_engine_has_died(start):
    engine = start({"die_on": "poison"})
    engine.submit(requests(1, text="poison")[0])
    with pytest.raises(EngineError, match="poison") as raised:
        finish(engine, 1)
    assert not isinstance(raised.value, ReplicaDiedError)


def test_one_that_hangs_is_ended_by_its_own_process(start):
    engine = start({}, {"hang_on": "poison"}, stall_s=0.6)
    for one in requests(2, text="poison"):
        engine.submit(one)
    found, gone = finish(engine, 2)
    assert (len(found), len(gone)) == (1, 1)


def test_all_are_killed_on_request(start):
    engine = start({"docs_per_s": 0.1}, {"docs_per_s": 0.1})
    for one in requests(4):
        engine.submit(one)
    assert engine.pulse() is None  # nobody waits for it
    processes = [psutil.Process(pid) for pid in pids(engine)]
    engine.kill("time is over")
    with pytest.raises(EngineError, match="time is over"):
        engine.poll()
    assert not psutil.wait_procs(processes, timeout=5)[1]


def test_signals_are_left_to_the_run(start):
    engine = start({"docs_per_s": 20})
    for one in requests(4):
        engine.submit(one)
    for pid in pids(engine):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert len(finish(engine, 4)[0]) == 4


def test_a_start_that_fails_is_told_and_leaves_no_process(start):
    with pytest.raises(StartError, match="CUDA out of memory"):
        start({}, {"start_faults": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB."]})
    assert not psutil.wait_procs(workers(), timeout=5)[1]


def test_each_has_its_own_environment(tmp_path):
    places = [Place(str(n), {"BATCHGEN_TEST": str(n)}, told) for n in range(2)]
    engine = EnginePool(places, stall_s=60, logs=tmp_path)
    try:
        assert [one.info.device for one in engine._workers] == ["0", "1"]
    finally:
        engine.close()
