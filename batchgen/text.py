"""What of a text a reader sees, and how text that others wrote is shown."""

import difflib
import re
import unicodedata
from collections.abc import Iterable

# Control characters but tab and line end, line and paragraph separators, marks that turn the direction of what
# follows, and lone surrogates: a terminal obeys them or cannot write them.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Blank letters and signs: fillers, the empty Braille cell, the grapheme joiner.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")


def visible_chars(text: str) -> int:
    """Characters a reader sees: white space, control, format, unassigned and blank characters do not count."""
    return sum(map(_is_visible, text))


def is_blank(text: str) -> bool:
    """Whether a reader sees nothing."""
    return not any(map(_is_visible, text))


def _is_visible(c: str) -> bool:
    return not c.isspace() and unicodedata.category(c)[0] != "C" and c not in _BLANK


def harmless(text: str) -> str:
    r"""The text for a terminal, a log or a report: what would move the cursor, hide or reverse is told as `\u001b`.

    JSON keeps its value.
    """
    return _HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The same on one line: a name with a line end in it could otherwise forge a line of a log."""
    return harmless(text).replace("\n", "\\n")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
