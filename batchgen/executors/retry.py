"""`retry-failed`: failed documents are done again. Their new rows come in later parts, then the old ones go.

A campaign is one such retry of a whole run, over as many starts as it takes. Each document has one try in it: a row
that failed again in one of its attempts is not wanted any more.
"""

import dataclasses
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchgen import fsio
from batchgen.data import Document
from batchgen.errors import InputError
from batchgen.feeding.line import Line, Reading
from batchgen.job.config import Job
from batchgen.sources import open_source
from batchgen.sources.base import place_key
from batchgen.storage.checkpoint import Tally
from batchgen.storage.failed import FailedRow, by_source, failed_rows
from batchgen.storage.index import DoneIndex, IndexBuilder, Visit
from batchgen.storage.rundir import attempt_of
from batchgen.storage.strikes import Strikes
from batchgen.storage.view import View

# Failed for what the record is: only another record can change that, and `run` does edited documents anyway.
OF_RECORDS = frozenset({
    "bad_json", "bad_value", "duplicate_id", "id_type", "missing_id", "missing_text", "record_too_large", "text_type",
})  # fmt: skip
# Failed for what the record is under the settings of then.
OF_SETTINGS = frozenset({"document_too_long", "prompt_too_long", "template_failed"})
_AGAIN = bytes(8)  # the content of a row that is to be replaced, whatever its document holds now
log = logging.getLogger("batchgen")


@dataclass(slots=True)
class Campaign:
    """types: error types that are retried; none: all that a second try can change.

    whole: as of checkpoint.Loaded: their failed documents are at their places. fingerprint: of the present settings.
    """

    job: Job
    view: View
    whole: Mapping[str, Tally]
    types: frozenset[str]
    fingerprint: str
    wanted: int = 0
    others: Counter[str] = field(default_factory=Counter)  # failed rows that stay, by error type
    _attempts: list[int] = field(default_factory=list)
    _parts: list[Path] = field(default_factory=list)
    _index: DoneIndex = field(default_factory=DoneIndex.empty)

    def begin(self, strikes: Strikes) -> None:
        """Find what is to be retried. Raises OutputError."""
        known = self._read()
        self._attempts = known or []
        self._parts = self.view.parts()
        builder = IndexBuilder()
        pardoned = []
        for rows in failed_rows(self.view, self._parts, {}):
            asked = [row for row in rows if self._wants(row)]
            self.wanted += len(asked)
            self.others.update(row.error_type for row in rows if not self._wants(row))
            pardoned += [key for row in asked if (key := bytes.fromhex(row.key)) in strikes]
            # Another may have been edited, where its file was.
            for row in (row for row in rows if self._wants(row) or row.source not in self.whole):
                content = _AGAIN if self._wants(row) else bytes.fromhex(row.content)
                builder.add(_bytes(bytes.fromhex(row.key)), _bytes(content), np.zeros(1, np.uint32))
        self._index = builder.index([])
        if known is None and pardoned:
            strikes.forget(pardoned)
        kept = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.others.items()))
        others = f"; these keep their rows: {kept}" if kept else ""
        log.info("%s failed documents are tried again%s → %s", f"{self.wanted:,}", others, self.view.run.path)

    def _wants(self, row: FailedRow) -> bool:
        if attempt_of(row.part) in self._attempts:
            return False
        if self.types:
            return row.error_type in self.types
        if row.error_type in OF_SETTINGS:
            return row.fingerprint != self.fingerprint
        return row.error_type not in OF_RECORDS

    def note(self, attempt: int) -> None:
        """From here on, rows of this attempt are of this campaign. Raises OutputError."""
        self._attempts.append(attempt)
        value = self._names | {"attempts": self._attempts}
        fsio.write_atomic(self.view.run.retry_json, json.dumps(value).encode(), owner=self.view.run.owner)

    def end(self) -> None:
        """All that could be read were tried: the next retry is another campaign. Raises OutputError."""
        fsio.remove(self.view.run.retry_json)

    @property
    def _names(self) -> dict[str, Any]:
        return {"types": sorted(self.types), "fingerprint": self.fingerprint}

    def _read(self) -> list[int] | None:
        """The attempts of this campaign so far; None where it begins."""
        try:
            value = json.loads(self.view.run.retry_json.read_bytes())
            attempts = [int(n) for n in value.pop("attempts")]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return None
        return attempts if value == self._names else None

    def documents(self, line: Line, reading: Reading) -> Iterator[Document]:
        """The documents to do: fetched from their places, then, where some are not there any more, looked for."""
        inputs = {file.source: file.input for file in line.plan.files}
        for rows in failed_rows(self.view, self._parts, {}):
            asked = [row for row in rows if self._wants(row) or row.source not in self.whole]
            here = [row for row in asked if self.view.split_at(row.source, row.place)[1]]
            for source, wanted in sorted(by_source(here).items()):
                if source not in inputs:
                    continue
                try:
                    for one in open_source(self.job, inputs[source], source).fetch(wanted):
                        found = [_as_before(one.document, row) for row in wanted[one.document.place]]
                        yield from self._to_do(line, reading, [document for document in found if document])
                except InputError as e:
                    reading.file_errors.append(str(e))
        yield from self._moved(line, reading)

    def _moved(self, line: Line, reading: Reading) -> Iterator[Document]:
        """Documents with an id that are elsewhere now: in files that changed, read as `run` reads them."""
        if not len(self._index.unseen()):
            return
        for source, splits in itertools.groupby(line.plan.splits, lambda split: split.source):
            pieces = list(splits)
            if source in self.whole or self.job.input[pieces[0].input].id_field is None:
                continue
            try:
                opened = open_source(self.job, pieces[0].input, source)
                for split in pieces:
                    for document in opened.read(split):
                        yield from self._to_do(line, reading, [document])
            except InputError as e:
                reading.file_errors.append(str(e))
        if (missing := len(self._index.unseen())) and not reading.file_errors:
            log.info("%s failed documents are not in the input any more; `batchgen run` moves their rows", missing)

    def _to_do(self, line: Line, reading: Reading, documents: Sequence[Document]) -> Iterator[Document]:
        for document in documents:
            if self._index.visit(document.key, document.content) is Visit.EDITED:
                reading.retried += 1
                line.stats.counts.read += 1
                split = self.view.split_at(document.source, document.place)[0]
                yield document if split is None else dataclasses.replace(document, split=split)


def _as_before(document: Document, row: FailedRow) -> Document | None:
    """The document as that of the row; None where another stands at its place now."""
    key = place_key(document.source, document.place)
    is_duplicate = row.error_type == "duplicate_id" and key.hex() == row.key
    if not is_duplicate and document.key.hex() != row.key:
        return None
    if is_duplicate or (document.error is not None and row.is_of(document)):
        # The sentence of then: it has the number of the line too.
        return dataclasses.replace(document, key=bytes.fromhex(row.key), error=(row.error_type, row.error))
    return document


def _bytes(value: bytes) -> Any:
    """(1, size): one row for the index."""
    return np.frombuffer(value, np.uint8).reshape(1, -1)
