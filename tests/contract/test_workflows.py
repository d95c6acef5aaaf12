"""What every workflow promises: one record for each document it admits, whatever comes back, and no id twice.

A new workflow joins as one more entry of WORKFLOWS.
"""

from collections import Counter

import pytest
from helpers_config import prepared
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Completion
from batchgen.workflows.auto import AutoWorkflow
from batchgen.workflows.long import Bounds
from batchgen.workflows.map_reduce import MapReduceWorkflow
from batchgen.workflows.packed import PackedWorkflow, PackRules
from batchgen.workflows.refine import RefineWorkflow
from batchgen.workflows.single import Rules, SingleWorkflow

MAX_MODEL_LEN = 1000


def single(**rules):
    return lambda prefix: SingleWorkflow(
        prefix=prefix, rules=Rules(max_tokens=8, max_model_len=MAX_MODEL_LEN, count=len, **rules)
    )


class Store:
    """Keeps answers, over all documents and attempts of a test."""

    def __init__(self):
        self.answers = {}

    def find(self, document, prompt):
        return self.answers.get((document.key, prompt), ())

    def keep(self, document, prompt, completions):
        self.answers[document.key, prompt] = tuple(completions)

    def forget(self, document):
        self.answers = {at: one for at, one in self.answers.items() if at[0] != document.key}


def join(document, texts):
    """Up to three texts a prompt; long ones do not fit together."""
    if any(len(text) > 25 for text in texts):
        return [(1, []) for _ in texts]
    groups = [texts[n : n + 3] for n in range(0, len(texts), 3)]
    return [(len(group), [len(group)] * len(group)) for group in groups]


def map_reduce(*, at_once=2, requests=7, max_depth=2, **rules):
    return lambda prefix: MapReduceWorkflow(
        prefix=prefix,
        rules=Rules(max_tokens=8, max_model_len=MAX_MODEL_LEN, count=len, **rules),
        bounds=Bounds(at_once=at_once, requests=requests),
        join=join,
        max_depth=max_depth,
        store=Store(),
    )


def refine(*, requests=7, **rules):
    return lambda prefix: RefineWorkflow(
        prefix=prefix,
        rules=Rules(max_tokens=8, max_model_len=MAX_MODEL_LEN, count=len, **rules),
        bounds=Bounds(at_once=2, requests=requests),
        refine=lambda document, summary, piece: None if len(summary) > 25 else [len(summary), *piece],
        store=Store(),
    )


def packing(**rules):
    packs = PackRules(frame=lambda turn: [0] * (len(turn) // 10), secret=b"secret", max_documents=3)
    more = Rules(max_tokens=8, max_model_len=MAX_MODEL_LEN, count=len, **rules)
    return lambda prefix: PackedWorkflow(
        SingleWorkflow(prefix=prefix, rules=more), prefix=prefix, rules=more, packs=packs
    )


def auto(prefix):
    return AutoWorkflow(packing()(prefix), size=lambda: 2, decided=lambda *_: True)


WORKFLOWS = {
    "packed": packing(),
    "packed-retry": packing(retry_max_tokens=30),
    "auto": auto,
    "single": single(),
    "single-retry": single(retry_max_tokens=30),
    "single-reasoning": single(reasoning_end="</think>"),
    "single-reasoning-retry": single(reasoning_end="</think>", retry_max_tokens=2000),
    "map_reduce": map_reduce(),
    "map_reduce-wide": map_reduce(at_once=9, requests=99, max_depth=9, retry_max_tokens=30),
    "map_reduce-reasoning-retry": map_reduce(requests=99, reasoning_end="</think>", retry_max_tokens=100),
    "refine": refine(),
    "refine-reasoning-retry": refine(requests=99, reasoning_end="</think>", retry_max_tokens=100),
}
TEXTS = st.sampled_from(
    [
        "A summary.",
        "A summary that is as long as they come.",
        "",
        " \u200b",
        "Thoughts </think>A summary.",
        "<think>Thoughts",
        "x</think>",
    ]
)
COMPLETIONS = st.fixed_dictionaries(
    {
        "text": TEXTS,
        "finish_reason": st.sampled_from(["stop", "length"]),
        "error": st.sampled_from([None, None, "refused"]),
        "completion_tokens": st.integers(0, 30),
        "prompt_tokens": st.just(3),
        "cached_tokens": st.integers(0, 3),
    }
)
# What happens next, and to which of the requests that are open.
STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "complete", "complete", "again", "give_up"]), st.integers(0, 99), COMPLETIONS),
    max_size=40,
)


