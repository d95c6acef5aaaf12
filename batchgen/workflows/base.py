"""The seam between documents and requests: what is asked for a document, and what its answers amount to."""

from collections.abc import Sequence
from typing import Protocol

from batchgen.data import Completion, Document, Prepared, Record, Request


class Workflow(Protocol):
    """Contract: every admitted document gives exactly one record in the end, whatever the completions are."""

    @property
    def gathers(self) -> bool:
        """Whether it puts documents together, and wants them in the order in which they were read."""
        ...

    @property
    def full(self) -> bool:
        """Whether it takes no document before a request of it is answered."""
        ...

    def admit(self, prepared: Prepared) -> list[Request]:
        """The first requests of a document."""
        ...

    def flush(self) -> list[Request]:
        """Requests held back so far; called when no more documents come, or none for a while."""
        ...

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        """Records that are final now, and requests that are still needed."""
        ...

    def documents(self, custom_id: str) -> Sequence[Document]:
        """The documents in a request that has no completion yet."""
        ...

    def apart(self, custom_id: str) -> list[str]:
        """Ids that stand for a request which will have no completion, one for each document of it.

        Nothing is sent under them: `again` or `give_up` has to follow for each.
        """
        ...

    def again(self, custom_id: str) -> Request:
        """The request of one document under a new id; the old one will have no completion."""
        ...

    def give_up(self, custom_id: str, error: tuple[str, str]) -> list[Record]:
        """The record of the document in a request that will have no completion: failed for this reason, but where an
        earlier answer holds a summary. Other requests of this document are forgotten.
        """
        ...


class AnswerStore(Protocol):
    """Answers to prompts of documents that are not finished, kept over kills. A prompt is known by a digest."""

    def find(self, document: Document, prompt: bytes) -> Sequence[Completion]:
        """What was kept for it, in its order; nothing where there is none."""
        ...

    def keep(self, document: Document, prompt: bytes, completions: Sequence[Completion]) -> None: ...

    def forget(self, document: Document) -> None:
        """It has its record."""
        ...
