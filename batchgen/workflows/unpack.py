"""The answer to a pack: text in, summaries by label out. Nothing is guessed, nothing goes by its place.

Two grammars are read. JSON: objects with a text `label` and a text `summary`, one after the other, in lists or inside
of other objects, with any words or fences around. Lines: `label: summary`, one line each.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.text import is_blank

LABEL = "[a-f][0-9a-f]{3}"  # of a document in a pack: begins with a letter, so that it is no number
_DEPTH = 8  # of objects and lists around an item
_KEYS = ("label", "summary")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """summaries: by label. refused: why there is none, for every other label. extras: items that nobody asked for."""

    summaries: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    extras: int = 0


def schema(documents: int) -> str:
    """The JSON schema of an answer for so many documents."""
    item = {
        "type": "object",
        "properties": {"label": {"type": "string", "pattern": f"^{LABEL}$"}, "summary": {"type": "string"}},
        "required": list(_KEYS),
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": item, "minItems": documents, "maxItems": documents})


def unpack(text: str, labels: Sequence[str], *, form: str, cut: bool) -> Unpacked:
    """form: `json` or `lines`. cut: the text ends because it reached max_tokens; its whole items count."""
    found = _lines(text, cut=cut) if form == "lines" else _items(text)
    given: dict[str, set[str]] = {}
    extras = 0
    for name, summary in found:
        label = _label(name, labels)
        if label is None:
            extras += 1
        else:
            given.setdefault(label, set()).add(summary.strip())
    missing = "cut" if cut else "missing" if given or extras else "unreadable"
    summaries, refused = {}, {}
    for label in labels:
        said = given.get(label, set())
        why = missing if not said else "doubled" if len(said) > 1 else _fault(next(iter(said)))
        if why:
            refused[label] = why
        else:
            summaries[label] = next(iter(said))
    return Unpacked(summaries, refused, extras)


def _fault(summary: str) -> str | None:
    if is_blank(summary):
        return "empty"
    # JSON can spell half a character, which nobody can write to a file.
    return "unreadable" if re.search("[\ud800-\udfff]", summary) else None


def _label(name: str, labels: Sequence[str]) -> str | None:
    """The label that is named, alone or among words (`Document a1f3`); None where that is not exactly one of them."""
    named = {word for word in re.findall(r"\w+", name.lower()) if word in labels}
    return named.pop() if len(named) == 1 else None


def _items(text: str) -> Iterator[tuple[str, str]]:
    """(label, summary) of each whole object in the text; what is broken or cut is passed over."""
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_once)
    at = 0
    while found := re.compile(r"[\[{]").search(text, at):
        try:
            value, at = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            at = found.start() + 1
            continue
        yield from _in_value(value, _DEPTH)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value


def _in_value(value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in _KEYS):
        yield value["label"], value["summary"]
    elif depth and isinstance(value, Mapping | list):
        for below in value.values() if isinstance(value, Mapping) else value:
            yield from _in_value(below, depth - 1)


def _lines(text: str, *, cut: bool) -> Iterator[tuple[str, str]]:
    """(label, summary) of each line; a label that is followed by lines without one has said it may not be one line."""
    lines = text.splitlines()
    if cut:
        lines = lines[:-1]
    pairs: list[tuple[str, str]] = []
    for line in lines:
        found = re.fullmatch(rf"\W*({LABEL})\W*[:\uff1a]\s*(.*)", line, flags=re.IGNORECASE)
        if found:
            pairs.append((found[1], found[2]))
        elif pairs and not is_blank(line) and not line.startswith("```"):
            pairs.append((pairs[-1][0], line))  # two values: whether it belongs to the summary nobody knows
    yield from pairs
