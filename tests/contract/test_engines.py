"""What every engine promises.

A real engine joins as one more entry of ENGINES, marked `real`, with MAX_NUM_SEQS, MAX_MODEL_LEN and a sampling that
ignores the end-of-text token. It may hand out one engine for all tests, as long as its `close` does nothing before the
last of them. What only the fake engine can do on purpose stands below.
"""

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data import Request
from batchgen.engines.fake import FakeEngine
from batchgen.engines.pool import EnginePool, Place
from batchgen.engines.start_faults import StartError
from batchgen.errors import EngineError
from batchgen.job.config import FakeEngine as Faults
from batchgen.models.tokenizer import BytesTokenizer

MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 512
POLLS = 20_000  # an engine that has not answered by then never will


def fake(*, fill_first):
    def make(**faults):
        return FakeEngine(
            Faults(**faults),
            BytesTokenizer(),
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            fill_first=fill_first,
        )

    return make


def pool():
    """Two fake engines in processes of their own."""
    make = partial(
        FakeEngine, Faults(), BytesTokenizer(), max_num_seqs=2, max_model_len=MAX_MODEL_LEN, fill_first=False
    )
    return EnginePool([Place(n, {}, make) for n in "12"], stall_s=60, logs=Path(tempfile.gettempdir()))


# name → (a function that makes an engine, marks)
ENGINES = {
    "fake-rolling": (fake(fill_first=False), ()),
    "fake-generate": (fake(fill_first=True), ()),
    "pool": (pool, ()),
}
FAKES = {name: make for name, (make, _) in ENGINES.items() if name.startswith("fake")}


@pytest.fixture(params=[pytest.param(make, id=name, marks=marks) for name, (make, marks) in ENGINES.items()])
def make_engine(request):
    """Makes engines, and closes them at the end."""
    made = []

    def make():
        made.append(request.param())
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine):
    return make_engine()


def requests(count, *, first=0, max_tokens=4):
    """Requests with ids of their own and prompts of different lengths, of plain letters in any vocabulary."""
    return [
        Request(f"test-{first}-{n}", [65 + (first + n + i) % 20 for i in range(8 + n - first)], max_tokens)
        for n in range(first, first + count)
    ]


def run(engine, wanted):
    """All completions of these requests, put in as the loop does: never more in flight than the engine wants."""
    waiting, found = list(wanted), []
    for _ in range(POLLS):
        while waiting and len(wanted) - len(waiting) - len(found) < engine.limits.in_flight:
            engine.submit(waiting.pop(0))
        if len(found) >= len(wanted):
            break
        found += engine.poll()
    return found + engine.poll()


def test_every_request_has_exactly_one_completion(engine):
    wanted = requests(3 * engine.limits.in_flight + 1)
    found = run(engine, wanted)
    assert Counter(one.custom_id for one in found) == Counter(one.custom_id for one in wanted)


def test_a_completion_belongs_to_its_request(engine):
    wanted = requests(10)
    found = {one.custom_id: one for one in run(engine, wanted)}
    for request in wanted:
        completion = found[request.custom_id]
        assert completion.error is None
        assert completion.text
        assert completion.finish_reason in {"stop", "length"}
        assert completion.prompt_tokens == len(request.prompt_ids)
        assert 0 < completion.completion_tokens <= request.max_tokens
        assert 0 <= completion.cached_tokens <= completion.prompt_tokens


def test_each_request_has_its_own_max_tokens(engine):
    wanted = [Request(f"test-max-{n}", [65 + n, *range(65, 85)], n) for n in (1, 2, 3, 9)]
    found = {one.custom_id: one for one in run(engine, wanted)}
    assert {n: found[f"test-max-{n}"].completion_tokens for n in (1, 2, 3)} == {1: 1, 2: 2, 3: 3}
    assert {found[f"test-max-{n}"].finish_reason for n in (1, 2, 3)} == {"length"}


def test_an_idle_engine_answers_with_nothing(engine):
    assert engine.poll() == []
    run(engine, requests(3))
    assert engine.poll() == []


