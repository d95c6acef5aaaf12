"""A text in pieces that fit, cut where it breaks by itself: at headings, paragraphs, lines, sentences, words.

Everything is places in the text, nothing is copied: piece after piece, `text[begin:end]` is the text again.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Where a text breaks, the best first; a piece begins where a match ends. Each takes time that is linear in the text.
_BREAKS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^(?=#{1,6}[^\S\n])|^(?=\S[^\n]{0,200}\r?\n([=\-~^\"*#+])\1{2,}[^\S\n]*$)",  # a heading, marked or underlined
        r"\n[^\S\n]*\n",  # a paragraph
        r"\n",
        r"[.!?\u2026\u061f\u0964]['\")\]\u00bb\u201d\u2019]{0,3}\s+|[\u3002\uff01\uff1f]",  # a sentence
        r"\s+",  # a word
    )
)
_SENTENCE = 3  # place in _BREAKS: a repeated end of a piece begins with a whole one, where there is one
_CHARS_PER_TOKEN = 4.0  # the first guess
_FILLED = 0.95  # of the room: nearer to its border nobody looks
_TRIES = 12


@dataclass(frozen=True, slots=True)
class Piece:
    """text[begin:end] is the piece, text[start:begin] what it repeats; ids: those of text[start:end] as it is sent."""

    start: int
    begin: int
    end: int
    ids: Sequence[int]


def split(
    text: str, encode: Callable[[int, int], Sequence[int]], *, room: int, overlap: int, at_most: int
) -> list[Piece] | None:
    """The text in pieces of at most `room` ids; None where it takes more than `at_most`, or one character is too much.

    encode: the ids of text[start:end] as they are sent, with what stands around them. overlap: tokens of the piece
    before that one repeats at most.
    """
    return _Splitter(text, encode, room, overlap).pieces(at_most)


def last_break(text: str, low: int, high: int) -> int:
    """The best place to end at in (low, high], `high` where the text breaks nowhere."""
    return _best(text, low, high, wanted=high)


def first_break(text: str, low: int, high: int) -> int:
    """The best place to begin at in [low, high), `low` where the text breaks nowhere."""
    found = _breaks(text, low, high)
    return found[0] if found else low


def _best(text: str, low: int, high: int, *, wanted: int) -> int:
    """The best break in (low, high]: of the best kind, the first from `wanted` on, else the last before it."""
    if high == len(text):
        return high
    found = _breaks(text, low + 1, high + 1)
    return next((at for at in found if at >= wanted), found[-1]) if found else high


def _breaks(text: str, low: int, high: int) -> list[int]:
    """The breaks of the best kind there is in [low, high)."""
    for pattern in _BREAKS:
        # A match can begin before it, and heading marks look behind their line's end.
        found = [one.end() for one in pattern.finditer(text, max(0, low - 2), min(len(text), high + 200))]
        if inside := [at for at in found if low <= at < high]:
            return inside
    return []


class _Splitter:
    def __init__(self, text: str, encode: Callable[[int, int], Sequence[int]], room: int, overlap: int) -> None:
        self._text = text
        self._encode = encode
        self._room = room
        self._overlap = overlap
        self._around = len(encode(0, 0))
        self._chars = _CHARS_PER_TOKEN  # a token, as far as was seen

    def pieces(self, at_most: int) -> list[Piece] | None:
        found: list[Piece] = []
        begin = 0
        while begin < len(self._text):
            piece = self._next(begin) if len(found) < at_most else None
            if piece is None:
                return None
            found.append(piece)
            begin = piece.end
        return found

    def _next(self, begin: int) -> Piece | None:
        """The piece from here on; None where not even a character fits."""
        for start in dict.fromkeys((self._start(begin), begin)):
            if (high := self._reach(start, begin)) is not None:
                return self._piece(start, begin, high)
        return None

    def _piece(self, start: int, begin: int, high: int) -> Piece | None:
        """One that ends at a break not far before `high`; all that is left is cut into pieces of about one size."""
        left = len(self._text) - begin
        wanted = begin + left // -(-left // (high - begin))
        while high > begin:
            end = _best(self._text, begin + (high - begin) // 2, high, wanted=min(wanted, high))
            ids = self._encode(start, end)
            if len(ids) <= self._room:
                return Piece(start, begin, end, ids)
            high = min(end, high - 1)  # a beginning can have more tokens than it has in the whole
        return None

    def _start(self, begin: int) -> int:
        """Where the repeated end of the piece before begins."""
        low = max(0, begin - int(self._overlap * self._chars))
        for _ in range(_TRIES):
            if low >= begin:
                break
            tokens = len(self._encode(low, begin)) - self._around
            if tokens <= self._overlap:
                return next((at for at in self._sentences(low, begin)), first_break(self._text, low, begin))
            low = begin - (begin - low) * self._overlap // (tokens + 1)
        return begin

    def _sentences(self, low: int, high: int) -> list[int]:
        found = _BREAKS[_SENTENCE].finditer(self._text, max(0, low - 2), high)
        return [one.end() for one in found if low <= one.end() < high]

    def _reach(self, start: int, begin: int) -> int | None:
        """About the last end with which it fits, and it does fit; None where no character more does."""

        def tokens(end: int) -> int:
            return len(self._encode(start, end))

        room = self._room - self._around
        first = start + int(room * self._chars * (1 + _FILLED) / 2)
        end = furthest(tokens, room=self._room, low=begin, high=len(self._text), first=first)
        self._chars = max(self._chars / 2, (end - start) / max(1, room))
        return end if end > begin else None


def furthest(tokens: Callable[[int], int], *, room: int, low: int, high: int, first: int) -> int:
    """About the last place in (low, high] whose tokens are within the room, and they are; `low` where there is none.

    first: where to look first.
    """
    fits, beyond, at = low, high + 1, first
    for _ in range(_TRIES):
        at = min(max(at, fits + 1), beyond - 1)
        if at <= fits:
            break
        found = tokens(at)
        chars = (at - low) / max(1, found)
        if found <= room:
            fits = at
            if at == high or found >= room * _FILLED:
                break
            at += int((room - found) * chars)
        else:
            beyond = at
            at = low + int(room * chars * (1 + _FILLED) / 2)
        if not fits < at < beyond:
            at = (fits + beyond) // 2
    while fits == low and beyond > low + 1:
        beyond = low + (beyond - low) // 2
        if tokens(beyond) <= room:
            fits = beyond
    return fits
