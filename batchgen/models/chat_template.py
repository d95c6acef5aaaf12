"""Which chat template a job uses: found, read and parsed without importing transformers."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import ConfigError
from batchgen.job.config import Job
from batchgen.job.jobfile import Origin
from batchgen.models.model import Model
from batchgen.models.tokenizer import NO_CHAT_TEMPLATE


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """given: whether the job names it; else it is the model's own."""

    text: str
    given: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def check(job: Job, origin: Origin) -> None:
    """Raise ConfigError where the file that the job names is missing or broken, or is not to be used at all."""
    if (given := job.prompt.chat_template) is None:
        return
    where = origin.where(("prompt", "chat_template"))
    if job.prompt.mode == "completion":
        raise ConfigError(f"{where}: prompt.mode: completion uses no chat template; leave one of them out")
    _read(given, where)


def find(job: Job, origin: Origin, model: Model | None) -> ChatTemplate | None:
    """The template of the job or of the model; None in completion mode and where only the tokenizer can tell.

    The job was checked. Raises ConfigError where the model has no template.
    """
    if (given := job.prompt.chat_template) is not None:
        return ChatTemplate(_read(given, origin.where(("prompt", "chat_template"))), given=True)
    if model is None or job.prompt.mode == "completion":
        return None
    if model.chat_template is not None:
        return ChatTemplate(model.chat_template, given=False)
    if job.engine.args.get("trust_remote_code"):  # the tokenizer's own code may have one
        return None
    raise ConfigError(f"{origin.where(('engine', 'args', 'model'))}: {model.name}: {NO_CHAT_TEMPLATE}")


def _read(given: str, where: str) -> str:
    file = Path(os.path.expanduser(given))  # noqa: PTH111  Path's own raises for a user that is not there
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{where}: {given}: {reason} (working directory {Path.cwd()})") from e
    try:
        _environment().from_string(text)
    except TemplateError as e:
        line = getattr(e, "lineno", None)
        raise ConfigError(f"{where}: {given}{f', line {line}' if line else ''}: {e}") from e
    if not text.strip():
        raise ConfigError(f"{where}: {given}: the file is empty")
    return text


class _Generation(Extension):
    """`{% generation %}`: a mark of transformers' templates, for training."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own way

    def parse(self, parser: Parser) -> Node:
        scope = Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders chat templates."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
