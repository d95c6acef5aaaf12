"""The values that travel along the line: Split → Document → Prepared → Request → Completion → Record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]

# Flags of a record.
DOCUMENT_TRUNCATED = "document_truncated"  # the document was cut to fit the context
SUMMARY_CUT = "summary_cut"  # the summary reached max_tokens
PIECE_CUT = "piece_cut"  # the answer to a piece of the document, or to several answers, reached max_tokens
MAP_REDUCED = "map_reduced"  # the document was done in pieces, and their answers put together
REFINED = "refined"  # the document was done piece after piece
COPIED = "copied"  # the summary is the beginning of its document, word for word


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of one input: bytes of JSONL, row groups of Parquet or shards of a data set, `end` exclusive.

    `index` is the place in plan.json and never changes; `input` is the place in the job's `input` list.
    """

    index: int
    input: int
    source: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Document:
    """One input record, or the reason why it is none (`error`).

    key: 16 bytes, identity. content: 8 bytes, hash of all fields that reach the prompt.
    source: the file or data set as the job names it. whole_chars: characters of the text where `text` has lost its end.
    place: `byte N` (JSONL), `row N` (Parquet) or `shard S row N` (data set), from 0.
    """

    key: bytes
    content: bytes
    source: str
    place: str
    id: str | None
    id_type: str | None
    fields: Mapping[str, Any]
    text: str
    keep: Mapping[str, Any]
    split: int
    error: tuple[str, str] | None = None
    whole_chars: int | None = None

    @property
    def chars(self) -> int:
        """Characters of the text as it was read, before anything was cut off."""
        return len(self.text) if self.whole_chars is None else self.whole_chars


@dataclass(frozen=True, slots=True)
class Prepared:
    """A document as token ids, ready to be sent; `skip` and `error` are (type, sentence) and mean: never sent.

    pieces: of a document that does not fit and is done in pieces, as LongPrompts.cut says; `prompt_ids` is the first.
    turn: the text of its user turn, where it may share a prompt with others (job key `packing`).
    """

    document: Document
    prompt_ids: Sequence[int]
    turn: str | None = None
    pieces: tuple[Sequence[int], ...] = ()
    flags: tuple[str, ...] = ()
    skip: tuple[str, str] | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine is asked. `custom_id` is ours, never used twice in a run's life.

    schema: a JSON schema, as text, that the answer is held to.
    """

    custom_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answers: exactly one per request, in any order. `error` is set where it could not.

    Tokens are counts; `cached_tokens` of the prompt came out of the prefix cache. Seconds are None where the engine
    does not tell them: `ttft_s` from when it got the request to its first token, `queue_s` of these in its waiting
    queue, `tpot_s` for each token after the first.
    """

    custom_id: str
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the output: what became of one document. The columns are described in docs/output.md.

    Tokens are summed over all its requests; of `completion_tokens`, `reasoning_tokens` are no part of a summary and
    `dropped_tokens` belong to an answer that a better one replaced. Of a request that it shared it has its share.
    pack_size: documents in the request that gave the summary. pack_fallback: why the answer to a pack held none for it.
    pieces: 0 where the document was sent as one. depth: how often answers were put together on the way from a piece to
    the summary.
    """

    document: Document
    status: Status
    summary: str | None = None
    error_type: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    flags: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    dropped_tokens: int = 0
    pack_size: int = 1
    pack_fallback: str | None = None
    requests: int = 0
    pieces: int = 0
    depth: int = 0
    attempts: int = 0
    finished_at: datetime = field(default_factory=lambda: datetime.now(UTC))
