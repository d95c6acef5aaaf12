"""What the committed rows of a run say: documents by status, reason, flag and way, tokens, lengths."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data import DOCUMENT_TRUNCATED, MAP_REDUCED, REFINED, SUMMARY_CUT
from batchgen.reporting.lengths import Lengths
from batchgen.sinks.base import DamagedPartError, Sink
from batchgen.storage.checkpoint import repeated_keys, superseded
from batchgen.storage.index import KeySet
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View

# How a document went to the engine, by the flag of its row; `whole` without any.
_WAYS = {"truncated": DOCUMENT_TRUNCATED, "map_reduce": MAP_REDUCED, "refine": REFINED}
_EXAMPLES = 3  # parts that are noted for a reason
COSTS = ("requests", "prompt_tokens", "completion_tokens")


@dataclass(slots=True)
class Rows:
    """What the committed rows tell, read column by column, part by part."""

    status: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    ways: dict[str, Counter[str]] = field(default_factory=lambda: {way: Counter() for way in ("whole", *_WAYS)})
    packed: int = 0  # ok rows whose summary came out of a pack
    fallbacks: Counter[str] = field(default_factory=Counter)  # rows that were sent alone after a pack, by reason
    fallback_tokens: int = 0  # output tokens of theirs that were dropped
    retry_tokens: int = 0  # output tokens of answers that a longer try replaced
    failed_tokens: int = 0  # output tokens of documents that failed, or were skipped, all the same
    cut_tokens: int = 0  # output tokens in summaries that reached max_tokens
    examples: dict[str, list[Path]] = field(default_factory=dict)  # by reason the first parts with such rows
    kept_tokens: int = 0
    damaged: list[str] = field(default_factory=list)  # parts that are there and cannot be read
    superseded: int = 0  # rows that stand beside a newer one of their document, not counted above
    old: Mapping[Path, set[str]] = field(default_factory=dict)  # these rows: their keys (hex) by part
    with_failed: list[Path] = field(default_factory=list)  # parts that hold failed rows
    document_chars: Lengths = field(default_factory=Lengths)  # of all that have text
    prompt_tokens: Lengths = field(default_factory=Lengths)
    completion_tokens: Lengths = field(default_factory=Lengths)

    @property
    def lengths(self) -> dict[str, Lengths]:
        return {name: getattr(self, name) for name in ("document_chars", "prompt_tokens", "completion_tokens")}

    @property
    def count(self) -> int:
        return sum(self.status.values())

    def add(self, table: pa.Table) -> None:
        for pair in (
            table.select(["status", "error_type"])
            .group_by(["status", "error_type"])
            .aggregate([([], "count_all")])
            .to_pylist()
        ):
            self.status[pair["status"]] += pair["count_all"]
            if pair["error_type"]:
                self.reasons[f"{pair['status']}: {pair['error_type']}"] += pair["count_all"]
        for flag in pc.value_counts(pc.list_flatten(table.column("flags"))).to_pylist():
            self.flags[flag["values"]] += flag["counts"]
        chars = table.column("document_chars").to_numpy()
        self.document_chars.add(chars[chars > 0])
        self._add_ways(table)
        self._add_packs(table)
        ok = table.filter(pc.and_(pc.equal(table.column("status"), "ok"), pc.equal(table.column("pieces"), 0)))
        requests = pc.max_element_wise(ok.column("requests"), 1)  # those of a row have one prompt
        self.prompt_tokens.add(pc.divide(ok.column("prompt_tokens"), requests).to_numpy())
        kept = pc.subtract(ok.column("completion_tokens"), ok.column("dropped_tokens"))
        self.completion_tokens.add(kept.to_numpy())
        ok = table.filter(pc.equal(table.column("status"), "ok"))
        kept = pc.subtract(ok.column("completion_tokens"), ok.column("dropped_tokens"))
        self.kept_tokens += int(pc.sum(kept).as_py() or 0)
        cut = pc.match_substring(pc.binary_join(ok.column("flags").combine_chunks(), ","), SUMMARY_CUT)
        self.cut_tokens += int(pc.sum(kept.filter(cut)).as_py() or 0)
        rest = table.filter(pc.not_equal(table.column("status"), "ok"))
        self.failed_tokens += int(pc.sum(rest.column("completion_tokens")).as_py() or 0)

    def _add_packs(self, table: pa.Table) -> None:
        alone = table.filter(pc.is_valid(table.column("pack_fallback")))
        for reason in pc.value_counts(alone.column("pack_fallback")).to_pylist():
            self.fallbacks[reason["values"]] += reason["counts"]
        self.fallback_tokens += int(pc.sum(alone.column("dropped_tokens")).as_py() or 0)
        tried = table.filter(pc.and_(pc.is_null(table.column("pack_fallback")), pc.equal(table.column("status"), "ok")))
        self.retry_tokens += int(pc.sum(tried.column("dropped_tokens")).as_py() or 0)
        lost = alone.filter(pc.not_equal(alone.column("status"), "ok"))
        self.failed_tokens -= int(pc.sum(lost.column("dropped_tokens")).as_py() or 0)
        self.packed += int(pc.sum(pc.greater(table.column("pack_size"), 1)).as_py() or 0)

    def _add_ways(self, table: pa.Table) -> None:
        """What was sent, by the way that its documents took."""
        sent = table.filter(pc.greater(table.column("requests"), 0))
        flags = pc.binary_join(sent.column("flags").combine_chunks(), ",")
        left = np.ones(len(sent), np.bool_)
        for way, flag in [*_WAYS.items(), ("whole", "")]:
            took = np.asarray(pc.match_substring(flags, flag), np.bool_) & left
            left &= ~took
            of_it = sent.filter(pa.array(took))
            self.ways[way]["documents"] += len(of_it)
            for name in COSTS:
                self.ways[way][name] += int(pc.sum(of_it.column(name)).as_py() or 0)


_READ = [
    "status", "error_type", "flags", "prompt_tokens", "completion_tokens", "dropped_tokens", "requests", "pieces",
    "pack_size", "pack_fallback", "document_chars",
]  # fmt: skip


def read_rows(
    run: RunDirectory, sink: Sink, *, unique: bool = False, view: View | None = None, unmet: KeySet | None = None
) -> Rows:
    """The sums over all committed parts, the newest row of each key; a part that vanishes meanwhile is left out.

    unique: each key is known to have one row, so that nobody has to look for older ones. view: of a shard's rows.
    unmet: keys of rows that are none of the shard's documents, after it has read all of them.
    """
    view = view or View(run, sink)
    rows = Rows()
    old = rows.old = {} if unique else superseded(view, repeated_keys(view))
    if unmet:
        old = rows.old = _among(view, unmet)
    for path in view.parts():
        failed = rows.status["failed"]
        try:
            table = view.read(path, [*_READ, "doc_key"] if path in old else _READ)
        except DamagedPartError as e:
            if path.exists():
                rows.damaged.append(f"{path.name}: {e}")
            continue
        if path in old:
            newest = pc.invert(pc.is_in(table.column("doc_key"), value_set=pa.array(sorted(old[path]))))
            rows.superseded += len(table) - int(pc.sum(newest).as_py() or 0)
            table = table.filter(newest)
        before = rows.reasons.copy()
        rows.add(table)
        for reason, count in rows.reasons.items():
            if count > before[reason] and len(found := rows.examples.setdefault(reason, [])) < _EXAMPLES:
                found.append(path)
        if rows.status["failed"] > failed:
            rows.with_failed.append(path)
    return rows


def _among(view: View, keys: KeySet) -> dict[Path, set[str]]:
    """By part its rows' keys (hex) that are among these."""
    found = {}
    for path in view.parts():
        with contextlib.suppress(DamagedPartError):
            held = view.read_keys(path).keys
            found[path] = {key.tobytes().hex() for key in held[keys.places(held) >= 0]}
    return {path: some for path, some in found.items() if some}
