"""The schema of the job file."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from batchgen.errors import ConfigError
from batchgen.job.values import ON_OFF, Bool, Float, Int

# Columns batchgen writes itself; a kept field cannot have one of these names. docs/output.md describes them.
COLUMNS = (
    "id", "id_type", "summary", "status", "error_type", "error", "finish_reason", "flags", "document_chars",
    "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "dropped_tokens", "pack_size",
    "pack_fallback", "requests", "pieces", "depth", "attempts", "source", "place", "doc_key", "content_hash",
    "fingerprint", "finished_at",
)  # fmt: skip


# What `prompt.user` is given besides kept fields.
OWN_NAMES = ("text", "boundary")


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


def _expression(value: str) -> str:
    try:
        re.compile(value)
    except re.error as e:
        raise ValueError(f"a regular expression is wanted: {e}") from None
    return value


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("a whole number of at least 1 is wanted, or auto")


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
    text: str = Field(
        description="The answer; tokens beyond the request's max_tokens are cut off. In an answer to a pack `<1>` is "
        "the label of its first document, `<2>` that of the second."
    )
    finish_reason: Literal["stop", "length"] = Field(
        "stop", description="`length` calls an answer cut that is whole; one that is cut has it anyway."
    )


Told = Literal[
    "running", "waiting", "kv_cache_usage", "preemptions", "prefix_cache_queries", "prefix_cache_hits", "gpus",
    "queue_s", "ttft_s", "tpot_s",
]  # fmt: skip


class FakeEngine(Section):
    """The engine for tests and dry runs: deterministic text, a set speed, faults on request."""

    docs_per_s: Float | None = Field(None, gt=0, description="Completions a second; as fast as possible when unset.")
    fail_every: Int | None = Field(None, ge=1, description="Every n-th request comes back with an error.")
    fail_on: str | None = Field(None, description="Requests whose prompt holds this text come back with an error.")
    die_after: Int | None = Field(None, ge=0, description="The engine dies after this many completions.")
    lives: Int | None = Field(None, ge=1, description="So many engines start in an attempt, further ones do not.")
    die_on: str | None = Field(None, description="The engine dies when it comes to a prompt that holds this text.")
    hang_on: str | None = Field(None, description="The engine hangs when it comes to a prompt that holds this text.")
    copies: Annotated[str, AfterValidator(_expression)] | None = Field(
        None, description="The answer to a prompt is what of it matches this regular expression, where something does."
    )
    output_tokens_per_s: Float | None = Field(
        None, gt=0, description="Tokens of answers a second; as fast as possible when unset."
    )
    answers: list[FakeAnswer] = Field(default_factory=list, description="Answers to certain prompts.")
    start_faults: list[str] = Field(
        default_factory=list,
        description="Texts with which starts of an attempt fail, one after the other; then it starts.",
    )
    tells: dict[Told, Float] = Field(
        default_factory=dict,
        description="What the engine tells of itself: requests `running` and `waiting`, `kv_cache_usage` (0 to 1), "
        "`preemptions`, `prefix_cache_queries` and `prefix_cache_hits`, a number of `gpus`; and of each request "
        "`queue_s`, `ttft_s` and `tpot_s`.",
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
    replicas_per_gpu: Annotated[
        Int | Literal["auto"], BeforeValidator(_count_or_auto, json_schema_input_type=int | Literal["auto"])
    ] = Field(
        "auto",
        description="Engines side by side on each GPU, each with its share of the memory. `auto`: several for models "
        "under a billion parameters, which one engine cannot keep a GPU busy with.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of vLLM's engine, under vLLM's own names and only those."
    )
    profile: Literal["throughput", "balanced", "low_memory"] = Field(
        "balanced",
        description="Fills engine arguments that the job leaves out: `throughput` for a GPU of one's own, `low_memory` "
        "for a small or shared one; docs/job.md has the values.",
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
    """The three prompts take the place of `prompt.user`; the chat template and `prompt.system` stay around them."""

    policy: Literal["truncate", "map_reduce", "refine", "fail", "skip"] = Field(
        "truncate",
        description="What becomes of a document that does not fit: cut, summarized whole in pieces (`map_reduce`, "
        "`refine`), failed or skipped; docs/long-documents.md compares them.",
    )
    keep: Literal["head", "head_tail", "middle_out"] = Field(
        "head",
        description="What `truncate` keeps: the beginning; beginning and end, half of the room each; the same in whole "
        "sentences.",
    )
    overlap_tokens: Int = Field(
        64, ge=0, description="Tokens at the end of a piece that the next one repeats, a quarter of a piece at most."
    )
    max_requests: Int = Field(
        256, ge=2, description="Requests for one document at most; one that takes more has failed."
    )
    max_depth: Int = Field(
        4, ge=1, description="`map_reduce`: how often summaries are summarized again, until one is left, at most."
    )
    piece: str = Field(
        "Write a summary of the following part of a longer document. Keep names, figures and results.\n\n{{ text }}",
        description="The user turn for a piece. `{{ text }}` is the piece.",
    )
    reduce: str = Field(
        "The following are summaries of the parts of one document, in their order. Write one summary of the whole "
        "document. Do not speak of parts.\n\n{{ text }}",
        description="`map_reduce`: the user turn that puts summaries together. `{{ text }}` are the summaries.",
    )
    refine: str = Field(
        "This is a summary of the beginning of a document:\n\n{{ summary }}\n\nThis is how the document goes on:"
        "\n\n{{ text }}\n\nWrite one summary of all of it, that holds what both say. Do not speak of parts.",
        description="`refine`: the user turn for a further piece, `{{ text }}`, with the `{{ summary }}` so far.",
    )

    @property
    def in_pieces(self) -> bool:
        """Whether a document can take several requests."""
        return self.policy in ("map_reduce", "refine")

    @property
    def in_force(self) -> tuple[str, ...]:
        """The keys that make the text of a summary; with the others a job makes the same."""
        keys = {
            "truncate": ("keep",),
            "map_reduce": ("overlap_tokens", "piece", "reduce"),
            "refine": ("overlap_tokens", "piece", "refine"),
        }
        return "policy", *keys.get(self.policy, ())


class Packing(Section):
    """Several short documents in one prompt; docs/packing.md says when that pays."""

    mode: Annotated[Literal["off", "on", "auto"], ON_OFF] = Field(
        "off",
        description="`on` packs, `auto` measures both ways on the first documents and keeps the faster.",
    )
    max_documents: Int = Field(8, ge=2, description="Documents in one prompt at most.")
    max_document_tokens: Int = Field(256, ge=1, description="A document whose user turn has more tokens is sent alone.")
    max_pack_tokens: Int | None = Field(
        None, ge=1, description="Tokens of a prompt with several documents at most; what fits the context when unset."
    )
    answer: Literal["json", "lines"] = Field(
        "json",
        description="How summaries come back: `json`, held to a schema by vLLM's structured outputs; `lines` "
        "(`label: summary`) where these cannot be used.",
    )
    verify: Literal["words", "labels"] = Field(
        "words",
        description="`words`: a summary must have more words with its own document in common than with any other of "
        "its prompt. `labels` leaves that out, for summaries in another language than the documents.",
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


class Metrics(Section):
    textfile: str | None = Field(
        None,
        pattern=r"\.prom$",
        description="A .prom file in the folder of node_exporter's textfile collector. It is written every 15 seconds "
        "and at the end; docs/metrics.md lists what is in it.",
    )

    @property
    def path(self) -> Path | None:
        return None if self.textfile is None else Path(os.path.expanduser(self.textfile))  # noqa: PTH111


class Output(Section):
    dir: str = Field(description="The run directory: summaries, report, and what a resume needs.")
    format: Literal["parquet", "jsonl"] = Field(
        "parquet", description="Format of the summaries: Parquet, or JSON Lines for what reads line by line."
    )

    @property
    def path(self) -> Path:
        return Path(os.path.expanduser(self.dir))  # noqa: PTH111  Path's own raises for a user that is not there


class Cost(Section):
    """What a GPU costs, so that the report tells what the summaries did."""

    currency: str = Field("EUR", min_length=1, max_length=8, description="How the money is called in the report.")
    per_gpu_hour: Float = Field(gt=0, description="The price of one GPU for one hour.")


class Report(Section):
    cost: Cost | None = Field(None, description="What a GPU costs; without it the report has no costs.")


class Job(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="What the run is called in its reports.")
    input: list[Input] = Field(min_length=1, description="The documents: one entry for files of one shape.")
    prompt: Prompt = Field(description="What the model is told.")
    engine: Engine = Field(Engine(), description="What runs the model, and how.")
    sampling: Sampling = Field(Sampling(), description="How the model writes: vLLM's SamplingParams by their names.")
    long_documents: LongDocuments = Field(LongDocuments(), description="Documents that are longer than the context.")
    packing: Packing = Field(Packing(), description="Several short documents in one prompt.")
    answers: Answers = Field(Answers(), description="How the model's answers are read.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="When finished work is written.")
    failures: Failures = Field(Failures(), description="What failed documents mean for the whole run.")
    lifecycle: Lifecycle = Field(Lifecycle(), description="How a run that is told to stop does so.")
    metrics: Metrics = Field(Metrics(), description="Metrics for Prometheus.")
    report: Report = Field(Report(), description="What the report tells besides what every report does.")
    output: Output = Field(description="Where the summaries go.")


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections an annotation takes, also as an entry of a list or as one of several types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from sections_of(inner)
