"""One start of a run in this process: lock, fingerprint, plan, index, pass, settling, report."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from batchgen import __version__, plan, sinks
from batchgen.engines import settings
from batchgen.engines.base import Engine, EngineInfo
from batchgen.engines.watchdog import Watchdog
from batchgen.errors import BatchgenError, ConfigError
from batchgen.executors import duplicates, identity
from batchgen.executors.checking import Checked, check, tokenizer_of
from batchgen.executors.ending import Ending, Outcome
from batchgen.executors.identity import OnChange
from batchgen.executors.packing import Packing
from batchgen.executors.retry import Campaign
from batchgen.executors.starting import Starter
from batchgen.feeding.line import Line, Reading
from batchgen.feeding.reader import read_documents
from batchgen.fingerprint import digest
from batchgen.job.config import Job
from batchgen.job.jobfile import JobFile
from batchgen.lifecycle import Stop
from batchgen.models.tokenizer import Tokenizer
from batchgen.pipeline import run_pass
from batchgen.prompting.long_prompts import LongPrompts
from batchgen.prompting.prompts import PromptBuilder
from batchgen.reporting.metrics import RunMetrics, exposing
from batchgen.reporting.progress import Progress
from batchgen.reporting.serving import Ports
from batchgen.reporting.stats import Stats, Telemetry
from batchgen.shards import WHOLE, Shard
from batchgen.sinks.base import Sink
from batchgen.storage import checkpoint
from batchgen.storage.kept_answers import KeptAnswers
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.strikes import Strikes
from batchgen.storage.view import View
from batchgen.workflows.base import Workflow
from batchgen.workflows.long import Bounds
from batchgen.workflows.map_reduce import MapReduceWorkflow
from batchgen.workflows.refine import RefineWorkflow
from batchgen.workflows.single import Rules, SingleWorkflow

log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line adds to a job.

    retry: failed documents are done again and no others, those of these error types (see retry.Campaign). metrics:
    where Prometheus finds them.
    shard: which share of the splits; fresh and on_change "new-run" are for a run that is not divided.
    """

    limit: int | None = None
    fresh: bool = False
    on_change: OnChange = "refuse"
    retry: frozenset[str] | None = None
    shard: Shard = WHOLE
    metrics: Ports | None = None


def run(
    file: JobFile, options: Options, stop: Stop, *, engine: Callable[[int | None], Engine] | None = None
) -> Outcome:
    """Go on with the job's run, or begin it. Raises BatchgenError where nothing could be begun.

    engine: starts the engine in the job's place; for measurements that share one.
    """
    with stop.raising():
        checked = check(file, fresh=options.fresh)
    if options.retry is not None and not RunDirectory(checked.job.output.path).run_json.exists():
        raise ConfigError(
            f"{checked.job.output.path}: there is no run yet that could have failed: `batchgen run` first"
        )
    with RunDirectory(checked.job.output.path, options.shard) as directory:
        attempt = _Attempt(checked, options, stop, directory, engine, again=lambda: check(file))
        metrics = RunMetrics(attempt.stats, checked.job.name, directory.owner)
        # Inside of the lock: a start that meets a run which goes is told so, not that its port is in use.
        with exposing(metrics, options.metrics, checked.job.metrics.path):
            outcome = attempt.run(metrics)
            metrics.ended = outcome.exit_status
            return outcome


