"""Why a run was not faster: sentences by rule from the figures of its report, each with the setting to change.

docs/report.md tells the thresholds and where they come from. A rule looks at the latest attempt that asked the engine
anything: its settings are those in force.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Seconds of work below which figures are chance: a sample comes every 5 s.
LEAST_S = 20.0
START_SHARE, START_S = 0.25, 30.0
STARVED_SHARE = 0.1
ENCODING_SHARE = 0.7  # of the time of work: then it is the tokenizer that the reader waits for, not the files
LOOP_SHARE = 0.75
GPU_SHARE = 0.7
POWER_SHARE = 0.95
PREEMPTED_SHARE = 0.02
CACHE_FULL, CACHE_EMPTY = 0.9, 0.5
SEATS_TAKEN = 0.9
BATCH_SEATS = 256
SHARED_TOKENS, SHARED_SHARE = 32, 0.1
BLOCK = 16  # tokens of a block of vLLM's KV cache, where the job says nothing
TAIL_SHARE, TAIL_S = 0.1, 10.0
CONTEXT_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a rule looks at: the report without `why`, the attempt it is about, and the job as run.json has it."""

    report: Mapping[str, Any]
    attempt: Mapping[str, Any]
    job: Mapping[str, Any]

    @property
    def working_s(self) -> float:
        return float(self.attempt["seconds"]["steady"] + self.attempt["seconds"]["drain"])

    @property
    def args(self) -> Mapping[str, Any]:
        return self.report["engine"]["args"] or {}

    @property
    def replicas(self) -> int:
        return int(self.report["engine"]["replicas"] or 1)

    @property
    def seats(self) -> int:
        """Requests that all engines together run at once; 0 where nobody knows."""
        return int(self.report["engine"]["max_num_seqs"] or 0) * self.replicas

    @property
    def preempted(self) -> float:
        return float(self.attempt["preemptions"] / max(1, self.attempt["requests"]))

    @property
    def is_cramped(self) -> bool:
        """Whether the KV cache was what the engine lacked."""
        load = self.attempt["load"]
        waits = self.seats and (load["waiting"] or 0) >= 1 and (load["running"] or 0) < SEATS_TAKEN * self.seats
        return self.preempted >= PREEMPTED_SHARE or bool(waits and (load["kv_cache_usage"] or 0) >= CACHE_FULL)

    @property
    def has_tail(self) -> bool:
        tail = self.attempt["seconds"]["tail"]
        return bool(tail >= TAIL_S and tail >= TAIL_SHARE * self.working_s)


@dataclass(frozen=True, slots=True)
class Advice:
    """setting: the key to change, with the value where there is one to name."""

    setting: str
    text: str


Rule = Callable[[Case], Advice | None]


def why(report: Mapping[str, Any], job: Mapping[str, Any]) -> list[dict[str, str]]:
    """`rule`, `text` and `setting` of each rule that the figures meet; [] where too little was done to tell.

    report: without `why`. job: as run.json has it.
    """
    attempt = report["attempt"] if report["attempt"]["requests"] else report["run"]
    case = Case(report, attempt, job)
    rules = RULES if case.working_s >= LEAST_S else {"start": _start}
    found = {name: advice for name, rule in rules.items() if (advice := rule(case)) is not None}
    if not found.keys() - {"start"} and case.working_s >= LEAST_S:
        found["engine"] = _engine(case)
    return [{"rule": name, "text": advice.text, "setting": advice.setting} for name, advice in found.items()]


def _start(case: Case) -> Advice | None:
    start, total = case.attempt["seconds"]["engine_start"], case.attempt["seconds"]["total"]
    if start < START_S or start < START_SHARE * total:
        return None
    text = f"Starting the engine took {start:,.0f} of {total:,.0f} seconds ({start / total:.0%}): do more in one start"
    if case.args.get("enforce_eager"):
        return Advice("input", text)
    return Advice(
        "engine.args.enforce_eager: true", f"{text}, or start without compiled graphs, which make steps faster"
    )


