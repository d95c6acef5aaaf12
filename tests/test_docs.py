"""The pages say what the code says: commands, keys, columns, exit statuses, error types, links."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from helpers_run import record, rows, start, write_job, write_jsonl

from batchgen import data, errors
from batchgen.cli import cli
from batchgen.executors.retry import OF_RECORDS, OF_SETTINGS
from batchgen.job import jobfile, schema
from batchgen.job.config import COLUMNS, Job
from batchgen.reporting.stats import read_telemetry
from batchgen.sinks.columns import KEPT_FIELD_UNFIT

TOP = Path(__file__).parent.parent
DOCS = TOP / "docs"
PAGES = sorted([*DOCS.glob("*.md"), TOP / "README.md", TOP / "CONTRIBUTING.md"])


# Reading a page.


def squeeze(text: str) -> str:
    return " ".join(text.split())


@cache
def sections(page: Path) -> dict[str, str]:
    """The text below each heading, up to the next; headings inside of code are none."""
    found, at, in_code = {}, "", False
    for line in page.read_text(encoding="utf-8").splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            at = line.lstrip("# ").strip()
            assert at not in found, f"{page.name}: heading {at!r} stands twice"
            found[at] = ""
        else:
            found[at] = found.get(at, "") + line + "\n"
    return found


def tables(text: str) -> list[list[list[str]]]:
    """Cells of each table row, without the two rows of the head; code marks around a whole cell are taken off."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        assert all(len(cells) == len(lines[0]) for cells in lines), f"uneven table: {block}"
        assert all(re.fullmatch(r"\s*:?-+:?\s*", cell) for cell in lines[1]), f"no table: {block}"
        found.append([[bare(cell) for cell in cells] for cells in lines[2:]])
    return found


def bare(cell: str) -> str:
    text = squeeze(cell).replace("\\|", "|")
    return text[1:-1] if re.fullmatch(r"`[^`]+`", text) else text


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The first table below a heading: its other cells by the first; the first cell stands once."""
    lines = tables(sections(DOCS / page)[heading])[0]
    found = {first: rest for first, *rest in lines}
    assert len(found) == len(lines), f"{page}, {heading}: a row stands twice"
    return found


# Commands.


def commands(command: click.Command = cli, name: str = "batchgen") -> dict[str, click.Command]:
    found = {name: command}
    if isinstance(command, click.Group):
        for below in command.commands:
            found |= commands(command.commands[below], f"{name} {below}")
    return found


def heading_of(name: str) -> str:
    arguments = [one for one in commands()[name].params if isinstance(one, click.Argument)]
    return " ".join([name, *(one.make_metavar(context(name)) for one in arguments)])


def context(name: str) -> click.Context:
    return click.Context(commands()[name], info_name=name, **cli.context_settings)


def test_every_command_has_its_section_and_no_other_has_one():
    told = {heading for heading in sections(DOCS / "commands.md") if heading.startswith("batchgen")}
    assert told == {heading_of(name) for name in commands()}


@pytest.mark.parametrize("name", commands())
def test_options_stand_with_the_text_of_their_help(name):
    at = context(name)
    records = [one.get_help_record(at) for one in commands()[name].get_params(at) if isinstance(one, click.Option)]
    assert all(text.strip() for _, text in records), "an option without help"
    assert {one: squeeze(cells[0]) for one, cells in table("commands.md", heading_of(name)).items()} == {
        squeeze(one): squeeze(text) for one, text in records
    }


@pytest.mark.parametrize("name", [name for name in commands() if name != "batchgen"])
def test_a_commands_section_begins_with_its_help(name):
    assert squeeze(sections(DOCS / "commands.md")[heading_of(name)]).startswith(squeeze(commands()[name].help))


# The job file.


def test_the_page_of_keys_is_what_the_schema_gives():
    assert (DOCS / "config.md").read_text(encoding="utf-8") == schema.page(), "write it anew: make docs"


@pytest.mark.parametrize("model", [model for _, model in schema.sections()], ids=lambda model: model.__name__)
def test_every_key_has_a_meaning(model):
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_smallest_job_of_the_page_is_one(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", (DOCS / "job.md").read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    job = jobfile.load(tmp_path / "job.yaml").job
    assert job.model_fields_set == {name for name, field in Job.model_fields.items() if field.is_required()} | {
        "engine"
    }
    assert job.engine.model_fields_set == {"args"}
    assert set(job.engine.args) == {"model"}


# The output.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run, with a document for every fault that an input can have."""
    folder = tmp_path_factory.mktemp("docs")
    path = write_jsonl(
        folder / "in/a.jsonl",
        [
            *map(record, range(20)),
            record(29, title="poison"),
            record(1),
            record(20, text=""),
            record(21, text="n/a"),
            record(22, text=7),
            {"id": "d23"},
            record(24, id=None),
            record(25, id=2.5),
            record(26, title="long " * 2000),
            record(27, title="title" * 9),
            record(28, text="word " * 9000),
        ],
    )
    with path.open("a") as stream:
        stream.write("{\n")
    user = "{% if title|length == 45 %}{{ title / 2 }}{% endif %}{{ title }}\n{{ text }}"
    job = write_job(folder, [folder / "in/*"], prompt={"user": user}, long_documents={"policy": "skip"})
    start(job, "engine.fake.fail_every=7", "engine.fake.die_on=poison")
    start(job, retry=frozenset({"text_type"}))
    return folder / "out"


