"""The columns of a row, in their order, whatever the format of the parts."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from batchgen.data import Record

KEPT_FIELD_UNFIT = "kept_field_unfit"  # flag: a kept value could not be written as it was and is null
LEADING = ("id", "id_type")  # kept fields stand behind them
# The columns of batchgen's own and their types.
TYPES: dict[str, pa.DataType] = {
    "id": pa.string(),
    "id_type": pa.string(),
    "summary": pa.string(),
    "status": pa.string(),
    "error_type": pa.string(),
    "error": pa.string(),
    "finish_reason": pa.string(),
    "flags": pa.list_(pa.string()),
    "document_chars": pa.int32(),
    "prompt_tokens": pa.int32(),
    "cached_tokens": pa.int32(),
    "completion_tokens": pa.int32(),
    "reasoning_tokens": pa.int32(),
    "dropped_tokens": pa.int32(),
    "pack_size": pa.int32(),
    "pack_fallback": pa.string(),
    "requests": pa.int32(),
    "pieces": pa.int32(),
    "depth": pa.int32(),
    "attempts": pa.int32(),
    "source": pa.string(),
    "place": pa.string(),
    "doc_key": pa.string(),
    "content_hash": pa.string(),
    "fingerprint": pa.string(),
    "finished_at": pa.timestamp("us", tz="UTC"),
}


def schema(kept: Mapping[str, pa.DataType]) -> pa.Schema:
    """All columns in their order; kept: those of the job."""
    return pa.schema([(name, kept[name] if name in kept else TYPES[name]) for name in order(kept)])


def order(kept: Iterable[str]) -> list[str]:
    return [*LEADING, *kept, *(name for name in TYPES if name not in LEADING)]


def row(record: Record, kept: Iterable[str], *, fingerprint: str) -> dict[str, Any]:
    """The record's values by column, in the columns' order. Kept values are as they came; one it lacks is None."""
    document = record.document
    keep = document.keep
    return {
        "id": document.id,
        "id_type": document.id_type,
        **{name: keep.get(name) for name in kept},
        "summary": record.summary,
        "status": record.status,
        "error_type": record.error_type,
        "error": record.error,
        "finish_reason": record.finish_reason,
        "flags": list(record.flags),
        "document_chars": document.chars,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "reasoning_tokens": record.reasoning_tokens,
        "dropped_tokens": record.dropped_tokens,
        "pack_size": record.pack_size,
        "pack_fallback": record.pack_fallback,
        "requests": record.requests,
        "pieces": record.pieces,
        "depth": record.depth,
        "attempts": record.attempts,
        "source": document.source,
        "place": document.place,
        "doc_key": document.key.hex(),
        "content_hash": document.content.hex(),
        "fingerprint": fingerprint,
        "finished_at": record.finished_at,
    }


def flagged(flags: list[str]) -> list[str]:
    """The flags of a row whose kept value could not be written."""
    return flags if KEPT_FIELD_UNFIT in flags else [*flags, KEPT_FIELD_UNFIT]
