"""Reads job files: errors name file, line, key and the nearest known key."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from batchgen.errors import ConfigError
from batchgen.job import yaml_lines
from batchgen.job.config import COLUMNS, OWN_NAMES, Job, sections_of
from batchgen.job.values import ON_OFF
from batchgen.job.yaml_lines import KeyPath, Parsed
from batchgen.text import nearest

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


def load(file: Path, sets: Sequence[str] = ()) -> JobFile:
    """The job in `file` with `sets` (`a.b=value`, YAML values) laid over it.

    Raises ConfigError with every fault found, one a line.
    """
    parsed = yaml_lines.load(file)
    origin = Origin(file, parsed.lines)
    doubts = _doubts(parsed.faults)
    faults = [origin.fault(at, words) for at, words in doubts.items()]  # before a --set changes the lines
    told = set(doubts)
    for assignment in sets:
        try:
            ours = _doubts(_apply_set(parsed, assignment))
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
        found_too = (*_input_faults(job), *_keep_faults(job), *_retry_faults(job), *_packing_faults(job))
        faults += [origin.fault(at, words) for at, words in found_too]
    refuse(faults)
    return JobFile(job, origin)


def _doubts(faults: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
    """What is in doubt: not a bare `on` or `off` where true and false mean the same."""
    return {at: words for at, words in faults.items() if not any(ON_OFF in field.metadata for field in _fields(at))}


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


def _packing_faults(job: Job) -> Iterator[tuple[KeyPath, str]]:
    if job.packing.mode == "off":
        return
    if job.answers.reasoning_end is not None:
        yield (
            ("packing", "mode"),
            "answers of a model that reasons (answers.reasoning_end) cannot be packed: leave it off",
        )
    if "structured_outputs" in job.sampling.others:
        yield ("packing", "mode"), "sampling.structured_outputs holds answers to another form: leave packing off"


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


def _fields(at: KeyPath) -> list[FieldInfo]:
    """The fields that the key at `at` can be."""
    name = str(at[-1]) if at else ""
    return [section.model_fields[name] for section in _sections(at[:-1]) if name in section.model_fields]


def _known_keys(at: KeyPath) -> list[str]:
    """The keys of the section at `at`, of all of them where it may be one of several."""
    return list(dict.fromkeys(name for section in _sections(at) for name in section.model_fields))


def _sections(at: KeyPath) -> list[type[BaseModel]]:
    """The sections that may stand at `at`."""
    sections: list[type[BaseModel]] = [Job]
    for part in at:
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        # What is no field is an entry of a list, which was unpacked already.
        sections = [below for field in fields for below in sections_of(field.annotation)] or sections
    return sections


def _dotted(at: KeyPath) -> str:
    return ".".join(str(part) for part in at)
