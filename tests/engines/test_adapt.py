"""Starts that are tried again with less: scripted faults, and what each next start gets."""

import logging

import pytest

from batchgen.engines import start_faults
from batchgen.engines.adapt import STARTS, Adaptation, Change, short
from batchgen.engines.start_faults import StartError
from batchgen.errors import EngineError

NO_FIT = "max seq len ({context}) larger than tokens that fit in KV cache ({fits})"
TAKEN = "free memory on device ({free}/80.0 GiB) below the wanted share (0.92)"
NO_BLOCKS = "no memory left for the cache blocks"
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


def oom_in(function):
    return f'Traceback (most recent call last):\n  File "a.py", line 7, in {function}\ntorch.OutOfMemoryError: {OOM}'


class Machine:
    """Starts fail with these texts, one after the other; `given` has the arguments of each start."""

    def __init__(self, *texts, ever=None):
        self.texts = list(texts)
        self.ever = ever
        self.given = []

    def __call__(self, args):
        self.given.append(args)
        text = self.texts.pop(0) if self.texts else self.ever
        if text is not None:
            raise start_faults.error("", text)
        return "the engine"

    def changed(self, job):
        """What each start got that the job did not have."""
        return [{k: v for k, v in args.items() if job.get(k) != v} for args in self.given]


JOB = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 4096}


def adaptation(job=JOB, *, need=1000, enabled=True, changes=()):
    def ask():
        asked.append(need)
        return need

    asked = []
    found = Adaptation(job, need=ask, enabled=enabled, changes=changes)
    found.asked = asked
    return found


def test_a_start_that_works_is_left_alone():
    machine, adapt = Machine(), adaptation()
    assert adapt.start(machine) == "the engine"
    assert machine.given == [JOB]
    assert adapt.changes == []
    assert adapt.asked == []


def test_the_context_goes_down_to_what_the_documents_need(caplog):
    caplog.set_level(logging.WARNING, logger="batchgen")
    logging.getLogger("batchgen").propagate = True
    machine, adapt = Machine(NO_FIT.format(context=8192, fits=4000)), adaptation()
    adapt.start(machine)
    assert machine.changed(JOB) == [{}, {"max_model_len": 1000}]
    assert adapt.asked == [1000]
    assert [str(change) for change in adapt.changes] == ["max_model_len 8192 → 1000"]
    assert "holds 4,000 tokens, the documents need 1,000" in adapt.changes[0].why
    [line] = caplog.messages
    assert "\n" not in line
    assert "max_model_len 8192 → 1000" in line
    assert "holds 4,000 tokens" in line


@pytest.mark.parametrize(("need", "fits"), [(4001, 4000), (8192, 4000)])
def test_never_below_what_the_documents_need(need, fits):
    machine, adapt = Machine(ever=NO_FIT.format(context=8192, fits=fits)), adaptation(need=need)
    with pytest.raises(StartError, match=f"the documents need a context of {need:,} tokens"):
        adapt.start(machine)
    assert min(args["max_model_len"] for args in machine.given) == need
    assert adapt.asked == [need]  # a pass over the inputs is made once


def test_more_room_is_made_where_what_the_documents_need_does_not_fit():
    machine = Machine(NO_FIT.format(context=8192, fits=900), NO_FIT.format(context=1000, fits=990))
    adaptation().start(machine)
    assert machine.changed(JOB)[1:] == [
        {"max_model_len": 1000, "max_num_seqs": 32, "max_num_batched_tokens": 2048},
        {"max_model_len": 1000, "max_num_seqs": 16, "max_num_batched_tokens": 1024},
    ]


def test_a_cache_of_a_given_size_gets_no_larger_by_other_steps():
    job = JOB | {"kv_cache_memory_bytes": 1 << 23}
    machine, adapt = Machine(ever=NO_FIT.format(context=8192, fits=900)), adaptation(job)
    with pytest.raises(StartError, match="the documents need a context of 1,000 tokens"):
        adapt.start(machine)
    assert len(machine.given) == 1


@pytest.mark.parametrize(("free", "share"), [(52.0, 0.64), (70.0, 0.87), (8.5, 0.1)])
def test_a_gpu_that_is_partly_taken_is_used_as_far_as_it_is_free(free, share):
    machine = Machine(TAKEN.format(free=free))
    adaptation().start(machine)
    assert machine.changed(JOB) == [{}, {"gpu_memory_utilization": share}]
    assert share * 80 < free


@pytest.mark.parametrize("free", [8.0, 0.5])
def test_a_gpu_that_is_taken_is_not_tried(free):
    machine = Machine(ever=TAKEN.format(free=free))
    with pytest.raises(StartError, match="end what else uses the device"):
        adaptation().start(machine)
    assert len(machine.given) == 1


def test_a_share_is_never_raised():
    job = JOB | {"gpu_memory_utilization": 0.3}
    machine = Machine(ever="free memory on device (70.0/80.0 GiB) below the wanted share (0.3)")
    with pytest.raises(StartError):
        adaptation(job).start(machine)
    assert len(machine.given) == 1


