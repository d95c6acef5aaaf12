"""What of a text a reader sees, and text of others on a terminal."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.text import harmless, one_line, visible_chars

ANY = st.text(st.characters(exclude_categories=[]), max_size=40)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("Zürich 世界 👩\u200d🚀 \u05d0", "Zürich 世界 👩\u200d🚀 \u05d0"),
        ("\x1b[31mred\x1b[0m", r"\u001b[31mred\u001b[0m"),
        ("\x9b2J", r"\u009b2J"),
        ("a\rb\x00c\x7f\x08", r"a\u000db\u0000c\u007f\u0008"),
        ("ab\u202ecd\u2066\u200f", r"ab\u202ecd\u2066\u200f"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\u0085d"),
        ("\ud800\udcff", r"\ud800\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_told_instead(text, shown):
    assert harmless(text) == shown


@given(ANY)
def test_what_is_shown_can_be_written_and_moves_nothing(text):
    shown = harmless(text)
    shown.encode()
    assert all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert not {unicodedata.bidirectional(c) for c in shown} & {
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    }
    assert harmless(shown) == shown
    assert len(one_line(text).splitlines()) <= 1


@given(st.recursive(ANY, lambda inner: st.lists(inner) | st.dictionaries(ANY, inner), max_leaves=8))
def test_json_keeps_its_value(value):
    def plain(at):
        if isinstance(at, str):  # two halves beside each other are one character to a reader of JSON
            return at.encode("utf-16-le", "surrogatepass")
        if isinstance(at, dict):
            return {plain(k): plain(v) for k, v in at.items()}
        return [plain(one) for one in at]

    written = json.dumps(value, indent=2, ensure_ascii=False)
    assert plain(json.loads(harmless(written))) == plain(value)


def test_visible_characters():
    assert visible_chars("a b\n\u200b\ufeff\u00ad\x00é") == 3
