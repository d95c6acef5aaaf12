"""docs/config.md, written from the schema: every section of a job with its keys, their types, defaults and meaning.

`python -m batchgen.job.schema` prints the page and `make docs` writes it. A new key needs no edit here.
"""

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchgen.job.config import Job, sections_of

_INTRO = """\
# Keys of the job file

Made from the schema by `make docs`; do not edit it by hand. [job.md](job.md) is the guide: what the keys do together,
with examples. A key with a default may be left out.
"""
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value"}
_MANY = {"text": "texts", "integer": "integers", "number": "numbers", "section": "sections", "mapping": "mappings"}


def page() -> str:
    """The whole of docs/config.md."""
    return "\n".join([_INTRO, *(_section(heading, model) for heading, model in sections())])


def sections(model: type[BaseModel] = Job, at: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section of a job with its heading: its dotted key, and its name where one key takes several sections."""
    if not at:
        yield "Top level", model
    for name, field in model.model_fields.items():
        key = f"{at}.{name}".lstrip(".")
        below = list(dict.fromkeys(sections_of(field.annotation)))
        for one in below:
            yield key if len(below) == 1 else f"{key} ({one.__name__})", one
            yield from sections(one, key)


def _section(heading: str, model: type[BaseModel]) -> str:
    lines = [f"## {heading}", ""]
    if doc := (vars(model).get("__doc__") or "").strip():
        lines += [*(line.strip() for line in doc.splitlines()), ""]
    lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        cells = [f"`{name}`", _type(field), _default(field), field.description or ""]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    if model.model_config.get("extra") == "allow":
        lines.append("| others | any value | none | [The guide](job.md) says which. |")
    return "\n".join([*lines, ""])


def _type(field: FieldInfo) -> str:
    for one in field.metadata:
        taken = getattr(one, "json_schema_input_type", PydanticUndefined)
        if taken is not PydanticUndefined:
            return _type_words(taken) + _limits(field.metadata)
    return _type_words(field.annotation) + _limits(field.metadata)


def _type_words(annotation: Any) -> str:
    outer, inner = get_origin(annotation), get_args(annotation)
    if outer is Literal:
        return " or ".join(f"`{one}`" for one in inner)
    if outer is Annotated:
        return _type_words(inner[0]) + _limits(inner[1:])
    if outer in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_words(one) for one in inner if one is not type(None)))
    if outer in (list, tuple):
        words = _type_words(inner[0])
        return f"list of {_MANY.get(words, words)}"
    if outer is dict:
        return "mapping" if inner[1] is Any else f"mapping of text to {_type_words(inner[1])}"
    return "section" if list(sections_of(annotation)) else _WORDS[annotation]


def _limits(metadata: Iterable[Any]) -> str:
    words = ""
    for one in metadata:
        if isinstance(one, annotated_types.Ge):
            words += f", at least {one.ge}"
        elif isinstance(one, annotated_types.Gt):
            words += f", above {one.gt}"
        elif isinstance(one, annotated_types.Le):
            words += f", at most {one.le}"
        elif isinstance(one, annotated_types.Lt):
            words += f", below {one.lt}"
        elif isinstance(one, annotated_types.MinLen):
            words += f", at least {one.min_length}"
        elif isinstance(one, annotated_types.MaxLen):
            words += f", at most {one.max_length}"
        elif pattern := getattr(one, "pattern", None):
            words += f" matching `{pattern}`"
    return words


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"`{value}`".replace("\n", "\\n")  # a table has one line a row
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
