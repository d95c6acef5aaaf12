"""Mistakes in a job file are told with file, line, key and the nearest known key; nothing is corrected silently."""

from pathlib import Path

import pytest
import yaml
from helpers_config import FULL, line_of, load_text, write
from pydantic import BaseModel, Field
from pydantic_core import PydanticUndefined

from batchgen.errors import ConfigError
from batchgen.job import config, jobfile
from batchgen.job.config import COLUMNS, Job
from batchgen.job.jobfile import Origin, load
from batchgen.sinks import columns
from batchgen.text import nearest

TOP = Path(__file__).parent.parent.parent


# Mistakes: (text in FULL, what stands there instead, dotted key told, nearest known key or other words told).
# The line told must be the one in which the new text stands; `▸` marks it where that is not its first line.
MISTAKES = [
    # Typos, at every level.
    ("name: demo", "nmae: demo", "nmae", "did you mean 'name'?"),
    ("input:\n", "inputs:\n", "inputs", "did you mean 'input'?"),
    ("text_field:", "textfield:", "input.0.textfield", "did you mean 'text_field'?"),
    ("id_field:", "idfield:", "input.0.idfield", "did you mean 'id_field'?"),
    ("    keep:\n", "    keeps:\n", "input.1.keeps", "did you mean 'keep'?"),
    ("on_error:", "onerror:", "input.0.onerror", "did you mean 'on_error'?"),
    ("min_chars:", "min_char:", "input.0.min_char", "did you mean 'min_chars'?"),
    ("system:", "sytem:", "prompt.sytem", "did you mean 'system'?"),
    ("  user:", "  usr:", "prompt.usr", "did you mean 'user'?"),
    ("engine:\n", "engin:\n", "engin", "did you mean 'engine'?"),
    ("backend:", "backnd:", "engine.backnd", "did you mean 'backend'?"),
    ("feed:", "fed:", "engine.fed", "did you mean 'feed'?"),
    ("  fake:", "  fakes:", "engine.fakes", "did you mean 'fake'?"),
    ("docs_per_s:", "docs_per_sec:", "engine.fake.docs_per_sec", "did you mean 'docs_per_s'?"),
    ("fail_every:", "fails_every:", "engine.fake.fails_every", "did you mean 'fail_every'?"),
    ("sampling:", "sampeling:", "sampeling", "did you mean 'sampling'?"),
    ("interval_s:", "interval:", "checkpoint.interval", "did you mean 'interval_s'?"),
    ("rows: 50", "row: 50", "checkpoint.row", "did you mean 'rows'?"),
    ("max: 3", "maximum: 3", "failures.maximum", "did you mean 'max'?"),
    ("failures:", "failure:", "failure", "did you mean 'failures'?"),
    ("  dir: out", "  directory: out", "output.directory", "unknown key"),
    ("output:", "ouput:", "ouput", "did you mean 'output'?"),
    # Wrong types.
    ("name: demo", "name: 7", "name", "valid string"),
    ("name: demo", "name: [demo]", "name", "valid string"),
    ("name: demo", "name: 2024", "name", "valid string"),
    ("name: demo", "name: a/b", "name", "should match pattern"),
    ("name: demo", 'name: ""', "name", "should match pattern"),
    ("text_field: body.text", "text_field: 3", "input.0.text_field", "valid string"),
    ("min_chars: 5", "min_chars: few", "input.0.min_chars", "a whole number is wanted (given: 'few')"),
    ("min_chars: 5", "min_chars: 5.5", "input.0.min_chars", "a whole number is wanted"),
    ("on_error: skip", "on_error: ignore", "input.0.on_error", "'refuse' or 'skip'"),
    ("on_duplicate: refuse", "on_duplicate: keep", "input.0.on_duplicate", "'fail' or 'refuse'"),
    ("keep: [title, lang]", "keep: title", "input.0.keep", "valid dictionary"),
    ("keep: [title, lang]", "keep: [title, {lang: l}]", "input.0.keep", "a list of field names is wanted"),
    ("keep: [title, lang]", "keep: [[title]]", "input.0.keep", "a list of field names is wanted"),
    ("keep: [title, lang]", "keep: [1, 2]", "input.0.keep", "a list of field names is wanted"),
    ("keep: [title, lang]", "keep: {title: 1}", "input.0.keep.title", "valid string"),
    ("keep: [title, lang]", "keep: {1: title}", "input.0.keep.1", "valid string"),
    ("backend: fake", "backend: vlm", "engine.backend", "'vllm' or 'fake'"),
    ("format: jsonl", "format: csv", "output.format", "'parquet' or 'jsonl'"),
    ("feed: rolling", "feed: stream", "engine.feed", "'rolling' or 'generate'"),
    ("feed: rolling", "feed: on", "engine.feed", "write true or false, or quote it"),
    ("mode: chat", "mode: complete", "prompt.mode", "'chat' or 'completion'"),
    ("policy: skip", "policy: cut", "long_documents.policy", "'map_reduce', 'refine', 'fail' or 'skip'"),
    ("keep: head_tail", "keep: tail", "long_documents.keep", "'head', 'head_tail' or 'middle_out'"),
    ("overlap_tokens: 32", "overlap_tokens: -1", "long_documents.overlap_tokens", "greater than or equal to 0"),
    ("max_requests: 100", "max_requests: 1", "long_documents.max_requests", "greater than or equal to 2"),
    ("max_depth: 2", "max_depth: 0", "long_documents.max_depth", "greater than or equal to 1"),
    ("piece: ", "pieces: ", "long_documents.pieces", "did you mean 'piece'?"),
    ("copies: canary-", "copies: [canary-]  # ", "engine.fake.copies", "valid string"),
    ("copies: canary-", "copies: (canary-", "engine.fake.copies", "a regular expression is wanted: missing )"),
    ("  args:\n    max_model_len: 512", "  args: [max_model_len]", "engine.args", "valid dictionary"),
    ("max_model_len: 512", "512: max_model_len", "engine.args.512", "valid string"),
    ("adapter: adapters/letters", "adapter: [adapters/letters]", "engine.adapter", "valid string"),
    ("adapter: adapters/letters", "adaptor: adapters/letters", "engine.adaptor", "did you mean 'adapter'?"),
    ("docs_per_s: 100.5", "docs_per_s: fast", "engine.fake.docs_per_s", "a number is wanted"),
    ("stall_s: 30.5", "stall_s: 0", "engine.stall_s", "greater than 0"),
    ("lives: 8", "lives: 0", "engine.fake.lives", "greater than or equal to 1"),
    ("die_on: poison", "die_on: [poison]", "engine.fake.die_on", "valid string"),
    ("fail_on: marsh", "fail_on: 7", "engine.fake.fail_on", "valid string"),
    ("hang_on: swamp", "hang_on: 3", "engine.fake.hang_on", "valid string"),
    ("match: quay wall", "match: 3", "engine.fake.answers.0.match", "valid string"),
    ("match: quay wall", "macth: quay wall", "engine.fake.answers.0.macth", "did you mean 'match'?"),
    ("text: <think>", "text:\n          - <think>", "engine.fake.answers.0.text", "valid string"),
    ("finish_reason: length", "finish_reason: abort", "engine.fake.answers.0.finish_reason", "'stop' or 'length'"),
    ("mode: false", "mode: always", "packing.mode", "'off', 'on' or 'auto'"),
    ("mode: false", "mode: auto", "packing.mode", "answers of a model that reasons"),
    ("packing:", "packin:", "packin", "did you mean 'packing'?"),
    ("max_documents: 6", "max_documents: 1", "packing.max_documents", "greater than or equal to 2"),
    ("max_document_tokens: 200", "max_document_tokens: 0", "packing.max_document_tokens", "greater than or equal to 1"),
    ("max_pack_tokens: 400", "max_pack_tokens: 0", "packing.max_pack_tokens", "greater than or equal to 1"),
    ("answer: lines", "answer: xml", "packing.answer", "'json' or 'lines'"),
    ("verify: labels", "verify: nothing", "packing.verify", "'words' or 'labels'"),
    ("output_tokens_per_s: 5000.5", "output_tokens_per_s: 0", "engine.fake.output_tokens_per_s", "greater than 0"),
    ("reasoning_end: </think>", 'reasoning_end: " "', "answers.reasoning_end", "should match pattern"),
    ("reasoning_end: </think>", "reasoning: </think>", "answers.reasoning", "did you mean 'reasoning_end'?"),
    ("retry_max_tokens: 96", "retry_max_tokens: true", "answers.retry_max_tokens", "not true or false"),
    ("retry_max_tokens: 96", "retry_max_tokens: 32", "answers.retry_max_tokens", "above sampling.max_tokens (32)"),
    ("start_faults: [too small]", "start_faults: too small", "engine.fake.start_faults", "valid list"),
    ("currency: CHF", "currency: ''", "report.cost.currency", "at least 1 character"),
    ("per_gpu_hour: 2.5", "per_gpu_hour: 0", "report.cost.per_gpu_hour", "greater than 0"),
    ("per_gpu_hour: 2.5", "per_hour: 2.5", "report.cost.per_hour", "did you mean 'per_gpu_hour'?"),
    ("tells: {running: 3", "tells: {runing: 3", "engine.fake.tells.runing", "'running'"),
    ("tells: {running: 3, ttft_s: 0.25}", "tells: much", "engine.fake.tells", "valid dictionary"),
    ("profile: low_memory", "profile: fast", "engine.profile", "'throughput', 'balanced' or 'low_memory'"),
    ("replicas_per_gpu: 2", "replicas_per_gpu: 0", "engine.replicas_per_gpu", "at least 1 is wanted, or auto"),
    ("replicas_per_gpu: 2", "replicas_per_gpu: many", "engine.replicas_per_gpu", "or auto (given: 'many')"),
    ("profile: low_memory", "profil: low_memory", "engine.profil", "did you mean 'profile'?"),
    ("adapt: true", "adapt: 1", "engine.adapt", "true or false is wanted (given: 1)"),
    ("adapt: true", "adapt: 'true'", "engine.adapt", "true or false is wanted, without quotes"),
    ("adapt: true", "adopt: true", "engine.adopt", "did you mean 'adapt'?"),
    ("grace_s: 5.5", "grace_s: -1", "lifecycle.grace_s", "greater than or equal to 0"),
    ("lifecycle:\n  grace_s: 5.5", "lifecycle: 5", "lifecycle", "valid dictionary"),
    ("demo.prom", "demo.txt", "metrics.textfile", "should match pattern"),
    ("metrics:\n  textfile: metrics/demo.prom", "metrics: true", "metrics", "valid dictionary"),
    ("strikes: 4", "strikes: 0", "failures.strikes", "greater than or equal to 1"),
    ("max_tokens: 32", "max_tokens: 32.5", "sampling.max_tokens", "a whole number is wanted"),
    ("max_tokens: 32", "max_tokens: 1e3", "sampling.max_tokens", "a whole number is wanted: write 1000"),
    ("max_tokens: 32", "max_tokens: 32.0", "sampling.max_tokens", "a whole number is wanted: write 32"),
    ("max_tokens: 32", "max_tokens: '32'", "sampling.max_tokens", "a whole number is wanted, without quotes"),
    ("max_tokens: 32", "max_tokens: 1_000", "sampling.max_tokens", "a whole number is wanted (given: '1_000')"),
    ("interval_s: 2.5", "interval_s: 0:30", "checkpoint.interval_s", "a number is wanted (given: '0:30')"),
    ("interval_s: 2.5", "interval_s: '2.5'", "checkpoint.interval_s", "a number is wanted, without quotes"),
    ("interval_s: 2.5", "interval_s: [2]", "checkpoint.interval_s", "a number is wanted"),
    ("interval_s: 2.5", "interval_s: .inf", "checkpoint.interval_s", "finite number"),
    ("temperature: 0.5", "temperature: .nan", "sampling.temperature", "finite number"),
    ("output:\n  dir: out\n  format: jsonl", "output: out", "output", "valid dictionary"),
    ("failures:\n  max: 3\n  strikes: 4", "failures:", "failures", "valid dictionary"),
    ("  max: 3", "  3: max", "failures.3", "Keys should be strings"),
    # Booleans, which Python counts as numbers.
    ("min_chars: 5", "min_chars: true", "input.0.min_chars", "not true or false"),
    ("docs_per_s: 100.5", "docs_per_s: yes", "engine.fake.docs_per_s", "a bare yes is a text to some"),
    ("fail_every: 7", "fail_every: on", "engine.fake.fail_every", "write true or false, or quote it"),
    ("die_after: 900", "die_after: false", "engine.fake.die_after", "not true or false"),
    ("temperature: 0.5", "temperature: false", "sampling.temperature", "not true or false"),
    ("max_tokens: 32", "max_tokens: true", "sampling.max_tokens", "not true or false"),
    ("interval_s: 2.5", "interval_s: true", "checkpoint.interval_s", "not true or false"),
    ("rows: 50", "rows: true", "checkpoint.rows", "not true or false"),
    ("max: 3", "max: no", "failures.max", "write true or false, or quote it"),
    # Numbers that mean nothing.
    ("min_chars: 5", "min_chars: 0", "input.0.min_chars", "greater than or equal to 1"),
    ("docs_per_s: 100.5", "docs_per_s: 0", "engine.fake.docs_per_s", "greater than 0"),
    ("fail_every: 7", "fail_every: 0", "engine.fake.fail_every", "greater than or equal to 1"),
    ("die_after: 900", "die_after: -1", "engine.fake.die_after", "greater than or equal to 0"),
    ("temperature: 0.5", "temperature: -0.5", "sampling.temperature", "greater than or equal to 0"),
    ("max_tokens: 32", "max_tokens: 0", "sampling.max_tokens", "greater than or equal to 1"),
    ("interval_s: 2.5", "interval_s: -30", "checkpoint.interval_s", "greater than 0"),
    ("rows: 50", "rows: 0", "checkpoint.rows", "greater than or equal to 1"),
    ("max: 3", "max: -1", "failures.max", "greater than or equal to 0"),
    # Keys that are missing: told where their section begins.
    (
        "prompt:\n  mode: chat\n  chat_template: own.jinja\n  system: You write summaries.\n  user:",
        "▸prompt:\n  system:",
        "prompt.user",
        "is required",
    ),
    ("output:\n  dir: out\n  format: jsonl", "▸output: {}", "output.dir", "is required"),
    ("path: data/a.jsonl\n    id_field: id", "id_field: id", "input.0.path", "is required"),
    # Kept names that would hide a column or the document.
    ("keep: [title, lang]", "keep: [title, summary]", "input.0.keep", "'summary' is a name of batchgen's own"),
    ("keep: [title, lang]", "keep: {author: id}", "input.0.keep", "keep: {author: my_id}"),
    ("keep: [title, lang]", "keep: {body: text}", "input.0.keep", "'text' is a name of batchgen's own"),
    ("keep: [title, lang]", "keep: [boundary]", "input.0.keep", "'boundary' is a name of batchgen's own"),
    ("keep: [title, lang]", "keep: {a: title, b: title}", "input.0.keep", "two fields get the same name"),
    # Data sets.
    ("data_files:", "data_file:", "input.2.dataset.data_file", "did you mean 'data_files'?"),
    ("path: parquet", 'path: ""', "input.2.dataset.path", "at least 1 character"),
    ("name: small", "name: 7", "input.2.dataset.name", "valid string"),
    ("data_dir: data/c", "data_dir: [data]", "input.2.dataset.data_dir", "valid string"),
    ("data_files: c.parquet", "data_files: 7", "input.2.dataset.data_files", "a path is wanted"),
    ("data_files: c.parquet", "data_files: []", "input.2.dataset.data_files", "a path is wanted"),
    ("data_files: c.parquet", "data_files: {train: [a, 7]}", "input.2.dataset.data_files", "a path is wanted"),
    ("split: test", "split: [test]", "input.2.dataset.split", "valid string"),
    ("split: test", "revision: 12", "input.2.dataset.revision", "valid string"),
    ("dataset:\n      path: parquet", "dataset:", "input.2.dataset.path", "is required"),
    (
        "path: data/b.parquet",
        "path: data/b.parquet\n    ▸dataset: {path: json}",
        "input.1.dataset",
        "path or dataset, not both",
    ),
    # Lists and mappings in each other's place.
    ("  - path: data/a.jsonl\n    id_field: id", "  - data/a.jsonl\n  - id_field: id", "input.0", "valid dictionary"),
]


