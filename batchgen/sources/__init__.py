"""Readers of inputs, one module a format."""

from batchgen.errors import InputError
from batchgen.job.config import Job
from batchgen.sources.base import Source
from batchgen.sources.dataset import DatasetSource
from batchgen.sources.jsonl import JsonlSource
from batchgen.sources.parquet import ParquetSource
from batchgen.sources.streams import format_ending

_FORMATS: dict[str, type[JsonlSource] | type[ParquetSource]] = {
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".json": JsonlSource,
    ".parquet": ParquetSource,
}


def is_known(name: str) -> bool:
    """Whether a file of this name is one of the formats."""
    return format_ending(name) in _FORMATS


def open_source(job: Job, number: int, path: str) -> Source:
    """The reader for a file or data set of the job's input `number`. Raises InputError for an unknown ending."""
    if job.input[number].dataset is not None:
        return DatasetSource(job.input[number], number, job.prompt.variables)
    if not is_known(path):
        known = ", ".join(_FORMATS)
        raise InputError(f"{path}: not a format batchgen reads ({known}; .gz and .zst); narrow input.{number}.path")
    return _FORMATS[format_ending(path)](job.input[number], number, path, job.prompt.variables)
