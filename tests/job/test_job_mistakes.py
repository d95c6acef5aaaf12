"""Mistakes planted in a job as people write them: `validate` tells each with its line, its key and the nearest name."""

import re
from importlib import util
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers_config import line_of
from helpers_run import command, record, write_jsonl

from batchgen.cli import cli
from batchgen.errors import ConfigError

JOB = """\
# Minutes and reports of the harbour, 2019 to 2024.
name: harbour-minutes

input:
  - &minutes
    path: data/minutes-*.jsonl        # one file a year
    id_field: id
    text_field: body.text
    keep: [title, lang]
    min_chars: 40
  - <<: *minutes
    path: data/more.jsonl
  - {path: data/letters.jsonl, id_field: id, keep: {subject: title, language: lang}}

prompt:
  system: >-
    You write short summaries.
    rows: 7 is not a key here, nor is
    max_tokens: 9.
  user: |
    Title: {{ title }}
    {% if lang %}Language: {{ lang }}{% endif %}

    {{ text }}

    Say in two sentences:
      who: did what
      when: and why

engine:
  backend: fake
  feed: rolling
  args:
    max_model_len: 4096
    max_num_seqs: 128
    gpu_memory_utilization: 0.92
    enforce_eager: false
    enable_prefix_caching: true
    quantization: fp8
  fake:
    docs_per_s: 5000

sampling:
  temperature: 0.2
  max_tokens: 160
  top_p: 0.9
  seed: 7
  stop: ["###"]

checkpoint: {interval_s: 20, rows: 500}

failures:
  max: 10

output:
  dir: outputs/harbour
"""

needs_vllm = pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed")


def mistake(old, new, *told, marks=()):
    """`old` of JOB replaced by `new`, and what is told: (key, words), and the line where it is not that of `new`.

    `▸` marks the line of `new` where it is not its first.
    """
    return pytest.param(old, new, told, marks=marks, id=str(told[0][0] or new.strip("\n▸ ")))


