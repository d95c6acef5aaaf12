"""pieces/: answers to pieces of documents that have no row yet, kept over kills.

One file holds those of all unfinished documents of a shard. It is written after each part and at the rhythm of parts,
each time whole: a document that has its row by then is not in it any more. It is advice: it loses against rows, and is
ignored where it is damaged or was made under another fingerprint.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchgen import fsio
from batchgen.data import Completion, Document
from batchgen.storage.rundir import RunDirectory

log = logging.getLogger("batchgen")
_FIELDS = ("text", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "error")
_Of = tuple[bytes, bytes]  # key and content of a document


class KeptAnswers:
    """An AnswerStore in a file. interval_s: what is new waits no longer for its write."""

    def __init__(
        self, run: RunDirectory, *, fingerprint: str, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._fingerprint = fingerprint
        self._interval_s = interval_s
        self._clock = clock
        self._since: float | None = None  # since when something is not written
        self._gone = False  # some document in the file has its row
        self._answers: dict[_Of, dict[str, list[dict[str, Any]]]] = {}  # what the file is to hold
        self._old: dict[_Of, dict[str, list[dict[str, Any]]]] = {}  # of earlier attempts
        self._load()

    def _load(self) -> None:
        """What this shard has kept, and, to be found only, what shards of another number have."""
        others = self._run.of_other_counts(self._run.pieces, "answers")
        for path in others:
            self._old |= self._read(path)
        self._answers = self._read(self._run.pieces_file)
        self._old |= {of: dict(answers) for of, answers in self._answers.items()}
        if self._old:
            answers = sum(map(len, self._old.values()))
            log.info("%s finished pieces of %s documents are used again", f"{answers:,}", f"{len(self._old):,}")

    def _read(self, path: Path) -> dict[_Of, dict[str, list[dict[str, Any]]]]:
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            told = json.loads(head)
            if told["blake2b"] != _sum(body):
                log.warning("%s: damaged (another checksum), ignored; the pieces in it are asked again", path)
            elif told["fingerprint"] != self._fingerprint:
                log.info("%s: made under other settings, not used", path)
            else:
                lines = [json.loads(line) for line in body.splitlines()]
                return {(bytes.fromhex(one["key"]), bytes.fromhex(one["content"])): one["answers"] for one in lines}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("%s: damaged (%s), ignored; the pieces in it are asked again", path, e)
        return {}

    def find(self, document: Document, prompt: bytes) -> Sequence[Completion]:
        kept = self._old.get((document.key, document.content), {}).get(prompt.hex(), [])
        return [Completion("", **one) for one in kept]

    def keep(self, document: Document, prompt: bytes, completions: Sequence[Completion]) -> None:
        values = [{name: getattr(one, name) for name in _FIELDS} for one in completions]
        of_document = self._answers.setdefault((document.key, document.content), {})
        if of_document.get(prompt.hex()) != values:
            of_document[prompt.hex()] = values
            self._since = self._since or self._clock()

    def forget(self, document: Document) -> None:
        for other in [one for one in self._answers if one[0] == document.key]:
            del self._answers[other]
            self._old.pop(other, None)
            self._gone = True

    @property
    def due(self) -> bool:
        """Whether the file should be written now; after a part, so that no row comes later than its answers go."""
        return self._since is not None and self._clock() - self._since >= self._interval_s

    def write(self) -> None:
        """Bring the file up to date, all records so far being committed. Raises OutputError."""
        if self._since is None and not self._gone:
            return
        if not self._answers:
            self.clear()
            return
        lines = [
            json.dumps({"key": key.hex(), "content": content.hex(), "answers": answers})
            for (key, content), answers in self._answers.items()
        ]
        body = "".join(f"{line}\n" for line in lines).encode()
        head = json.dumps({"version": 1, "fingerprint": self._fingerprint, "blake2b": _sum(body)}).encode()
        fsio.write_atomic(self._run.pieces_file, head + b"\n" + body, owner=self._run.owner)
        self._since, self._gone = None, False

    def clear(self) -> None:
        """Nothing is unfinished any more. Raises OutputError."""
        self._answers.clear()
        self._old.clear()
        self._since, self._gone = None, False
        self._run.remove_pieces()


def _sum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
