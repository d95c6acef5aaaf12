"""The engines of an attempt: which arguments they get, and what `engine.adapt` changed in these.

run.json keeps the changes under `decisions.engine`, and later attempts begin with them. They hold for the arguments
they were made for, and a context for the documents it was measured on.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen import plan
from batchgen.engines import settings
from batchgen.engines.adapt import Adaptation, Change, short
from batchgen.engines.base import Engine
from batchgen.engines.pool import EnginePool, Place
from batchgen.engines.replicas import Replica, replicas
from batchgen.executors.checking import Checked, tokenizer_of
from batchgen.feeding.longest import longest_prompt
from batchgen.fingerprint import digest
from batchgen.job.config import Job
from batchgen.models.model import Model
from batchgen.models.tokenizer import Tokenizer
from batchgen.prompting.prompts import PromptBuilder
from batchgen.storage.rundir import RunDirectory

log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes one engine, in this process or in another. life, start: how many started, and were tried, before."""

    checked: Checked
    args: dict[str, Any]
    log: Path
    life: int
    start: int

    def apart(self, replica: Replica) -> "Recipe":
        """The same for one of several, to be called in a process of its own."""
        path = self.log.with_stem(f"{self.log.stem}-{replica.label}")
        return replace(self, args=self.args | replica.args, log=path)

    def __call__(self) -> Engine:
        return self.make(tokenizer_of(self.checked))

    def make(self, tokenizer: Tokenizer) -> Engine:
        job, args = self.checked.job, self.args
        if job.engine.backend == "fake":
            from batchgen.engines.fake import FakeEngine

            return FakeEngine(
                job.engine.fake,
                tokenizer,
                max_num_seqs=args.get("max_num_seqs") or settings.max_num_seqs(job),
                max_model_len=args["max_model_len"],
                fill_first=job.engine.feed == "generate",
                life=self.life,
                start=self.start,
                args=args,
            )
        from batchgen.engines.vllm import GenerateEngine, VllmEngine

        engines: dict[str, Callable[..., Engine]] = {"rolling": VllmEngine, "generate": GenerateEngine}
        sampling = settings.sampling(job, tokenizer)
        return engines[job.engine.feed](args, sampling, log=self.log, adapter=self.checked.adapter)


