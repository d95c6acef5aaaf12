"""One configuration of vLLM by itself, rolling feed, fixed lengths: what a setting does.

    python benchmarks/h200/settings.py NAME '{"quantization": "fp8"}' OUT.jsonl [--documents 3072] [--tokens-in 778]

Prompts are random token ids. Adds a line to OUT.jsonl: docs/s from the first request to the last answer. Answers of
equal length end in waves: compare runs of equally many documents, and of many.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def roll(engine, prompts, params, tag):
    """Moments at which answers came, with twice max_num_seqs in flight."""
    limit = 2 * engine.vllm_config.scheduler_config.max_num_seqs
    waiting, in_flight, moments = list(enumerate(prompts))[::-1], 0, []
    while waiting or in_flight:
        while waiting and in_flight < limit:
            n, ids = waiting.pop()
            engine.add_request(f"{tag}-{n}", {"prompt_token_ids": ids}, params)
            in_flight += 1
        done = [output for output in engine.step() if output.finished]
        in_flight -= len(done)
        moments += [time.monotonic()] * len(done)
    return moments


def measure(args, options) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    begin = time.monotonic()
    llm = LLM(
        **{"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 1024, "model": options.model} | args,
        disable_log_stats=False,
    )
    started = time.monotonic() - begin
    config = llm.llm_engine.vllm_config
    params = SamplingParams(
        temperature=0, max_tokens=options.tokens_out, min_tokens=options.tokens_out, ignore_eos=True,
        detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 120_000) for _ in range(options.tokens_in)] for _ in range(options.documents + 256)]
    roll(llm.llm_engine, prompts[options.documents :], params, "warm-up")
    begin = time.monotonic()
    moments = roll(llm.llm_engine, prompts[: options.documents], params, "run")
    return {
        "start_s": round(started, 1),
        "docs_per_s": round(options.documents / (moments[-1] - begin), 2),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "kv_tokens": getattr(config.cache_config, "kv_cache_size_tokens", None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("args", type=json.loads)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="outputs/h200/llama-3.1-8b-shape")
    parser.add_argument("--documents", type=int, default=3072)
    parser.add_argument("--tokens-in", type=int, default=778)
    parser.add_argument("--tokens-out", type=int, default=128)
    options = parser.parse_args()
    told = {"name": options.name, "args": options.args, "in": options.tokens_in, "out": options.tokens_out}
    try:
        told |= measure(options.args, options)
    except Exception as e:  # noqa: BLE001  whatever vLLM raises is what this setting does
        told["error"] = f"{type(e).__name__}: {e}"[:400]
    with options.out.open("a") as lines:
        lines.write(json.dumps(told) + "\n")
    print(json.dumps(told), flush=True)
    sys.stdout.flush()
    os._exit("error" in told)  # the engine's processes end with this one


if __name__ == "__main__":
    main()