@dataclass
class _Attempt:
    """again: checks the job once more."""

    checked: Checked
    options: Options
    stop: Stop
    directory: RunDirectory
    engine: Callable[[int | None], Engine] | None
    again: Callable[[], Checked]
    stats: Stats = field(default_factory=Stats)
    _tokenizer: Tokenizer | None = None
    _builder: PromptBuilder | None = None

    @property
    def job(self) -> Job:
        return self.checked.job

    def run(self, metrics: RunMetrics) -> Outcome:
        # Up to the first document nothing is half done that a signal could not leave.
        with self.stop.raising():
            with self.directory.alone():
                self._settle_identity()
                files = plan.make(self.job, self.directory)
            _tell_odd_files(files)
            sink = self._sink(files)
            view = View(self.directory, sink, files.layout)
            loaded = checkpoint.load(self.job, files.files, view)
            if view.others:
                log.info("%s parts of other shards were looked through: the number of shards, or files, have changed",
                         f"{view.others:,}")  # fmt: skip
            for damaged in loaded.damaged:
                log.warning("damaged part: %s", damaged)
            attempt = self.directory.next_attempt()
            telemetry = Telemetry(self.directory.telemetry(attempt), attempt=attempt, batchgen=__version__)
            strikes = Strikes(
                self.directory.strikes_json, limit=self.job.failures.strikes, owner=self.directory.owner,
                others=self.directory.of_other_counts(self.directory.path, "strikes"),
            )  # fmt: skip
            campaign = self._campaign(view, loaded, strikes)
            if campaign is None:
                log.info("%s in %s; %s done before → %s", _documents(files), _files(files), f"{loaded.index.done:,}",
                         self.directory.path)  # fmt: skip
                self._refuse_duplicates(files, loaded)
        if campaign is not None and campaign.wanted:
            telemetry.event("retry", documents=campaign.wanted)
            campaign.note(attempt)
        metrics.attempt, metrics.expected = attempt, files.rows or None
        if campaign is not None:
            metrics.expected = campaign.wanted
        line = self._line(files, loaded, sink, strikes, telemetry, campaign, attempt)
        return self._pass(line, view, files, campaign, list(loaded.damaged))

    def _settle_identity(self) -> None:
        on_hub = any(item.dataset is not None for item in self.job.input)
        if on_hub and not self.directory.shard.is_whole and self.directory.run_json.exists():
            # Another shard may have begun the run meanwhile, and said which commit of a data set it has.
            self.checked = self.again()
        identity.settle(self.checked, self.directory, fresh=self.options.fresh, on_change=self.options.on_change)

    def _sink(self, files: plan.Plan) -> Sink:
        form = self.job.output.format
        kept = sinks.types_to_keep(form, self.directory.summaries, files.kept(self.job))
        return sinks.open_sink(form, kept=kept, owner=self.directory.owner)

    def _line(  # noqa: PLR0917  each is made once, and only here
        self,
        files: plan.Plan,
        loaded: checkpoint.Loaded,
        sink: Sink,
        strikes: Strikes,
        telemetry: Telemetry,
        campaign: Campaign | None,
        attempt: int,
    ) -> Line:
        starter = Starter(
            self.checked, self.directory, files, attempt, self._make_tokenizer, self._at_most(files, loaded, campaign),
            exposes=self.options.metrics is not None,
        )  # fmt: skip
        committer = checkpoint.Committer(
            self.job, self.directory, sink, digest(self.checked.fingerprint), attempt,
            {one.source: one for one in files.files}, loaded.whole, files.layout,
        )  # fmt: skip
        kept = None
        if self.job.long_documents.in_pieces:
            kept = KeptAnswers(self.directory, fingerprint=digest(self.checked.fingerprint),
                               interval_s=self.job.checkpoint.interval_s)  # fmt: skip
        return Line(
            job=self.job,
            plan=files,
            whole=loaded.whole,
            index=loaded.index,
            prompts=self._prompts,
            engine=self.engine or (lambda documents: starter.engine(self.stats.counts.engine_starts, documents)),
            workflow=self._workflow(telemetry, starter, attempt, kept, retrying=campaign is not None),
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
            progress=Progress(files, None if campaign is None else campaign.wanted, limit=self.options.limit),
            stop=self.stop,
            engine_ready=lambda info: self._note_engine(info, starter),
            documents=read_documents if campaign is None else campaign.documents,
            limit=self.options.limit,
            kept=kept,
            twins=loaded.twins,
        )

    def _workflow(
        self, telemetry: Telemetry, starter: Starter, attempt: int, kept: KeptAnswers | None, *, retrying: bool
    ) -> Workflow:
        """One document a request or, where it is longer than the context, several; short ones packed before that."""
        prefix = f"{self.directory.shard.number}-{attempt}"
        alone = self._alone(prefix, kept)
        if retrying:  # what failed is not packed again
            return alone
        packing = Packing(
            self.checked, self.directory, self.stats, telemetry,
            frame=lambda turn: self._prompts().frame(turn), left=lambda: starter.at_most,
        )  # fmt: skip
        return packing.workflow(alone, prefix=prefix, rules=self._rules())

    def _pass(self, line: Line, view: View, files: plan.Plan, campaign: Campaign | None, damaged: list[str]) -> Outcome:
        failure: BatchgenError | None = None
        reading = Reading(file_errors=[str(skipped) for skipped in files.skipped])
        ending = Ending(view, line, reading, retrying=campaign is not None)
        orphans = 0
        try:
            run_pass(line, reading)
            orphans = ending.settle()
            if campaign is not None:
                campaign.end()
        except BatchgenError as e:
            failure = e
        finally:
            line.progress.close(self.stats)
        notes = {"damaged parts": damaged, "orphans": orphans, "engine deaths": self.stats.deaths}
        return ending.tell(failure, notes)

    def _at_most(self, files: plan.Plan, loaded: checkpoint.Loaded, campaign: Campaign | None) -> int | None:
        """Documents that can be left to do, as far as that is known before any is read.

        Rows that were done before say nothing here: their documents may all have been edited or replaced.
        """
        if campaign is not None:
            return campaign.wanted
        left = [file for file in files.files if file.source not in loaded.whole and files.layout.mine(file.source)]
        known = [self.options.limit, sum(file.rows for file in left) if all(file.exact for file in left) else None]
        return min((number for number in known if number is not None), default=None)

    def _campaign(self, view: View, loaded: checkpoint.Loaded, strikes: Strikes) -> Campaign | None:
        """What `retry-failed` does; None where all documents without a row are done."""
        if self.options.retry is None:
            return None
        loaded.index.clear()
        now = digest(self.checked.fingerprint)
        campaign = Campaign(self.job, view, loaded.whole, self.options.retry, now)
        campaign.begin(strikes)
        return campaign

    def _refuse_duplicates(self, files: plan.Plan, loaded: checkpoint.Loaded) -> None:
        """Raise InputError for `on_duplicate: refuse`; a start with nothing to read looks for nothing."""
        if not any(item.on_duplicate == "refuse" for item in self.job.input):
            return
        if all(split.source in loaded.whole for split in files.splits):
            return
        duplicates.refuse(self.job, files.files)

    def _make_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            began = datetime.fromisoformat((self.directory.read_run() or {})["began"])
            self._tokenizer = tokenizer_of(self.checked, now=began)
        return self._tokenizer

    def _prompts(self) -> PromptBuilder:
        if self._builder is None:
            room = self.checked.max_prompt_tokens
            self._builder = PromptBuilder(self.job, self._make_tokenizer(), max_prompt_tokens=room)
        return self._builder

    def _alone(self, prefix: str, kept: KeptAnswers | None) -> Workflow:
        long, rules = self.job.long_documents, self._rules()
        if not long.in_pieces:
            return SingleWorkflow(prefix=prefix, rules=rules)
        bounds = Bounds(at_once=settings.at_once(self.job), requests=long.max_requests)

        def prompts() -> LongPrompts:  # made when there are answers to put together
            return self._prompts().long

        if long.policy == "refine":
            return RefineWorkflow(
                prefix=prefix, rules=rules, bounds=bounds, store=kept, refine=lambda *of: prompts().refine(*of)
            )
        return MapReduceWorkflow(
            prefix=prefix, rules=rules, bounds=bounds, store=kept, join=lambda *of: prompts().join(*of),
            max_depth=long.max_depth,
        )  # fmt: skip

    def _rules(self) -> Rules:
        job = self.job
        return Rules(
            max_tokens=job.sampling.max_tokens,
            max_model_len=settings.max_model_len(job, self.checked.model),
            count=lambda text: len(self._make_tokenizer().encode_batch([text])[0]),
            retry_max_tokens=job.answers.retry_max_tokens,
            reasoning_end=job.answers.reasoning_end,
        )

    def _note_engine(self, info: EngineInfo, starter: Starter) -> None:
        """run.json tells the engine of the latest attempt that had one."""
        from dataclasses import asdict

        with self.directory.alone():
            value = self.directory.read_run() or {}
            value["engine"] = asdict(info) | {"feed": self.job.engine.feed, "profile": self.job.engine.profile}
            starter.note(value)
            self.directory.write_run(value)
        if info.backend != "fake":
            each = " each" if info.replicas > 1 else ""
            cache = f", KV cache {info.kv_cache_tokens:,} tokens{each}" if info.kv_cache_tokens else ""
            ready = "engine ready" if info.replicas == 1 else f"{info.replicas} engines ready"
            log.info("%s in %.0f s: %s%s", ready, self.stats.engine_start_s, info.device, cache)


def _tell_odd_files(files: plan.Plan) -> None:
    if files.left_out:
        log.info("files of no format batchgen reads, left out: %s", plan.names(files.left_out))
    if files.skipped:
        log.warning("files that cannot be read, skipped: %s", f"{len(files.skipped):,}")


def _documents(files: plan.Plan) -> str:
    if not files.exact and not files.rows:
        return "documents of unknown number"
    return f"{'' if files.exact else 'about '}{files.rows:,} documents"


def _files(files: plan.Plan) -> str:
    sets = sum(bool(file.revision) for file in files.files)
    told = [f"{len(files.files) - sets} files"] if len(files.files) > sets else []
    return " and ".join(told + ([f"{sets} data {'set' if sets == 1 else 'sets'}"] if sets else []))
