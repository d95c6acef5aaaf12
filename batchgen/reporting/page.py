"""How values stand in a page of HTML: numbers, times, settings; and the page around them."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from batchgen.text import harmless, one_line

_NONE = "–"
# Values that nobody should send to a colleague by accident.
_SECRET = re.compile(r"(^|_)(token|secret|password|api_key)$")


def count(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Three figures at least."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def money(value: float | None) -> str:
    """Cents, and of less than one the first two figures."""
    return _NONE if value is None else f"{value:,.2f}" if abs(value) >= 1 or not value else f"{value:,.2g}"


def share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """44 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    if value is None:
        return _NONE
    if value < 60:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    whole = round(value)
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def gib(value: float | None) -> str:
    return _NONE if value is None else f"{value / (1 << 30):,.2f} GiB"


def reach(report: Mapping[str, Any], name: str) -> Any:
    """A value of the report by its dotted name; None where it has none."""
    at: Any = report
    for step in name.split("."):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at


def figure(name: str, value: Any, text: str) -> Markup:
    """A figure of report.json where a person reads it, with its name and raw value for a program."""
    return Markup('<span data-figure="{}" data-value="{}">{}</span>').format(name, json.dumps(value), text)


def settings(value: Any) -> str:
    """Settings as YAML, secrets left out."""
    text: str = yaml.safe_dump(_without_secrets(value), sort_keys=False, allow_unicode=True, width=100)
    return harmless(text)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: "(not shown)" if one and _SECRET.search(str(name)) else _without_secrets(one)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def cell(value: Any) -> str:
    """A value of a figure or a setting, whatever it is, on one line."""
    if value is None:
        return _NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return count(value) if isinstance(value, int) else f"{value:,.6g}"


@cache
def _environment(*, is_html: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("batchgen.reporting"),
        undefined=StrictUndefined,
        autoescape=is_html,  # noqa: S701  what is not HTML is Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": count, "rate": rate, "share": share, "seconds": seconds, "gib": gib, "money": money,
        "harmless": harmless, "settings": settings, "cell": cell,
    }  # fmt: skip
    environment.globals["figure"] = figure
    return environment


def render(template: str, **values: Any) -> bytes:
    """A page of HTML. What a template does not call safe is escaped."""
    return _environment(is_html=True).get_template(template).render(values).encode()


def text(template: str, **values: Any) -> str:
    """Markdown."""
    return harmless(_environment(is_html=False).get_template(template).render(values))
