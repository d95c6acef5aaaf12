"""Kept values as what a format can hold: Arrow's types, JSON, text. What cannot be held is told, never changed."""

import base64
import json
import math
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import Any

import numpy as np
import pyarrow as pa

_UNFIT = object()
_DEPTH = 200  # JSON that nests deeper is written by some and read by few


def common_type(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The narrowest type that all of these widen to; text where they have none in common."""
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
    try:
        schemas = [pa.schema([("x", kind)]) for kind in kinds]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type if kinds else pa.string()
    except pa.ArrowException:
        return pa.string()


def array(values: list[Any], kind: pa.DataType, unfit: set[int]) -> pa.Array:
    """The values as the column's type; positions of those that do not fit, and are null, go into `unfit`."""
    if is_text(kind):
        values = [_as_text(value) for value in values]
    else:
        values = [value if _fits(value, kind) else _UNFIT for value in values]
    unfit |= {n for n, value in enumerate(values) if value is _UNFIT}
    values = [None if value is _UNFIT else value for value in values]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        fitting = []
        for n, value in enumerate(values):
            try:
                fitting.append(pa.scalar(value, kind))
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                unfit.add(n)
                fitting.append(None)
        return pa.array([None if one is None else one.as_py() for one in fitting], kind)


def _fits(value: Any, kind: pa.DataType) -> bool:
    """False where pyarrow would change the value instead of refusing it.

    1.5 to 1, 1e300 to infinity, 5 to 1970, "ab" to ["a", "b"].
    """
    if isinstance(value, int | float):
        return _number_fits(value, kind)
    if isinstance(value, list) and _is_list(kind):
        return all(_fits(one, kind.value_type) for one in value)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        fields = {kind.field(n).name: kind.field(n).type for n in range(kind.num_fields)}
        return all(name in fields and _fits(one, fields[name]) for name, one in value.items())
    if isinstance(value, str | bytes):
        return not _is_list(kind)
    return not (isinstance(value, datetime) and pa.types.is_date(kind))


def _number_fits(value: float, kind: pa.DataType) -> bool:
    if pa.types.is_floating(kind) and kind.bit_width < 64:
        return _is_exact(value, kind)
    if isinstance(value, float) and pa.types.is_integer(kind):
        return value.is_integer()
    return not pa.types.is_temporal(kind)


def _is_exact(value: float, kind: pa.DataType) -> bool:
    """Whether a narrow float holds the value: 0.1 and 1e300 are none of float32's."""
    try:
        with np.errstate(over="ignore"):
            narrow = float(np.dtype(kind.to_pandas_dtype()).type(value))
    except OverflowError:
        return False
    return narrow == value or math.isnan(value)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _as_text(value: Any) -> Any:
    """The value itself where it is text or nothing, else its JSON; `_UNFIT` where it nests too deep for that."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=_text_of)
    except RecursionError:
        return _UNFIT


def json_value(value: Any) -> tuple[Any, bool]:
    """(the value as JSON holds it, whether something of it had to become null).

    Dates and times are ISO 8601, bytes are base64, decimals and the like their own text. NaN, infinities, text with
    half a character and what nests too deep become null, each where it stands.
    """
    fault = [False]
    return _json(value, fault, _DEPTH), fault[0]


def _json(value: Any, fault: list[bool], depth: int) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, list | tuple) and depth:
        return [_json(one, fault, depth - 1) for one in value]
    if isinstance(value, dict) and depth and all(isinstance(name, str) and _is_whole(name) for name in value):
        return {name: _json(one, fault, depth - 1) for name, one in value.items()}
    if isinstance(value, str | float | list | tuple | dict):
        fits = _is_whole(value) if isinstance(value, str) else isinstance(value, float) and math.isfinite(value)
        fault[0] |= not fits
        return value if fits else None
    return _text_of(value)


def _text_of(value: Any) -> str:
    """What JSON has no word for."""
    if isinstance(value, date | time):  # datetime is a date
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _is_whole(text: str) -> bool:
    """Whether UTF-8 can hold the text: it has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Kinds:
    """The narrowest Arrow type that holds every JSON value of a column: text where they have nothing in common."""

    def __init__(self) -> None:
        self._met: set[type] = set()
        self._low = self._high = 0

    def meet(self, value: Any) -> None:
        if value is None:
            return
        self._met.add(type(value))
        if type(value) is int:
            self._low, self._high = min(self._low, value), max(self._high, value)

    @property
    def common(self) -> pa.DataType:
        """Lists and objects are text: their JSON."""
        if self._met == {bool}:
            return pa.bool_()
        if self._met == {int} and self._low >= -(1 << 63) and self._high < 1 << 63:
            return pa.int64()
        if self._met in ({float}, {int, float}) and max(-self._low, self._high) <= 1 << 53:
            return pa.float64()
        return pa.string()