MISTAKES = [
    # Typos, on every level.
    mistake("name: harb", "nmae: harb", ("name", "this key is required", None),
            ("nmae", "unknown key; did you mean 'name'?")),
    mistake("\ninput:\n", "\n▸inputs:\n", ("input", "this key is required", None),
            ("inputs", "unknown key; did you mean 'input'?")),
    mistake("checkpoint:", "checkpoints:", ("checkpoints", "unknown key; did you mean 'checkpoint'?")),
    mistake("  feed:", "  fead:", ("engine.fead", "unknown key; did you mean 'feed'?")),
    mistake("docs_per_s:", "doc_per_s:", ("engine.fake.doc_per_s", "unknown key; did you mean 'docs_per_s'?")),
    mistake("  user: |", "  usr: |", ("prompt.user", "this key is required", line_of(JOB, "prompt:")),
            ("prompt.usr", "unknown key; did you mean 'user'?")),
    mistake("interval_s: 20", "intervall_s: 20", ("checkpoint.intervall_s", "did you mean 'interval_s'?")),
    # In entries of lists: a block, a flow mapping, and one that another entry merges.
    mistake("{path: data/letters.jsonl, id_field", "{path: data/letters.jsonl, id_feild",
            ("input.2.id_feild", "unknown key; did you mean 'id_field'?")),
    mistake("    path: data/more.jsonl", "    path: data/more.jsonl\n▸    text_feild: text",
            ("input.1.text_feild", "unknown key; did you mean 'text_field'?")),
    mistake("min_chars: 40", "minchars: 40",
            ("input.0.minchars", "unknown key; did you mean 'min_chars'?"),
            ("input.1.minchars", "unknown key; did you mean 'min_chars'?")),
    mistake("keep: {subject: title, language: lang}", "keep: {subject: title, language: [lang]}",
            ("input.2.keep.language", "valid string")),
    # vLLM's names, and values of another type than vLLM declares.
    mistake("max_num_seqs:", "max_num_seq:",
            ("engine.args.max_num_seq", "vLLM has no 'max_num_seq'; did you mean 'max_num_seqs'?"), marks=needs_vllm),
    mistake("gpu_memory_utilization:", "gpu_memory_utilisation:",
            ("engine.args.gpu_memory_utilisation", "did you mean 'gpu_memory_utilization'?"), marks=needs_vllm),
    mistake("top_p:", "topp:", ("sampling.topp", "SamplingParams has no 'topp'; did you mean 'top_p'?"),
            marks=needs_vllm),
    mistake("max_num_seqs: 128", 'max_num_seqs: "128"',
            ("engine.args.max_num_seqs", "a whole number is wanted, without quotes"), marks=needs_vllm),
    mistake("enforce_eager: false", 'enforce_eager: "false"',
            ("engine.args.enforce_eager", "true or false is wanted, without quotes"), marks=needs_vllm),
    mistake("gpu_memory_utilization: 0.92", "gpu_memory_utilization: 92%",
            ("engine.args.gpu_memory_utilization", "a number is wanted (given: '92%')"), marks=needs_vllm),
    mistake("max_model_len: 4096", "max_model_len: 4_096",
            ("engine.args.max_model_len", "a whole number is wanted (given: '4_096')"), marks=needs_vllm),
    mistake("seed: 7", "seed: 7.5", ("sampling.seed", "a whole number is wanted (given: 7.5)"), marks=needs_vllm),
    mistake("seed: 7", "n: 2", ("sampling.n", "cannot be set"), marks=needs_vllm),
    # YAML's own traps.
    mistake("enforce_eager: false", "enforce_eager: no",
            ("engine.args.enforce_eager", "a bare no is a text to some and true or false to others: write true or fa")),
    mistake("keep: [title, lang]", "keep: [title, on]", ("input.0.keep.1", "a bare on is a text to some")),
    mistake("language: lang}", "NO: lang}", ("input.2.keep.NO", "a bare NO is a text to some")),
    mistake("max_tokens: 160", "max_tokens: 1e3", ("sampling.max_tokens", "a whole number is wanted: write 1000")),
    mistake("interval_s: 20", "interval_s: 0:20", ("checkpoint.interval_s", "a number is wanted (given: '0:20')")),
    mistake("temperature: 0.2", "temperature: .nan", ("sampling.temperature", "a finite number is wanted")),
    mistake("top_p: 0.9", "top_p: .inf", ("sampling.top_p", "a finite number is wanted (given: .inf)")),
    mistake("  feed: rolling", "  feed: rolling\n  fake: {fail_every: 9}\n▸  feed: generate",
            ("engine.feed", "this key stands twice (first in line 32)"),
            ("engine.fake", "this key stands twice (first in line 33)", line_of(JOB, "  fake:") + 2)),
    mistake("  max: 10", "  max: 10\n▸  max: 20", ("failures.max", "this key stands twice (first in line 53)")),
    mistake("  max: 10", "\tmax: 10", (None, "no valid YAML: found character '\\t' that cannot start any token")),
    mistake("dir: outputs/harbour", "dir: outputs: harbour", (None, "no valid YAML: mapping values are not allowed")),
    mistake("<<: *minutes", "<<: *minute", (None, "no valid YAML: found undefined alias 'minute'")),
    mistake("  - <<: *minutes", "  - <<: minutes", (None, "no valid YAML: expected a mapping")),
    mistake('stop: ["###"]\n\ncheckpoint:', 'stop: ["###"\n\n▸checkpoint:',
            (None, "no valid YAML: expected ',' or ']'")),
    # Values of another type, numbers that mean nothing.
    mistake("name: harbour-minutes", "name: 2024", ("name", "valid string (given: 2024)")),
    mistake("name: harbour-minutes", "name: harbour minutes", ("name", "should match pattern")),
    mistake("backend: fake", "backend: vlm", ("engine.backend", "'vllm' or 'fake'")),
    mistake("rows: 500}", "rows: -500}", ("checkpoint.rows", "greater than or equal to 1 (given: -500)")),
    mistake("rows: 500}", "rows: true}", ("checkpoint.rows", "a whole number is wanted, not true or false")),
    mistake("rows: 500}", "rows: '500'}", ("checkpoint.rows", "a whole number is wanted, without quotes")),
    mistake("min_chars: 40", "min_chars: 0", ("input.0.min_chars", "greater than or equal to 1"),
            ("input.1.min_chars", "greater than or equal to 1")),
    mistake("failures:\n  max: 10", "failures: 10", ("failures", "valid dictionary")),
    mistake("  args:\n    max_model_len: 4096\n", "  args:\n  - max_model_len: 4096\n",
            ("engine.args", "valid dictionary")),
    # What is missing: told where its section begins.
    mistake("output:\n  dir: outputs/harbour", "output: {}", ("output.dir", "this key is required")),
    mistake("{path: data/letters.jsonl, id_field", "{id_field", ("input.2.path", "this key is required")),
    mistake("\n  user: |\n", "\n  # user: |\n▸", (None, "no valid YAML: expected <block end>")),
    # Templates and kept fields, which belong together.
    mistake("keep: [title, lang]", "keep: [title, status]",
            ("input.0.keep", "'status' is a name of batchgen's own; give it another: keep: {status: my_status}"),
            ("input.1.keep", "'status' is a name of batchgen's own")),
    mistake("subject: title,", "subject: lang,", ("input.2.keep", "two fields get the same name")),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the documents of the job."""
    monkeypatch.chdir(tmp_path)
    for name in ("minutes-2019", "minutes-2020", "more", "letters"):
        write_jsonl(tmp_path / f"data/{name}.jsonl", [record(f"{name}-{n}") for n in range(3)])
    return tmp_path


def validate(text, *sets) -> list[str]:
    """The faults that `batchgen validate` lists, one a line."""
    Path("job.yaml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(cli, ["validate", "job.yaml", *sets], standalone_mode=False)
    if isinstance(result.exception, ConfigError):
        return str(result.exception).splitlines()
    assert result.exception is None
    return [line.strip() for line in result.stdout.partition("faults:\n")[2].splitlines()]


def test_the_job_without_a_mistake_is_valid(folder):
    (folder / "job.yaml").write_text(JOB)
    result = CliRunner().invoke(cli, ["validate", "job.yaml"], standalone_mode=False)
    assert result.exception is None, result.exception
    assert "job.yaml: valid" in result.stdout


@pytest.mark.parametrize(("old", "new", "told"), MISTAKES)
def test_a_mistake_is_told_with_its_line_and_key(folder, old, new, told):
    text, line = planted(JOB, old, new)
    found = validate(text)
    assert len(found) == len(told), found
    for one, (key, words, *other) in zip(found, told, strict=True):
        assert one.startswith(place(*(other or [line]), key)), one
        assert words in one


def planted(text, old, new):
    """`text` with a mistake in it, and the mistake's line."""
    assert text.count(old) == 1, f"{old!r} is no single place"
    text = text.replace(old, new if "▸" in new else "▸" + new)
    return text.replace("▸", ""), line_of(text, "▸")


def place(line, key):
    return "job.yaml" + (f", line {line}: " if line else ": ") + (f"{key}: " if key else "")


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 30


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("{{ title }}", "{{ titel }}", "which input.0 (data/minutes-*.jsonl) does not keep; did you mean 'title'?"),
        ("{{ text }}", "the text", "prompt.user must hold {{ text }} exactly once"),
        ("{{ text }}", "{{ text | upper }}", "prompt.user must hold {{ text }} exactly once"),
        ("{{ text }}", "{{ text }", "prompt.user: unexpected '}'"),
        ("{{ title }}", "{{ title | uper }}", "prompt.user: No filter named 'uper'"),
        ("language: lang}", "language: lang_2}", "which input.2 (data/letters.jsonl) does not keep"),
    ],
)
def test_a_mistake_in_a_template_is_told_with_the_line_of_its_key(folder, old, new, key):
    (found,) = validate(planted(JOB, old, new)[0])
    assert found.startswith(f"job.yaml, line {line_of(JOB, '  user: |')}: prompt.user")
    assert key in found


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("engine.fede=generate", "unknown key; did you mean 'feed'?"),
        ("engin.feed=generate", "unknown key; did you mean 'engine'?"),
        ("input.2.id_feild=nr", "unknown key; did you mean 'id_field'?"),
        ("input.3.id_field=nr", "no entry 3 in a list of 3"),
        ("checkpoint.rows=many", "a whole number is wanted (given: 'many')"),
        ("checkpoint.rows=1e3", "a whole number is wanted: write 1000 (given: 1000.0)"),
        ("checkpoint={rows: 1, rows: 2}", "checkpoint.rows: this key stands twice (first in line 1)"),
        ("engine.feed=no", "a bare no is a text to some and true or false to others"),
        ("prompt.user={{ text }}", "the value is no valid YAML: a key is a plain text"),
        ("sampling.seed=.inf", "a finite number is wanted (given: .inf)"),
        ("output.dir", "a key and a value are wanted: --set engine.feed=generate"),
        ("output.dir=", "Input should be a valid string (given: None)"),
        pytest.param("engine.args.enforce_eager='false'", "true or false is wanted, without quotes", marks=needs_vllm),
        pytest.param("engine.args.max_num_seq=4", "vLLM has no 'max_num_seq'; did you mean 'max_num_seqs'?",
                     marks=needs_vllm),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_names_its_set(folder, assignment, told):
    (found,) = validate(JOB, "--set", assignment)
    place = "engin" if assignment.startswith("engin.") else assignment.partition("=")[0]
    assert re.match(rf"--set {re.escape(place)}(=[^:]*(: \d[^:]*)*)?: ", found), found
    assert f": {told}" in found


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(folder):
    text = JOB
    for old, new in [
        ("id_field: id, keep", "id_feild: id, keep"),
        ("feed: rolling", "feed: on"),
        ("max_num_seqs: 128", "max_num_seqs: 128\n    max_num_seqs: 256"),
        ("docs_per_s: 5000", "docs_per_s: -1"),
        ("top_p: 0.9", "top_p: .nan"),
        ("rows: 500", "row: 500"),
        ("  max: 10", '  max: "10"'),
    ]:
        text, _ = planted(text, old, new)
    found = validate(text, "--set", "input.9.path=x", "--set", "failures.maximum=3")
    assert [re.match(r"(?:job.yaml, line \d+: |--set )[\w.]+", one)[0] for one in found] == [
        place(line_of(text, marker), None) + key
        for key, marker in [
            ("input.2.id_feild", "id_feild"),
            ("engine.feed", "feed: on"),
            ("engine.args.max_num_seqs", "max_num_seqs: 256"),
            ("engine.fake.docs_per_s", "docs_per_s"),
            ("sampling.top_p", "top_p"),
            ("checkpoint.row", "row: 500"),
            ("failures.max", '  max: "10"'),
        ]
    ] + ["--set input.9.path", "--set failures.maximum"]


@needs_vllm
def test_mistakes_in_names_of_vllm_and_in_templates_are_told_at_once(folder):
    text = JOB
    for old, new in [("{{ title }}", "{{ titel }}"), ("max_num_seqs:", "max_num_seq:"), ("seed: 7", "seed: '7'")]:
        text, _ = planted(text, old, new)
    found = validate(text)
    assert [one.split(": ")[0] for one in found] == [
        f"job.yaml, line {line_of(text, marker)}" for marker in ("  user: |", "max_num_seq:", "seed:")
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("feed: rolling", "feeds: rolling", "engine.feeds: unknown key; did you mean 'feed'?"),
        ("rows: 500}", "rows: no, rows: 1}", "checkpoint.rows: this key stands twice"),
    ],
)
def test_the_real_command_line_tells_a_mistake_and_ends_with_78(folder, old, new, told):
    text, line = planted(JOB, old, new)
    (folder / "job.yaml").write_text(text)
    for name in ("validate", "run"):
        done = command(name, "job.yaml")
        assert done.returncode == ConfigError.exit_status
        assert f"job.yaml, line {line}: {told}" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
