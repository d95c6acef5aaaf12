"""The longest prompt that the documents really have."""

from batchgen.errors import InputError
from batchgen.feeding.reader import batched
from batchgen.job.config import Job
from batchgen.plan import Plan
from batchgen.prompting.prompts import PromptBuilder
from batchgen.sources import open_source


def longest_prompt(job: Job, plan: Plan, prompts: PromptBuilder, *, at_most: int) -> int:
    """Its tokens, `at_most` where a prompt is that long; reads the inputs, and encodes only what could be longer."""
    longest = 0
    for split in plan.splits:
        try:
            for documents in batched(open_source(job, split.input, split.source).read(split)):
                longer = [(one, split.input) for one in documents if prompts.bound(one) > longest]
                prepared = prompts.prepare(longer)
                if any(one.pieces for one in prepared):  # prompts that are made of answers can have any length
                    return at_most
                longest = max([longest, *(len(one.prompt_ids) for one in prepared)])
                if longest >= at_most:
                    return longest
        except InputError:  # told by the pass itself, which comes no further than this one
            continue
    return longest
