"""Metrics, alerts and dashboard in the real programs: promtool, Prometheus, node_exporter."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from helpers_run import record, start, write_job, write_jsonl

DEPLOY = Path(__file__).parents[2] / "deploy"
PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"^\| `(batchgen_\w+)`", PAGE, flags=re.MULTILINE))
# What a run on the fake engine that goes has not to tell.
INSIDE = {name for name in NAMES if name.startswith("batchgen_gpu_")}
END = {"batchgen_end_time_seconds", "batchgen_exit_status"}
pytestmark = pytest.mark.long


def program(name: str, package: str = "prometheus") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there (apt-get install {package})")
    return found


def promtool(*words, **options) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, words)], capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def job(tmp_path):
    """A run of some twenty seconds, with failures of two kinds and an engine that dies."""
    texts = [*map(record, range(198)), record(198, text=""), record(199, text=7)]
    tells = {"running": 4, "waiting": 4, "kv_cache_usage": 0.5, "queue_s": 0.4, "ttft_s": 0.5, "tpot_s": 0.02}
    fake = {"docs_per_s": 10, "fail_every": 20, "die_after": 60, "tells": tells}
    engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}, "fake": fake}
    inputs = [write_jsonl(tmp_path / "a.jsonl", texts)]
    return write_job(tmp_path, inputs, engine=engine, checkpoint={"interval_s": 1}, failures={"max": 100})


@contextlib.contextmanager
def running(*words, log: Path):
    with log.open("wb") as stream:
        child = subprocess.Popen(list(map(str, words)), stdout=stream, stderr=stream)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port: int, path: str, patience_s: float = 30, **query):
    """What a server answers, once it does."""
    end = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}", timeout=10
            ) as answer:
                return answer.read().decode()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_promtool_finds_no_fault_with_the_metrics(job, tmp_path):
    path = tmp_path / "it.prom"
    start(job, f"metrics.textfile={path}", "engine.fake.docs_per_s=null")
    assert promtool("check", "metrics", input=path.read_text()) == ""


def test_promtool_takes_the_rules_and_they_do_what_they_say():
    assert "7 rules" in promtool("check", "rules", DEPLOY / "alerts.yml")
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))
    told = {rule["alert"] for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
            for rule in group["rules"]}  # fmt: skip
    tests = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == told, "each alert fires in some test"


def queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [one["expr"] for one in board["annotations"]["list"]]
    for name, value in {"$run": ".*", "$instance": ".*", "$__rate_interval": "10s"}.items():
        found = [one.replace(name, value) for one in found]
    assert not any("$" in one for one in found)
    return found


def test_promtool_takes_the_configuration_of_the_page(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    assert "1 rule files found" in promtool("check", "config", tmp_path / "prometheus.yml")


def test_promtool_takes_the_queries_of_the_dashboard(tmp_path):
    rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(queries())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules" in promtool("check", "rules", tmp_path / "rules.yml")


def test_prometheus_scrapes_a_run_and_the_dashboard_has_something_to_show(job, tmp_path):
    port, web = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "scrape_configs": [{"job_name": "batchgen", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    promtool("check", "config", tmp_path / "prometheus.yml")
    server = [
        program("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{web}", "--log.level=warn",
    ]  # fmt: skip
    run = [sys.executable, "-m", "batchgen", "run", job, "--metrics-port", port]
    with running(*server, log=tmp_path / "prometheus.log"), running(*run, log=tmp_path / "run.log") as child:

        def result(expr: str) -> list:
            return json.loads(ask(web, "/api/v1/query", query=expr))["data"]["result"]

        while not (seen := result("batchgen_engine_deaths_total > 0 and batchgen_commits_total > 3")):
            assert child.poll() is None, (tmp_path / "run.log").read_text()
            time.sleep(0.5)
        assert seen[0]["metric"]["run"] == "test"
        time.sleep(3)
        empty = [one for one in queries() if "batchgen_" in one and not result(one)]
        assert [one for one in empty if not any(name in one for name in INSIDE)] == []
        groups = json.loads(ask(web, "/api/v1/rules"))["data"]["groups"]
        assert [(rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]] == [
            ("ok", None)
        ] * 7
        names = set(json.loads(ask(web, "/api/v1/label/__name__/values"))["data"])
        whole = {re.sub("_(bucket|sum|count)$", "", name) for name in names if name.startswith("batchgen_")}
        assert whole == NAMES - INSIDE - END
        assert child.wait(60) == 0


def test_node_exporter_takes_the_file(job, tmp_path):
    node_exporter, web = program("prometheus-node-exporter", "prometheus-node-exporter"), free_port()
    folder = tmp_path / "textfiles"
    folder.mkdir()
    start(job, f"metrics.textfile={folder}/a.prom", "engine.fake.docs_per_s=null")
    other = write_job(tmp_path, [tmp_path / "a.jsonl"], name="other", output={"dir": str(tmp_path / "other")})
    start(other, f"metrics.textfile={folder}/b.prom")
    words = [
        node_exporter, "--collector.disable-defaults", "--collector.textfile", f"--web.listen-address=127.0.0.1:{web}",
        f"--collector.textfile.directory={folder}",
    ]  # fmt: skip
    with running(*words, log=tmp_path / "node.log"):
        told = ask(web, "/metrics")
    assert "node_textfile_scrape_error 0" in told
    assert set(re.findall(r'^batchgen_exit_status\{run="(\w+)"', told, flags=re.MULTILINE)) == {"test", "other"}
    found = re.findall(r"^# TYPE (batchgen_\w+)", told, flags=re.MULTILINE)
    engines = {"batchgen_requests_running", "batchgen_requests_waiting", "batchgen_kv_cache_usage_ratio"}
    assert set(found) == NAMES - INSIDE - engines, "there is no engine any more"
    assert os.access(folder / "a.prom", os.R_OK)
    assert (folder / "a.prom").stat().st_mode & 0o044, "node_exporter runs as somebody else"
