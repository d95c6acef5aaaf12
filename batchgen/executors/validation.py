"""`validate`: everything that is wrong with a job and its inputs. Nothing is started or written.

A fault is what a start would be refused for, or end with 65 for; what only costs single documents is a warning. One
fault hides no other: each step goes on with what the steps before it left whole.
"""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchgen import plan, sinks
from batchgen.data import DOCUMENT_TRUNCATED, Document, Split
from batchgen.engines import settings
from batchgen.errors import ConfigError, InputError, LockedError, OutputError
from batchgen.executors import duplicates
from batchgen.executors.checking import (
    Checked,
    adapter_doubt,
    check_weights,
    job_checks,
    measure,
    model_of,
    pin,
    tokenizer_of,
)
from batchgen.executors.findings import Finding, Findings
from batchgen.fingerprint import differences
from batchgen.job import jobfile
from batchgen.job.config import Job, Prompt
from batchgen.job.jobfile import JobFile
from batchgen.prompting.prompts import PromptBuilder
from batchgen.sources import open_source
from batchgen.sources.base import FileFacts, Source
from batchgen.storage.rundir import RunDirectory

log = logging.getLogger("batchgen")
_RECORDS = 100  # looked at in each file, at least
_SAMPLE = 1000  # documents whose tokens are counted
_PIECES = 10  # places in a file that its records are taken from
_BATCH = 16  # documents held at once
_LARGE = 1 << 28  # bytes of input that take more than some seconds
_LINES = 40  # of one kind that are shown to a person


def validate(path: Path, sets: Sequence[str], *, quick: bool) -> tuple[dict[str, Any], int]:
    """(what is wrong and what a run would work with, as plain JSON values; the exit status of the worst fault).

    quick: footers and first records only, instead of records from all over each file and all ids.
    """
    findings = Findings(path, sets)
    found: dict[str, Any] = dict.fromkeys(
        (
            "backend",
            "engine_profile",
            "engine_args",
            "max_prompt_tokens",
            "output",
            "files",
            "rows",
            "rows_are_exact",
            "sample",
            "ids",
        )
    )
    with findings.catching():
        file = jobfile.load(path, sets)
        findings.origin = file.origin
        found |= _look(file, findings, quick=quick)
    return {
        "job": str(path),
        "valid": not findings.faults,
        "faults": [one.value() for one in findings.faults],
        "warnings": [one.value() for one in findings.warnings],
        **found,
    }, findings.exit_status


def _look(file: JobFile, findings: Findings, *, quick: bool) -> dict[str, Any]:
    job = file.job
    with findings.catching(about=("input",)):
        job = pin(job)
    checked, prompts = _settings(file, job, findings)
    _output(job, checked, findings)
    _metrics(job, findings)
    if checked is None or prompts is None:  # a template that is broken hides nothing in the files
        job = job.model_copy(update={"prompt": Prompt(user="{{ text }}")})
    inputs = plan.look(job)
    files = inputs.files
    for fault in (*inputs.faults, *inputs.skipped):
        findings.add(fault)
    if inputs.left_out:
        findings.warn(findings.at(("input",), f"no format batchgen reads, left out: {plan.names(inputs.left_out)}"))
    args: dict[str, Any] = dict(job.engine.args)
    if job.engine.backend == "vllm" and checked is not None and checked.model is not None:
        args |= settings.chosen(job, checked.model, checked.adapter)
    elif job.engine.backend == "fake":
        args |= settings.profile(job)
    sample = _Sample(job, findings, prompts, full=not quick)
    sample.look_at(files)
    ids = None if quick else _ids(job, files, findings)
    findings.tell_bad_records()
    return {
        "backend": job.engine.backend,
        "engine_profile": job.engine.profile,
        "engine_args": args,
        "max_prompt_tokens": None if checked is None else checked.max_prompt_tokens,
        "output": str(job.output.path),
        "files": [{"path": f.source, "rows": f.rows, "exact": f.exact, "bytes": f.size} for f in files],
        "rows": sum(f.rows for f in files),
        "rows_are_exact": all(f.exact for f in files),
        "sample": sample.value() if prompts else None,
        "ids": ids,
    }


def _settings(file: JobFile, job: Job, findings: Findings) -> tuple[Checked | None, PromptBuilder | None]:
    """Templates, vLLM's names, the model's files, its tokenizer and chat template, room for a document."""
    checked = prompts = None
    for check in job_checks(file):
        with findings.catching():
            check()
    is_fine = not any((one.key or "").startswith(("prompt", "long_documents")) for one in findings.faults)
    model, is_found = None, False
    with findings.catching():
        model = model_of(job)
        is_found = True
    if is_found:
        with findings.catching():
            check_weights(job, model)
        with findings.catching():
            checked = measure(file, job, model)
    if checked is not None and (doubt := adapter_doubt(checked)):
        findings.warn(doubt)
    if checked is not None and is_fine:
        with findings.catching(about=("prompt",)):
            tokenizer = tokenizer_of(checked)
            prompts = PromptBuilder(job, tokenizer, max_prompt_tokens=checked.max_prompt_tokens)
    return checked, prompts


