"""Writers and readers of parts, one module a format. All parts of a run have one format."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from batchgen.errors import ConfigError
from batchgen.sinks.base import Sink
from batchgen.sinks.jsonl import JsonlSink
from batchgen.sinks.parquet import ParquetSink, settled_types

_FORMATS: dict[str, type[ParquetSink] | type[JsonlSink]] = {"parquet": ParquetSink, "jsonl": JsonlSink}


def format_of(summaries: Path) -> str | None:
    """The format of the parts in this folder; None where there are none. Raises ConfigError where there are two."""
    found = [name for name, sink in _FORMATS.items() if next(summaries.glob(f"part-*{sink.suffix}"), None)]
    if len(found) > 1:
        raise ConfigError(f"{summaries}: holds parts in two formats ({', '.join(found)}); move those of one away")
    return found[0] if found else None


def refuse_other(summaries: Path, wanted: str) -> None:
    """Raise ConfigError where there are parts of another format than the one that is wanted."""
    there = format_of(summaries)
    if there not in (None, wanted):
        raise ConfigError(
            f"{summaries}: its parts are {there} and output.format is {wanted}; a run has one format. Go on with "
            f"output.format: {there} (`batchgen export` writes the other one), name another output.dir, or start "
            "with --fresh to move the run aside"
        )


def open_sink(name: str, *, owner: str, kept: Mapping[str, pa.DataType] | None = None) -> Sink:
    """The sink of this format. kept: the kept fields and their types, for writing."""
    return _FORMATS[name](kept or {}, owner=owner)


def types_to_keep(name: str, summaries: Path, wanted: Mapping[str, pa.DataType]) -> Mapping[str, pa.DataType]:
    """Types of the kept fields for the parts to come; wanted: those of the input."""
    parts = sorted(summaries.glob(f"part-*{ParquetSink.suffix}"))
    return settled_types(parts, wanted) if name == "parquet" and parts else wanted
