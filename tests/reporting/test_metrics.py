"""Metrics for Prometheus: the names of the page, the numbers of the report, a port and a file that harm no run."""

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from helpers_run import command, record, rows, start, write_job, write_jsonl
from prometheus_client.parser import text_string_to_metric_families

from batchgen.data import Completion
from batchgen.engines import exposition
from batchgen.engines.base import EngineMetrics
from batchgen.errors import ConfigError, LockedError
from batchgen.reporting import metrics as metrics_module
from batchgen.reporting.metrics import RunMetrics
from batchgen.reporting.serving import Ports
from batchgen.reporting.stats import Stats
from batchgen.storage.checkpoint import Committer
from batchgen.storage.rundir import RunDirectory

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
ALERTS = Path(__file__).parents[2] / "deploy" / "alerts.yml"


@pytest.fixture
def job(tmp_path):
    texts = [*map(record, range(20)), record(20, text=""), record(21, text=7)]
    return write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], checkpoint={"rows": 5})


def values(text: str) -> dict:
    """{(name, labels besides run and shard): value}, in Prometheus' text format."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = {name: value for name, value in one.labels.items() if name not in ("run", "shard")}
            found[one.name, *sorted(labels.items())] = one.value
    return found


def everything() -> RunMetrics:
    """What a start tells that has met all there is to meet."""
    stats = Stats()
    stats.reasons["failed: bad_json"] = 1
    stats.committed(3)
    stats.engine(EngineMetrics(running=1, waiting=2, kv_cache_usage=0.5, rss_bytes=9))
    stats.completed(Completion("1", queue_s=1, ttft_s=1.5, tpot_s=0.02))
    stats.gpus = [{"gpu": "0", "utilization": 0.9, "memory_used_bytes": 8, "power_w": 400.0}]
    return RunMetrics(stats, "r", "00000", attempt=1, expected=9, ended=0)


# The page.


def told() -> dict[str, tuple[str, set[str]]]:
    rows_of_page = re.findall(r"^\| `(batchgen_\w+)` \| (\w+) \| (.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len({name for name, *_ in rows_of_page}) == len(rows_of_page)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows_of_page}


def test_names_types_and_labels_are_those_of_the_page():
    found = {}
    for family in everything().own():
        for one in family.samples:
            assert {"run", "shard"} <= set(one.labels)
            name = family.name if family.type == "histogram" else one.name
            found[name] = (family.type, set(one.labels) - {"run", "shard", "le"})
    assert found == told()


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS], ids=lambda path: path.name)
def test_dashboard_and_alerts_use_names_of_the_page(path):
    used = set(re.findall(r"\b(batchgen_\w+|vllm:\w+)", path.read_text()))
    page = set(re.findall(r"^\| `([\w:]+)`", PAGE.read_text(), flags=re.MULTILINE))
    assert len(used) > 5
    assert {re.sub("_bucket$", "", name) for name in used} <= page


def test_the_dashboard_is_one():
    found = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in found["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert all(target["expr"] for target in panel["targets"])
    known = {one["name"] for one in found["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__all"} <= known


# The numbers.


def test_numbers_are_those_of_the_report(job, out, tmp_path):
    path = tmp_path / "it.prom"
    report = start(job, f"metrics.textfile={path}", "engine.fake.fail_every=7").report
    found, attempt = values(path.read_text()), report["attempt"]
    for status in ("ok", "failed", "skipped"):
        assert found["batchgen_documents_total", ("status", status)] == attempt["documents"][status]
    assert attempt["documents"]["failed"] > 1
    for name, status in (("request_failed", "failed"), ("text_type", "failed"), ("empty", "skipped")):
        labels = ("error_type", name), ("status", status)
        assert found["batchgen_errors_total", *labels] == report["documents"]["reasons"][f"{status}: {name}"]
    for kind in ("prompt", "cached", "output", "reasoning"):
        assert found["batchgen_tokens_total", ("kind", kind)] == attempt["tokens"][kind]
    kept = found["batchgen_tokens_total", ("kind", "kept")]
    assert attempt["tokens"]["wasted"] == attempt["tokens"]["output"] - kept
    assert found[("batchgen_requests_total",)] == attempt["requests"]
    assert found[("batchgen_documents_expected",)] == report["documents"]["total"] == 22
    assert found[("batchgen_documents_read_total",)] == attempt["documents"]["read"]
    assert found[("batchgen_committed_rows_total",)] == len(rows(out)) == 22
    assert found[("batchgen_commits_total",)] == len(list(out.glob("summaries/part-*")))
    assert found[("batchgen_documents_per_second",)] == pytest.approx(attempt["rates"]["docs_per_s"], abs=0.01)
    for phase in ("engine_start", "steady", "drain", "commit", "starved"):
        seconds = attempt["seconds"][phase]
        assert found["batchgen_phase_seconds", ("phase", phase)] == pytest.approx(seconds, abs=0.002)
    assert found[("batchgen_exit_status",)] == report["exit_status"] == 3
    assert found[("batchgen_running",)] == 0
    assert found[("batchgen_start_time_seconds",)] <= found[("batchgen_last_commit_time_seconds",)]
    assert found[("batchgen_last_commit_time_seconds",)] <= found[("batchgen_end_time_seconds",)]


def test_times_of_requests_are_those_of_the_report(job, tmp_path):
    path = tmp_path / "it.prom"
    tells = "engine.fake.tells={running: 4, waiting: 3, kv_cache_usage: 0.75, queue_s: 1, ttft_s: 1.5, tpot_s: 0.02}"
    report = start(job, f"metrics.textfile={path}", tells, "engine.fake.docs_per_s=60").report
    found = values(path.read_text())
    assert found[("batchgen_time_to_first_token_seconds_count",)] == report["attempt"]["latency"]["ttft"]["count"] == 20
    assert found[("batchgen_time_to_first_token_seconds_sum",)] == pytest.approx(20 * 1.5, rel=0.0222)
    for edge, count in (("1.0", 0), ("2.0", 20), ("+Inf", 20)):
        assert found["batchgen_time_to_first_token_seconds_bucket", ("le", edge)] == count
    assert found["batchgen_time_per_output_token_seconds_bucket", ("le", "0.03125")] == 20
    assert found["batchgen_time_per_output_token_seconds_bucket", ("le", "0.015625")] == 0


def test_counters_begin_anew_and_what_was_done_is_told_apart(job, tmp_path):
    path = tmp_path / "it.prom"
    start(job, f"metrics.textfile={path}", limit=5)
    start(job, f"metrics.textfile={path}")
    found = values(path.read_text())
    assert found[("batchgen_documents_done_before",)] == 5
    assert sum(value for name, value in found.items() if name[0] == "batchgen_documents_total") == 17
    assert found["batchgen_info", ("attempt", "2"), ("version", metrics_module.__version__)] == 1


def test_vllms_own_of_several_engines_are_told_apart():
    text = (
        "# HELP vllm:generation_tokens_total Tokens.\n# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0"} %s\n'
    )
    (family,) = exposition.merged({"0.1": text % 7, "0.0": text % 5})
    assert family.type == "counter"
    assert [(one.labels["replica"], one.labels["engine"], one.value) for one in family.samples] == [
        ("0.0", "0", 5),
        ("0.1", "0", 7),
    ]


def test_without_vllm_there_is_nothing_of_its_own(monkeypatch):
    monkeypatch.delitem(metrics_module.exposition.sys.modules, "vllm", raising=False)
    assert list(exposition.Here.collect()) == []


# The port.


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one.getsockname()[1]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    ("text", "address", "first", "last"),
    [
        ("9400", "127.0.0.1", 9400, 9400),
        ("0", "127.0.0.1", 0, 0),
        ("9400-9415", "127.0.0.1", 9400, 9415),
        ("0.0.0.0:9400", "0.0.0.0", 9400, 9400),
        ("gpu-1.example:9400-9401", "gpu-1.example", 9400, 9401),
        ("[::]:9400", "::", 9400, 9400),
    ],
)
def test_ports_are_read(text, address, first, last):
    assert Ports.read(text) == Ports(address, first, last)


@pytest.mark.parametrize("text", ["", "web", "65536", "9400-", "9415-9400", ":9400", "::1:9400", "-1", "1 2"])
def test_what_is_no_port_is_refused(text):
    with pytest.raises(ValueError, match=r"write it like|ports go from"):
        Ports.read(text)


def test_a_scrape_in_the_middle_of_a_run_shows_how_far_it_is(job, monkeypatch):
    port, seen = free_port(), []
    commit = Committer.commit

    def scraped(self):
        wrote = commit(self)
        seen.append(values(scrape(port)))
        return wrote

    monkeypatch.setattr(Committer, "commit", scraped)
    start(job, metrics=Ports("127.0.0.1", port, port))
    assert len(seen) > 2
    done = [one["batchgen_documents_total", ("status", "ok")] for one in seen]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == 20
    middle = seen[1]
    assert middle[("batchgen_running",)] == 1
    assert ("batchgen_exit_status",) not in middle
    assert middle[("batchgen_requests_in_flight",)] > 0
    assert 0 < middle[("batchgen_committed_rows_total",)] < 22
    with pytest.raises(OSError, match="refused"):  # the port went with the run
        scrape(port)


def test_a_busy_port_is_an_error_before_anything_starts(job, out, taken):
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{taken} in use by other processes.*{taken}-") as caught:
        start(job, metrics=Ports("127.0.0.1", taken, taken))
    assert caught.value.exit_status == 78
    assert rows(out) == []
    assert not (out / "run.json").exists()
    assert not list(out.glob("telemetry-*"))


def test_of_a_range_the_first_free_port_is_taken(job, taken):
    done = command("run", job, "--metrics-port", f"{taken}-{taken + 15}")
    found = re.search(r"metrics: http://127\.0\.0\.1:(\d+)/metrics", done.stderr)
    assert taken < int(found[1]) <= taken + 15
    assert done.returncode == 3


def test_an_address_that_is_not_ours_is_an_error(job):
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:9400"):
        start(job, metrics=Ports("192.0.2.1", 9400, 9400))


def test_a_start_that_meets_a_run_is_told_of_the_run_not_of_its_port(job, out, taken):
    with RunDirectory(out), pytest.raises(LockedError):
        start(job, metrics=Ports("127.0.0.1", taken, taken))


# The file.


def test_the_file_is_whole_at_any_moment_and_nothing_else_ends_like_it(job, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module, "TEXTFILE_S", 0.01)
    folder = tmp_path / "textfiles"
    folder.mkdir()
    names, looks = set(), 0
    commit = Committer.commit

    def looked(self):
        nonlocal looks
        names.update(path.name for path in folder.iterdir() if path.name.endswith(".prom"))
        looks += 1
        found = values((folder / "it.prom").read_text())
        assert ("batchgen_resident_memory_bytes", ("process", "run")) in found
        return commit(self)

    monkeypatch.setattr(Committer, "commit", looked)
    start(job, f"metrics.textfile={folder / 'it.prom'}", "engine.fake.docs_per_s=100")
    assert looks > 2
    assert names == {"it.prom"}
    assert [path.name for path in folder.iterdir()] == ["it.prom"]


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(job, out, tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.textfile: .*nowhere/it\.prom: cannot be written: No such file"):
        start(job, f"metrics.textfile={tmp_path / 'nowhere/it.prom'}")
    assert rows(out) == []


def test_a_file_that_cannot_be_written_any_more_ends_no_run(job, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "textfiles"
    folder.mkdir()
    commit = Committer.commit

    def gone(self):
        for path in folder.glob("*"):
            path.unlink()
        if folder.is_dir():
            folder.rmdir()
        return commit(self)

    monkeypatch.setattr(Committer, "commit", gone)
    assert start(job, f"metrics.textfile={folder / 'it.prom'}").exit_status == 3
    assert "metrics.textfile" in caplog.text


def test_the_end_of_a_run_that_fails_is_told(job, tmp_path):
    path = tmp_path / "it.prom"
    assert start(job, f"metrics.textfile={path}", "engine.fake.die_after=3", "engine.fake.lives=1").exit_status == 69
    assert values(path.read_text())[("batchgen_exit_status",)] == 69
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(Exception, match=r"a\.jsonl"):
        start(job, f"metrics.textfile={path}")
    assert values(path.read_text())[("batchgen_exit_status",)] == 65


@pytest.mark.parametrize(("shard", "name"), [("00000", "a.b.prom"), ("00002of00004", "a.b-00002of00004.prom")])
def test_each_shard_has_a_file_of_its_own(shard, name):
    assert metrics_module.own_file(Path("x/a.b.prom"), shard) == Path("x") / name


def test_a_held_run_keeps_its_file(job, out, tmp_path):
    path = tmp_path / "it.prom"
    path.write_text("theirs")
    with RunDirectory(out), pytest.raises(LockedError):
        start(job, f"metrics.textfile={path}")
    assert path.read_text() == "theirs"