def _metrics(job: Job, findings: Findings) -> None:
    path = job.metrics.path
    if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
        fault = f"cannot be written: {path.parent} is no folder, or one without permission"
        findings.fault(Finding(str(path), "metrics.textfile", fault), ConfigError.exit_status)


def _output(job: Job, checked: Checked | None, findings: Findings) -> None:
    """The output folder, and the settings of the run in it."""
    run = RunDirectory(job.output.path)
    at = run.path
    while not os.path.lexists(at) and at != at.parent:
        at = at.parent
    if not at.is_dir():
        findings.fault(Finding(str(run.path), None, f"cannot be made: {at} is no folder"), OutputError.exit_status)
        return
    if not os.access(at, os.W_OK | os.X_OK):
        fault = f"cannot be written: no permission in {at}"
        findings.fault(Finding(str(run.path), None, fault), OutputError.exit_status)
    if running := run.running():
        fault = f"another process holds this run: {running[0].who_holds()}"
        findings.fault(Finding(str(run.path), None, fault), LockedError.exit_status)
    old = None
    with findings.catching():
        old = run.read_run()
    made = None
    with findings.catching(about=("output", "format")):
        made = sinks.format_of(run.summaries)
        sinks.refuse_other(run.summaries, job.output.format)
    if old is not None and checked is not None and made is not None:
        for line in differences(old["fingerprint"], checked.fingerprint):
            key, _, change = line.partition(": ")
            fault = f"{change}: not the setting of the run there; `run` wants --on-change, or the old setting"
            findings.fault(Finding(str(run.path), key, fault), ConfigError.exit_status)


def _ids(job: Job, files: Sequence[FileFacts], findings: Findings) -> dict[str, int]:
    """Read all ids: duplicates, and records without a usable one."""

    def unusable(document: Document, source: Source) -> None:
        findings.bad_record(source, document, document.error, of=None)

    if (size := sum(file.size for file in files)) > _LARGE:
        log.info("reading the ids in %s bytes; --quick leaves that out", f"{size:,}")
    found = duplicates.find(job, files, among=set(range(len(job.input))), unusable=unusable)
    for error in found.errors:
        findings.add(error)
    for number, count in sorted(found.counts.items()):
        shown = [
            Finding(one.second, None, f"the id {one.id!r} stood in {one.first}")
            for one in found.shown
            if one.input == number
        ]
        if left := count - len(shown):
            shown.append(findings.at(("input", number), f"{left:,} more rows have an id that stood before"))
        for finding in shown:
            if job.input[number].on_duplicate == "refuse":
                findings.fault(finding, InputError.exit_status)
            else:
                findings.warn(finding)
    return {"read": found.read, "duplicates": found.counts.total()}