def test_columns_stand_in_their_order_with_the_type_in_the_file(run):
    part = min(run.glob("summaries/*"))
    schema = [field for field in pq.read_schema(part) if field.name != "title"]
    assert [name for name, *_ in tables(sections(DOCS / "output.md")["Columns"])[0]] == [field.name for field in schema]
    assert {name: cells[0] for name, cells in table("output.md", "Columns").items()} == {
        field.name: str(field.type) for field in schema
    }
    assert set(table("output.md", "Columns")) == set(COLUMNS)


def error_types() -> set[str]:
    """What the code gives as an error's type: the first of a pair whose second is the sentence."""
    found: set[str] = set()
    for path in sorted((TOP / "batchgen").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if is_pair(node) and is_sentence(node.elts[1]):
                found.add(node.elts[0].value)
            found |= {one.elts[0].value for one in errors_in(node) if is_pair(one)}
            if isinstance(node, ast.keyword) and node.arg == "error_type" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
    return found


def errors_in(node: ast.AST) -> list[ast.AST]:
    """Expressions that are errors by the place they stand in, whatever their sentence is made of."""
    if isinstance(node, ast.Assign):
        named = [one.id for one in node.targets if isinstance(one, ast.Name)]
        return [node.value] if any(re.search("error|fault|skip", name) for name in named) else []
    if isinstance(node, ast.keyword):
        return [node.value] if node.arg in ("error", "skip") else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "broken":
        return node.args
    return []


def is_pair(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant)):
        return False
    return bool(re.fullmatch("[a-z_]+", str(node.elts[0].value)))


def is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and " " in str(node.value))


def test_error_types_of_the_code_and_of_the_page_are_the_same():
    told = {kind: status for status, kind, _ in tables(sections(DOCS / "output.md")["Error types"])[0]}
    assert set(told) == error_types()


def test_rows_have_the_error_types_and_flags_of_the_page(run):
    told = {(status, kind) for status, kind, _ in tables(sections(DOCS / "output.md")["Error types"])[0]}
    met = {(row["status"], row["error_type"]) for row in rows(run) if row["error_type"]}
    assert met <= told
    # All but those that JSONL, the fake engine and this job cannot give: the search through the code misses none.
    kinds = (
        "bad_value",
        "record_too_large",
        "empty_output",
        "reasoning_cut",
        "no_answer",
        "document_too_long",
        "not_reduced",
    )
    assert told - met == {("failed", kind) for kind in kinds}
    assert {row["status"] for row in rows(run)} == set(table("output.md", "Statuses"))


def test_the_page_tells_which_failures_are_tried_again():
    lines = tables(sections(DOCS / "commands.md")["Which documents are tried again"])[0]
    told = [{*re.findall(r"`(\w+)`", types)} for _, types, _ in lines]
    assert told[:2] == [OF_RECORDS, OF_SETTINGS]
    failing = {kind for status, kind, _ in tables(sections(DOCS / "output.md")["Error types"])[0] if status == "failed"}
    assert set().union(*told) == failing


def test_reasons_of_packs_are_those_of_the_page():
    told = set(table("packing.md", "What is looked at"))
    texts = [
        (TOP / "batchgen/workflows" / name).read_text(encoding="utf-8")
        for name in ("packed.py", "unpack.py", "support.py")
    ]
    assert all(any(f'"{one}"' in text for text in texts) for one in told)
    met = set(re.findall(r'found\[n\] = "(\w+)"|\breason="(\w+)"|fromkeys\(pack\.labels, "(\w+)"', "".join(texts)))
    met = {one for found in met for one in found if one}
    assert met == {"foreign", "unsupported", "alike", "engine_died", "request_failed"}
    assert met <= told
    assert told - met == {"missing", "cut", "doubled", "empty", "too_long", "unreadable"}