def mistaken(old: str, new: str) -> tuple[str, int]:
    """FULL with the mistake in it, and the line the error must name."""
    assert FULL.count(old) == 1, f"{old!r} is no single place"
    text = FULL.replace(old, new if "▸" in new else "▸" + new)
    return text.replace("▸", ""), line_of(text, "▸")


@pytest.mark.parametrize(("old", "new", "dotted", "words"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_a_mistake_is_told_with_line_and_key(tmp_path, old, new, dotted, words):
    text, line = mistaken(old, new)
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    told = [one for one in str(caught.value).splitlines() if one.startswith(f"{tmp_path / 'job.yaml'}, line {line}: ")]
    told = [one for one in told if f": {dotted}: " in one]
    assert len(told) == 1, str(caught.value)
    assert words in told[0]


def test_missing_sections_are_told_with_the_file(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "engine: {backend: fake}\n")
    file = tmp_path / "job.yaml"
    assert str(caught.value).splitlines() == [
        f"{file}: {key}: this key is required" for key in ("name", "input", "prompt", "output")
    ]


def test_an_empty_list_of_inputs_is_refused(tmp_path):
    text = yaml.safe_dump(yaml.safe_load(FULL) | {"input": []}, sort_keys=False)
    with pytest.raises(ConfigError, match="line 2: input: List should have at least 1 item"):
        load_text(tmp_path, text)


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    text = FULL
    for old, new in [("nam", "nom"), ("rows: 50", "rows: -1"), ("feed: rolling", "feed: x"), ("max: 3", "mx: 3")]:
        text = text.replace(old, new, 1)
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    told = str(caught.value).splitlines()
    assert len(told) == 5  # the misspelt name is one that is missing, too
    for dotted in ("name", "nome", "checkpoint.rows", "engine.feed", "failures.mx"):
        assert sum(f": {dotted}: " in one for one in told) == 1, told


def test_all_faults_of_kept_names_are_told_at_once(tmp_path):
    text = FULL.replace("keep: [title, lang]", "keep: [status, error]").replace("region: lang", "region: title")
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    told = str(caught.value).splitlines()
    assert [one.split(": ", 1)[1] for one in told] == [
        "input.0.keep: 'status' is a name of batchgen's own; give it another: keep: {status: my_status}",
        "input.0.keep: 'error' is a name of batchgen's own; give it another: keep: {error: my_error}",
        "input.1.keep: two fields get the same name",
    ]
    assert f"line {line_of(text, 'keep: [')}:" in told[0]
    assert f"line {line_of(text, '    keep:' + chr(10))}:" in told[2]


# Every key of the schema: its value in FULL, and what it is where the job leaves it out (... where it must not).
FIELDS = {
    "name": ("demo", ...),
    "input": (None, ...),
    "input.path": ("data/a.jsonl", None),
    "input.dataset": (None, None),
    "input.dataset.path": ("parquet", ...),
    "input.dataset.name": ("small", None),
    "input.dataset.data_dir": ("data/c", None),
    "input.dataset.data_files": ("c.parquet", None),
    "input.dataset.split": ("test", "train"),
    "input.dataset.revision": (None, None),
    "input.id_field": ("id", None),
    "input.text_field": ("body.text", "text"),
    "input.keep": ({"title": "title", "lang": "lang"}, {}),
    "input.on_error": ("skip", "refuse"),
    "input.on_duplicate": ("refuse", "fail"),
    "input.min_chars": (5, 20),
    "prompt": (None, ...),
    "prompt.mode": ("chat", "chat"),
    "prompt.chat_template": ("own.jinja", None),
    "prompt.system": ("You write summaries.", None),
    "prompt.user": ("{{ title }} ({{ lang }}): {{ text }}", ...),
    "engine": (None, config.Engine()),
    "engine.backend": ("fake", "vllm"),
    "engine.feed": ("rolling", "rolling"),
    "engine.args": ({"max_model_len": 512}, {}),
    "engine.profile": ("low_memory", "balanced"),
    "engine.replicas_per_gpu": (2, "auto"),
    "engine.adapt": (True, False),
    "engine.adapter": ("adapters/letters", None),
    "engine.fake": (None, config.FakeEngine()),
    "engine.fake.docs_per_s": (100.5, None),
    "engine.fake.fail_every": (7, None),
    "engine.fake.fail_on": ("marsh", None),
    "engine.fake.die_after": (900, None),
    "engine.fake.lives": (8, None),
    "engine.fake.die_on": ("poison", None),
    "engine.fake.hang_on": ("swamp", None),
    "engine.fake.copies": ("canary-[0-9]+", None),
    "engine.fake.answers": (None, []),
    "engine.fake.answers.match": ("quay wall", ...),
    "engine.fake.answers.text": ("<think>Walls.</think>The wall is new.", ...),
    "engine.fake.answers.finish_reason": ("length", "stop"),
    "engine.fake.start_faults": (["too small"], []),
    "engine.fake.tells": ({"running": 3, "ttft_s": 0.25}, {}),
    "engine.fake.output_tokens_per_s": (5000.5, None),
    "engine.stall_s": (30.5, 300.0),
    "lifecycle": (None, config.Lifecycle()),
    "lifecycle.grace_s": (5.5, 20.0),
    "metrics": (None, config.Metrics()),
    "metrics.textfile": ("metrics/demo.prom", None),
    "failures.strikes": (4, 2),
    "sampling": (None, config.Sampling()),
    "sampling.temperature": (0.5, 0.0),
    "sampling.max_tokens": (32, 256),
    "long_documents": (None, config.LongDocuments()),
    "long_documents.policy": ("skip", "truncate"),
    "long_documents.keep": ("head_tail", "head"),
    "long_documents.overlap_tokens": (32, 64),
    "long_documents.max_requests": (100, 256),
    "long_documents.max_depth": (2, 4),
    "long_documents.piece": ("Part: {{ text }}", config.LongDocuments().piece),
    "long_documents.reduce": ("Parts: {{ text }}", config.LongDocuments().reduce),
    "long_documents.refine": ("{{ summary }} and {{ text }}", config.LongDocuments().refine),
    "packing": (None, config.Packing()),
    "packing.mode": ("off", "off"),
    "packing.max_documents": (6, 8),
    "packing.max_document_tokens": (200, 256),
    "packing.max_pack_tokens": (400, None),
    "packing.answer": ("lines", "json"),
    "packing.verify": ("labels", "words"),
    "answers": (None, config.Answers()),
    "answers.reasoning_end": ("</think>", None),
    "answers.retry_max_tokens": (96, None),
    "checkpoint": (None, config.Checkpoint()),
    "checkpoint.interval_s": (2.5, 30.0),
    "checkpoint.rows": (50, 2000),
    "failures": (None, config.Failures()),
    "failures.max": (3, 0),
    "report": (None, config.Report()),
    "report.cost": (None, None),
    "report.cost.currency": ("CHF", "EUR"),
    "report.cost.per_gpu_hour": (2.5, ...),
    "output": (None, ...),
    "output.dir": ("out", ...),
    "output.format": ("jsonl", "parquet"),
}
NO_MISTAKE_POSSIBLE = {
    "input.path",
    "prompt.user",
    "prompt.system",
    "prompt.chat_template",
    "input.id_field",
    "long_documents.piece",
    "long_documents.reduce",
    "long_documents.refine",
}  # any text is one


def schema(section: type[BaseModel] = Job, at: str = "") -> dict:
    """Each field of the schema by its dotted key, lists left out."""
    found = {}
    for name, field in section.model_fields.items():
        found[f"{at}{name}"] = field
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= schema(kind, f"{at}{name}.")
    return found


def reach(job: Job, dotted: str):
    at = job
    for part in dotted.split("."):
        found = [getattr(one, part) for one in (at if isinstance(at, list) else [at])]
        at = next((one for one in found if one is not None), None)  # an input has a path or a data set
    return at


def test_the_tables_here_know_every_field():
    assert set(schema()) == set(FIELDS)
    tested = {".".join(part for part in m[2].split(".") if not part.isdigit()) for m in MISTAKES}
    leaves = {key for key, (value, _) in FIELDS.items() if value is not None}
    assert leaves - NO_MISTAKE_POSSIBLE <= tested


@pytest.mark.parametrize("dotted", sorted(schema()))
def test_every_field_has_a_description(dotted):
    text = schema()[dotted].description
    assert text
    assert text.endswith(".")


@pytest.mark.parametrize("dotted", sorted(FIELDS))
def test_every_field_is_read_and_has_its_default(tmp_path, dotted):
    value, default = FIELDS[dotted]
    if value is not None:
        assert reach(load_text(tmp_path, FULL).job, dotted) == value
    field = schema()[dotted]
    given = field.get_default(call_default_factory=True)
    assert given is PydanticUndefined if default is ... else given == default


def test_the_second_input_stands_on_its_own(tmp_path):
    second = load_text(tmp_path, FULL).job.input[1]
    assert (second.path, second.keep) == ("data/b.parquet", {"heading": "title", "region": "lang"})
    assert (second.id_field, second.text_field, second.min_chars) == (None, "text", 20)


def test_sampling_takes_other_names_of_vllm(tmp_path):
    text = FULL.replace("  max_tokens: 32", "  max_tokens: 32\n  top_p: 0.9\n  stop: ['##']")
    sampling = load_text(tmp_path, text).job.sampling
    assert sampling.others == {"top_p": 0.9, "stop": ["##"]}
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 32)


def test_a_job_never_changes(tmp_path):
    job = load_text(tmp_path, FULL).job
    for section, name in [(job, "name"), (job.input[0], "path"), (job.sampling, "max_tokens"), (job.output, "dir")]:
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, name, "x")


