"""Prompts of documents that are done in pieces: the pieces themselves, and those that put answers together."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from batchgen.data import MAP_REDUCED, REFINED, Document, Prepared
from batchgen.job.config import Job
from batchgen.models.tokenizer import Frame, Tokenizer
from batchgen.prompting.splitter import Piece, split
from batchgen.prompting.turns import Turn, reason
from batchgen.text import is_blank

_LEAST_ROOM = 32  # tokens for the text of a piece: there are characters of a dozen
_BETWEEN = "\n\n"  # summaries that are put together
FLAGS = {"map_reduce": MAP_REDUCED, "refine": REFINED}


class LongPrompts:
    """For `map_reduce` and `refine`. All lengths are of final ids: frame, user turn and what is put into it.

    frame: what stands around each user turn. max_prompt_tokens: the longest prompt.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, frame: Frame, *, max_prompt_tokens: int) -> None:
        self._job = job.long_documents
        self._tokenizer = tokenizer
        self._frame = frame
        self._max = max_prompt_tokens
        self._room = max_prompt_tokens - len(frame.before) - len(frame.after)
        self._piece = Turn(self._job.piece)
        self._reduce = Turn(self._job.reduce)
        self._refine = Turn(self._job.refine)
        answer = job.answers.retry_max_tokens or job.sampling.max_tokens
        self._summary = answer + answer // 8 + 8  # a text can have other tokens than the model wrote it with

    def cut(self, document: Document) -> Prepared:
        """The document in pieces, in their order. Pieces in which nobody sees anything are left out.

        `map_reduce`: each is a whole prompt. `refine`: the first is, the further ones are the ids of their text, for
        `refine`.
        """
        try:
            around = self._around(self._piece, document)
            more = self._around(self._refine, document, summary="")
            self._around(self._reduce, document)
        except Exception as e:  # noqa: BLE001  the templates meet values of any type
            return Prepared(document, [], error=("template_failed", f"long_documents: {reason(e)}"))
        if self._job.policy == "map_reduce":
            pieces, room = self._whole_prompts(document.text, around)
        else:
            pieces, room = self._first_prompt(document.text, around, more)
        if room < _LEAST_ROOM:
            sentence = (
                f"the prompts of its pieces leave {room} tokens for their text, at least {_LEAST_ROOM} are wanted"
            )
            return Prepared(document, [], error=("prompt_too_long", sentence))
        most, extra = self._job.max_requests, self._job.policy == "map_reduce"
        if pieces is None or len(pieces) + (extra and len(pieces) > 1) > most:
            sentence = (
                f"it takes more than {most} requests of {self._max} tokens, long_documents.max_requests is {most}"
            )
            return Prepared(document, [], error=("document_too_long", sentence))
        return Prepared(document, pieces[0], pieces=tuple(pieces), flags=(FLAGS[self._job.policy],))

    def _whole_prompts(self, text: str, around: tuple[str, str]) -> tuple[list[list[int]] | None, int]:
        before, after = around

        def encode(start: int, end: int) -> list[int]:
            return self._encode(before + text[start:end] + after)

        room = self._room - len(encode(0, 0))
        pieces = self._split(text, encode, room=room, around=self._room - room)
        return None if pieces is None else [self._framed(piece.ids) for piece in pieces], room

    def _first_prompt(
        self, text: str, around: tuple[str, str], more: tuple[str, str]
    ) -> tuple[list[list[int]] | None, int]:
        before, after, *others = self._tokenizer.encode_batch([*around, *more])
        room = self._room - max(len(before) + len(after), self._summary + sum(map(len, others)))
        pieces = self._split(text, lambda start, end: self._encode(text[start:end]), room=room, around=0)
        if not pieces:
            return None, room
        return [self._framed([*before, *pieces[0].ids, *after]), *(list(one.ids) for one in pieces[1:])], room

    def _split(
        self, text: str, encode: Callable[[int, int], Sequence[int]], *, room: int, around: int
    ) -> list[Piece] | None:
        """Pieces that have something to see. room: tokens for the text of one, besides those `around` it."""
        if room < _LEAST_ROOM:
            return None
        overlap = min(self._job.overlap_tokens, room // 4)
        pieces = split(text, encode, room=room + around, overlap=overlap, at_most=self._job.max_requests)
        return pieces and [one for one in pieces if not is_blank(text[one.begin : one.end])]

    def join(self, document: Document, texts: Sequence[str]) -> list[tuple[int, list[int]]]:
        """Prompts that put these texts together in their order: how many texts each takes, and its ids.

        As few as possible, of about as many texts each; one text alone has no prompt. As many entries as texts: no
        two fit into a prompt together.
        """
        for groups in range(1, len(texts)):
            bounds = [len(texts) * n // groups for n in range(groups + 1)]
            found = [self._joined(document, texts[a:b]) for a, b in itertools.pairwise(bounds)]
            if all(len(ids) <= self._max for _, ids in found):
                return found
        return [(1, []) for _ in texts]

    def _joined(self, document: Document, texts: Sequence[str]) -> tuple[int, list[int]]:
        if len(texts) == 1:
            return 1, []
        whole = dataclasses.replace(document, text=_BETWEEN.join(texts))
        return len(texts), self._framed(self._encode(whole.text.join(self._around(self._reduce, whole))))

    def refine(self, document: Document, summary: str, piece: Sequence[int]) -> list[int] | None:
        """The prompt for a further piece; None where it does not fit."""
        decoded = self._tokenizer.decode_batch([piece])[0]  # for the boundary alone, which stands in none of it
        around = self._around(self._refine, dataclasses.replace(document, text=decoded), summary=summary)
        before, after = self._tokenizer.encode_batch(around)
        ids = self._framed([*before, *piece, *after])
        return ids if len(ids) <= self._max else None

    def _around(self, turn: Turn, document: Document, **more: str) -> tuple[str, str]:
        before, after = turn.around(document, **more)
        return self._frame.lead + before, after + self._frame.tail

    def _framed(self, ids: Sequence[int]) -> list[int]:
        return [*self._frame.before, *ids, *self._frame.after]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text])[0]
