"""In which order documents that are ready go to the engine.

Those that begin the same way, beyond what all prompts share, go one after the other: what the prefix cache holds of
the first is still there for the next. The last ones of a run go longest first, so that its end waits for short ones.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from batchgen.data import Prepared

WINDOW = 1024  # documents that are put in order together
_BLOCK = 16  # tokens: the prefix cache keeps whole blocks, and shorter beginnings are alike by chance


def ordered(window: Sequence[Prepared], *, last: bool) -> list[Prepared]:
    """The documents of a window as they are to be sent; `last`: no others come after these.

    One that begins like an earlier one moves up to it, the others keep their order. In the last window those that
    begin alike stay together, and the longest goes first, within and between them. Those that are not sent at all come
    before all others: their rows need no engine.
    """
    unsent = [one for one in window if not one.prompt_ids]
    groups = _groups([one for one in window if one.prompt_ids])
    if last:
        groups = [sorted(group, key=_length, reverse=True) for group in groups]
        groups.sort(key=lambda group: _length(group[0]), reverse=True)
    return [*unsent, *(one for group in groups for one in group)]


def _length(one: Prepared) -> int:
    return sum(map(len, one.pieces)) or len(one.prompt_ids)


def _groups(window: Sequence[Prepared]) -> list[list[Prepared]]:
    """Documents that begin alike, in the order of the window.

    One that is done in pieces stays where it is: all of them begin alike, and would stand together before the others.
    """
    prompts: list[Any] = [one.prompt_ids for one in window]
    shared = _common(min(prompts), max(prompts)) if prompts else 0  # of all of them: none lies outside of these two
    found: dict[tuple[int, ...], list[Prepared]] = {}
    for n, one in enumerate(window):
        alike = (-1, n) if one.pieces else tuple(one.prompt_ids[shared : shared + _BLOCK])
        found.setdefault(alike, []).append(one)
    return list(found.values())


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
