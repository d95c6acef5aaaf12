"""Rolling feed against one LLM.generate: the same documents, one engine life, in turn.

    python benchmarks/feed.py jobs/summarize.yaml --documents 64 --rounds 5 [--set engine.args.max_num_seqs=16]

Output lengths are fixed (ignore_eos), the prefix cache is emptied before each round, and unequal work is refused.
Prints a line a round and the median ratio; the last line is JSON.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from batchgen import config, jobfile, plan
from batchgen.data import Request, Split
from batchgen.engines import settings
from batchgen.engines.vllm import VllmEngine
from batchgen.executors.checking import check
from batchgen.prompts import PromptBuilder
from batchgen.sources import open_source
from batchgen.tokenizer import HuggingFaceTokenizer


def prompts(checked, count: int) -> list[list[int]]:
    """Token ids of `count` documents of the job, over again where it has fewer."""
    builder = PromptBuilder(
        checked.job, HuggingFaceTokenizer(checked.model.folder), max_prompt_tokens=checked.max_prompt_tokens
    )
    ids = []
    for file in plan.discover(checked.job):
        source = open_source(checked.job, file.input, file.source)
        for start, end in source.cut(begin=0, target_bytes=1 << 30):
            documents = [(one, file.input) for one in source.read(Split(0, file.input, file.source, start, end))]
            ids += [one.prompt_ids for one in builder.prepare(documents) if one.prompt_ids]
    return list(islice(cycle(ids), count))


def rolling(engine: VllmEngine, ids: list[list[int]], tokens: int, round_: int) -> int:
    waiting = [Request(f"{round_}-{n}", one, tokens) for n, one in enumerate(ids)][::-1]
    in_flight = made = 0
    while waiting or in_flight:
        while waiting and in_flight < engine.limits.in_flight:
            engine.submit(waiting.pop())
            in_flight += 1
        done = engine.poll()
        in_flight -= len(done)
        made += sum(one.completion_tokens for one in done)
    return made


def generate(engine: VllmEngine, ids: list[list[int]], tokens: int) -> int:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = engine.llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    given = parser.parse_args()
    checked = check(jobfile.load(given.job, given.sets))
    args = checked.job.engine.args | settings.chosen(checked.job, checked.model)
    sampling = config.Sampling(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    ids = prompts(checked, given.documents)
    engine = VllmEngine(args, sampling, log=Path("outputs/benchmark-feed.log"))
    times: dict[str, list[float]] = {"rolling": [], "generate": []}
    try:
        rolling(engine, ids[:8], 8, -1)  # warm-up
        for n in range(given.rounds):
            made = []
            for name in ("rolling", "generate") if n % 2 else ("generate", "rolling"):
                engine.llm.reset_prefix_cache()
                begin = time.monotonic()
                made.append(
                    rolling(engine, ids, given.tokens, n) if name == "rolling" else generate(engine, ids, given.tokens)
                )
                times[name].append(time.monotonic() - begin)
            if len(set(made)) != 1:
                raise SystemExit(f"unequal work: {made} output tokens")
            print(f"round {n + 1}: rolling {times['rolling'][-1]:.2f} s, generate {times['generate'][-1]:.2f} s")
        device, limits = engine.info.device, dataclasses.asdict(engine.limits)
    finally:
        engine.close()
    ratios = [a / b for a, b in zip(times["rolling"], times["generate"], strict=True)]
    print(f"rolling / generate: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    print(json.dumps({"documents": given.documents, "device": device, "limits": limits, "seconds": times}))
    return 0


if __name__ == "__main__":  # engine processes import this file again
    sys.exit(main())
