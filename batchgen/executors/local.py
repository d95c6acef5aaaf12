"""One start of a run in this process: lock, fingerprint, plan, index, pass, settling, report."""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from batchgen import __version__, checkpoint, duplicates, plan, report, sinks
from batchgen.config import Job, JobFile
from batchgen.engines import settings
from batchgen.engines.base import Engine, EngineInfo
from batchgen.errors import (
    OK,
    TOO_MANY_FAILED,
    BatchgenError,
    ConfigError,
    FingerprintError,
    InputError,
    OutputError,
)
from batchgen.executors.checking import Checked, check, tokenizer_of
from batchgen.executors.starting import Starter
from batchgen.failed import FailedList
from batchgen.fingerprint import differences, digest
from batchgen.index import KeySet
from batchgen.lifecycle import Stop
from batchgen.line import Line, Reading
from batchgen.pipeline import run_pass
from batchgen.progress import Progress
from batchgen.prompts import PromptBuilder
from batchgen.reader import read_documents
from batchgen.retry import Campaign
from batchgen.rundir import SHARD, RunDirectory
from batchgen.sinks.base import Sink
from batchgen.stats import Stats, Telemetry
from batchgen.strikes import Strikes
from batchgen.tokenizer import Tokenizer
from batchgen.watchdog import Watchdog
from batchgen.workflows.single import Rules, SingleWorkflow

OnChange = Literal["refuse", "keep", "new-run"]
log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line adds to a job.

    retry: failed documents are done again and no others, those of these error types (see retry.Campaign).
    """

    limit: int | None = None
    fresh: bool = False
    on_change: OnChange = "refuse"
    retry: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """exit_status and the sentence for it; report is report.json's value, None where the run never began."""

    exit_status: int
    reason: str
    report: Mapping[str, Any] | None = None


def run(file: JobFile, options: Options, stop: Stop) -> Outcome:
    """Go on with the job's run, or begin it. Raises BatchgenError where nothing could be begun."""
    with stop.raising():
        checked = check(file, fresh=options.fresh)
    if options.retry is not None and not RunDirectory(checked.job.output.path).run_json.exists():
        raise ConfigError(
            f"{checked.job.output.path}: there is no run yet that could have failed: `batchgen run` first"
        )
    with RunDirectory(checked.job.output.path) as directory:
        return _Attempt(checked, options, stop, directory).run()