def test_an_engine_goes_on_after_it_was_idle(engine):
    for first in (0, 100, 200):
        wanted = requests(5, first=first)
        assert {one.custom_id for one in run(engine, wanted)} == {one.custom_id for one in wanted}


def test_aborted_requests_give_no_completion(engine):
    wanted = requests(engine.limits.in_flight)
    for request in wanted:
        engine.submit(request)
    gone = {one.custom_id for one in wanted[1::2]}
    engine.abort(sorted(gone))
    found = []
    for _ in range(POLLS):
        if len(found) >= len(wanted[::2]):
            break
        found += engine.poll()
    assert Counter(one.custom_id for one in found) == Counter(one.custom_id for one in wanted[::2])
    assert engine.poll() == []


def test_aborting_all_or_nothing_or_what_is_gone_is_no_fault(engine):
    wanted = requests(4)
    for request in wanted:
        engine.submit(request)
    engine.abort([])
    engine.abort([one.custom_id for one in wanted])
    engine.abort([wanted[0].custom_id, "test-never-seen"])
    assert engine.poll() == []
    assert len(run(engine, requests(2, first=50))) == 2


def test_metrics_count_what_was_done(engine):
    before = engine.metrics()
    found = run(engine, requests(6, first=900))
    after = engine.metrics()
    assert after.generation_tokens - (before.generation_tokens or 0) >= sum(one.completion_tokens for one in found)
    assert after.prompt_tokens - (before.prompt_tokens or 0) >= sum(one.prompt_tokens for one in found)


def test_an_engine_says_what_it_is(engine):
    assert engine.info.backend in {"fake", "vllm"}
    assert engine.info.max_num_seqs * engine.info.replicas == MAX_NUM_SEQS
    assert engine.limits.in_flight >= engine.info.max_num_seqs
    assert engine.limits.max_model_len == MAX_MODEL_LEN


def test_an_engine_is_closed_once_or_twice_busy_or_not(make_engine):
    engine = make_engine()
    for request in requests(3, first=700):
        engine.submit(request)
    engine.close()
    engine.close()


# The fake engine


@pytest.fixture(params=FAKES)
def make_fake(request):
    return FAKES[request.param]


@pytest.mark.parametrize("fail_every", [1, 3, 100])
def test_a_request_that_fails_is_a_completion_with_an_error(make_fake, fail_every):
    wanted = requests(12)
    found = run(make_fake(fail_every=fail_every), wanted)
    assert Counter(one.custom_id for one in found) == Counter(one.custom_id for one in wanted)
    failed = [one for one in found if one.error is not None]
    assert len(failed) == len(wanted) // fail_every
    assert all("failed this request" in one.error for one in failed)
    assert all((one.text, one.completion_tokens) == ("", 0) for one in failed)


def test_a_request_with_certain_words_fails_and_no_other(make_fake):
    wanted = requests(12)
    found = run(make_fake(fail_on="C"), wanted)
    assert {one.custom_id for one in found if one.error is not None} == {
        one.custom_id for one in wanted if ord("C") in one.prompt_ids
    }


@pytest.mark.parametrize("die_after", [0, 1, 5, 11])
def test_an_engine_that_dies_raises_engine_error(make_fake, die_after):
    engine = make_fake(die_after=die_after)
    found = []
    for request in requests(12):
        engine.submit(request)
        if len(found) < die_after:
            found += engine.poll()
    assert len(found) == die_after
    with pytest.raises(EngineError, match=f"died after {die_after} completions"):
        run(engine, requests(1, first=50))
    engine.close()


def test_a_request_longer_than_the_context_is_a_completion_with_an_error(make_fake):
    lengths = {"fits": MAX_MODEL_LEN - 4, "too-long": MAX_MODEL_LEN - 3}
    found = run(make_fake(), [Request(name, [65] * length, 4) for name, length in lengths.items()])
    assert {one.custom_id: one.error is None for one in found} == {"fits": True, "too-long": False}


def test_starts_fail_with_the_texts_they_are_given():
    settings = Faults(start_faults=["no memory left for the cache blocks", "nobody knows this"])
    found = []
    for start in range(3):
        try:
            FakeEngine(settings, BytesTokenizer(), max_num_seqs=4, max_model_len=64, fill_first=False, start=start)
        except StartError as e:
            found.append(e.fault and e.fault.kind)
    assert found == ["no_cache", None]