class Driver:
    """Plays the loop: knows which requests are open, and keeps what came out."""

    def __init__(self, make, *, pieces):
        self.workflow = make("0-1")
        self.pieces = pieces
        self.open, self.ids, self.records = {}, [], []
        self.admitted = 0
        self.tokens = Counter()

    def send(self, requests):
        for request in requests:
            assert request.max_tokens > 0
            assert len(request.prompt_ids) + request.max_tokens <= MAX_MODEL_LEN
            self.ids.append(request.custom_id)
            self.open[request.custom_id] = request

    def do(self, step, choice, completion):
        if step == "admit":
            if self.workflow.full:
                assert self.open
                return
            # Some documents fit, the others have up to eight pieces.
            pieces = tuple([70 + n] * 3 for n in range(self.admitted * 4 % 9)) if self.pieces else ()
            turn = None if pieces else f"Text {self.admitted}"
            self.send(self.workflow.admit(prepared(n=self.admitted, pieces=pieces, turn=turn)))
            self.admitted += 1
            return
        if not self.open:
            return
        custom_id = sorted(self.open)[choice % len(self.open)]
        documents = [one.id for one in self.workflow.documents(custom_id)]
        assert documents
        others = [one for one in self.open if self.workflow.documents(one)[0].id in documents]
        del self.open[custom_id]
        if step == "again":
            self.send([self.workflow.again(one) for one in self.workflow.apart(custom_id)])
        elif step == "give_up":
            apart = self.workflow.apart(custom_id)
            records = [record for one in apart for record in self.workflow.give_up(one, ("engine_died", "it died"))]
            assert sorted(record.document.id for record in records) == sorted(documents)
            for one in others:
                self.open.pop(one, None)
            self.records += records
        else:
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
                self.tokens[name] += completion[name]
            records, requests = self.workflow.complete(Completion(custom_id, **completion))
            self.records += records
            self.send(requests)

    def finish(self, completion):
        """Answer all that is open, with the same completion; it ends after few rounds."""
        for _ in range(40):
            self.send(self.workflow.flush())
            for _ in range(len(self.open)):
                self.do("complete", 0, completion)
        assert not self.open


def check(record, *, reasons):
    assert (record.status == "ok") is (record.summary is not None) is (record.error_type is None)
    assert record.status in ("ok", "failed")
    if record.summary is not None:
        assert record.summary == record.summary.strip() != ""
        assert not reasons or not {"<think>", "</think>", "Thoughts"} & set(record.summary.split())
    assert 0 <= record.reasoning_tokens <= record.completion_tokens
    assert 0 <= record.dropped_tokens <= record.completion_tokens
    assert record.attempts >= 1


@pytest.mark.parametrize("name", WORKFLOWS)
@given(steps=STEPS, last=COMPLETIONS)
def test_each_document_has_one_record_and_no_id_comes_twice(name, steps, last):
    driver = Driver(WORKFLOWS[name], pieces=not name.startswith("single"))
    for step in steps:
        driver.do(*step)
    driver.finish(last)
    assert Counter(record.document.id for record in driver.records) == Counter(f"d{n}" for n in range(driver.admitted))
    assert len(set(driver.ids)) == len(driver.ids)
    for record in driver.records:
        check(record, reasons="reasoning" in name)
    for column, tokens in driver.tokens.items():  # of all requests that were answered, whatever was kept
        assert sum(getattr(record, column) for record in driver.records) == tokens


@pytest.mark.parametrize("name", WORKFLOWS)
def test_ids_of_two_attempts_have_nothing_in_common(name):
    make = WORKFLOWS[name]
    ids = [request.custom_id for prefix in ("0-1", "0-2", "1-1") for request in make(prefix).admit(prepared())]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_an_answered_request_is_not_known_any_more(name):
    workflow = WORKFLOWS[name]("0-1")
    (request,) = workflow.admit(prepared())
    workflow.complete(Completion(request.custom_id, text="x</think>y", finish_reason="stop"))
    for call in (workflow.apart, workflow.again, workflow.documents, lambda one: workflow.complete(Completion(one))):
        with pytest.raises(KeyError):
            call(request.custom_id)
