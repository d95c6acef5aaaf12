"""Variants of a job in turn on one engine: what a workflow costs, with everything else equal.

    python benchmarks/variants.py JOB.yaml OUT --variant off packing.mode=off --variant pack-4 packing.mode=on ... \
        [--set KEY=VALUE ...] [--rounds 2] [--limit N] [--replay]

Each turn is a whole run in OUT/NAME-ROUND, which stays there; keys of the engine can only be set for all of them. Rates
are from the first request to the last durable row; a summary counts when its row is ok. --replay sends the prompts of
each turn once more, as requests that have nothing to do with each other, with the same number in flight: what the
engine does when nothing has to wait for an answer. OUT/figures.json has it all.
"""

import argparse
import itertools
import json
import time
from datetime import datetime
from pathlib import Path

from batchgen import plan
from batchgen.bench.life import Lent
from batchgen.data import Request
from batchgen.executors import local
from batchgen.executors.checking import check, tokenizer_of
from batchgen.executors.starting import Starter
from batchgen.job import jobfile
from batchgen.lifecycle import Stop
from batchgen.reporting.stats import last_told, read_telemetry
from batchgen.storage.rundir import RunDirectory


class Noting(Lent):
    """Keeps what a turn sends."""

    def __init__(self, engine):
        super().__init__(engine)
        self.sent = []

    def submit(self, request):
        self.sent.append(request)
        super().submit(request)


def started(file, folder):
    """The engine that a run of this job would start."""
    checked = check(file, fresh=True)
    directory = RunDirectory(folder)
    files = plan.make(checked.job, directory)
    return Starter(checked, directory, files, 1, lambda: tokenizer_of(checked)).engine(0)


def rest(engine):
    """Wait until the prefix cache is empty."""
    forget = getattr(engine, "forget_prefixes", lambda: True)
    while not forget():
        time.sleep(0.1)


def turn(engine, file, limit) -> tuple[dict, list[Request]]:
    rest(engine)
    lent = Noting(engine)
    outcome = local.run(file, local.Options(limit=limit), Stop(), engine=lent.take)
    (telemetry,) = RunDirectory(file.job.output.path).telemetries()
    durable = [e["at"] for e in read_telemetry(telemetry) if e["event"] == "commit"]
    seconds = datetime.fromisoformat(durable[-1]).timestamp() - lent.since
    counts, _ = last_told(telemetry)
    run = json.loads((RunDirectory(file.job.output.path).run_json).read_text())
    return {
        "exit_status": outcome.exit_status,
        "seconds": round(seconds, 2),
        "ok": counts.ok,
        "failed": counts.failed,
        "ok_per_s": round(counts.ok / seconds, 2),
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
        "out_tok_per_s": round(counts.completion_tokens / seconds, 1),
        "preemptions": counts.preemptions,
        "decided": run.get("decisions", {}).get("packing", {}).get("why"),
    }, lent.sent


def replayed(engine, requests) -> dict:
    rest(engine)
    waiting = (Request(f"replay-{n}", r.prompt_ids, r.max_tokens, r.schema) for n, r in enumerate(requests))
    in_flight = output = prompts = 0
    begin = time.monotonic()
    while True:
        for request in itertools.islice(waiting, engine.limits.in_flight - in_flight):
            engine.submit(request)
            in_flight += 1
        if not in_flight:
            break
        done = engine.poll()
        in_flight -= len(done)
        output += sum(one.completion_tokens for one in done)
        prompts += sum(one.prompt_tokens for one in done)
    seconds = time.monotonic() - begin
    return {"seconds": round(seconds, 2), "prompt_tokens": prompts, "output_tokens": output,
            "out_tok_per_s": round(output / seconds, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", nargs="+", action="append", required=True, metavar="NAME KEY=VALUE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--replay", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def file(name, sets):
        return jobfile.load(args.job, (*args.set, *sets, f"output.dir={args.out / name}"))

    first = args.variant[0]
    engine = started(file("engine", first[1:]), args.out / "engine")
    found = {
        "engine_args": engine.info.args,
        "versions": engine.info.versions,
        "device": engine.info.device,
        "turns": [],
    }
    try:
        turn(engine, file("warm-up", first[1:]), 64)
        for round_ in range(1, args.rounds + 1):
            for name, *sets in args.variant[:: 1 if round_ % 2 else -1]:
                figures, sent = turn(engine, file(f"{name}-{round_}", sets), args.limit)
                told = {"variant": name, "round": round_} | figures
                if args.replay:
                    told["replay"] = replayed(engine, sent)
                found["turns"].append(told)
                print(json.dumps(told), flush=True)
                (args.out / "figures.json").write_text(json.dumps(found, indent=2, default=str) + "\n")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
