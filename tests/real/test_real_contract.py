"""The engine contract on real vLLM, both feeds: the tests of tests/contract/test_engines.py with other fixtures."""

import pytest
import test_engines
from helpers_real import ON_SHARED
from test_engines import (  # noqa: F401  collected here once more
    requests,
    run,
    test_a_completion_belongs_to_its_request,
    test_aborted_requests_give_no_completion,
    test_aborting_all_or_nothing_or_what_is_gone_is_no_fault,
    test_an_engine_goes_on_after_it_was_idle,
    test_an_engine_says_what_it_is,
    test_an_idle_engine_answers_with_nothing,
    test_each_request_has_its_own_max_tokens,
    test_every_request_has_exactly_one_completion,
    test_metrics_count_what_was_done,
)

from batchgen.data import Request
from batchgen.engines.vllm import GenerateEngine, VllmEngine
from batchgen.job.config import Sampling

pytestmark = ON_SHARED


@pytest.fixture(scope="module", params=[VllmEngine, GenerateEngine], ids=["rolling", "generate"])
def shared_engine(request, lent_to_module, tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_engines, "MAX_MODEL_LEN", lent_to_module.limits.max_model_len)
        patch.setattr(test_engines, "MAX_NUM_SEQS", lent_to_module.info.max_num_seqs)
        engine = request.param({}, Sampling(temperature=0, ignore_eos=True), log=log)
        yield engine
        engine.close()


@pytest.fixture
def make_engine(shared_engine):
    return lambda: shared_engine


@pytest.fixture
def engine(shared_engine):
    return shared_engine


def test_a_prompt_that_vllm_refuses_harms_no_other(engine):
    """Our own length rule comes first; what it lets through by mistake is one failed document."""
    wanted = requests(6, first=300)
    wanted.insert(3, Request("too-long", [65] * (engine.limits.max_model_len + 1), 4))
    found = {one.custom_id: one for one in run(engine, wanted)}
    assert len(found) == 7
    assert {name for name, one in found.items() if one.error is not None} == {"too-long"}
    assert str(engine.limits.max_model_len) in found["too-long"].error


def test_texts_decoded_in_bulk_are_those_of_vllm(engine, monkeypatch):
    """By the ids that came out: the rolling feed decodes them in bulk, in `generate` vLLM does."""
    from batchgen.engines import vllm
    from batchgen.engines.vllm_text import BulkText

    seen = []

    def completion(output, text, *more, original=vllm._completion):
        seen.append((output, text))
        return original(output, text, *more)

    monkeypatch.setattr(vllm, "_completion", completion)
    found = run(engine, requests(12, first=500, max_tokens=40))
    bulk = BulkText(*engine._as_vllm_decodes())
    assert len(seen) == 12
    for output, text in seen:
        assert text == (bulk.decode([output])[0] if engine.fill_first else bulk._step_by_step(output))
        assert output.outputs[0].text == (text if engine.fill_first else "")
    assert {one.custom_id: one.text for one in found if one.text} == {
        one.custom_id: one.text for one in found if one.completion_tokens == 40
    }