@dataclass
class _Attempt:
    checked: Checked
    options: Options
    stop: Stop
    directory: RunDirectory
    stats: Stats = field(default_factory=Stats)
    _tokenizer: Tokenizer | None = None

    @property
    def job(self) -> Job:
        return self.checked.job

    def run(self) -> Outcome:
        self._settle_identity()
        files = plan.make(self.job, self.directory)
        if files.left_out:
            log.info("files of no format batchgen reads, left out: %s", plan.names(files.left_out))
        if files.skipped:
            log.warning("files that cannot be read, skipped: %s", f"{len(files.skipped):,}")
        parts = self.job.output.format
        kept = sinks.types_to_keep(parts, self.directory.summaries, files.kept(self.job))
        sink = sinks.open_sink(parts, kept=kept, owner=self.directory.owner)
        loaded = checkpoint.load(self.job, files.files, self.directory, sink)
        for damaged in loaded.damaged:
            log.warning("damaged part: %s", damaged)
        attempt = self.directory.next_attempt()
        telemetry = Telemetry(self.directory.telemetry(attempt), attempt=attempt, batchgen=__version__)
        committer = checkpoint.Committer(
            self.job, self.directory, sink, digest(self.checked.fingerprint), attempt,
            {one.source: one for one in files.files}, loaded.whole,
        )  # fmt: skip
        strikes = Strikes(self.directory.strikes_json, limit=self.job.failures.strikes, owner=self.directory.owner)
        campaign = self._campaign(sink, loaded, strikes)
        if campaign is None:
            log.info("%s in %s; %s done before → %s", _documents(files), _files(files), f"{loaded.index.done:,}",
                     self.directory.path)  # fmt: skip
            self._refuse_duplicates(files, loaded)
        elif campaign.wanted:
            telemetry.event("retry", documents=campaign.wanted)
            campaign.note(attempt)
        progress = Progress(files, None if campaign is None else campaign.wanted)
        starter = Starter(self.checked, self.directory, files, attempt, self._make_tokenizer)
        line = Line(
            job=self.job,
            plan=files,
            whole=loaded.whole,
            index=loaded.index,
            prompts=self._prompts,
            engine=lambda: self._engine(starter),
            workflow=SingleWorkflow(prefix=f"{SHARD}-{attempt}", rules=self._rules()),
            committer=committer,
            strikes=strikes,
            watchdog=Watchdog(
                self.stop,
                stall_s=self.job.engine.stall_s,
                grace_s=self.job.lifecycle.grace_s,
                logs=self.directory.logs,
            ),
            stats=self.stats,
            telemetry=telemetry,
            progress=progress,
            stop=self.stop,
            engine_ready=lambda info: self._note_engine(info, starter),
            documents=read_documents if campaign is None else campaign.documents,
            limit=self.options.limit,
        )
        failure: BatchgenError | None = None
        reading = Reading(file_errors=[str(skipped) for skipped in files.skipped])
        orphans = 0
        try:
            run_pass(line, reading)
            orphans = self._finish(line, reading, sink)
            if campaign is not None:
                campaign.end()
        except BatchgenError as e:
            failure = e
        finally:
            progress.close(self.stats)
        return self._end(
            line,
            reading,
            sink,
            failure,
            {"damaged parts": list(loaded.damaged), "orphans": orphans, "engine deaths": self.stats.deaths},
        )

    def _campaign(self, sink: Sink, loaded: checkpoint.Loaded, strikes: Strikes) -> Campaign | None:
        """What `retry-failed` does; None where all documents without a row are done."""
        if self.options.retry is None:
            return None
        loaded.index.clear()
        now = digest(self.checked.fingerprint)
        campaign = Campaign(self.job, self.directory, sink, loaded.whole, self.options.retry, now)
        campaign.begin(strikes)
        return campaign

    def _settle_identity(self) -> None:
        """Go on only with the settings of the parts that are there, unless told otherwise."""
        if self.options.fresh:
            if self.directory.run_json.exists() or any(self.directory.summaries.glob("part-*")):
                log.info("--fresh: the old run is now %s", self.directory.set_aside())
            old = None
        else:
            old = self.directory.read_run()
        now = self.checked.fingerprint
        made = sinks.format_of(self.directory.summaries) is not None  # without a row, settings are nobody's yet
        if made and old is not None and (lines := differences(old["fingerprint"], now)):
            if self.options.on_change == "refuse":
                raise FingerprintError(_refusal(self.directory.path, lines))
            if self.options.on_change == "keep" and old["fingerprint"]["columns"] != now["columns"]:
                raise FingerprintError(
                    f"{self.directory.path}: the kept fields are not those of the run there, and all its parts "
                    "have the same columns: --on-change new-run, or the old list under input.keep"
                )
            if self.options.on_change == "new-run":
                log.info("--on-change new-run: the old run is now %s", self.directory.set_aside())
                old = None
            else:
                log.info("--on-change keep: going on under new settings; rows tell theirs in column fingerprint")
        sinks.refuse_other(self.directory.summaries, self.job.output.format)
        began = (old or {}).get("began") or datetime.now(UTC).isoformat(timespec="seconds")
        earlier = dict((old or {}).get("earlier_fingerprints", {}))
        if made and old is not None and digest(old["fingerprint"]) != digest(now):
            earlier[digest(old["fingerprint"])] = old["fingerprint"]
        value = (old or {}) | {
            "name": self.job.name,
            "began": began,
            "batchgen": __version__,
            "fingerprint": now,
            "fingerprint_digest": digest(now),
            "earlier_fingerprints": earlier,
            "job": self._job_record(),
        }
        if value != old:
            self.directory.write_run(value)

    def _job_record(self) -> dict[str, Any]:
        """The job with all defaults, and which chat template it used."""
        record = self.checked.written.model_dump()
        template = self.checked.chat_template
        record["prompt"]["chat_template_sha256"] = template and template.sha256
        return record

    def _refuse_duplicates(self, files: plan.Plan, loaded: checkpoint.Loaded) -> None:
        """Raise InputError for `on_duplicate: refuse`; a start with nothing to read looks for nothing."""
        if not any(item.on_duplicate == "refuse" for item in self.job.input):
            return
        if all(file.source in loaded.whole for file in files.files):
            return
        with self.stop.raising():
            duplicates.refuse(self.job, files.files)

    def _make_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            began = datetime.fromisoformat((self.directory.read_run() or {})["began"])
            self._tokenizer = tokenizer_of(self.checked, now=began)
        return self._tokenizer

    def _prompts(self) -> PromptBuilder:
        return PromptBuilder(self.job, self._make_tokenizer(), max_prompt_tokens=self.checked.max_prompt_tokens)

    def _rules(self) -> Rules:
        job = self.job
        return Rules(
            max_tokens=job.sampling.max_tokens,
            max_model_len=settings.max_model_len(job, self.checked.model),
            count=lambda text: len(self._make_tokenizer().encode_batch([text])[0]),
            retry_max_tokens=job.answers.retry_max_tokens,
            reasoning_end=job.answers.reasoning_end,
        )

    def _engine(self, starter: Starter) -> Engine:
        return starter.engine(self.stats.counts.engine_starts)

    def _note_engine(self, info: EngineInfo, starter: Starter) -> None:
        """run.json tells the engine of the latest attempt that had one."""
        from dataclasses import asdict

        value = self.directory.read_run() or {}
        value["engine"] = asdict(info) | {"feed": self.job.engine.feed}
        starter.note(value)
        self.directory.write_run(value)
        if info.backend != "fake":
            cache = f", KV cache {info.kv_cache_tokens:,} tokens" if info.kv_cache_tokens else ""
            log.info("engine ready in %.0f s: %s%s", self.stats.engine_start_s, info.device, cache)

    def _finish(self, line: Line, reading: Reading, sink: Sink) -> int:
        """After a whole pass: one row a document. The number of orphans moved."""
        plan.counted(self.directory, line.committer.counted)
        orphans = line.index.unseen() if reading.complete else KeySet.empty()
        line.index.clear()
        if len(orphans) or reading.edited or reading.retried:
            checkpoint.settle(self.directory, sink, orphans)
        if reading.complete:
            line.strikes.forget()
        if len(orphans):
            log.info("%s rows of documents that are gone were moved to %s", len(orphans), self.directory.orphans)
        return len(orphans)

    def _end(
        self, line: Line, reading: Reading, sink: Sink, failure: BatchgenError | None, notes: dict[str, Any]
    ) -> Outcome:
        for error in reading.file_errors:
            log.error("%s", error)
        settled = failure is None  # so each document has one row
        line.index.clear()
        rows = report.read_rows(self.directory, sink, unique=settled or not (reading.edited or reading.retried))
        failed = FailedList(
            self.job, self.directory, sink, {one.source: one.input for one in line.plan.files}, rows.old
        )
        try:
            listed = failed.renew(rows.with_failed, self.stop, failure)
        except OutputError as e:
            listed, failure = None, e
        if failure is None and reading.file_errors:
            failure = InputError(f"{len(reading.file_errors)} input files could not be read, or not to their end")
        status, reason = OK, "finished" if self.options.retry is None else f"{reading.retried:,} tried again"
        if failure is not None:
            status, reason = failure.exit_status, str(failure)
        elif rows.status["failed"] > self.job.failures.max:
            status = TOO_MANY_FAILED
            reason += f", {rows.status['failed']} documents failed (failures.max is {self.job.failures.max})"
        elif not reading.complete and self.options.retry is None:
            reason = f"--limit {self.options.limit} reached"
        counts = self.stats.now()
        stale = 0 if settled else max(0, reading.edited - rows.superseded)
        notes |= {"input files with errors": reading.file_errors, "edited documents": reading.edited,
                  "duplicate ids": reading.duplicates, "failed documents": listed}  # fmt: skip
        scope = report.Scope(
            name=self.job.name,
            attempt=line.committer.attempt,
            counts=counts,
            exit_status=status,
            reason=reason,
            rows=rows,
            stale=stale,
            total_rows=counts.read if reading.complete else max(line.plan.rows, rows.count),
            total_exact=reading.complete or line.plan.exact,
            notes=notes,
        )
        value = report.build(self.directory, scope)
        told = {"notes": notes, "edited_pending": stale}
        try:
            report.write(self.directory, value)
        except OutputError as e:
            with contextlib.suppress(OutputError):
                line.telemetry.close(self.stats, e.exit_status, reason=str(e), **told)
            raise
        line.telemetry.close(self.stats, status, reason=reason, **told)
        return Outcome(status, reason, value)


def _documents(files: plan.Plan) -> str:
    if not files.exact and not files.rows:
        return "documents of unknown number"
    return f"{'' if files.exact else 'about '}{files.rows:,} documents"


def _files(files: plan.Plan) -> str:
    sets = sum(bool(file.revision) for file in files.files)
    told = [f"{len(files.files) - sets} files"] if len(files.files) > sets else []
    return " and ".join(told + ([f"{sets} data {'set' if sets == 1 else 'sets'}"] if sets else []))


def _refusal(path: Path, lines: list[str]) -> str:
    shown = "\n".join(f"  {line}" for line in lines)
    return (
        f"{path}: the run there was made with other settings:\n{shown}\n"
        "Go on with one of: the old settings; --on-change keep (new rows under the new settings, old rows stay); "
        "--on-change new-run (the old run is moved aside, a new one begins)"
    )
