"""The user turn: a template of the job with a document in it, as the text before and after the document."""

import hashlib
import itertools
import secrets
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateSyntaxError, meta
from jinja2.runtime import StrictUndefined, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from batchgen.data import Document

# Stand for the document and for the boundary while templates are rendered. Nobody who writes a document knows them.
STAND_IN = f"batchgen-{secrets.token_hex(8)}-document"
EDGE = f"batchgen-{secrets.token_hex(8)}-boundary"
_BOUNDARY = "5eb1c7"  # `{{ boundary }}` of all documents that do not hold it


class NoTextError(Exception):
    """A template prints something that is no value."""


def _printed(value: Any) -> Any:
    """What a template prints for a value. What shows its place in memory would be other text in each attempt."""
    if value is None:
        return ""
    if isinstance(value, Iterator) or (callable(value) and not isinstance(value, Undefined)):
        way = "add | list or | join" if isinstance(value, Iterator) else "call it: ()"
        raise NoTextError(f"a {type(value).__name__} is printed, which is no text; {way}")
    return value


def environment() -> SandboxedEnvironment:
    # Immutable: a kept value that a template changed would be changed in the output too.
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=False,
        finalize=_printed,
    )


class Turn:
    """One template of the job."""

    def __init__(self, template: str) -> None:
        self._template = environment().from_string(template)
        self._bounded = "boundary" in variables(template)

    def around(self, document: Document, **more: str) -> tuple[str, str]:
        """The text before and after the document; more: values besides its fields. Raises what the template raises."""
        values: dict[str, Any] = {k: "" if v is None else v for k, v in document.fields.items()}
        shown = self._template.render(values | more | {"text": STAND_IN, "boundary": EDGE})
        before, found, after = shown.partition(STAND_IN)
        assert found
        if self._bounded:
            word = _boundary(document, before, after)
            before, after = before.replace(EDGE, word), after.replace(EDGE, word)
        # A lone surrogate deep in a kept field cannot be encoded.
        return before.encode(errors="replace").decode(), after.encode(errors="replace").decode()


def variables(template: str) -> frozenset[str]:
    """Names a template reads; none where it is broken."""
    try:
        return frozenset(meta.find_undeclared_variables(environment().parse(template)))
    except TemplateSyntaxError:
        return frozenset()


def reason(e: Exception) -> str:
    """What is told of an error that a template raised."""
    return f"{type(e).__name__}: {e}" if str(e) else type(e).__name__


def _boundary(document: Document, before: str, after: str) -> str:
    """The first word that stands nowhere in the prompt, and the same one in each attempt.

    All begin with the same; the next ones follow from the content, so that no document holds all of them.
    """
    for n in itertools.count():
        word = _BOUNDARY
        if n:
            word = hashlib.blake2b(document.content + n.to_bytes(8, "big")).hexdigest()[: len(_BOUNDARY) - 1 + n]
        near = len(word)
        if not any(
            word in part for part in (before + document.text[:near], document.text, document.text[-near:] + after)
        ):
            return word
    raise AssertionError("unreachable")
