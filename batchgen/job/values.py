"""Plain values of a job file: a number is no text that looks like one, and true and false are no numbers."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from batchgen.job import yaml_lines

_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def wanted(kinds: Collection[type], value: Any) -> str | None:
    """What to tell where `value` is of none of `kinds` (of bool, int, float, str), None where it is of one.

    An integer is a number; true and false are none, nor is a text that looks like one.
    """
    fits = {*kinds, int} if float in kinds else {*kinds}
    if type(value) in fits:
        return None
    words = " or ".join(name for kind, name in _KINDS.items() if kind in kinds) + " is wanted"
    if isinstance(value, bool):
        return f"{words}, not true or false"
    if isinstance(value, str) and _type_without_quotes(value) in fits:
        return f"{words}, without quotes"
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return f"{words}: write {int(value)}"
    if isinstance(value, int | float) and str in kinds:
        return f"{words}: put it in quotes"
    return words


def _type_without_quotes(text: str) -> type | None:
    try:
        return type(yaml_lines.parse(text).value)
    except ValueError:
        return None


def _of(kind: type) -> BeforeValidator:
    def check(value: Any) -> Any:
        if (words := wanted({kind}, value)) is not None:
            raise ValueError(words)
        return value

    return BeforeValidator(check)


def _on_or_off(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


# Of a key that is `on` or `off`: true and false say the same, so a bare word means one thing to every YAML reader.
ON_OFF = BeforeValidator(_on_or_off, json_schema_input_type=bool | Literal["off", "on", "auto"])
Bool = Annotated[bool, _of(bool)]
Int = Annotated[int, _of(int)]
Float = Annotated[float, _of(float)]
