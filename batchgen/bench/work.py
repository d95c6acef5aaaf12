"""The same work for every contestant: a file of documents for batchgen, their token ids for the others."""

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path

from batchgen import plan
from batchgen.data import Document, Split
from batchgen.errors import InputError
from batchgen.executors.checking import Checked, check, tokenizer_of
from batchgen.feeding.reader import batched
from batchgen.job.config import Failures, Input, Job, Metrics, Output, Packing, Sampling
from batchgen.job.jobfile import JobFile
from batchgen.models.tokenizer import Tokenizer
from batchgen.prompting.prompts import PromptBuilder
from batchgen.sources import open_source
from batchgen.sources.base import FileFacts

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Work:
    """file: the job, reading documents that were written for it. prompts: their token ids, in the order of that file.

    distinct: how many of the documents are different ones. tokens: of each answer; None where lengths are real.
    """

    file: JobFile
    checked: Checked
    prompts: Sequence[Sequence[int]]
    distinct: int
    tokens: int | None

    @property
    def job(self) -> Job:
        return self.checked.job

    @cached_property
    def mark(self) -> int:
        """What tells these prompts from others, in any order."""
        return sum(map(mark, self.prompts)) & _WORD

    def into(self, folder: Path) -> JobFile:
        """The job with a run directory of its own, that tells no monitoring of itself."""
        output = Output(dir=str(folder), format=self.job.output.format)
        update = {"output": output, "metrics": Metrics()}
        return dataclasses.replace(self.file, job=self.file.job.model_copy(update=update))


def mark(prompt_ids: Sequence[int]) -> int:
    """What one prompt adds to the mark of a Work."""
    return int.from_bytes(hashlib.blake2b(array("i", prompt_ids), digest_size=8).digest())


def make(file: JobFile, folder: Path, *, documents: int, tokens: int | None) -> Work:
    """So many documents of the job that get a prompt, over again where it has fewer, written into `folder`.

    tokens: the length of each answer; None leaves it to the job's sampling. Raises ConfigError, and InputError where
    the job has no document to send.
    """
    given = dataclasses.replace(file, job=_plain(file.job, tokens))
    checked = check(given, fresh=True)
    tokenizer = tokenizer_of(checked)
    rows = [_row(document) for document, _ in islice(_sendable(checked, _prompts(checked, tokenizer)), documents)]
    if not rows:
        raise InputError("none of the job's documents gets a prompt: `batchgen validate` tells why")
    path = folder / "documents.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for n, row in enumerate(islice(cycle(rows), documents)):
            stream.write(json.dumps({"id": f"d{n}"} | row, default=str) + "\n")
    keep = {ours: ours for item in given.job.input for ours in item.keep.values()}
    update = {
        "input": [Input(path=str(path), id_field="id", keep=keep, min_chars=1)],
        "failures": Failures(max=documents),  # answers of made-up length may hold nothing
    }
    ours = dataclasses.replace(given, job=given.job.model_copy(update=update))
    checked = check(ours, fresh=True)
    prompts = [ids for _, ids in _sendable(checked, _prompts(checked, tokenizer))]
    if len(prompts) != documents:
        raise InputError(f"{documents:,} documents were written, and {len(prompts):,} of them get a prompt")
    return Work(ours, checked, prompts, distinct=len(rows), tokens=tokens)


def _plain(job: Job, tokens: int | None) -> Job:
    """The job with one request a document, one document a request, and answers of the wanted length."""
    answers = job.answers.model_copy(update={"retry_max_tokens": None})
    long = job.long_documents.model_copy(update={"policy": "skip"} if job.long_documents.in_pieces else {})
    update = {
        "answers": answers,
        "sampling": _sampling(job.sampling, tokens),
        "long_documents": long,
        "packing": Packing(),
    }
    return job.model_copy(update=update)


def _sampling(sampling: Sampling, tokens: int | None) -> Sampling:
    if tokens is None:
        return sampling
    return sampling.model_copy(update={"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True})


def _prompts(checked: Checked, tokenizer: Tokenizer) -> PromptBuilder:
    return PromptBuilder(checked.job, tokenizer, max_prompt_tokens=checked.max_prompt_tokens)


def _sendable(checked: Checked, prompts: PromptBuilder) -> Iterator[tuple[Document, Sequence[int]]]:
    """The documents of a job that get a prompt, with its ids."""
    files = plan.discover(checked.job)
    inputs = {file.source: file.input for file in files}
    for documents in batched(_documents(checked.job, files)):
        for one in prompts.prepare([(document, inputs[document.source]) for document in documents]):
            if one.error is None and one.skip is None:
                yield one.document, array("i", one.prompt_ids)


def _documents(job: Job, files: Sequence[FileFacts]) -> Iterator[Document]:
    for file in files:
        source = open_source(job, file.input, file.source)
        for start, end in source.cut(begin=0, target_bytes=1 << 30):
            yield from source.read(Split(0, file.input, file.source, start, end))


def _row(document: Document) -> dict[str, object]:
    return {"text": document.text, **document.keep}
