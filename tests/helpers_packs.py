"""Packs in tests: canary documents, a workflow with a known secret, and scripted answers in place of a model's."""

import json
import re

from helpers_config import document

from batchgen.data import Completion, Prepared
from batchgen.workflows.packed import PackedWorkflow, PackRules
from batchgen.workflows.single import Rules, SingleWorkflow

FRAME = [1, 2, 3]
PLACES = (
    "Quillfort", "Marrowby", "Ostenvale", "Pellam", "Drosk", "Hathersea", "Unwick", "Tarnello", "Bexmouth", "Corriden",
    "Ashgarth", "Lowmere",
)  # fmt: skip
TEXT = (
    "The harbour board of {place} met on Tuesday. It agreed to replace {number} metres of quay wall, to be paid for "
    "over three years. The case number is {place} {number}. Work starts in spring."
)
BLOCK = re.compile(r"^--- block ([a-f][0-9a-f]{3}) ([0-9a-f]{16})\n(.*?)\n--- end \1 \2$", re.MULTILINE | re.DOTALL)


def number(n: int) -> int:
    return 4400 + 17 * n


def text_of(n: int) -> str:
    """The nth canary document: a place and a number that stand in no other."""
    return TEXT.format(place=PLACES[n % len(PLACES)], number=number(n))


def summary_of(n: int) -> str:
    return f"The board will rebuild {number(n)} metres of quay at {PLACES[n % len(PLACES)]}."


def canary(n: int, **more) -> Prepared:
    text = text_of(n)
    return Prepared(document(text, n=n), [*FRAME, *text.encode()], text, **more)


def strangers(summary: str, n: int, documents: int) -> list[int]:
    """Documents whose canary, place or number, stands in the summary of the nth."""
    others = [m for m in range(documents) if m != n]
    return [m for m in others if PLACES[m % len(PLACES)] in summary or str(number(m)) in summary]


def packed(*, max_tokens=64, max_model_len=6000, opened=lambda _: None, rules=None, **packs) -> PackedWorkflow:
    """Prompts are FRAME and the bytes of their text."""
    given = {"frame": lambda turn: [*FRAME, *turn.encode()], "secret": b"secret", "max_documents": 6} | packs
    more = Rules(max_tokens=max_tokens, max_model_len=max_model_len, count=len, **(rules or {}))
    return PackedWorkflow(
        SingleWorkflow(prefix="0-1", rules=more),
        prefix="0-1",
        rules=more,
        packs=PackRules(**given),
        opened=opened,
    )


def prompt_of(request) -> str:
    return bytes(request.prompt_ids[len(FRAME) :]).decode()


def blocks(request) -> list[tuple[str, str]]:
    """(label, text) of each document in a pack; none of a request for one document."""
    return [(label, text) for label, _, text in BLOCK.findall(prompt_of(request))]


def word_of(request) -> str:
    """The boundary of a pack."""
    return BLOCK.search(prompt_of(request))[2]


def whole(items) -> str:
    return json.dumps([{"label": label, "summary": summary} for label, summary in items])


def answered(workflow, request, text, *, finish_reason="stop", tokens=100, error=None):
    return workflow.complete(
        Completion(
            request.custom_id,
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=tokens,
            error=error,
        )
    )


def pack_of(workflow, documents=6):
    """A request for all of these documents; they stand in it in the order of their numbers."""
    assert [workflow.admit(canary(n)) for n in range(documents)] == [[]] * documents
    (request,) = workflow.flush()
    numbered = {text_of(n): n for n in range(documents)}
    found = sorted((numbered[text], label) for label, text in blocks(request))
    return request, [label for _, label in found]


def alone(workflow, requests, text="Alone, it is a summary of its own."):
    """The records of documents that were sent alone."""
    return [record for request in requests for record in answered(workflow, request, text, tokens=9)[0]]
