"""The real command line: help, exit statuses, and who gets what: results on stdout, the talk on stderr."""

import functools
import json
import os
import statistics
import subprocess
import sys
import time

import click
import helpers_forked
import pytest
from helpers_config import FULL, line_of

from batchgen import __version__
from batchgen.cli import cli

SENTENCE = "The harbour board met and agreed to repair the quay before the winter."
JOB = """\
name: test
input:
  - {path: docs.jsonl, id_field: id, keep: [title]}
prompt:
  system: You write summaries.
  user: "{{ title }}: {{ text }}"
engine:
  backend: fake
  args: {max_model_len: 512}
sampling: {max_tokens: 32}
output: {dir: out}
"""
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "HF_", "BATCHGEN_"))
} | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def folder(tmp_path):
    """A job and its documents; the command line is called from here."""
    (tmp_path / "job.yaml").write_text(JOB)
    rows = [{"id": f"d{n}", "title": f"Minutes {n}", "text": SENTENCE} for n in range(5)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def batchgen(folder):
    return functools.partial(helpers_forked.command, cwd=folder, env=ENVIRONMENT)


@pytest.fixture
def whole(folder):
    """The same from the first step of Python's to the last."""

    def call(*words):
        return subprocess.run(
            [sys.executable, "-m", "batchgen", *words], capture_output=True, text=True, timeout=60, check=False,
            cwd=folder, env=ENVIRONMENT,
        )  # fmt: skip

    return call


def refused(done, status):
    """What stderr tells of an error; stdout is empty and there is no traceback."""
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def faults(done, status):
    """What `validate` lists on stdout."""
    assert (done.returncode, done.stderr) == (status, ""), done.stderr
    return done.stdout


# Help

COMMANDS = {(): cli} | {(name,): command for name, command in cli.commands.items()}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "batchgen")
def test_every_command_and_every_option_has_a_help_text(words):
    command = COMMANDS[words]
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
        else:
            assert parameter.metavar, parameter.name


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "batchgen")
def test_help_goes_to_stdout(whole, words):
    for flag in ("--help", "-h"):
        done = whole(*words, flag)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: python -m batchgen {' '.join(words)}".rstrip())
        for parameter in COMMANDS[words].params:
            assert (parameter.opts[0] if isinstance(parameter, click.Option) else parameter.metavar) in done.stdout
    if not words:
        assert all(name in done.stdout for name in cli.commands)


def test_help_comes_at_once(whole):
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        assert whole("--help").returncode == 0
        seconds.append(time.perf_counter() - begin)
    assert statistics.median(seconds) < 0.5


