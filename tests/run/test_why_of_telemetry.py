"""Each rule is met by telemetry as it lies on disk: 100 s of work after 10 s of start, a sample every 5."""

import json

import pyarrow as pa
import pytest
from helpers_config import document

from batchgen.data import Record
from batchgen.reporting import report as reports
from batchgen.reporting.rows import read_rows
from batchgen.sinks.parquet import ParquetSink
from batchgen.storage.rundir import RunDirectory

BEGIN, END = 10, 110
JOB = {"packing": {"mode": "off"}, "answers": {"retry_max_tokens": None}, "sampling": {"max_tokens": 128}}
ARGS = {"max_model_len": 1024}


def at(second):
    return f"2026-01-01T00:{second // 60:02}:{second % 60:02}.000+00:00"


def sample(second, *, drain_from=END - 2, counts=(), gpu=0.98, **more):
    """counts: those that grow otherwise, a second of work."""
    work = max(0, second - BEGIN)
    grows = {
        "requests": 11, "ok": 11, "prompt_tokens": 8000, "completion_tokens": 800, "generated_tokens": 800,
        "prefix_cache_queries": 8000, "encode_s": 0.1, "loop_cpu_s": 0.2,
    } | dict(counts)  # fmt: skip
    drain = max(0, second - drain_from)
    told = {name: value * work for name, value in grows.items()}
    told |= {"total_s": second, "engine_start_s": BEGIN, "steady_s": work - drain, "drain_s": drain}
    state = {
        "running": 500, "waiting": 512, "kv_cache_usage": 0.7, "shared": {"prefix_tokens": 20, "suffix_tokens": 5},
        "gpus": [{"gpu": "0", "utilization": gpu, "power_w": 600, "memory_used_bytes": 1}],
    }  # fmt: skip
    return {"event": "sample", "at": at(second), "counts": told | {"rows": 0}} | state | more


def why(folder, *, args=ARGS, seats=512, start_s=BEGIN, **changes):
    """What the report says of this telemetry; a change can be a function of the second."""
    run = RunDirectory(folder / "out")
    run.summaries.mkdir(parents=True)
    engine = {"backend": "vllm", "args": args, "max_num_seqs": seats, "replicas": 1, "adapted": []}
    run.write_run({"name": "test", "job": JOB, "engine": engine})
    row = Record(document("x"), "ok", summary="s", prompt_tokens=800, completion_tokens=80, requests=1)
    ParquetSink({"title": pa.string()}, owner="0").write_part(
        run.part(1, 1, ".parquet"), [row], fingerprint="f", footer={"files": {}}
    )
    events = [{"event": "engine", "at": at(BEGIN), "max_num_seqs": seats, "replicas": 1, "gpus": ["0"]}]
    for second in range(BEGIN, END + 1, 5):
        now = {name: value(second) if callable(value) else value for name, value in changes.items()}
        events.append(sample(second, **now))
        events[-1]["counts"] |= {"engine_start_s": start_s, "total_s": second + start_s - BEGIN}
    run.telemetry(1).write_text("".join(json.dumps(one) + "\n" for one in events))
    built = reports.afresh(run, read_rows(run, ParquetSink({"title": pa.string()}, owner="0")))
    assert reports.markdown(built).count("\n- ") >= len(built["why"])
    return [one["rule"] for one in built["why"]]


CRAMPED = {"running": 300, "kv_cache_usage": 0.97}


@pytest.mark.parametrize(
    ("rules", "changes"),
    [
        (["engine"], {}),
        (["start", "engine"], {"start_s": 60}),
        (["reading"], {"counts": {"starved_s": 0.3}}),
        (["host"], {"counts": {"loop_cpu_s": 0.9}}),
        (["host"], {"gpu": 0.4}),
        (["kv_cache"], CRAMPED),
        (["kv_cache"], {"counts": {"preemptions": 1}}),
        (["prefix_cache"], {"shared": {"prefix_tokens": 200, "suffix_tokens": 5}}),
        (["tail"], {"drain_from": 70, "running": lambda second: 500 if second < 80 else 40}),
        (["kv_cache", "context"], CRAMPED | {"args": {"max_model_len": 131_072}}),
        (["batch"], {"seats": 64, "running": 63, "kv_cache_usage": 0.1}),
    ],
)
def test_a_rule_is_met_by_telemetry(tmp_path, rules, changes):
    assert why(tmp_path, **changes) == rules
