"""The job file: its schema, and errors that name file, line, key and the nearest known key."""

import copy
import difflib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from batchgen import yaml_lines
from batchgen.errors import ConfigError
from batchgen.values import Bool, Float, Int
from batchgen.yaml_lines import KeyPath, Parsed


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _keep_as_mapping(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if not all(isinstance(name, str) for name in value):
        raise ValueError("a list of field names is wanted, or a mapping {theirs: new_name}")
    return {name: name for name in value}


def _patterns(value: Any) -> Any:
    lists = [value] if isinstance(value, str | list) else list(value.values()) if isinstance(value, dict) else [None]
    patterns = [one for some in lists for one in (some if isinstance(some, list) else [some])]
    if value is not None and not (patterns and all(isinstance(one, str) and one for one in patterns)):
        raise ValueError("a path is wanted, a list of paths, or a mapping {split: paths}")
    return value


class Dataset(Section):
    """What `datasets.load_dataset` reads, under its own argument names. It is streamed, and no code of it is run."""

    path: str = Field(
        min_length=1, description="A folder, a builder (`parquet`, `json`, `csv`, `text`, …), or a name on the Hub."
    )
    name: str | None = Field(None, description="The configuration, where the data set has several.")
    data_dir: str | None = Field(None, description="The folder of a builder's files, or a folder in the data set.")
    data_files: Annotated[
        str | list[str] | dict[str, str | list[str]] | None,
        BeforeValidator(_patterns, json_schema_input_type=str | list[str] | dict[str, str]),
    ] = Field(None, description="Paths and globs of the data: one, a list, or a mapping {split: paths}.")
    split: str = Field("train", min_length=1, description="The split, or several: `train+test`, `all`.")
    revision: str | None = Field(
        None, description="Branch, tag or commit on the Hub. A run keeps the commit that its first start found."
    )

    @property
    def source(self) -> str:
        """What rows and messages call it: `dataset:org/data/config/split`, and a digest where files are named.

        It depends on no other input: documents without ids are known by it.
        """
        parts = [self.path.rstrip("/"), *([self.name] if self.name else []), self.split]
        files = [self.data_dir, self.data_files]
        digest = hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=4).hexdigest()
        return "dataset:" + "/".join(parts) + (f"#{digest}" if any(files) else "")


class Input(Section):
    """Documents of one shape, from files or a data set. Relative paths start at the working directory."""

    path: str | None = Field(
        None,
        description="A .jsonl, .ndjson, .json or .parquet file, JSON also as .gz or .zst; a folder of such; or a glob. "
        "Not with `dataset`.",
    )
    dataset: Dataset | None = Field(None, description="Anything that `datasets.load_dataset` reads. Not with `path`.")
    id_field: str | None = Field(
        None, description="Field with the document's id, text or integer. Without it a document is its place."
    )
    text_field: str = Field("text", description="Field with the text; `a.b` reaches into nested records.")
    keep: Annotated[
        dict[str, str], BeforeValidator(_keep_as_mapping, json_schema_input_type=list[str] | dict[str, str])
    ] = Field(
        default_factory=dict,
        description="Fields copied to the output and usable in the prompt: a list, or {theirs: new_name}.",
    )
    on_error: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What a file means that cannot be read: `refuse` starts nothing; `skip` does the others and ends "
        "with 65.",
    )
    on_duplicate: Literal["fail", "refuse"] = Field(
        "fail",
        description="A row of this input whose id stood in an earlier row: `fail` makes it a failed row; `refuse` "
        "looks for such rows before anything is sent, and does not start.",
    )
    min_chars: Int = Field(20, ge=1, description="Documents with fewer visible characters are skipped, and never sent.")

    @property
    def source(self) -> str:
        """What the fingerprint and messages call the input."""
        return self.dataset.source if self.dataset else str(self.path)


