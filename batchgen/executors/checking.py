"""What a job is made of besides its inputs: templates, names, model, adapter, room. Nothing is read or written yet."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from batchgen.engines import settings, vllm_names
from batchgen.errors import ConfigError
from batchgen.fingerprint import fingerprint
from batchgen.job.config import Job
from batchgen.job.jobfile import JobFile, at_once
from batchgen.models import chat_template
from batchgen.models.adapter import Adapter
from batchgen.models.adapter import resolve as resolve_adapter
from batchgen.models.chat_template import ChatTemplate
from batchgen.models.model import Model, resolve
from batchgen.models.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer
from batchgen.prompting.prompts import check_templates
from batchgen.sources.dataset import pinned
from batchgen.storage.rundir import RunDirectory

log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Checked:
    """A job whose model, adapter, templates and lengths were looked at; nothing is read or written yet.

    written: the job as it was given. job: the same, data sets of the Hub pinned to a commit.
    """

    written: Job
    job: Job
    model: Model | None
    adapter: Adapter | None
    max_prompt_tokens: int
    fingerprint: Mapping[str, Any]
    chat_template: ChatTemplate | None

    @property
    def given_template(self) -> str | None:
        """The text of the chat template that the job itself names."""
        return self.chat_template.text if self.chat_template and self.chat_template.given else None


def check(file: JobFile, *, fresh: bool = False) -> Checked:
    """Raise ConfigError for what is wrong with a job besides its inputs; takes less than a second.

    fresh: the run that is there is none of this job's: its commits do not hold.
    """
    at_once(*job_checks(file))
    job = pin(file.job, fresh=fresh)
    model = model_of(job)
    check_weights(job, model)
    checked = measure(file, job, model)
    if doubt := adapter_doubt(checked):
        log.warning("%s", doubt)
    return checked


def job_checks(file: JobFile) -> list[Callable[[], None]]:
    """Checks of the job alone; each raises ConfigError."""
    return [
        lambda: check_templates(file.job, file.origin),
        lambda: chat_template.check(file.job, file.origin),
        lambda: vllm_names.check(file),
    ]


def pin(job: Job, *, fresh: bool = False) -> Job:
    """The job with a commit for each data set of the Hub. Raises ConfigError, and InputError where there is none."""
    return pinned(job, lambda: None if fresh else RunDirectory(job.output.path).read_run())


def model_of(job: Job) -> Model | None:
    """The model that the job names. Raises ConfigError where it is not found."""
    name = job.engine.args.get("model")
    return resolve(str(name), job.engine.args.get("revision")) if name else None


def check_weights(job: Job, model: Model | None) -> None:
    """Raise ConfigError where the engine would find no weights."""
    if model is not None and settings.reads_weights(job):
        model.check_weights()


def measure(file: JobFile, job: Job, model: Model | None) -> Checked:
    """The job with its model. Raises ConfigError with all that does not go together, or leaves no room for a document.

    job: the file's, checked and pinned.
    """
    found: dict[str, Any] = {}
    at_once(
        lambda: found.update(adapter=_adapter(job, model)),
        lambda: found.update(template=chat_template.find(job, file.origin, model)),
        lambda: found.update(room=_room(file, model)),
    )
    adapter, template, room = found["adapter"], found["template"], found["room"]
    given = template.sha256 if template and template.given else None
    prints = fingerprint(job, model, max_prompt_tokens=room, adapter=adapter, chat_template=given)
    return Checked(file.job, job, model, adapter, room, prints, template)


def _room(file: JobFile, model: Model | None) -> int:
    """Tokens of the longest prompt."""
    context, answer = settings.max_model_len(file.job, model), file.job.sampling.max_tokens
    if context - answer < 1:
        raise ConfigError(
            f"{file.origin.place(('sampling', 'max_tokens'))}: sampling.max_tokens ({answer}) leaves no room for a "
            f"document in max_model_len ({context}): lower it, or raise engine.args.max_model_len"
        )
    return context - answer


def _adapter(job: Job, model: Model | None) -> Adapter | None:
    if job.engine.adapter is None:
        return None
    adapter = resolve_adapter(job.engine.adapter)
    if model is not None and job.engine.backend == "vllm":
        settings.lora(job, adapter)
        adapter.check_size(model.hidden_size)
    return adapter


def adapter_doubt(checked: Checked) -> str | None:
    """What speaks against the adapter and is no reason to stop: it may have been made for another model."""
    adapter = checked.adapter
    if adapter is None or checked.model is None:
        return None
    name = str(checked.job.engine.args["model"])
    if adapter.fits(name):
        return None
    return f"engine.adapter: {adapter.name} was made for {adapter.base}, engine.args.model is {name}"


def tokenizer_of(checked: Checked, *, now: datetime | None = None) -> Tokenizer:
    """The model's own tokenizer; bytes where the job names no model. Takes seconds: transformers is imported.

    now: the present day of chat templates that tell it.
    """
    mode = checked.job.prompt.mode
    if checked.model is None:
        return BytesTokenizer(mode=mode)
    trust = bool(checked.job.engine.args.get("trust_remote_code", False))
    return HuggingFaceTokenizer(
        checked.model.folder, trust_remote_code=trust, chat_template=checked.given_template, mode=mode, now=now
    )
