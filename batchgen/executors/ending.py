"""The end of a start: one row a document, the list of the failed, the report, the exit status."""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen import plan
from batchgen.errors import OK, TOO_MANY_FAILED, BatchgenError, InputError, OutputError
from batchgen.feeding.line import Line, Reading
from batchgen.reporting import html, report
from batchgen.reporting.rows import Rows, read_rows
from batchgen.sinks.base import Sink
from batchgen.storage import checkpoint
from batchgen.storage.failed import FailedList
from batchgen.storage.index import KeySet
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View

log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Outcome:
    """exit_status and the sentence for it; report is report.json's value, None where the run never began.

    report_md: the same for reading.
    """

    exit_status: int
    reason: str
    report: Mapping[str, Any] | None = None
    report_md: Path | None = None


@dataclass(slots=True)
class Ending:
    """What a pass leaves behind. retrying: it was one of `retry-failed`."""

    view: View
    line: Line
    reading: Reading
    retrying: bool
    _unmet: KeySet = field(default_factory=KeySet.empty)  # rows of documents that are none of the shard's

    @property
    def directory(self) -> RunDirectory:
        return self.view.run

    @property
    def sink(self) -> Sink:
        return self.view.sink

    def settle(self) -> int:
        """After a whole pass: one row a document. The number of orphans moved."""
        with self.directory.alone():
            plan.counted(self.directory, self._counted())
        unmet = self.line.index.unseen() if self.reading.complete else KeySet.empty()
        self.line.index.clear()
        # A shard does not know what the others have met: what none has, only a pass over all of it can tell.
        orphans = unmet if self.directory.shard.is_whole else KeySet.empty()
        self._unmet = KeySet.empty() if self.directory.shard.is_whole else unmet
        if len(orphans) or self.reading.edited or self.reading.retried:
            checkpoint.settle(self.view, orphans)
        if self.reading.complete:
            self.line.strikes.forget()
            if self.directory.shard.is_whole:
                self.line.strikes.forget_others()
            self.directory.remove_pieces()
        if len(orphans):
            log.info("%s rows of documents that are gone were moved to %s", len(orphans), self.directory.orphans)
        return len(orphans)

    def _counted(self) -> dict[str, int]:
        """Rows of the files that were read to their end, all splits of them being of this shard."""
        counted, layout = self.line.committer.counted, self.line.plan.layout
        return {source: rows for source, rows in counted.items() if layout.holds(source)}

    def tell(self, failure: BatchgenError | None, notes: dict[str, Any]) -> Outcome:
        """Write failed.jsonl, the report and the last of telemetry. failure: what ended the pass; None after settle."""
        reading, line = self.reading, self.line
        for error in reading.file_errors:
            log.error("%s", error)
        settled = failure is None  # so each document has one row
        line.index.clear()
        unique = settled or not (reading.edited or reading.retried)
        rows = read_rows(self.directory, self.sink, unique=unique, view=self.view, unmet=self._unmet)
        inputs = {one.source: one.input for one in line.plan.files}
        listed = None
        try:
            failed = FailedList(line.job, self.view, inputs, rows.old)
            listed = failed.renew(rows.with_failed, line.stop, failure)
        except OutputError as e:
            failure = e
        if failure is None and reading.file_errors:
            failure = InputError(f"{len(reading.file_errors)} input files could not be read, or not to their end")
        status, reason = self._verdict(failure, rows)
        stale = 0 if settled else max(0, reading.edited - rows.superseded)
        counts = line.stats.end()
        scope = report.Scope(
            name=line.job.name,
            attempt=line.committer.attempt,
            counts=counts,
            exit_status=status,
            reason=reason,
            rows=rows,
            stale=stale,
            total_rows=counts.read if reading.complete else max(line.plan.rows, rows.count),
            total_exact=reading.complete or line.plan.exact,
            notes=notes
            | {
                "input files with errors": reading.file_errors,
                "edited documents": reading.edited,
                "duplicate ids": reading.duplicates,
                "failed documents": listed,
            },
        )
        return self._written(scope)

    def _verdict(self, failure: BatchgenError | None, rows: Rows) -> tuple[int, str]:
        """The exit status and its sentence."""
        if failure is not None:
            return failure.exit_status, str(failure)
        reason = f"{self.reading.retried:,} tried again" if self.retrying else "finished"
        failed, most = rows.status["failed"], self.line.job.failures.max
        if failed > most:
            return TOO_MANY_FAILED, f"{reason}, {failed} documents failed (failures.max is {most})"
        if not self.reading.complete and not self.retrying:
            reason = f"--limit {self.line.limit} reached"
        return OK, reason

    def _written(self, scope: report.Scope) -> Outcome:
        value = report.build(self.directory, scope)
        told = {"notes": scope.notes, "edited_pending": scope.stale}
        telemetry, stats = self.line.telemetry, self.line.stats
        try:
            report.write(self.directory, value)
            now = {self.directory.telemetry(scope.attempt): scope.counts}
            html.renew(html.Shown(self.view, value, scope.rows, now, self.line.committer.met), self.line.stop)
        except OutputError as e:
            with contextlib.suppress(OutputError):
                telemetry.close(stats, e.exit_status, reason=str(e), **told)
            raise
        telemetry.close(stats, scope.exit_status or OK, reason=scope.reason, **told)
        return Outcome(scope.exit_status or OK, scope.reason, value, self.directory.report_md)
