"""A prompt has the BOS that template and tokenizer give it, once (vllm-project/vllm#9519, #55288)."""

import pytest
from helpers_run import by_id, record, start, watch_requests, write_job, write_jsonl
from helpers_tokenizers import model, turns

TURNS = ("<|u|>", "", "<|e|>", "<|a|>")
PAIRS = {
    "with_bos": {"template": turns(*TURNS, bos=True), "bos": "<s>", "adds_bos": True},
    "without_bos": {"template": turns(*TURNS), "bos": "<s>", "adds_bos": True},
    "no_bos_at_all": {"template": turns(*TURNS), "bos": None, "adds_bos": False},
}
# With a tokenizer of bytes, and with two that put a space before the first word.
FAMILIES = {"llama3": "<|begin_of_text|>", "llama2": "<s>", "plain words": "<s>"}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_is_given_the_ids_of_the_chat_template(tmp_path, out, monkeypatch, family, pair):
    over = dict(PAIRS[pair])
    over["bos"] = over["bos"] and FAMILIES[family]
    folder = model(family, tmp_path / "model", **over)
    docs = write_jsonl(tmp_path / "in/a.jsonl", map(record, range(5)))
    engine = {"backend": "fake", "args": {"model": str(folder)}}
    prompt = {"system": "You write summaries.", "user": "{{ title }}\n{{ text }}\nSummarize this."}
    sent = watch_requests(monkeypatch)
    start(write_job(tmp_path, [docs], engine=engine, prompt=prompt))

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    expected = []
    for n in range(5):
        user = f"{record(n)['title']}\n{record(n)['text']}\nSummarize this."
        messages = [{"role": "system", "content": "You write summaries."}, {"role": "user", "content": user}]
        whole = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
        expected.append(list(whole["input_ids"]))
    assert sorted(list(request.prompt_ids) for request in sent) == sorted(expected)
    # The count that the length is checked with is that of these same ids.
    assert sorted(row["prompt_tokens"] for row in by_id(out).values()) == sorted(map(len, expected))
    bos = tokenizer.convert_tokens_to_ids(FAMILIES[family])
    begins = [(request.prompt_ids[0] == bos, list(request.prompt_ids).count(bos)) for request in sent]
    assert begins == [(True, 1) if pair == "with_bos" else (False, 0)] * 5