@dataclass(slots=True)
class _Sample:
    """Looks at some records of each file, and counts the prompt tokens of up to _SAMPLE documents of all files."""

    job: Job
    findings: Findings
    prompts: PromptBuilder | None
    full: bool
    tokens: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    truncated: int = 0
    in_pieces: int = 0
    _batch: list[tuple[Document, Source, int]] = field(default_factory=list)
    _has_value: dict[tuple[int, str], bool] = field(default_factory=dict)  # by input and kept field

    def look_at(self, files: Sequence[FileFacts]) -> None:
        for number, file in enumerate(files):
            share = _SAMPLE * (number + 1) // len(files) - _SAMPLE * number // len(files)
            with self.findings.catching():
                self._look_at(file, share)
        self._flush()
        for (number, theirs), has_value in self._has_value.items():
            if not has_value:
                fault = f"no record that was looked at has a value for {theirs!r}"
                self.findings.warn(self.findings.at(("input", number, "keep"), fault))

    def _look_at(self, file: FileFacts, share: int) -> None:
        """share: documents of this file whose tokens are counted."""
        source = open_source(self.job, file.input, file.source)
        item = self.job.input[file.input]
        wanted = max(_RECORDS, share if self.full else 0)
        step = max(1, min(wanted, file.rows) // max(1, share))
        bad: dict[str, tuple[Document, int]] = {}  # the first of each kind, and how many
        met = 0
        for document in self._records(file, source, wanted):
            if document.error is None:
                for theirs, ours in item.keep.items():
                    at = file.input, theirs
                    self._has_value[at] = self._has_value.get(at, False) or document.keep.get(ours) is not None
            elif not (self.full and item.id_field is not None and document.id is None):  # else the ids' scan tells
                first, count = bad.get(document.error[0], (document, 0))
                bad[document.error[0]] = first, count + 1
            if share and met % step == 0:
                self._take(document, source, file.input)
                share -= 1
            met += 1
        if not met:
            self.findings.warn(Finding(file.source, None, "holds no records"))
        for first, count in bad.values():
            self.findings.bad_record(source, first, first.error, count=count, of=met)

    def _records(self, file: FileFacts, source: Source, wanted: int) -> Iterator[Document]:
        """So many documents from _PIECES places of the file; the first ones where only a quick look is wanted."""
        target = max(1, -(-file.size // _PIECES)) if self.full else duplicates.WHOLE
        pieces = source.cut(begin=0, target_bytes=target)
        pieces = pieces[:: max(1, len(pieces) // _PIECES)][: _PIECES if self.full else 1]
        for start, end in pieces:
            split = Split(0, file.input, file.source, start, end)
            yield from itertools.islice(source.read(split), max(1, wanted // len(pieces)))

    def _take(self, document: Document, source: Source, number: int) -> None:
        self._batch.append((document, source, number))
        if len(self._batch) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if self.prompts is None:
            return
        prepared = self.prompts.prepare([(document, number) for document, _, number in batch])
        for one, (document, source, _) in zip(prepared, batch, strict=True):
            self.documents += 1
            if one.error is not None:
                self.reasons[f"failed: {one.error[0]}"] += 1
                if document.error is None:
                    self.findings.bad_record(source, document, one.error, of=None)
            elif one.skip is not None:
                self.reasons[f"skipped: {one.skip[0]}"] += 1
            else:
                self.truncated += DOCUMENT_TRUNCATED in one.flags
                self.in_pieces += bool(one.pieces)
                self.tokens.append(len(one.prompt_ids))

    def value(self) -> dict[str, Any]:
        shares = {"p50": 0.5, "p90": 0.9, "max": 1.0}
        return {
            "documents": self.documents,
            "prompt_tokens": {n: int(np.quantile(self.tokens, q)) if self.tokens else None for n, q in shares.items()},
            "truncated": self.truncated,
            "in_pieces": self.in_pieces,
            "reasons": dict(sorted(self.reasons.items())),
        }


def text(found: Mapping[str, Any]) -> str:
    """The same for a person."""
    faults, warnings = found["faults"], found["warnings"]
    verdict = [
        "valid" if found["valid"] else _count(faults, "fault"),
        *([_count(warnings, "warning")] * bool(warnings)),
    ]
    lines = [f"{found['job']}: {', '.join(verdict)}"]
    if found["files"] is not None:
        lines += _inputs(found) + _run(found)
    for title, findings in (("warnings", warnings), ("faults", faults)):
        if findings:
            lines.append(f"{title}:")
            lines += _short([f"  {Finding(one['place'], one.get('key'), one['fault'])}" for one in findings])
    return "\n".join(lines)


def _count(what: Sequence[Any], name: str) -> str:
    return f"{len(what):,} {name}{'s' if len(what) != 1 else ''}"


def _rows(rows: int, *, exact: bool) -> str:
    return "rows not counted yet" if not rows and not exact else f"{'' if exact else 'about '}{rows:,} rows"


def _short(lines: list[str]) -> list[str]:
    left = len(lines) - _LINES
    return lines if left <= 0 else [*lines[:_LINES], f"  and {left:,} more; --json lists all"]


def _inputs(found: Mapping[str, Any]) -> list[str]:
    files = found["files"]
    rows = [_rows(one["rows"], exact=one["exact"]) for one in files]
    sizes = [f"{one['bytes']:,} bytes" if one["bytes"] else "" for one in files]
    wide = [max(map(len, column), default=0) for column in ([one["path"] for one in files], rows, sizes)]
    lines = [f"  {'files':<9}{len(files):,} with {_rows(found['rows'], exact=found['rows_are_exact'])}"]
    lines += _short([
        f"    {one['path']:<{wide[0]}}  {row:>{wide[1]}}  {size:>{wide[2]}}".rstrip()
        for one, row, size in zip(files, rows, sizes, strict=True)
    ])  # fmt: skip
    ids = found["ids"]
    told = (
        "not read: --quick"
        if ids is None
        else f"{ids['read']:,} read, {ids['duplicates']:,} rows with one that stood before"
    )
    lines.append(f"  {'ids':<9}{told}")
    return lines


def _run(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if (sample := found["sample"]) and sample["documents"]:
        tokens = sample["prompt_tokens"]
        counts = (
            "none to send"
            if tokens["max"] is None
            else f"p50 {tokens['p50']:,}, p90 {tokens['p90']:,}, longest {tokens['max']:,}"
        )
        room = found["max_prompt_tokens"]
        lines.append(f"  {'prompts':<9}{counts} of {room:,} tokens; {sample['documents']:,} documents looked at")
        told = {"truncated": sample["truncated"], "in pieces": sample["in_pieces"]} | sample["reasons"]
        lines += [f"    {name}: {count:,} of these" for name, count in told.items() if count]
    lines.append(f"  {'output':<9}{found['output']}")
    lines.append(f"  {'engine':<9}{found['backend']}, profile {found['engine_profile']}")
    lines += [f"    {name}: {value}" for name, value in found["engine_args"].items()]
    return lines
