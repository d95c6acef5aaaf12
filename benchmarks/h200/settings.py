"""One configuration of vLLM by itself, rolling feed, fixed lengths: what a setting does.

    python benchmarks/h200/settings.py NAME '{"quantization": "fp8"}' OUT.jsonl [--documents 3072] [--tokens-in 778] \
        [--scheduler 1024,8192 --scheduler 512,4096 ...]

Prompts are random token ids. Adds a line to OUT.jsonl: docs/s from the first request to the last answer, and those of
the second third of the answers. Answers of equal length end in waves: compare runs of equally many documents, and of
many. --scheduler gives the vLLM of one start other values of max_num_seqs and max_num_batched_tokens, not above those
that it started with, and adds a line for each, so that neither a start nor a compilation stands between them. After all
of them comes the first once more: what differs there is the machine.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def roll(engine, prompts, params, tag, limit):
    """Moments at which answers came, with so many documents in flight."""
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


class Limits:
    """Part of vLLM's worker, which lies in one process with the scheduler where there is one GPU."""

    def limit(self, seqs: int, tokens: int) -> int:
        from vllm.v1.core.sched.scheduler import Scheduler

        gc.unfreeze()  # vLLM freezes all there is after its start
        found = [one for one in gc.get_objects() if isinstance(one, Scheduler)]
        for one in found:
            one.max_num_running_reqs = one.max_num_active_reqs = seqs  # later vLLMs admit by the second
            one.max_num_scheduled_tokens = tokens
        gc.freeze()
        return len(found)


def measure(args, options):
    """Figures of the engine as it starts, then of each value of --scheduler."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    begin = time.monotonic()
    llm = LLM(
        **{"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 1024, "model": options.model} | args,
        disable_log_stats=False, worker_extension_cls="settings.Limits",
    )  # fmt: skip
    started = time.monotonic() - begin
    config = llm.llm_engine.vllm_config
    own = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
    params = SamplingParams(
        temperature=0, max_tokens=options.tokens_out, min_tokens=options.tokens_out, ignore_eos=True,
        detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 40_000) for _ in range(options.tokens_in)] for _ in range(options.documents)]
    try:
        roll(llm.llm_engine, prompts[: options.documents // 6], params, "warm-up", 2 * own[0])
        for n, (seqs, tokens) in enumerate([own, *options.scheduler, *([own] if options.scheduler else [])]):
            if n and llm.collective_rpc("limit", args=(seqs, tokens)) != [1]:
                raise RuntimeError(
                    "no scheduler of vLLM lies in the process of its worker: measure without --scheduler"
                )
            llm.reset_prefix_cache()
            begin = time.monotonic()
            moments = roll(llm.llm_engine, prompts, params, f"run-{n}", 2 * seqs)
            third = options.documents // 3
            yield {
                "start_s": round(started, 1),
                "turn": n,
                "documents": options.documents,
                "docs_per_s": round(options.documents / (moments[-1] - begin), 2),
                "middle_docs_per_s": round(third / (moments[2 * third] - moments[third]), 2),
                "max_num_seqs": seqs,
                "max_num_batched_tokens": tokens,
                "kv_tokens": getattr(config.cache_config, "kv_cache_size_tokens", None),
            }
    finally:
        llm.llm_engine.engine_core.shutdown()  # or its processes keep the GPU


def pair(text: str) -> tuple[int, int]:
    seqs, tokens = text.split(",")
    return int(seqs), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("args", type=json.loads)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="outputs/h200/llama-3.1-8b-shape")
    parser.add_argument("--documents", type=int, default=3072)
    parser.add_argument("--tokens-in", type=int, default=778)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--scheduler", type=pair, action="append", default=[], metavar="SEQS,TOKENS")
    options = parser.parse_args()
    told = {"name": options.name, "args": options.args, "in": options.tokens_in, "out": options.tokens_out}
    failed = False
    found = measure(options.args, options)
    while not failed:
        try:
            figures = next(found)
        except StopIteration:
            break
        except Exception as e:  # noqa: BLE001  whatever vLLM raises is what this setting does
            figures, failed = {"error": f"{type(e).__name__}: {e}"[:400]}, True
        with options.out.open("a") as lines:
            lines.write(json.dumps(told | figures) + "\n")
        print(json.dumps(told | figures), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
