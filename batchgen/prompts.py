"""Documents to token ids: the job's templates, the model's chat template, and the length rule.

The ids of a prompt are  frame before + user turn + frame after.  The frame (chat template, system instruction)
is encoded once, so it is the same to the byte for every document and the prefix cache keeps it.
The length is checked on these final ids: prompt + max_tokens <= max_model_len.
"""

import logging
import unicodedata
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from batchgen.config import Job, Origin, nearest
from batchgen.data import DOCUMENT_TRUNCATED, Document, Prepared
from batchgen.errors import ConfigError
from batchgen.tokenizer import Tokenizer

log = logging.getLogger("batchgen")
_LOADS: tuple[type[nodes.Stmt], ...] = (nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)
# Stands for the document while templates are rendered; no template changes it, no document is compared with it.
_STAND_IN = "batchgen-7f3e1c5a-document"
# Few texts have more: a longer document is encoded from its beginning only, until that fills the prompt.
_MAX_CHARS_PER_TOKEN = 32


def environment() -> SandboxedEnvironment:
    # Immutable: a kept value that a template changed would be changed in the output too.
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=False,
        finalize=lambda value: "" if value is None else value,
    )


def check_templates(job: Job, origin: Origin) -> None:
    """Raise ConfigError where a template is broken, uses an unknown name, or does not hold the document once."""
    at = ("prompt", "user")
    names = _names(job.prompt.user, origin, at)
    if names.count("text") != 1 or not _is_plain(job.prompt.user):
        raise ConfigError(
            f"{origin.place(at)}: prompt.user must hold {{{{ text }}}} exactly once, without filters or conditions"
        )
    for index, item in enumerate(job.input):
        known = ["text", *item.keep.values()]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{origin.place(at)}: prompt.user uses {{{{ {name} }}}}, which input.{index} ({item.path}) does "
                    f"not keep{nearest(name, known)}; add it there: keep: [{name}]"
                )
    try:
        environment().from_string(job.prompt.user).render(dict.fromkeys(names, ""))
    except SecurityError as e:
        raise ConfigError(f"{origin.place(at)}: prompt.user: {e}") from e
    except Exception:  # real values may fit where empty ones do not
        log.debug("prompt.user fails with empty values", exc_info=True)
    _check_system(job, origin)


def _check_system(job: Job, origin: Origin) -> None:
    at = ("prompt", "system")
    if job.prompt.system is None:
        return
    if names := _names(job.prompt.system, origin, at):
        raise ConfigError(
            f"{origin.place(at)}: prompt.system is the same for every document and cannot use {{{{ {names[0]} }}}}"
        )
    try:
        environment().from_string(job.prompt.system).render()
    except Exception as e:  # templates compute: anything may come out
        raise ConfigError(f"{origin.place(at)}: prompt.system: {_reason(e)}") from e


def _names(template: str, origin: Origin, at: tuple[str, str]) -> list[str]:
    """Names a template wants to be given, in order, each as often as it is read."""
    try:
        environment().from_string(template)  # finds unknown filters too
        tree = environment().parse(template)
    except TemplateError as e:
        raise ConfigError(f"{origin.place(at)}: {'.'.join(at)}: {e}") from e
    if any(tree.find(kind) for kind in _LOADS):
        raise ConfigError(f"{origin.place(at)}: {'.'.join(at)}: a prompt is one template and loads no others")
    wanted = meta.find_undeclared_variables(tree)
    return [n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and n.name in wanted]


def _reason(e: Exception) -> str:
    return f"{type(e).__name__}: {e}" if str(e) else type(e).__name__


def _is_plain(template: str) -> bool:
    """Whether `{{ text }}` is printed as it is: a direct child of an output at the top of the template."""
    tree = environment().parse(template)
    return any(
        isinstance(part, nodes.Name) and part.name == "text"
        for output in tree.body
        if isinstance(output, nodes.Output)
        for part in output.nodes
    )


def visible_chars(text: str) -> int:
    """Characters a reader sees: white space, control, format and unassigned characters do not count."""
    return sum(not c.isspace() and unicodedata.category(c)[0] != "C" for c in text)