def test_variables_are_what_the_user_turn_reads(tmp_path):
    assert load_text(tmp_path, FULL).job.prompt.variables == {"title", "lang", "text"}
    job = load_text(tmp_path, FULL.replace("{{ title }}", "{{ title")).job
    with pytest.raises(ConfigError, match=r"prompt\.user, line 1 of it"):
        _ = job.prompt.variables


def test_columns_are_those_that_parts_have():
    written = list(columns.TYPES)
    assert sorted(COLUMNS) == sorted(written)


@pytest.mark.parametrize("path", sorted((TOP / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_jobs_that_come_along_are_valid(path):
    from batchgen.prompting.prompts import check_templates

    file = load(path)
    check_templates(file.job, file.origin)


class Either(config.Section):
    one: str = ""


class Or(config.Section):
    other: str = ""


class Whole(config.Section):
    parts: list[Either | Or] = Field(default_factory=list)
    part: Or | None = None


@pytest.mark.parametrize(
    ("word", "mode"), [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("auto", "auto")]
)
def test_packing_is_on_or_off_in_every_spelling_of_these(tmp_path, word, mode):
    path = tmp_path / "job.yaml"
    short = "name: x\ninput: [{path: a.jsonl}]\nprompt: {user: '{{ text }}'}\noutput: {dir: out}\n"
    path.write_text(f"{short}packing:\n  mode: {word}\n")
    assert jobfile.load(path).job.packing.mode == mode
    path.write_text(short)
    assert jobfile.load(path, [f"packing.mode={word}"]).job.packing.mode == mode


def test_known_keys_are_those_of_all_sections_that_may_stand_there(monkeypatch):
    monkeypatch.setattr(jobfile, "Job", Whole)
    assert jobfile._known_keys(()) == ["parts", "part"]
    assert jobfile._known_keys(("parts", 0)) == ["one", "other"]
    assert jobfile._known_keys(("part",)) == ["other"]


# --set


@pytest.mark.parametrize(
    ("assignment", "dotted", "value"),
    [
        ("name=other", "name", "other"),
        ("engine.feed=generate", "engine.feed", "generate"),
        ("checkpoint.rows=7", "checkpoint.rows", 7),
        ("sampling.temperature=0", "sampling.temperature", 0),
        ("input.0.path=x.jsonl", "input.path", "x.jsonl"),
        ("input.0.keep=[a, b]", "input.keep", {"a": "a", "b": "b"}),
        ("input.0.keep={a: b}", "input.keep", {"a": "b"}),
        ("engine.args.model=some/where", "engine.args", {"max_model_len": 512, "model": "some/where"}),
        ("engine.args={}", "engine.args", {}),
        ("output.dir=a=b", "output.dir", "a=b"),
        ("prompt.system=", "prompt.system", None),
        ("engine.fake.docs_per_s=~", "engine.fake.docs_per_s", None),
    ],
)
def test_set_lays_a_value_over_the_file(tmp_path, assignment, dotted, value):
    file = load_text(tmp_path, FULL, assignment)
    assert reach(file.job, dotted) == value
    rest = load_text(tmp_path, FULL).job.model_dump()
    changed = file.job.model_dump()
    top = dotted.split(".")[0]
    assert {k: v for k, v in changed.items() if k != top} == {k: v for k, v in rest.items() if k != top}


def test_set_makes_sections_that_are_not_there(tmp_path):
    text = "name: a\ninput: [{path: x}]\nprompt: {user: '{{ text }}'}\noutput: {dir: o}\nengine:\n"
    job = load_text(tmp_path, text, "engine.fake.fail_every=3", "sampling.top_p=0.5", "input.0.keep.year=y").job
    assert job.engine.fake.fail_every == 3
    assert job.sampling.others == {"top_p": 0.5}
    assert job.input[0].keep == {"year": "y"}


def test_set_names_fields_that_look_like_numbers(tmp_path):
    text = FULL.replace("keep: [title, lang]", "keep: {title: title, lang: lang}")
    assert load_text(tmp_path, text, "input.0.keep.2024=year").job.input[0].keep["2024"] == "year"


def test_the_last_set_holds(tmp_path):
    assert load_text(tmp_path, FULL, "name=a", "name=b").job.name == "b"


def test_set_changes_one_section_where_an_alias_names_two(tmp_path):
    text = "name: a\ninput: [&one {path: x, keep: [t]}, *one]\nprompt: {user: '{{ text }}'}\noutput: {dir: o}\n"
    job = load_text(tmp_path, text, "input.1.path=y").job
    assert [item.path for item in job.input] == ["x", "y"]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("name", "a key and a value are wanted"),
        ("=x", "a key and a value are wanted"),
        ("engine..feed=x", "a key and a value are wanted"),
        (".=x", "a key and a value are wanted"),
        ("name.=x", "a key and a value are wanted"),
        ("input.3.path=x", "no entry 3 in a list of 3"),
        ("input.-1.path=x", "no entry '-1' in a list of 3"),
        ("input.first.path=x", "no entry 'first' in a list of 3"),
        ("input.\u00b2.path=x", "no entry '\u00b2' in a list of 3"),
        ("input.3=x", "no entry 3 in a list of 3"),
        ("output.dir.x=1", "leads through 'dir', which holds no keys"),
        ("output.dir.x.y=1", "leads through 'dir', which holds no keys"),
        ("name=[", "the value is no valid YAML"),
        ("name=!!int few", "the value is no valid YAML"),
    ],
)
def test_a_set_that_leads_nowhere_is_told_whole(tmp_path, assignment, words):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, FULL, assignment)
    assert str(caught.value).startswith(f"--set {assignment}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("engine.fed=x", "--set engine.fed: unknown key; did you mean 'feed'?"),
        ("enigne.feed=rolling", "--set enigne: unknown key; did you mean 'engine'?"),
        ("checkpoint.rows=-1", "--set checkpoint.rows: Input should be greater than or equal to 1"),
        ("checkpoint.rows=true", "--set checkpoint.rows: a whole number is wanted, not true or false"),
        ("checkpoint.rows=yes", "--set checkpoint.rows: a bare yes is a text to some and true or false to others: "),
        ("checkpoint.rows=1e3", "--set checkpoint.rows: a whole number is wanted: write 1000"),
        ("input.0.keep={a: no}", "--set input.0.keep: input.0.keep.a: a bare no is a text to some"),
        ("engine.args={a: 1, a: 2}", "--set engine.args: engine.args.a: this key stands twice"),
        ("engine.args.x=.nan", "--set engine.args.x: a finite number is wanted (given: .nan)"),
        ("engine.fake={docs_per_s: 0}", "--set engine.fake: engine.fake.docs_per_s: Input should be greater than 0"),
        ("prompt={}", "--set prompt: prompt.user: this key is required"),
        ("input.0.keep=[id]", "--set input.0.keep: 'id' is a name of batchgen's own"),
    ],
)
def test_a_fault_that_a_set_brought_names_the_set(tmp_path, assignment, told):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, FULL, assignment)
    assert str(caught.value).startswith(told)