def test_the_version_is_that_of_the_package(whole):
    done = whole("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"batchgen, version {__version__}\n", "")


# Usage: 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "Usage: "),
        (("rum", "job.yaml"), "No such command 'rum'"),
        (("run",), "Missing argument 'JOB.yaml'"),
        (("run", "none.yaml"), "'none.yaml' does not exist"),
        (("run", "."), "'.' is a directory"),
        (("run", "job.yaml", "--limits", "3"), "No such option"),
        (("run", "job.yaml", "--limit", "0"), "'--limit'"),
        (("run", "job.yaml", "--limit", "few"), "'few' is not a valid integer"),
        (("run", "job.yaml", "--on-change", "go"), "'go' is not one of 'refuse', 'keep', 'new-run'"),
        (("run", "job.yaml", "other.yaml"), "unexpected extra argument"),
        (("validate", "job.yaml", "--set"), "requires an argument"),
        (("retry-failed",), "Missing argument 'JOB.yaml'"),
        (("retry-failed", "job.yaml", "--on-change", "new-run"), "'new-run' is not one of 'refuse', 'keep'"),
        (("retry-failed", "job.yaml", "--limit", "3"), "No such option"),
        (("retry-failed", "job.yaml", "--deadline", "soon"), "'soon' is no time"),
        (("status",), "Missing argument 'RUN_DIR'"),
        (("status", "out"), "'out' does not exist"),
        (("status", "job.yaml"), "'job.yaml' is a file"),
        (("report", "out"), "'out' does not exist"),
        (("demo-model",), "Missing argument 'DIR'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_ends_with_2(batchgen, folder, words, told):
    assert told in refused(batchgen(*words), 2)
    assert sorted(path.name for path in folder.iterdir()) == ["docs.jsonl", "job.yaml"]


# The job file: 78


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("backend: fake", "backnd: fake", "job.yaml, line 8: engine.backnd: unknown key; did you mean 'backend'?"),
        ("max_tokens: 32", "max_tokens: -1", "job.yaml, line 10: sampling.max_tokens: Input should be greater"),
        ("max_tokens: 32", "max_tokens: 512", "job.yaml, line 10: sampling.max_tokens (512) leaves no room"),
        ("name: test", "name: [", "job.yaml, line 3: no valid YAML: "),
        ("name: test", "? [a]\n: b", "job.yaml, line 1: no valid YAML: a key is a plain text"),
        ("name: test", "name: !!int few", "job.yaml, line 1: no valid YAML: 'few' is no int"),
        ("name: test", "name: off", "job.yaml, line 1: name: a bare off is a text to some and true or false to others"),
        ("keep: [title]", "keep: [[title]]", "job.yaml, line 3: input.0.keep: a list of field names is wanted"),
        ("{{ title }}", "{{ titel }}", "job.yaml, line 6: prompt.user uses {{ titel }}, which input.0"),
        ("{{ title }}", "{{ title.__class__ }}", "job.yaml, line 6: prompt.user: access to attribute '__class__'"),
        ("{{ title }}", "{{ title | upcase }}", "job.yaml, line 6: prompt.user: No filter named 'upcase'"),
        ("max_model_len: 512", "max_model_len: 4k", "engine.args.max_model_len: a whole number is wanted"),
        ("max_model_len: 512", "model: ./none", "engine.args.model: ./none: no such folder"),
    ],
)
def test_a_mistake_in_the_job_ends_with_78(batchgen, folder, old, new, told):
    assert JOB.count(old) == 1
    (folder / "job.yaml").write_text(JOB.replace(old, new))
    assert told in faults(batchgen("validate", "job.yaml"), 78)
    assert told in refused(batchgen("run", "job.yaml"), 78)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("new", ["backend: fak", "backend: fake\n  backend: fake"])
def test_a_run_with_a_mistake_in_its_job_leaves_nothing(batchgen, folder, new):
    (folder / "job.yaml").write_text(JOB.replace("backend: fake", new))
    assert "job.yaml, line " in refused(batchgen("run", "job.yaml", "--json"), 78)
    assert sorted(path.name for path in folder.iterdir()) == ["docs.jsonl", "job.yaml"]


def test_several_mistakes_are_told_at_once(batchgen, folder):
    text = FULL.replace("rows: 50", "rows: 0").replace("feed: rolling", "feed: fast")
    (folder / "job.yaml").write_text(text)
    told = faults(batchgen("validate", "job.yaml"), 78)
    for dotted, marker in (("checkpoint.rows", "rows: 0"), ("engine.feed", "feed: fast")):
        assert f"job.yaml, line {line_of(text, marker)}: {dotted}: " in told


def test_a_mistake_in_a_set_ends_with_78(batchgen):
    assert "--set engine.fed: unknown key; did you mean 'feed'?" in refused(
        batchgen("run", "job.yaml", "--set", "engine.fed=rolling"), 78
    )
    assert "--set engine.feed: a key and a value are wanted" in faults(
        batchgen("validate", "job.yaml", "--set", "engine.feed"), 78
    )


def test_a_folder_that_is_no_run_ends_with_78(batchgen, folder):
    (folder / "out").mkdir()
    for command in ("status", "report"):
        assert "out: is no run directory" in refused(batchgen(command, "out", "--json"), 78)


def test_an_input_that_matches_nothing_ends_with_65(batchgen, folder):
    (folder / "docs.jsonl").unlink()
    assert "input.0.path: docs.jsonl: no file matches" in faults(batchgen("validate", "job.yaml"), 65)
    assert "input.0.path: docs.jsonl: no file matches" in refused(batchgen("run", "job.yaml"), 65)


# Results


def plain_json(done):
    """The one JSON value that stdout holds, and nothing else."""
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(done.stdout, parse_constant=refuse)


