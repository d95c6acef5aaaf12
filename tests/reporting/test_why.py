"""Each rule has figures that meet it and figures just beside them that do not; what it names can be changed."""

import copy
import re
from pathlib import Path

import pytest

from batchgen.engines import vllm_names
from batchgen.job import schema
from batchgen.job.config import Job
from batchgen.reporting import why as why_module
from batchgen.reporting.why import RULES, why

JOB = {"packing": {"mode": "off"}, "answers": {"retry_max_tokens": None}, "sampling": {"max_tokens": 128}}
# A run that nothing is wrong with: an hour at the limit of a GPU, 512 requests at once.
ATTEMPT = {
    "requests": 100_000,
    "tokens": {"prompt": 80_000_000},
    "seconds": {
        "total": 3700.0, "engine_start": 60.0, "steady": 3500.0, "drain": 100.0, "tail": 20.0, "encode": 300.0,
        "loop_cpu": 900.0,
    },
    "starved_share": 0.01,
    "preemptions": 10,
    "load": {"running": 505.0, "waiting": 510.0, "kv_cache_usage": 0.7, "kv_cache_usage_max": 0.8},
    "shared": {"prefix_tokens": 20, "suffix_tokens": 8},
    "prefix_cache": {"queries": 1000, "hit_share": 0.02},
    "gpu": {"gpus": 1, "utilization": 0.98, "power_w": 600.0, "power_limit_w": 700.0},
}  # fmt: skip
REPORT = {
    "attempt": ATTEMPT,
    "run": ATTEMPT,
    "lengths": {"prompt_tokens": {"max": 3000}, "completion_tokens": {"max": 128, "p50": 80}},
    "engine": {
        "args": {"max_model_len": 4096, "quantization": "fp8"}, "max_num_seqs": 512, "replicas": 1, "adapted": [],
    },
}  # fmt: skip
CRAMPED = {"load.running": 300.0, "load.kv_cache_usage": 0.95, "load.kv_cache_usage_max": 1.0}
START = {"seconds.engine_start": 1000.0}
ROOM = {"starved_share": 0.3}
# rule → what of the figures above is otherwise, the setting it names, and a part of its sentence.
MEETS = [
    ("start", START, "engine.args.enforce_eager: true", "1,000 of 3,700 seconds (27%)"),
    ("start", START | {"engine.args.enforce_eager": True}, "input", "do more in one start"),
    ("reading", ROOM, "input.path", "For 30% of the time"),
    ("reading", ROOM | {"seconds.encode": 3000.0}, "processor cores (Slurm: --cpus-per-task)", "took 83%"),
    ("host", {"seconds.loop_cpu": 3000.0}, "engine.replicas_per_gpu: 2", "83% of the time"),
    ("host", {"seconds.loop_cpu": 3000.0, "engine.replicas": 8}, "input", "8 engines"),
    ("host", {"gpu.utilization": 0.5}, "engine.replicas_per_gpu: 2", "computed for 50%"),
    ("host", {"gpu.utilization": 0.5, "engine.replicas": 8, "gpu.gpus": 4}, "engine.replicas_per_gpu: 4", "several"),
    ("kv_cache", CRAMPED, "engine.args.gpu_memory_utilization", "95% of it in use): 300 of 512 requests"),
    ("kv_cache", {"preemptions": 5000}, "engine.args.max_num_seqs: 505", "5,000 were put back"),
    (
        "prefix_cache",
        {"shared.prefix_tokens": 165, "prefix_cache.queries": 0, "prefix_cache.hit_share": 0.0},
        "engine.args.enable_prefix_caching: true",
        "the same 165 tokens, 20% of all",
    ),
    ("prefix_cache", {"shared.prefix_tokens": 165}, "engine.args.gpu_memory_utilization", "2% came out"),
    ("prefix_cache", {"shared.suffix_tokens": 160}, "prompt.user", "The same 160 tokens stand behind"),
    ("tail", {"seconds.tail": 400.0}, "sampling.max_tokens", "the last 400 of 3,600 seconds"),
    (
        "tail",
        {"seconds.tail": 50.0, "seconds.steady": 40.0, "seconds.drain": 60.0, "seconds.loop_cpu": 5.0,
         "seconds.encode": 1.0, "requests": 700},
        "input",
        "700 requests, and 512 run at once",
    ),
    ("context", CRAMPED | {"engine.args.max_model_len": 131_072}, "engine.args.max_model_len: 3136", "takes 3,128"),
    (
        "context",
        {"engine.adapted": [{"argument": "max_num_seqs"}], "engine.args.max_model_len": 131_072},
        "engine.args.max_model_len: 3136",
        "131,072",
    ),
    (
        "batch",
        {"engine.max_num_seqs": 16, "load.running": 15.9, "load.kv_cache_usage_max": 0.1},
        "engine.args.max_num_seqs: 32",
        "16 of 16 requests",
    ),
    ("engine", {}, "engine.args.model", "had work for 99%"),
    ("engine", {"gpu.power_w": 680.0}, "engine.args.model", "GPUs that lower their clock to stay within 700 W"),
    ("engine", {"engine.args.quantization": None}, "engine.args.quantization: fp8", "FP8"),
]  # fmt: skip
# Just beside: no rule but `engine` holds.
BESIDE = [
    ("start", {"seconds.engine_start": 900.0}),
    ("start", {"seconds.engine_start": 29.0, "seconds.total": 60.0, "seconds.steady": 25.0, "seconds.drain": 5.0,
               "seconds.loop_cpu": 1.0, "seconds.tail": 0.0}),
    ("reading", {"starved_share": 0.09}),
    ("reading", {"starved_share": None}),
    ("host", {"seconds.loop_cpu": 2600.0}),
    ("host", {"gpu.utilization": 0.71}),
    ("host", {"gpu.utilization": None}),
    ("kv_cache", CRAMPED | {"load.kv_cache_usage": 0.89}),
    ("kv_cache", CRAMPED | {"load.running": 470.0}),
    ("kv_cache", CRAMPED | {"load.waiting": 0.0}),  # nobody waits for room
    ("kv_cache", {"preemptions": 1999}),
    ("prefix_cache", {"shared.prefix_tokens": 79}),  # whole blocks of it are 64 tokens, 8% of the prompts
    ("prefix_cache", {"shared.prefix_tokens": 165, "prefix_cache.hit_share": 0.19}),
    ("prefix_cache", {"shared.prefix_tokens": 165, "requests": 1000, "tokens.prompt": 800_000}),
    ("prefix_cache", {"shared.suffix_tokens": 75}),
    ("prefix_cache", {"shared.suffix_tokens": 200, "shared.prefix_tokens": 110, "prefix_cache.hit_share": 0.12}),
    ("prefix_cache", {"shared.prefix_tokens": None, "shared.suffix_tokens": None}),
    ("tail", {"seconds.tail": 350.0}),
    ("context", {"engine.args.max_model_len": 131_072}),  # the KV cache lacks nothing
    ("batch", {"engine.max_num_seqs": 16, "load.running": 15.9, "load.kv_cache_usage_max": 0.6}),
    ("batch", {"engine.max_num_seqs": 16, "load.running": 10.0, "load.kv_cache_usage_max": 0.1}),
    ("batch", {"load.running": 511.0, "load.kv_cache_usage_max": 0.1}),  # 512 are enough
    ("batch", {"load.running": None, "load.waiting": None, "load.kv_cache_usage": None,
               "load.kv_cache_usage_max": None}),
]  # fmt: skip