def test_a_set_does_not_hide_a_fault_of_the_file(tmp_path):
    with pytest.raises(ConfigError, match=rf"line {line_of(FULL, 'rows: 50')}: checkpoint\.rows: "):
        load_text(tmp_path, FULL.replace("rows: 50", "rows: 0"), "checkpoint.interval_s=1")


# Origin


def test_place_is_the_nearest_line_that_is_known():
    origin = Origin(Path("a.yaml"), {("engine",): 3, ("engine", "args"): 4, ("sampling",): 0})
    assert origin.place(("engine", "args", "model")) == "a.yaml, line 4"
    assert origin.place(("engine", "feed")) == "a.yaml, line 3"
    assert origin.place(("sampling", "n")) == "--set sampling"
    assert origin.place(("output",)) == "a.yaml"


def test_where_names_the_key_once():
    origin = Origin(Path("a.yaml"), {("engine",): 3, ("sampling",): 0})
    assert origin.where(("engine", "feed")) == "a.yaml, line 3: engine.feed"
    assert origin.where(("sampling",)) == "--set sampling"
    assert origin.where(("sampling", "n")) == "--set sampling: sampling.n"


def test_faults_sort_by_their_lines_and_those_of_a_set_are_the_last():
    origin = Origin(Path("a.yaml"), {("engine",): 3, ("engine", "feed"): 5, ("sampling",): 0})
    ats = [("sampling", "n"), ("engine", "feed"), ("engine", "args", "x"), ("output",)]
    with pytest.raises(ConfigError) as caught:
        jobfile.refuse([origin.fault(at, "wrong") for at in ats])
    assert str(caught.value).splitlines() == [
        "a.yaml: output: wrong",
        "a.yaml, line 3: engine.args.x: wrong",
        "a.yaml, line 5: engine.feed: wrong",
        "--set sampling: sampling.n: wrong",
    ]


def test_without_faults_nothing_is_refused():
    jobfile.refuse([])


def test_nearest_says_nothing_where_nothing_is_near():
    assert nearest("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert nearest("xyz", ["temperature", "top_p"]) == ""
    assert nearest("xyz", []) == ""


def test_loading_leaves_the_file_alone(tmp_path):
    path = write(tmp_path, FULL)
    load(path, ["name=other", "engine.feed=generate"])
    assert path.read_text(encoding="utf-8") == FULL
