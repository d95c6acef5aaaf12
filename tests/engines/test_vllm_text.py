"""Answers decoded in bulk have the text that vLLM's own detokenizer gives the same ids, with any tokenizer."""

from types import SimpleNamespace

import pytest
from helpers_tokenizers import FAMILIES, WORDS, save
from hypothesis import given
from hypothesis import strategies as st

# What vLLM imports warns; that is not for our tests to judge.
# One group, with the tests on an engine: it takes six seconds of CPU to import vLLM, in each process that does.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("engine")]
ENDS = ("stop", "length", "abort")


@pytest.fixture(scope="module")
def vllm():
    """vLLM's parts that this is about; no engine."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

    return SimpleNamespace(params=SamplingParams, incremental=IncrementalDetokenizer, fast=FastIncrementalDetokenizer)


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    from transformers import AutoTokenizer

    made = {}

    def get(name):
        if name not in made:
            made[name] = AutoTokenizer.from_pretrained(save(name, tmp_path_factory.mktemp("tokenizer")))
        return made[name]

    return get


def output_of(prompt, ids, finish_reason):
    answer = SimpleNamespace(token_ids=ids, finish_reason=finish_reason)
    return SimpleNamespace(request_id="r", prompt_token_ids=prompt, outputs=[answer])


def theirs(vllm, tokenizer, params, output):
    """The text as vLLM's engine makes it: each token as it comes, the last one told as the end."""
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=output.prompt_token_ids, prompt_embeds=None, sampling_params=params
    )
    detokenizer = vllm.incremental.from_new_request(tokenizer, request)
    assert isinstance(detokenizer, vllm.fast)
    answer = output.outputs[0]
    for n, token in enumerate(answer.token_ids):
        last = n == len(answer.token_ids) - 1
        detokenizer.update([token], last and answer.finish_reason == "stop")
    return detokenizer.get_next_output_text(finished=True, delta=False)


def ours(tokenizer, params, outputs):
    from batchgen.engines.vllm_text import bulk_text

    bulk = bulk_text(tokenizer, params)
    slow = []
    step_by_step = bulk._step_by_step
    bulk._step_by_step = lambda output: slow.append(output) or step_by_step(output)
    return bulk.decode(outputs), slow


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(data=st.data())
def test_any_ids_give_the_text_of_vllms_detokenizer(vllm, tokenizer_of, name, data):
    tokenizer = tokenizer_of(name)
    ids = st.integers(0, len(tokenizer) - 1)
    of_text = st.text(st.sampled_from("aet hro.,'€世界é\n🙂"), max_size=12).map(lambda text: encoded(tokenizer, text))
    some = st.one_of(st.lists(ids, max_size=12), of_text)
    params = vllm.params(
        max_tokens=64, skip_special_tokens=data.draw(st.booleans()), include_stop_str_in_output=data.draw(st.booleans())
    )
    outputs = data.draw(
        st.lists(
            st.builds(output_of, st.lists(ids, min_size=1, max_size=40), some, st.sampled_from(ENDS)),
            max_size=4,
        )
    )
    found, _ = ours(tokenizer, params, outputs)
    assert found == [theirs(vllm, tokenizer, params, output) for output in outputs]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ordinary_answers_are_decoded_in_one_call(vllm, tokenizer_of, name):
    """The whole of a text, with the space that its first word has behind the prompt, and no token of its end."""
    tokenizer = tokenizer_of(name)
    prompt, end = encoded(tokenizer, WORDS[:200]), tokenizer(FAMILIES[name].special[-1])["input_ids"][-1]
    # As answers go on: in the middle of the text, and as a text of their own.
    goes_on = encoded(tokenizer, WORDS[:200] + " The board met.")[len(prompt) :]
    texts = [goes_on, encoded(tokenizer, "The harbour board agreed to pay."), encoded(tokenizer, "who, what, where?")]
    outputs = [output_of(prompt, [*ids, end], "stop") for ids in texts]
    outputs += [output_of(prompt, ids, "length") for ids in texts]
    for skip in (True, False):
        params = vllm.params(max_tokens=64, skip_special_tokens=skip)
        found, slow = ours(tokenizer, params, outputs)
        assert found == [theirs(vllm, tokenizer, params, output) for output in outputs]
        assert found[:3] == found[3:]
        assert "board" in found[0]
        assert not slow


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_first_word_keeps_its_space_behind_control_tokens_alone(vllm, tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    control = tokenizer(FAMILIES[name].special[-1])["input_ids"][-1]
    prompt = [*encoded(tokenizer, WORDS[:200]), *[control] * 40]
    output = output_of(prompt, encoded(tokenizer, "who met where"), "length")
    for skip in (True, False):
        params = vllm.params(max_tokens=64, skip_special_tokens=skip)
        assert ours(tokenizer, params, [output])[0] == [theirs(vllm, tokenizer, params, output)]


def test_vllm_decodes_where_the_text_is_needed_or_another_tokenizer_decodes(vllm, tokenizer_of):
    from batchgen.engines.vllm_text import bulk_text

    tokenizer = tokenizer_of("chatml")
    assert bulk_text(tokenizer, vllm.params())
    assert bulk_text(tokenizer, vllm.params(stop_token_ids=[5], bad_words=["a"], logprobs=1))
    assert bulk_text(tokenizer, vllm.params(spaces_between_special_tokens=False))
    assert bulk_text(tokenizer, vllm.params(stop=["."])) is None
    assert bulk_text(tokenizer, vllm.params(skip_special_tokens=False, spaces_between_special_tokens=False)) is None
    assert bulk_text(None, vllm.params()) is None
    assert bulk_text(SimpleNamespace(decode=print), vllm.params()) is None