def test_json_is_all_there_is_on_stdout(batchgen, folder):
    valid = plain_json(batchgen("validate", "job.yaml", "--json"))
    assert (valid["backend"], valid["rows"], valid["max_prompt_tokens"]) == ("fake", 5, 480)
    assert not (folder / "out").exists()

    done = batchgen("run", "job.yaml", "--json", "--limit", "2")
    report = plain_json(done)
    assert (report["exit_status"], report["documents"]["ok"], report["documents"]["pending"]) == (0, 2, 3)
    assert "2 ok, 0 failed, 0 skipped, 3 pending" in done.stderr
    assert report == json.loads((folder / "out" / "report.json").read_text())

    status = plain_json(batchgen("status", "out", "--json"))
    assert (status["ok"], status["pending"], status["running"]) == (2, 3, None)

    again = plain_json(batchgen("report", "out", "--json"))
    assert (again["documents"], again["reason"]) == (report["documents"], report["reason"])


def test_failed_documents_are_listed_and_tried_again(batchgen, folder):
    assert "there is no run yet" in refused(batchgen("retry-failed", "job.yaml", "--json"), 78)
    assert not (folder / "out").exists()
    done = batchgen("run", "job.yaml", "--set", "engine.fake.fail_on=Minutes 3")
    assert done.returncode == 3
    assert "1 failed, 0 skipped; " in done.stderr.splitlines()[-1]
    assert "; failed documents: out/failed.jsonl; report: out/report.md" in done.stderr.splitlines()[-1]
    assert json.loads((folder / "out/failed.jsonl").read_text())["id"] == "d3"
    done = batchgen("retry-failed", "job.yaml", "--type", "engine_died")
    assert (done.returncode, done.stdout) == (3, "")
    assert "0 failed documents are tried again; these keep their rows: request_failed 1 → out" in done.stderr
    report = plain_json(batchgen("retry-failed", "job.yaml", "--json", "--deadline", "1h"))
    assert (report["reason"], report["documents"]["ok"], report["notes"]["failed documents"]) == (
        "1 tried again",
        5,
        None,
    )
    assert not (folder / "out/failed.jsonl").exists()


def test_a_retry_that_gets_a_signal_stops_and_goes_on(batchgen, folder):
    fails = ("--set", "engine.fake.fail_on=harbour")
    assert batchgen("run", "job.yaml", *fails).returncode == 3
    slow = ("--set", "engine.fake.docs_per_s=2", "--set", "lifecycle.grace_s=0.6", "--set", "checkpoint.rows=1")
    words = [sys.executable, "-m", "batchgen", "retry-failed", "job.yaml", *slow]
    child = subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while len(list((folder / "out/summaries").glob("part-00002-*"))) < 1:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.terminate()
        told = child.communicate(timeout=20)[1]
        assert child.returncode == 75
    finally:
        child.kill()
        child.communicate()
    assert "stopped by SIGTERM; the same command goes on" in told.splitlines()[-1]
    report = plain_json(batchgen("retry-failed", "job.yaml", "--json"))
    assert 0 < report["attempt"]["requests"] < 5
    assert report["documents"]["ok"] == 5


def test_without_json_a_run_says_nothing_on_stdout_and_the_others_their_lines(whole):
    done = whole("run", "job.yaml")
    assert (done.returncode, done.stdout) == (0, "")
    assert "\r" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    assert "finished: 5 documents: 5 ok, 0 failed, 0 skipped" in done.stderr.splitlines()[-1]
    done = whole("validate", "job.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("job.yaml: valid\n  files    1 with 5 rows\n    docs.jsonl  5 rows  ")
    done = whole("status", "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 documents: 5 ok, 0 failed, 0 skipped, 0 pending" in done.stdout


def test_a_changed_prompt_ends_with_78_and_the_ways_on(batchgen, folder):
    assert batchgen("run", "job.yaml").returncode == 0
    told = refused(batchgen("run", "job.yaml", "--json", "--set", "sampling.max_tokens=64"), 78)
    assert "sampling.max_tokens: 32 → 64" in told
    assert "--on-change keep" in told
    assert "--on-change new-run" in told
    told = faults(batchgen("validate", "job.yaml", "--set", "sampling.max_tokens=64"), 78)
    assert "out: sampling.max_tokens: 32 → 64: not the setting of the run there" in told