class PromptBuilder:
    """Makes `Prepared` of documents; one tokenizer call per batch.

    max_prompt_tokens: the longest prompt that leaves room for max_tokens of answer.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> None:
        self._template = environment().from_string(job.prompt.user)
        self._min_chars = [item.min_chars for item in job.input]
        self._tokenizer = tokenizer
        self._max = max_prompt_tokens
        system = None if job.prompt.system is None else environment().from_string(job.prompt.system).render()
        self._before, self._after = tokenizer.frame(system, _STAND_IN)
        if self._room < 1:
            raise ConfigError(
                f"the prompt without any document takes {self._fixed} of {self._max} tokens: "
                "shorten prompt.system, lower sampling.max_tokens or raise engine.args.max_model_len"
            )

    @property
    def _fixed(self) -> int:
        return len(self._before) + len(self._after)

    @property
    def _room(self) -> int:
        return self._max - self._fixed

    def prepare(self, documents: Sequence[tuple[Document, int]]) -> list[Prepared]:
        """One `Prepared` for each (document, place of its input in the job), in order."""
        done: dict[int, Prepared] = {}
        texts: dict[int, str] = {}
        around: dict[int, tuple[str, str]] = {}
        for n, (document, item) in enumerate(documents):
            if document.error is not None:
                done[n] = Prepared(document, [], error=document.error)
            elif (skip := self._skip(document, item)) is not None:
                done[n] = Prepared(document, [], skip=skip)
            else:
                try:
                    around[n] = self._around(document)
                except Exception as e:  # noqa: BLE001  the template meets values of any type
                    done[n] = Prepared(document, [], error=("template_failed", f"prompt.user: {_reason(e)}"))
                    continue
                if len(document.text) > self._room * _MAX_CHARS_PER_TOKEN:
                    done[n] = self._cut(document, *around[n])
                else:
                    texts[n] = document.text.join(around[n])
        for n, ids in zip(texts, self._tokenizer.encode_batch(list(texts.values())), strict=True):
            document = documents[n][0]
            if len(ids) <= self._room:
                done[n] = Prepared(document, self._before + ids + self._after)
            else:
                done[n] = self._cut(document, *around[n])
        return [done[n] for n in range(len(documents))]

    def _skip(self, document: Document, item: int) -> tuple[str, str] | None:
        # The common document is long: look at its beginning only.
        least = self._min_chars[item]
        seen = visible_chars(document.text[: 4 * least])
        if seen < least:
            seen = visible_chars(document.text)
        if seen == 0:
            return "empty", "the document has no visible character"
        if seen < least:
            return "short", f"the document has {seen} visible characters, min_chars is {least}"
        return None

    def _around(self, document: Document) -> tuple[str, str]:
        """The user turn's text before and after the document."""
        values: dict[str, Any] = {k: "" if v is None else v for k, v in document.fields.items()}
        before, found, after = self._template.render(values | {"text": _STAND_IN}).partition(_STAND_IN)
        assert found
        # A lone surrogate deep in a kept field cannot be encoded.
        return before.encode(errors="replace").decode(), after.encode(errors="replace").decode()

    def _cut(self, document: Document, before: str, after: str) -> Prepared:
        """The prompt with as much of the document's beginning as fits, at a token boundary."""
        lead, tail = self._tokenizer.encode_batch([before, after])
        room = self._room - len(lead) - len(tail)
        if room < 1:
            sentence = f"the fields around the document take {len(lead) + len(tail)} tokens, {self._room} fit"
            return Prepared(document, [], error=("prompt_too_long", sentence))
        chars = room * _MAX_CHARS_PER_TOKEN
        while True:
            text = document.text[:chars]
            ids = self._tokenizer.encode_batch([text])[0]
            if len(ids) > room or len(text) == len(document.text):
                break
            chars *= 4
        # Encoded in three pieces a text can come out a token longer than as one: only a real cut is flagged.
        flags = (DOCUMENT_TRUNCATED,) if len(ids) > room else ()
        return Prepared(document, [*self._before, *lead, *ids[:room], *tail, *self._after], flags=flags)
