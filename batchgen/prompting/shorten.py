"""`truncate`: the prompt of a document that does not fit, with as much of it as does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from batchgen.prompting.splitter import first_break, furthest, last_break

Keep = Literal["head", "head_tail", "middle_out"]
GAP = "\n\n[\u2026]\n\n"  # stands where the middle was
# Few texts have more: a longer document is encoded from its beginning only, until that fills the prompt.
MAX_CHARS_PER_TOKEN = 32
_SEAM = 16  # tokens: so far from the end of a document the text behind it changes no token
_CHARS_PER_TOKEN = 4
Encode = Callable[[str], list[int]]


def beginning(text: str, before: str, encode: Encode, *, more_than: int) -> tuple[list[int], bool]:
    """Ids of `before` and as much of the text as gives more ids; whether that is all of it."""
    chars = more_than * MAX_CHARS_PER_TOKEN
    while True:
        ids = encode(before + text[:chars])
        if chars >= len(text):
            return ids, True
        if len(ids) > more_than:
            return ids, False
        chars *= 4


@dataclass(frozen=True, slots=True)
class Shortener:
    """A document that seems not to fit. around: the text before and after it, lead and tail: the ids of these.

    whole: ids of all of it, where they are known; then nothing is encoded again for the beginning.
    """

    text: str
    around: tuple[str, str]
    lead: Sequence[int]
    tail: Sequence[int]
    encode: Encode
    whole: Sequence[int] = ()

    def shortened(self, *, room: int, keep: Keep) -> tuple[list[int], bool]:
        """(ids of the user turn, at most `room`; whether something of the text was left out).

        `head` and `head_tail` fill the room to the token, which may cut a word; `middle_out` leaves sentences whole.
        """
        most = room - len(self.tail)
        ids = self.whole
        if len(ids) < room + _SEAM:  # not known, or the cut is where document and tail meet
            ids, _ = beginning(self.text, self.around[0], self.encode, more_than=most)
        # Encoded in two pieces a text can come out a token longer than as one: only a real cut is flagged.
        if len(ids) <= most:
            return [*ids, *self.tail], False
        gap = self.encode(GAP)
        left = most - len(self.lead) - len(gap)  # for the document
        if keep == "head" or left < 2:
            return [*ids[:most], *self.tail], True
        first, last = len(self.lead) + left - left // 2, left // 2 + len(self.tail)
        if keep == "head_tail":
            return [*ids[:first], *gap, *self._end(more_than=last)[-last:]], True
        return self._whole_sentences(room=room, first=first, last=last), True

    def _end(self, *, more_than: int) -> list[int]:
        """Ids of as much of the end of the text as gives more ids, and of what stands after it."""
        chars = more_than * _CHARS_PER_TOKEN
        while True:
            ids = self.encode(self.text[-chars:] + self.around[1])
            if chars >= len(self.text) or len(ids) > more_than:
                return ids
            chars *= 4

    def _whole_sentences(self, *, room: int, first: int, last: int) -> list[int]:
        """first, last: tokens for what stands before and behind the gap."""
        text, encode, (before, after) = self.text, self.encode, self.around

        def head_tokens(end: int) -> int:
            return len(encode(before + text[:end]))

        def foot_tokens(back: int) -> int:
            return len(encode(text[len(text) - back :] + after))

        chars = _CHARS_PER_TOKEN
        end = furthest(head_tokens, room=first, low=0, high=len(text), first=first * chars)
        back = furthest(foot_tokens, room=last, low=0, high=len(text) - end, first=last * chars)
        while True:
            begin = len(text) - back
            head = text[: last_break(text, end // 2, end)] if end else ""
            foot = text[first_break(text, begin, begin + (back + 1) // 2) :] if back else ""
            ids = encode(before + head + GAP + foot + after)
            if len(ids) <= room or not (end or back):
                return ids[:room]
            end, back = end * 9 // 10, back * 9 // 10