def test_flags_stand_on_the_page():
    flags = {KEPT_FIELD_UNFIT}
    flags |= {value for name, value in vars(data).items() if name.isupper() and isinstance(value, str)}
    assert set(table("output.md", "Flags")) == flags


def leaves(value, at="") -> set[str]:
    """Dotted keys; what hangs below these depends on the run."""
    whole = {
        "documents.reasons", "documents.flags", "documents.ways", "engine.args", "versions", "packing.fallbacks",
        "packing.decision", "cost",
    }  # fmt: skip
    if not isinstance(value, dict) or at in whole or re.fullmatch(r"(lengths|histograms|\w+\.latency)\.\w+", at):
        return {at}
    return {leaf for key, below in value.items() for leaf in leaves(below, f"{at}.{key}".lstrip("."))}


def test_keys_of_the_report_are_those_of_the_page(run):
    told = set()
    for key in table("output.md", "report.json"):
        told |= {key.replace("attempt|run", one) for one in ("attempt", "run")}
    assert told == leaves(json.loads((run / "report.json").read_text()))


@pytest.fixture(scope="module")
def run_of_packs(tmp_path_factory):
    """A run whose only pack gets an answer that nobody can read."""
    folder = tmp_path_factory.mktemp("packs")
    write_jsonl(folder / "a.jsonl", map(record, range(3)))
    answers = json.dumps([{"match": "separate requests", "text": "No."}])
    start(write_job(folder, [folder / "a.jsonl"]), "packing.mode=true", f"engine.fake.answers={answers}")
    return folder / "out"


def test_telemetry_events_and_counts_are_those_of_the_page(run, run_of_packs):
    paths = [path for folder in (run, run_of_packs) for path in sorted(folder.glob("telemetry-*"))]
    events = [event for path in paths for event in read_telemetry(path)]
    shown, counts = tables(sections(DOCS / "output.md")["Telemetry"])
    told = {event: {*re.findall(r"`(\w+)`", keys if "`" in keys else f"`{keys}`")} for event, _, keys in shown}
    assert told == {one["event"]: {*one} - {"event", "at"} for one in events}
    assert [name for name, _ in counts] == list(next(one for one in events if "counts" in one)["counts"])


@pytest.fixture(scope="module")
def run_of_lines(tmp_path_factory):
    """A run with parts of JSON Lines, a damaged one and orphans."""
    folder = tmp_path_factory.mktemp("lines")
    write_jsonl(folder / "in/a.jsonl", map(record, range(9)))
    gone = write_jsonl(folder / "in/b.jsonl", [record(9)])
    job = write_job(
        folder, [folder / "in/*"], checkpoint={"rows": 4}, output={"dir": str(folder / "out"), "format": "jsonl"}
    )
    start(job)
    gone.unlink()
    min(folder.glob("out/summaries/part-*")).write_bytes(b"torn")
    start(job)
    return folder / "out"


def test_a_line_of_json_has_the_columns_of_the_page(run_of_lines):
    row = json.loads(min(run_of_lines.glob("summaries/part-*")).read_text().split("\n")[0])
    assert [name for name in row if name != "title"] == list(table("output.md", "Columns"))


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_files_of_a_run_are_those_of_the_page(format_, request):
    run = request.getfixturevalue("run" if format_ == "parquet" else "run_of_lines")
    told = [
        re.compile(re.sub(r"<\w+>", r"\\d+", name.replace(".", r"\.").replace("…", ".*")))
        for name in table("output.md", "The run directory")
    ]
    made = [str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file()]
    assert made
    assert [name for name in made if not any(pattern.fullmatch(name) for pattern in told)] == []


@pytest.mark.parametrize("page", ["output.md", "troubleshooting.md"])
def test_python_on_the_page_works(run, run_of_lines, tmp_path, page):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/summarize").symlink_to(run)
    (tmp_path / "outputs/summarize_jsonl").symlink_to(run_of_lines)
    env = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=env, check=True)


# Exit statuses.


def tree(kind=errors.BatchgenError):
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("batchgen."):  # tests may have their own
            yield from tree(below)


def test_exit_statuses_are_those_of_the_code():
    known = {kind.exit_status for kind in tree()} | {errors.OK, errors.TOO_MANY_FAILED, errors.BUG}
    known |= {click.UsageError.exit_code, 128 + signal.SIGPIPE}
    assert set(table("exit-codes.md", "Exit statuses")) == {*map(str, known), "128 + n"}


# Links.


def slugs(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in sections(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in slugs(target)):
            broken.append(link)
    assert broken == []


def test_the_pages_are_there():
    assert {"commands.md", "config.md", "exit-codes.md", "job.md", "output.md", "troubleshooting.md", "README.md"} <= {
        page.name for page in PAGES
    }