SHARES = [{"gpu_memory_utilization": share} for share in (0.85, 0.75)]
BATCHES = [{"max_num_seqs": n, "max_num_batched_tokens": 64 * n} for n in (32, 16)]
EAGER = {"enforce_eager": True}


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (OOM, [*SHARES, *BATCHES, EAGER]),
        (oom_in("capture_model"), [*SHARES, EAGER]),
        (oom_in("profile_run"), [*BATCHES, *SHARES, EAGER]),
        (f"{OOM} occurred when warming up sampler with 64 dummy requests", [*BATCHES, *SHARES, EAGER]),
        (oom_in("load_model"), []),
        (NO_BLOCKS, [*BATCHES, EAGER]),
    ],
)
def test_the_order_of_the_steps_follows_the_fault(text, steps):
    machine, adapt = Machine(ever=text), adaptation()
    with pytest.raises(StartError) as caught:
        adapt.start(machine)
    wanted, now = [{}], {}
    for step in steps:
        now = now | step
        wanted.append(now)
    assert machine.changed(JOB) == wanted
    assert str(caught.value).count("; tried: ") == bool(steps)
    assert isinstance(caught.value, EngineError)


def test_steps_are_bounded_and_each_value_has_a_least():
    machine = Machine(ever=OOM)
    with pytest.raises(StartError):
        adaptation({"max_model_len": 8192, "max_num_seqs": 1024}).start(machine)
    assert len(machine.given) <= STARTS
    assert machine.given[-1] == {
        "max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.75,
        "enforce_eager": True,
    }  # fmt: skip


def test_small_batches_stay_as_they_are():
    job = {"max_model_len": 8192, "max_num_seqs": 4, "max_num_batched_tokens": 512, "enforce_eager": True}
    machine = Machine(ever=NO_BLOCKS)
    with pytest.raises(StartError):
        adaptation(job).start(machine)
    assert machine.given == [job]


def test_a_batch_holds_a_whole_prompt_where_prompts_are_not_cut_into_chunks():
    job = JOB | {"enable_chunked_prefill": False, "max_num_batched_tokens": 16384}
    machine = Machine(ever=NO_BLOCKS)
    with pytest.raises(StartError):
        adaptation(job).start(machine)
    assert min(args["max_num_batched_tokens"] for args in machine.given) == 8192


def test_no_share_is_lowered_where_the_cache_has_a_given_size():
    machine = Machine(ever=oom_in("capture_model"))
    with pytest.raises(StartError):
        adaptation(JOB | {"kv_cache_memory_bytes": 1 << 30}).start(machine)
    assert machine.changed(JOB | {"kv_cache_memory_bytes": 1 << 30}) == [{}, EAGER]


def test_faults_of_several_kinds_one_after_the_other():
    machine = Machine(oom_in("capture_model"), NO_FIT.format(context=8192, fits=2000), TAKEN.format(free=40.0))
    adapt = adaptation()
    adapt.start(machine)
    last = {"gpu_memory_utilization": 0.49, "max_model_len": 1000}
    assert machine.changed(JOB)[-1] == last
    assert short(adapt.changes) == "gpu_memory_utilization default → 0.49, max_model_len 8192 → 1000"


@pytest.mark.parametrize("text", ["Model architectures ['X'] are not supported for now", "nobody knows this"])
def test_other_faults_are_not_tried_again(text):
    machine = Machine(ever=text)
    with pytest.raises(StartError) as caught:
        adaptation().start(machine)
    assert len(machine.given) == 1
    assert str(caught.value) == str(start_faults.error("", text))


@pytest.mark.parametrize(
    ("text", "hinted"),
    [(OOM, True), (NO_BLOCKS, True), (oom_in("load_model"), False), ("nobody knows this", False)],
)
def test_without_adapt_the_first_fault_is_the_end_and_says_so(text, hinted):
    machine, adapt = Machine(ever=text), adaptation(enabled=False)
    with pytest.raises(StartError) as caught:
        adapt.start(machine)
    assert len(machine.given) == 1
    assert adapt.asked == []
    assert ("engine.adapt: true" in str(caught.value)) is hinted


def test_an_engine_started_again_begins_where_the_last_ended():
    adapt = adaptation()
    adapt.start(Machine(OOM))
    machine = Machine(OOM)
    adapt.start(machine)
    assert machine.changed(JOB) == [{"gpu_memory_utilization": 0.85}, {"gpu_memory_utilization": 0.75}]


def test_changes_of_an_earlier_attempt_come_first():
    adapt = adaptation(changes=[Change("max_model_len", 8192, 3000, "because")])
    machine = Machine()
    adapt.start(machine)
    assert machine.given == [JOB | {"max_model_len": 3000}]


def test_what_is_no_start_fault_goes_through():
    def start(_):
        raise EngineError("died later")

    with pytest.raises(EngineError, match=r"^died later$"):
        adaptation().start(start)
