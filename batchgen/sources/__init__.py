"""Readers of input files, one module a format."""

from pathlib import PurePath

from batchgen.config import Job
from batchgen.errors import InputError
from batchgen.sources.base import Source
from batchgen.sources.jsonl import JsonlSource
from batchgen.sources.parquet import ParquetSource

_FORMATS: dict[str, type[JsonlSource] | type[ParquetSource]] = {
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".parquet": ParquetSource,
}


def open_source(job: Job, number: int, path: str) -> Source:
    """The reader for a file of the job's input `number`. Raises InputError for an unknown ending."""
    ending = PurePath(path).suffix
    if ending not in _FORMATS:
        raise InputError(f"{path}: not a format batchgen reads ({', '.join(_FORMATS)}); narrow input.{number}.path")
    return _FORMATS[ending](job.input[number], number, path, job.prompt.variables)
