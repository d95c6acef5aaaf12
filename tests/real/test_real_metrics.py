"""What a scrape of a run on real vLLM shows: the names of docs/metrics.md, batchgen's and vLLM's own."""

import functools
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from array import array
from pathlib import Path

import pytest
from helpers_real import engine_processes, kill_group, real_engine
from helpers_run import by_id, record, write_job, write_jsonl
from prometheus_client.parser import text_string_to_metric_families

from batchgen.data import Request
from batchgen.engines.pool import EnginePool, Place
from batchgen.engines.vllm import VllmEngine
from batchgen.job.config import Sampling

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
DOCUMENTS = 40
pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]


def documented(prefix: str) -> set[str]:
    return set(re.findall(rf"^\| `({prefix}\w+)`", PAGE, flags=re.MULTILINE))


def families(text: str) -> dict:
    """By the names of the page: counters with `_total`, histograms without what their samples have."""
    found = {}
    for family in text_string_to_metric_families(text):
        found[f"{family.name}_total" if family.type == "counter" else family.name] = family
    return found


def total(found: dict, name: str, **labels) -> float:
    return sum(one.value for one in found[name].samples if labels.items() <= one.labels.items())


def scrape_of_the_middle(child: subprocess.Popen, said: Path) -> dict:
    """What the run tells once it has committed and asked its engine."""
    end = time.monotonic() + 400
    while True:
        assert child.poll() is None, said.read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
        if at := re.search(r"http://127\.0\.0\.1:\d+/metrics", said.read_text()):
            with urllib.request.urlopen(at[0], timeout=30) as answer:
                found = families(answer.read().decode())
            if "batchgen_last_commit_time_seconds" in found and "batchgen_requests_running" in found:
                return found


def test_a_scrape_shows_the_documented_names_also_from_a_bare_environment(tmp_path, out, model_folder):
    write_jsonl(tmp_path / "a.jsonl", map(record, range(DOCUMENTS)))
    engine = real_engine(model_folder.absolute(), max_num_seqs=4)
    textfile = tmp_path / "it.prom"
    job = write_job(
        tmp_path, [tmp_path / "a.jsonl"], engine=engine, checkpoint={"rows": 4}, metrics={"textfile": str(textfile)}
    )
    bare = {"PATH": "/usr/bin:/bin"} | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    words = [sys.executable, "-m", "batchgen", "run", str(job), "--metrics-port", "0"]
    with (tmp_path / "err").open("wb") as err:
        child = subprocess.Popen(words, stderr=err, env=bare, cwd="/", start_new_session=True)
    try:
        found = scrape_of_the_middle(child, tmp_path / "err")
        assert child.wait(400) == 0
    finally:
        kill_group(child)
    assert not engine_processes(child.pid)
    assert len(by_id(out)) == DOCUMENTS
    check(found)
    assert total(families(textfile.read_text()), "batchgen_documents_total", status="ok") == DOCUMENTS
    if promtool := shutil.which("promtool"):  # apt-get install prometheus
        done = subprocess.run([promtool, "check", "metrics"], input=textfile.read_bytes(), capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def check(found: dict) -> None:
    own = {name for name in found if name.startswith("batchgen_")}
    others = {"batchgen_end_time_seconds", "batchgen_exit_status", "batchgen_errors_total"}
    others |= {name for name in documented("batchgen_") if name.startswith("batchgen_gpu_")}
    assert own | others == documented("batchgen_")
    assert documented("vllm:") <= set(found), sorted(found)
    assert len(documented("vllm:")) > 10
    assert total(found, "vllm:generation_tokens_total") >= total(found, "batchgen_tokens_total", kind="output") > 0
    assert total(found, "vllm:prompt_tokens_total") > 0
    assert not any(one.name.endswith("_created") for family in found.values() for one in family.samples)


def test_of_engines_in_processes_of_their_own_they_come_too(tmp_path, model_folder):
    args = {"model": str(model_folder), "max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True}
    args["kv_cache_memory_bytes"] = 1 << 30
    make = functools.partial(VllmEngine, args, Sampling(), log=tmp_path / "engine.log")
    pool = EnginePool([Place("0.0", {}, make)], stall_s=120, logs=tmp_path, exposes=True)
    try:
        for n in range(4):
            pool.submit(Request(f"r{n}", array("i", range(100, 140)), 64))
        end, done = time.monotonic() + 120, []
        while len(done) < 4 or not pool.metrics().exposition:
            assert time.monotonic() < end
            done += pool.poll()
        found = families(pool.metrics().exposition["0.0"])
    finally:
        pool.close()
    assert documented("vllm:") <= set(found)