class Prompt(Section):
    """Jinja2 templates. `{{ text }}` is the document; names under `keep` are usable too."""

    mode: Literal["chat", "completion"] = Field(
        "chat", description="`chat` lays the chat template around both; `completion` is for models that have none."
    )
    chat_template: str | None = Field(
        None, description="A file with the chat template to use (Jinja) instead of the model's own."
    )
    system: str | None = Field(None, description="The shared instruction. It comes first: the prefix cache keeps it.")
    user: str = Field(description="The user turn. It holds `{{ text }}` exactly once, without filters.")

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names the user turn reads: their values reach the prompt, so a change in one is another document."""
        from jinja2 import TemplateSyntaxError, meta
        from jinja2.sandbox import SandboxedEnvironment

        try:
            return frozenset(meta.find_undeclared_variables(SandboxedEnvironment().parse(self.user)))
        except TemplateSyntaxError as e:
            raise ConfigError(f"prompt.user, line {e.lineno} of it: {e.message}") from e


class FakeAnswer(Section):
    match: str = Field(description="The answer is for prompts that hold this text; of several answers the first.")
    text: str = Field(description="The answer; tokens beyond the request's max_tokens are cut off.")
    finish_reason: Literal["stop", "length"] = Field(
        "stop", description="`length` calls an answer cut that is whole; one that is cut has it anyway."
    )


class FakeEngine(Section):
    """The engine for tests and dry runs: deterministic text, a set speed, faults on request."""

    docs_per_s: Float | None = Field(None, gt=0, description="Completions a second; as fast as possible when unset.")
    fail_every: Int | None = Field(None, ge=1, description="Every n-th request comes back with an error.")
    fail_on: str | None = Field(None, description="Requests whose prompt holds this text come back with an error.")
    die_after: Int | None = Field(None, ge=0, description="The engine dies after this many completions.")
    lives: Int | None = Field(None, ge=1, description="So many engines start in an attempt, further ones do not.")
    die_on: str | None = Field(None, description="The engine dies when it comes to a prompt that holds this text.")
    hang_on: str | None = Field(None, description="The engine hangs when it comes to a prompt that holds this text.")
    answers: list[FakeAnswer] = Field(default_factory=list, description="Answers to certain prompts.")
    start_faults: list[str] = Field(
        default_factory=list,
        description="Texts with which starts of an attempt fail, one after the other; then it starts.",
    )


class Engine(Section):
    backend: Literal["vllm", "fake"] = Field("vllm", description="The real engine, or a stand-in without a model.")
    feed: Literal["rolling", "generate"] = Field(
        "rolling",
        description="`rolling` keeps a bounded number of requests in flight; `generate` is plain LLM.generate "
        "over windows.",
    )
    stall_s: Float = Field(
        300.0, gt=0, description="An engine that gives no sign of work for so many seconds is started again."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of vLLM's engine, under vLLM's own names and only those."
    )
    adapt: Bool = Field(
        False,
        description="A start that fails for lack of memory is tried again with less, in the steps of docs/job.md.",
    )
    adapter: str | None = Field(
        None, description="A LoRA adapter that every request uses: a folder as PEFT saves it, or a name on the Hub."
    )
    fake: FakeEngine = Field(FakeEngine(), description="For `backend: fake`.")


class Sampling(BaseModel):
    """vLLM's SamplingParams under their own names; max_tokens is always set, since vLLM's default is 16."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    temperature: Float = Field(0.0, ge=0, description="0 always takes the likeliest token.")
    max_tokens: Int = Field(256, ge=1, description="Tokens of a summary at most; what is longer is cut and flagged.")

    @property
    def others(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class LongDocuments(Section):
    policy: Literal["truncate", "fail", "skip"] = Field(
        "truncate", description="What becomes of a document that does not fit: cut at its end, failed or skipped."
    )


class Answers(Section):
    reasoning_end: str | None = Field(
        None,
        pattern=r"\S",
        description="The tag that ends the model's reasoning, such as `</think>`; unset for a model that does not "
        "reason.",
    )
    retry_max_tokens: Int | None = Field(
        None,
        ge=1,
        description="A document whose answer was cut is sent once more, with this max_tokens; never if unset.",
    )


class Checkpoint(Section):
    interval_s: Float = Field(30.0, gt=0, description="Finished work is on disk after at most so many seconds.")
    rows: Int = Field(2000, ge=1, description="A part is written as soon as so many rows have gathered.")


class Failures(Section):
    max: Int = Field(0, ge=0, description="Up to so many failed documents the run still ends with 0.")
    strikes: Int = Field(
        2, ge=1, description="A document that was in so many dying engines is tried alone, and then fails."
    )


class Lifecycle(Section):
    grace_s: Float = Field(
        20.0, ge=0, description="After a signal or at the deadline, what finishes within so many seconds is kept."
    )


class Output(Section):
    dir: str = Field(description="The run directory: summaries, report, and what a resume needs.")
    format: Literal["parquet", "jsonl"] = Field(
        "parquet", description="Format of the summaries: Parquet, or JSON Lines for what reads line by line."
    )

    @property
    def path(self) -> Path:
        return Path(os.path.expanduser(self.dir))  # noqa: PTH111  Path's own raises for a user that is not there


class Job(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="What the run is called in its reports.")
    input: list[Input] = Field(min_length=1, description="The documents: one entry for files of one shape.")
    prompt: Prompt = Field(description="What the model is told.")
    engine: Engine = Field(Engine(), description="What runs the model, and how.")
    sampling: Sampling = Field(Sampling(), description="How the model writes: vLLM's SamplingParams by their names.")
    long_documents: LongDocuments = Field(LongDocuments(), description="Documents that are longer than the context.")
    answers: Answers = Field(Answers(), description="How the model's answers are read.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="When finished work is written.")
    failures: Failures = Field(Failures(), description="What failed documents mean for the whole run.")
    lifecycle: Lifecycle = Field(Lifecycle(), description="How a run that is told to stop does so.")
    output: Output = Field(description="Where the summaries go.")


Fault = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a job's keys stand: `place(("engine", "args"))` is a text like `jobs/a.yaml, line 12`."""

    file: Path
    lines: dict[KeyPath, int]

    def place(self, at: KeyPath) -> str:
        for end in range(len(at), 0, -1):
            if at[:end] in self.lines:
                line = self.lines[at[:end]]
                return f"{self.file}, line {line}" if line else f"--set {_dotted(at[:end])}"
        return str(self.file)

    def where(self, at: KeyPath) -> str:
        """The place and the key: `jobs/a.yaml, line 12: engine.args`, or `--set engine.args`."""
        place, key = self.place(at), _dotted(at)
        return place if place == f"--set {key}" else f"{place}: {key}"

    def fault(self, at: KeyPath, words: str) -> Fault:
        """What is wrong at a key, to be sorted: faults of the file by line, then those of `--set`."""
        lines = [self.lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self.lines]
        return (lines[0] or math.inf) if lines else 0, f"{self.where(at)}: {words}"


@dataclass(frozen=True, slots=True)
class JobFile:
    job: Job
    origin: Origin


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def load(file: Path, sets: Sequence[str] = ()) -> JobFile:
    """The job in `file` with `sets` (`a.b=value`, YAML values) laid over it.

    Raises ConfigError with every fault found, one a line.
    """
    parsed = yaml_lines.load(file)
    origin = Origin(file, parsed.lines)
    faults = [origin.fault(at, words) for at, words in parsed.faults.items()]  # before a --set changes the lines
    told = set(parsed.faults)
    for assignment in sets:
        try:
            ours = _apply_set(parsed, assignment)
        except ConfigError as e:
            faults.append((math.inf, str(e)))
        else:
            faults += [origin.fault(at, words) for at, words in ours.items()]
            told |= set(ours)
    try:
        job = Job.model_validate(parsed.value)
    except ValidationError as e:
        found = [_fault(error) for error in e.errors()]
        faults += [origin.fault(at, words) for at, words in found if at not in told]
    else:
        found_too = (*_input_faults(job), *_keep_faults(job), *_retry_faults(job))
        faults += [origin.fault(at, words) for at, words in found_too]
    refuse(faults)
    return JobFile(job, origin)


def refuse(faults: Iterable[Fault]) -> None:
    """Raise ConfigError with all of them, one a line, where there are any."""
    if lines := [text for _, text in sorted(faults, key=itemgetter(0))]:
        raise ConfigError("\n".join(lines))


def at_once(*checks: Callable[[], None]) -> None:
    """Make all checks, and raise one ConfigError with all that they raise."""
    told = []
    for check in checks:
        try:
            check()
        except ConfigError as e:
            told.append(str(e))
    if told:
        raise ConfigError("\n".join(told))


# Columns batchgen writes itself; a kept field cannot have one of these names. docs/output.md describes them.
COLUMNS = (
    "id", "id_type", "summary", "status", "error_type", "error", "finish_reason", "flags", "prompt_tokens",
    "cached_tokens", "completion_tokens", "reasoning_tokens", "dropped_tokens", "requests", "attempts", "source",
    "place", "doc_key", "content_hash", "fingerprint", "finished_at",
)  # fmt: skip


# What `prompt.user` is given besides kept fields.
OWN_NAMES = ("text", "boundary")


def _input_faults(job: Job) -> Iterator[tuple[KeyPath, str]]:
    for index, item in enumerate(job.input):
        if item.path is None and item.dataset is None:
            yield ("input", index, "path"), "this key is required, or dataset"
        if item.path is not None and item.dataset is not None:
            yield ("input", index, "dataset"), "an input has path or dataset, not both"


def _keep_faults(job: Job) -> Iterator[tuple[KeyPath, str]]:
    for index, item in enumerate(job.input):
        at = ("input", index, "keep")
        for theirs, ours in item.keep.items():
            if ours in (*COLUMNS, *OWN_NAMES):
                yield at, f"{ours!r} is a name of batchgen's own; give it another: keep: {{{theirs}: my_{ours}}}"
        if len(set(item.keep.values())) < len(item.keep):
            yield at, "two fields get the same name"


def _retry_faults(job: Job) -> Iterator[tuple[KeyPath, str]]:
    more, first = job.answers.retry_max_tokens, job.sampling.max_tokens
    if more is not None and more <= first:
        yield ("answers", "retry_max_tokens"), f"must be above sampling.max_tokens ({first}) (given: {more})"


def _apply_set(parsed: Parsed, assignment: str) -> dict[KeyPath, str]:
    """Lay one `--set` over the job; what is wrong in its value by path. Raises ConfigError where it leads nowhere."""
    key, equals, text = assignment.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {assignment}: a key and a value are wanted: --set engine.feed=generate")
    try:
        given = yaml_lines.parse(text)
    except ValueError as e:
        raise ConfigError(f"--set {assignment}: the value is no valid YAML: {e}; a text can be quoted") from e
    at: Any = parsed.value
    lines = parsed.lines
    path: list[str | int] = []
    for number, part in enumerate(parts, 1):
        step: Any = int(part) if isinstance(at, list) and part.isdecimal() else part
        if isinstance(at, list) and not (isinstance(step, int) and step < len(at)):
            raise ConfigError(f"--set {assignment}: no entry {step!r} in a list of {len(at)}")
        if not isinstance(at, dict | list):
            raise ConfigError(f"--set {assignment}: {key!r} leads through {path[-1]!r}, which holds no keys")
        path.append(step)
        if number == len(parts):
            at[step] = given.value
        else:
            old = at.get(step) if isinstance(at, dict) else at[step]
            if old is None:
                lines.setdefault(tuple(path), 0)
            # A copy: an alias elsewhere in the file may name the same section.
            at[step] = {} if old is None else copy.copy(old)
            at = at[step]
    for below in [known for known in lines if known[: len(path)] == tuple(path)]:
        del lines[below]
    lines[tuple(path)] = 0  # 0: not from the file
    return {(*path, *below): words for below, words in given.faults.items()}


def _fault(error: Any) -> tuple[KeyPath, str]:
    at: KeyPath = tuple(error["loc"])
    if at[-1] == "[key]" or error["type"] == "invalid_key":  # the key itself is wrong: a number, say
        at = at if at[-1] != "[key]" else at[:-1]
        at = (*at[:-1], str(at[-1]))
    if error["type"] == "extra_forbidden":
        return at, f"unknown key{nearest(str(at[-1]), _known_keys(at[:-1]))}"
    if error["type"] == "missing":
        return at, "this key is required"
    return at, f"{error['msg'].removeprefix('Value error, ')} (given: {error['input']!r})"


def _known_keys(at: KeyPath) -> list[str]:
    """The keys of the section at `at`, of all of them where it may be one of several."""
    sections: list[type[BaseModel]] = [Job]
    for part in at:
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        # What is no field is an entry of a list, which was unpacked already.
        sections = [below for field in fields for below in sections_of(field.annotation)] or sections
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections an annotation takes, also as an entry of a list or as one of several types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from sections_of(inner)


def _dotted(at: KeyPath) -> str:
    return ".".join(str(part) for part in at)
