"""The seam between documents and requests: what is asked for a document, and what its answers amount to."""

from typing import Protocol

from batchgen.data import Completion, Prepared, Record, Request


class Workflow(Protocol):
    """Contract: every admitted document gives exactly one record in the end, whatever the completions are."""

    def admit(self, prepared: Prepared) -> list[Request]:
        """The first requests of a document."""
        ...

    def flush(self) -> list[Request]:
        """Requests held back so far; called when no more documents come."""
        ...

    def complete(self, completion: Completion) -> tuple[list[Record], list[Request]]:
        """Records that are final now, and requests that are still needed."""
        ...
