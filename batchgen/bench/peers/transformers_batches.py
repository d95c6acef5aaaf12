"""transformers' `generate` with static batches, the loop of its documentation.

Batches are padded on the left, `batch` documents each (32 if null). The whole work is sorted by length first, longest
first, so that little is padded: more than a loop over a stream could do. bfloat16, on the GPU if there is one.
"""

import time
from typing import Any

from batchgen.bench.peers.work import Result, Rows, Work, born, main, peak_bytes, versions

BATCH = 32


def answer(ids: list[int], ends: set[int], *, keep_end: bool) -> list[int]:
    """What was written, up to the first end token and with it, as vLLM counts; the rest of a batch's row is padding."""
    if keep_end:
        return ids
    return next((ids[: n + 1] for n, one in enumerate(ids) if one in ends), ids)


def settings(work: Work, model: Any, tokenizer: Any) -> Any:
    """Greedy, or plain sampling at the work's temperature; nothing of the model's own defaults but its end tokens."""
    from transformers import GenerationConfig

    sampling = {"do_sample": True, "temperature": work.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=work.max_tokens,
        min_new_tokens=work.max_tokens if work.ignore_eos else None,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(sampling if work.temperature > 0 else {"do_sample": False}),
    )


def run(work: Work) -> Result:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16).to(device).eval()
    config = settings(work, model, tokenizer)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]

    prompts = sorted(work.prompts(), key=lambda one: len(one[1]), reverse=True)
    rows, size, written = Rows(work.out), work.batch or BATCH, 0
    start = time.time()
    for at in range(0, len(prompts), size):
        names, ids = zip(*prompts[at : at + size], strict=True)
        padded = tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt").to(device)
        with torch.inference_mode():
            whole = model.generate(**padded, generation_config=config)
        answers = whole[:, padded["input_ids"].shape[1] :].tolist()
        answers = [answer(one, set(ends), keep_end=work.ignore_eos) for one in answers]
        written += sum(map(len, answers))
        rows.write(zip(names, tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True))
    end = time.time()
    rows.close()
    return Result(
        seconds=end - start,
        start_s=start - born(),
        first_s=(rows.first or end) - start,
        documents=len(prompts),
        prompt_tokens=sum(len(ids) for _, ids in prompts),
        output_tokens=written,
        peak_bytes=peak_bytes(),
        versions=versions("transformers", "torch"),
    )


if __name__ == "__main__":
    main(run, {"torch": "torch", "transformers": "transformers"})