def test_an_engine_does_not_die_before_it_is_asked_to_work(make_fake):
    assert make_fake(die_after=0).poll() == []
    assert len(run(make_fake(die_after=3), requests(3))) == 3


def test_the_rolling_feed_works_on_what_fits_and_generate_on_all_there_is():
    for name, size in (("fake-rolling", MAX_NUM_SEQS), ("fake-generate", 2 * MAX_NUM_SEQS)):
        engine = FAKES[name]()
        assert engine.limits.in_flight == 2 * MAX_NUM_SEQS
        assert engine.limits.fill_first is (name == "fake-generate")
        for request in requests(engine.limits.in_flight):
            engine.submit(request)
        assert len(engine.poll()) == size


def test_completions_do_not_come_in_the_order_of_the_requests(make_fake):
    engine = make_fake()
    wanted = requests(MAX_NUM_SEQS)
    for request in wanted:
        engine.submit(request)
    order = [one.custom_id for one in engine.poll()]
    assert sorted(order) == sorted(one.custom_id for one in wanted)
    assert order != [one.custom_id for one in wanted]


def test_the_same_prompt_has_the_same_text_and_another_prompt_another(make_fake):
    texts = [
        {one.custom_id: one.text for one in run(make_fake(), [*requests(8), Request("again", [65] * 30, 4)])}
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0].values())) == 9


def test_a_set_speed_is_kept(make_fake, monkeypatch):
    slept = []
    monkeypatch.setattr(FakeEngine, "_wait", lambda _, seconds: slept.append(seconds))
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    engine = make_fake(docs_per_s=40)
    run(engine, requests(10))
    assert max(slept) == pytest.approx(10 / 40)  # the clock stands still, so each waits for all before it
    assert len(slept) == (2 if engine.limits.fill_first else 5)


def test_prompts_that_hold_a_text_get_the_answer_that_was_told(make_fake):
    told = [
        {"match": "BCD", "text": "first", "finish_reason": "length"},
        {"match": "CDE", "text": " \x1b```é"},
        {"match": "XYZ", "text": ""},
    ]
    prompts = {"both": "ABCDEF", "second": "CDEF", "empty": "XYZ", "none": "ABABAB"}
    wanted = [Request(name, list(prompt.encode()), 9) for name, prompt in prompts.items()]
    found = {one.custom_id: one for one in run(make_fake(answers=told), [*wanted, Request("cut", list(b"CDE"), 3)])}
    given = {name: (one.text, one.finish_reason, one.completion_tokens) for name, one in found.items()}
    assert given["both"] == ("first", "length", 5)
    assert given["second"] == (" \x1b```é", "stop", 7)
    assert given["cut"] == (" \x1b`", "length", 3)
    assert given["empty"] == ("", "stop", 0)
    assert given["none"][0].startswith("[6] ")


@settings(deadline=None)
@given(
    st.sampled_from(sorted(FAKES)),
    st.lists(st.sampled_from(["submit", "poll", "abort"]), max_size=60),
    st.integers(1, 5),
)
def test_whatever_is_called_no_request_is_lost_or_answered_twice(name, calls, fail_every):
    engine = FAKES[name](fail_every=fail_every)
    open_ids, answered, aborted = [], [], []
    for n, call in enumerate(calls):
        if call == "submit":
            open_ids.append(f"r{n}")
            engine.submit(Request(f"r{n}", [65, 66, n], 2))
        elif call == "poll":
            answered += [one.custom_id for one in engine.poll()]
        elif open_ids:
            aborted.append(open_ids[n % len(open_ids)])
            engine.abort(aborted[-1:])
    before_drain = set(answered)
    for _ in calls:
        answered += [one.custom_id for one in engine.poll()]
    assert engine.poll() == []
    assert len(set(answered)) == len(answered)
    assert set(answered) >= set(open_ids) - set(aborted)
    # What was aborted after its answer had come is answered; nothing else that was aborted is.
    assert set(aborted) & set(answered) <= before_drain