def _reading(case: Case) -> Advice | None:
    starved = case.attempt["starved_share"] or 0
    if starved < STARVED_SHARE:
        return None
    text = f"For {starved:.0%} of the time the engine had room and no document was ready"
    encoding = case.attempt["seconds"]["encode"] / case.working_s
    if encoding >= ENCODING_SHARE:
        return Advice(
            "processor cores (Slurm: --cpus-per-task)",
            f"{text}; making token ids took {encoding:.0%} of it all: give the run more cores",
        )
    return Advice("input.path", f"{text}: put the input on a faster disk, unpack it, or make Parquet of it")


def _host(case: Case) -> Advice | None:
    """One thread feeds the engines, and one engine's own process can be what the GPU waits for."""
    attempt = case.attempt
    if (attempt["starved_share"] or 0) >= STARVED_SHARE or case.is_cramped or case.has_tail:
        return None
    loop, busy = attempt["seconds"]["loop_cpu"] / case.working_s, attempt["gpu"]["utilization"]
    each = case.replicas // max(1, attempt["gpu"]["gpus"])
    more = f"engine.replicas_per_gpu: {2 * max(1, each)}"
    if loop >= LOOP_SHARE:
        text = f"The thread that feeds the engine was at work for {loop:.0%} of the time"
        if case.replicas == 1:
            return Advice(more, f"{text}: with several engines most of that is theirs")
        return Advice("input", f"{text}, with {case.replicas} engines: divide the documents among several runs")
    if busy is not None and busy < GPU_SHARE:
        text = f"The GPU computed for {busy:.0%} of the time: the engine's own process did not keep it busy"
        return Advice(more, f"{text}; several engines on it do")
    return None


def _kv_cache(case: Case) -> Advice | None:
    if not case.is_cramped:
        return None
    load, running = case.attempt["load"], case.attempt["load"]["running"]
    text = "The KV cache was full"
    if load["kv_cache_usage"] is not None:
        text += f" ({load['kv_cache_usage']:.0%} of it in use)"
    if running is not None and case.seats:
        text += f": {running:,.0f} of {case.seats:,} requests ran at once"
    room = "give it more memory, or halve its values (kv_cache_dtype: fp8, which changes texts)"
    if case.preempted < PREEMPTED_SHARE:
        return Advice("engine.args.gpu_memory_utilization", f"{text}: {room}")
    fewer = max(1, int((running or case.seats / 2) / case.replicas))
    text += f", and {case.attempt['preemptions']:,} were put back and computed again: run fewer, or {room}"
    return Advice(f"engine.args.max_num_seqs: {fewer}", text)


def _prefix_cache(case: Case) -> Advice | None:
    shared, requests, prompt = case.attempt["shared"], case.attempt["requests"], case.attempt["tokens"]["prompt"]
    prefix, suffix = shared["prefix_tokens"] or 0, shared["suffix_tokens"] or 0
    if not prompt or requests < 2 * case.seats:  # the first of them all begin before there is anything in the cache
        return None
    block = case.args.get("block_size") or BLOCK
    possible, behind = prefix // block * block * requests / prompt, suffix * requests / prompt
    cached = case.attempt["prefix_cache"]["hit_share"] or 0
    if prefix >= SHARED_TOKENS and possible >= SHARED_SHARE and cached < possible / 2:
        text = (
            f"All prompts begin with the same {prefix:,} tokens, {possible:.0%} of all prompt tokens, and {cached:.0%} "
            "came out of the prefix cache"
        )
        if case.attempt["prefix_cache"]["queries"]:
            return Advice("engine.args.gpu_memory_utilization", f"{text}: the cache is too small to keep them")
        return Advice("engine.args.enable_prefix_caching: true", f"{text}, which is off")
    if suffix >= SHARED_TOKENS and behind >= SHARED_SHARE and suffix > 2 * prefix:
        return Advice(
            "prompt.user",
            f"The same {suffix:,} tokens stand behind every document, {behind:.0%} of all prompt tokens, and are "
            "computed each time: put the instruction before the text, where the prefix cache keeps it (this changes "
            "texts)",
        )
    return None