def figures(changes):
    report = copy.deepcopy(REPORT)
    for key, value in changes.items():
        at = report if key.startswith(("engine.", "lengths.")) else report["attempt"]
        *path, name = key.split(".")
        for one in path:
            at = at[one]
        at[name] = value
    return report


@pytest.mark.parametrize(("rule", "changes", "setting", "words"), MEETS)
def test_a_rule_is_met(rule, changes, setting, words):
    found = why(figures(changes), JOB)
    told = [one for one in found if one["rule"] == rule]
    assert [one["setting"] for one in told] == [setting], found
    assert words in told[0]["text"]
    others = {"context": {"kv_cache", "engine"}, "start": {"engine"}}.get(rule, set())
    assert {one["rule"] for one in found} - {rule} <= others


@pytest.mark.parametrize(("rule", "changes"), BESIDE)
def test_figures_beside_it_do_not_meet_a_rule(rule, changes):
    assert [one["rule"] for one in why(figures(changes), JOB)] == ["engine"], rule


@pytest.mark.parametrize("changes", [{}, {"gpu.power_w": None}, {"gpu.power_w": 680.0, "gpu.power_limit_w": None}])
def test_a_gpu_below_its_power_limit_is_not_said_to_be_at_it(changes):
    (told,) = why(figures(changes), JOB)
    assert " W" not in told["text"]


