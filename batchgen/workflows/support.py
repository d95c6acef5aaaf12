"""Whose summary is this? What a summary has in common with its own document and with the others of its prompt.

Nothing here knows a language. The features of a text are its words, and where words are not set apart by spaces the
pairs of characters in them.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_WORD = re.compile(r"\w+")
# Scripts that are written without spaces: Thai to Khmer, Han and kana, and the planes behind them.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_SENTENCE_END = re.compile(r"[.!?:;\u3002\uff01\uff1f\n\u2026\u00bf\u00a1][\s\"'\u201c\u201e\u00ab(\[]*$")
_MARGIN = 2.0  # so many times more must speak for the own document than for another
_ALIKE = 0.8  # of the features of two summaries


@dataclass(frozen=True)
class Text:
    """A text and what it is compared by."""

    text: str

    @cached_property
    def _plain(self) -> str:
        return unicodedata.normalize("NFKC", self.text)

    @cached_property
    def features(self) -> frozenset[str]:
        """Words without case, and pairs of characters of unspaced scripts."""
        words = _WORD.findall(self._plain.casefold())
        if not _UNSPACED.search(self._plain):
            return frozenset(words)
        found: set[str] = set()
        for word in words:
            if _UNSPACED.search(word):
                found |= {word[n : n + 2] for n in range(max(1, len(word) - 1))}
            else:
                found.add(word)
        return frozenset(found)

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Words with digits; a single digit says too little."""
        return frozenset(word for word in self.features if len(word) > 1 and any(map(str.isdigit, word)))

    @cached_property
    def names(self) -> frozenset[str]:
        """Words, without case, that begin with a capital in the middle of a sentence; none where a script has none."""
        found = set()
        for match in _WORD.finditer(self._plain):
            before = self._plain[: match.start()].rstrip(" \t")
            if match[0][0].isupper() and len(match[0]) > 2 and before and not _SENTENCE_END.search(before[-8:]):
                found.add(match[0].casefold())
        return frozenset(found)

    @cached_property
    def capitals(self) -> frozenset[str]:
        """Words, without case, that never stand there without a capital."""
        words = _WORD.findall(self._plain)
        small = {word for word in words if not word[0].isupper()}
        return frozenset(word.casefold() for word in words if word[0].isupper()) - small


def doubts(documents: Sequence[str], summaries: Sequence[str | None], *, words: bool) -> list[str | None]:
    """Why each summary may be none of its document, None where nothing speaks against it.

    documents: those of one prompt. summaries: one for each, None where there is none. words: also look whether it has
    more words in common with its own document than with others.
    """
    texts = [Text(one) for one in documents]
    answers = [None if one is None else Text(one) for one in summaries]
    found: list[str | None] = [None] * len(texts)
    spread = Counter(feature for text in texts for feature in text.features)
    weights = {feature: math.log(len(texts) / count) for feature, count in spread.items()}
    pairs = list(zip(texts, answers, strict=True))
    for n, (own, answer) in enumerate(pairs):
        if answer is None:
            continue
        others = pairs[:n] + pairs[n + 1 :]
        if any(_from_elsewhere(answer, own, other) for other, _ in others):
            found[n] = "foreign"
        elif words and not all(_belongs(answer, own, other, weights) for other, _ in others):
            found[n] = "unsupported"
        elif any(said is not None and _is_like((own, answer), (other, said)) for other, said in others):
            found[n] = "alike"
    return found


def _is_like(one: tuple[Text, Text], other: tuple[Text, Text]) -> bool:
    """Whether a summary says nearly the same as the other, and where it differs nothing that its document alone says.

    one, other: (document, summary).
    """
    (ours, first), (theirs, second) = one, other
    if len(first.features & second.features) < _ALIKE * len(first.features | second.features):
        return False
    return not first.features - second.features & ours.features - theirs.features


def _from_elsewhere(summary: Text, own: Text, other: Text) -> bool:
    """Whether a number or a name in it stands in the other document, and not in its own."""
    numbers, names = summary.numbers - own.features, summary.names - own.features
    return bool((numbers and numbers & other.numbers) or (names and names & other.capitals))


def _belongs(summary: Text, own: Text, other: Text, weights: dict[str, float]) -> bool:
    """Whether what the two documents do not share speaks for its own. Words that all documents have weigh nothing."""
    ours = sum(weights[one] for one in summary.features & own.features - other.features)
    theirs = sum(weights[one] for one in summary.features & other.features - own.features)
    return ours > _MARGIN * theirs