def _tail(case: Case) -> Advice | None:
    if not case.has_tail:
        return None
    requests, tail = case.attempt["requests"], case.attempt["seconds"]["tail"]
    text = f"For the last {tail:,.0f} of {case.working_s:,.0f} seconds the engine had less than half of what it can run"
    if requests < 2 * case.seats:
        text += f": there were {requests:,} requests, and {case.seats:,} run at once"
        return Advice("input", f"{text}; give a start more documents")
    lengths = case.report["lengths"]["completion_tokens"]
    longest, usual = lengths["max"] or 0, lengths["p50"] or 0
    return Advice(
        "sampling.max_tokens",
        f"{text}; the longest answer has {longest:,} tokens, half of them no more than {usual:,}: a lower limit ends "
        "the longest earlier (this changes texts)",
    )


def _context(case: Case) -> Advice | None:
    """A long context costs nothing by itself; it does where the KV cache is what the engine lacks."""
    context, longest = case.args.get("max_model_len"), case.report["lengths"]["prompt_tokens"]["max"]
    packed = (case.job.get("packing") or {}).get("mode", "off") != "off"
    if not context or not longest or packed or not (case.is_cramped or case.report["engine"]["adapted"]):
        return None
    answers, sampling = case.job.get("answers") or {}, case.job.get("sampling") or {}
    need = longest + (answers.get("retry_max_tokens") or sampling.get("max_tokens") or 0)
    if context < CONTEXT_RATIO * need:
        return None
    return Advice(
        f"engine.args.max_model_len: {-(-need // BLOCK) * BLOCK}",
        f"max_model_len is {context:,}, and the longest prompt with its answer takes {need:,} tokens: what the engine "
        "keeps ready for longer ones is lost to the KV cache",
    )


def _batch(case: Case) -> Advice | None:
    load, each = case.attempt["load"], case.report["engine"]["max_num_seqs"]
    if not case.seats or each > BATCH_SEATS or load["running"] is None or load["kv_cache_usage_max"] is None:
        return None
    if load["running"] < SEATS_TAKEN * case.seats or load["kv_cache_usage_max"] >= CACHE_EMPTY:
        return None
    return Advice(
        f"engine.args.max_num_seqs: {2 * each}",
        f"{load['running']:,.0f} of {case.seats:,} requests ran at once while others waited, and the KV cache was "
        f"never fuller than {load['kv_cache_usage_max']:.0%}: run more at once",
    )


def _engine(case: Case) -> Advice:
    """What is left where no rule holds."""
    starved = case.attempt["starved_share"] or 0
    text = f"The engine had work for {1 - starved:.0%} of the time and nothing else stands out: its speed is the limit"
    gpu = case.attempt["gpu"]
    if gpu["power_limit_w"] and (gpu["power_w"] or 0) >= POWER_SHARE * gpu["power_limit_w"]:
        text += f", on GPUs that lower their clock to stay within {gpu['power_limit_w']:,.0f} W"
    if gpu["gpus"] and not case.args.get("quantization"):
        more = "more GPUs change it, or weights in FP8 on Ada, Hopper or newer (this changes texts)"
        return Advice("engine.args.quantization: fp8", f"{text}; {more}")
    return Advice("engine.args.model", f"{text}; a smaller model, shorter answers or more hardware change it")


RULES: Mapping[str, Rule] = {
    "start": _start,
    "reading": _reading,
    "host": _host,
    "kv_cache": _kv_cache,
    "prefix_cache": _prefix_cache,
    "tail": _tail,
    "context": _context,
    "batch": _batch,
}