@dataclass
class Starter:
    """Starts engines for an attempt; `lives` tells how many of them started before. tokenizer: the attempt's.

    at_most: documents that the attempt can have left to do, None where nobody knows. exposes: vLLM's own metrics are
    wanted.
    """

    checked: Checked
    directory: RunDirectory
    files: plan.Plan
    attempt: int
    tokenizer: Callable[[], Tokenizer]
    at_most: int | None = None
    exposes: bool = False
    _starts: int = 0

    @property
    def job(self) -> Job:
        return self.checked.job

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, as the job has it."""
        return settings.max_model_len(self.job, self.checked.model)

    def engine(self, lives: int, documents: int | None = None) -> Engine:
        """An engine. documents: those that the reader has for it, None where there may be more."""
        if self.job.long_documents.in_pieces:  # nobody knows how many requests they are
            documents = self.at_most = None
        known = [number for number in (self.at_most, documents) if number is not None]
        self.at_most = min(known, default=None)
        return self.adaptation.start(lambda args: self._start(args, lives))

    @cached_property
    def replicas(self) -> list[Replica]:
        """Where the engines of this attempt run; it is the first start's documents that decide."""
        return replicas(self.job, self.checked.model, documents=self.at_most)

    @cached_property
    def adaptation(self) -> Adaptation:
        args, model = self.job.engine.args | {"max_model_len": self.context}, self.checked.model
        if self.job.engine.backend == "vllm":
            assert model is not None
            args |= self._chosen(model) | {"model": model.name}
        else:
            args |= settings.profile(self.job)
        return Adaptation(args, need=lambda: self._need, enabled=self.job.engine.adapt, changes=self._remembered())

    def _chosen(self, model: Model) -> dict[str, Any]:
        adapter = self.checked.adapter
        usual, chosen = (settings.chosen(self.job, model, adapter, documents=n) for n in (None, self.at_most))
        few = settings.for_few(self.job, self.at_most)
        if special := {name: chosen[name] for name in few if name in chosen and usual.get(name) != chosen[name]}:
            log.info(
                "at most %s documents are left: the engine starts with %s: to prepare it for more would not pay",
                self.at_most,
                ", ".join(f"{name} {str(value).lower()}" for name, value in special.items()),
            )
        return chosen

    @cached_property
    def _need(self) -> int:
        """Tokens of context that no document exceeds; all of it where documents are packed into what there is."""
        if self.job.packing.mode != "off":
            return self.context
        log.info("looking for the longest document, to see what context is needed")
        room = self.checked.max_prompt_tokens
        # With a tokenizer of its own: the attempt's is at work in another thread.
        prompts = PromptBuilder(self.job, tokenizer_of(self.checked), max_prompt_tokens=room)
        longest = longest_prompt(self.job, self.files, prompts, at_most=room)
        answer = self.job.answers.retry_max_tokens or self.job.sampling.max_tokens
        least = settings.least_context(self.checked.model, self.context)
        return max(min(longest + answer, self.context), least)

    def _start(self, args: dict[str, Any], lives: int) -> Engine:
        logs = self.directory.logs
        recipe = Recipe(self.checked, args, logs / f"engine-{self.attempt:05d}.log", life=lives, start=self._starts)
        self._starts += 1
        if len(self.replicas) == 1:
            if self.job.engine.backend == "vllm":
                log.info("starting the engine with %s (log: %s)", args["model"], recipe.log)
            return recipe.make(self.tokenizer())
        log.info("starting %s engines (logs: %s)", len(self.replicas), logs / f"engine-{self.attempt:05d}-*.log")
        places = [Place(one.label, one.environment, recipe.apart(one)) for one in self.replicas]
        return EnginePool(places, stall_s=self.job.engine.stall_s, logs=logs, exposes=self.exposes)

    def _made_for(self) -> dict[str, str]:
        # A shard's documents are its own: the longest one of another's says nothing about them.
        files = [[file.source, plan.state(self.job, file)] for file in self.files.files] + [str(self.directory.shard)]
        return {
            "args": _digest(self.job.engine.args),
            "documents": _digest([files, digest(self.checked.fingerprint)]),
        }

    def _remembered(self) -> list[Change]:
        """What an earlier attempt changed, as far as it holds for this one."""
        known = _decided(self.directory.read_run() or {})
        now = self._made_for()
        if not self.job.engine.adapt or not known or known["args"] != now["args"]:
            return []
        changes = [Change(**change) for change in known["changes"]]
        contexts = [change.after for change in changes if change.argument == "max_model_len"]
        if contexts and known["documents"] != now["documents"] and self._need > min(contexts):
            log.info("engine.adapt: the documents now need a context of %s tokens", f"{self._need:,}")
            changes = [change for change in changes if change.argument != "max_model_len"]
        if changes:
            log.info("engine.adapt: beginning with %s, as the last attempt", short(changes))
        return changes

    def note(self, value: dict[str, Any]) -> None:
        """Write into run.json's value what the engine that now runs was changed to."""
        changes = [dataclasses.asdict(change) for change in self.adaptation.changes]
        value["engine"]["adapted"] = changes
        if self.job.engine.adapt:
            decisions = {name: one for name, one in value.get("decisions", {}).items() if name != "engine"}
            if changes:
                decisions["engine"] = self._made_for() | {"changes": changes}
            value["decisions"] = decisions


def _decided(run: Mapping[str, Any]) -> dict[str, Any] | None:
    found = run.get("decisions", {}).get("engine")
    return found if isinstance(found, dict) else None


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