def test_a_starved_engine_is_not_called_bound_by_its_host():
    found = why(figures(ROOM | {"gpu.utilization": 0.3, "seconds.loop_cpu": 3000.0}), JOB)
    assert [one["rule"] for one in found] == ["reading"]


def test_several_rules_are_told_in_their_order():
    found = why(figures(CRAMPED | START | {"engine.args.max_model_len": 131_072}), JOB)
    assert [one["rule"] for one in found] == ["start", "kv_cache", "context"]


@pytest.mark.parametrize("changes", [{"packing": {"mode": "on"}}, {"answers": {"retry_max_tokens": 4000}}])
def test_a_context_that_something_needs_is_not_too_large(changes):
    wide = figures(CRAMPED | {"engine.args.max_model_len": 8192})
    assert "context" in {one["rule"] for one in why(wide, JOB)}
    assert "context" not in {one["rule"] for one in why(wide, JOB | changes)}


def test_of_a_few_seconds_nothing_is_told_but_the_start():
    short = {"seconds.steady": 5.0, "seconds.drain": 3.0, "seconds.total": 100.0, "starved_share": 0.9}
    assert [one["rule"] for one in why(figures(short), JOB)] == ["start"]
    assert why(figures(short | {"seconds.engine_start": 5.0}), JOB) == []


def test_an_attempt_that_asked_nothing_is_not_what_it_is_about():
    report = figures(ROOM) | {"run": ATTEMPT}
    assert [one["rule"] for one in why(report, JOB)] == ["reading"]
    report["attempt"]["requests"] = 0
    assert [one["rule"] for one in why(report, JOB)] == ["engine"]


def test_each_rule_has_figures_for_and_against_it():
    assert {*RULES, "engine"} == {rule for rule, *_ in MEETS}
    assert set(RULES) == {rule for rule, _ in BESIDE}


@pytest.mark.skipif(vllm_names.package() is None, reason="vLLM is not installed")
def test_what_is_to_be_changed_is_a_key_of_the_job_or_an_argument_of_vllm():
    keys = {"input"}
    for heading, section in schema.sections():
        at = "" if heading == "Top level" else heading.partition(" (")[0]
        keys |= {f"{at}.{name}".lstrip(".") for name in section.model_fields}
    settings = {setting.partition(":")[0] for *_, setting, _ in MEETS}
    args = {setting.removeprefix("engine.args.") for setting in settings if setting.startswith("engine.args.")}
    assert args <= set(vllm_names._fields("engine/arg_utils.py", "EngineArgs"))
    assert {one for one in settings if not one.startswith(("engine.args.", "processor cores"))} <= keys


def test_thresholds_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs/report.md").read_text()
    told = dict(re.findall(r"^\| `([A-Z_]+)` \| ([\d.]+) \|", page, flags=re.MULTILINE))
    there = {
        name: value for name, value in vars(why_module).items() if name.isupper() and isinstance(value, int | float)
    }
    assert {name: float(value) for name, value in told.items()} == {n: float(v) for n, v in there.items()}


def test_the_job_has_what_the_rules_read():
    assert {"packing", "answers", "sampling"} <= set(Job.model_fields)
