"""The text of finished answers, decoded many at a time: what vLLM's own detokenizer makes of them token by token.

vLLM decodes the whole prompt before an answer's first token, and then each token as it comes, since somebody may be
reading along or wait for a stop string. Nobody does here. So requests without stop strings ask for no text, and what
has finished is decoded in one call.

The text of a token can depend on what stands before it: SentencePiece drops the space of a first word. So the end of
the prompt is decoded along, and cut off again. Where bytes do not make characters, the text also depends on where the
tokens were cut: an answer whose text holds a replacement character goes through vLLM's detokenizer after all.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

_TAIL = 16  # tokens of a prompt that are decoded along
_REPLACEMENT = "\ufffd"


class BulkText:
    """Decodes with vLLM's tokenizer as requests with these SamplingParams want it; see `bulk_text`."""

    def __init__(self, tokenizer: Any, params: Any) -> None:
        self._tokenizer = tokenizer
        self._params = params

    def decode(self, outputs: Sequence[Any]) -> list[str]:
        """The text of the first answer of each finished RequestOutput."""
        if not outputs:
            return []
        backend, skip = self._tokenizer._tokenizer, self._params.skip_special_tokens  # noqa: SLF001  as vLLM does
        tails = [list(output.prompt_token_ids[-_TAIL:]) for output in outputs]
        wholes = [tail + self._shown(output.outputs[0]) for tail, output in zip(tails, outputs, strict=True)]
        texts = backend.decode_batch(tails + wholes, skip_special_tokens=skip)
        found = zip(texts[: len(tails)], texts[len(tails) :], outputs, strict=True)
        return [self._text(before, whole, output) for before, whole, output in found]

    def _shown(self, answer: Any) -> list[int]:
        """Without the token that ended the answer, be it the end of text or one of `stop_token_ids`."""
        ids = list(answer.token_ids)
        return ids[:-1] if answer.finish_reason == "stop" and not self._params.include_stop_str_in_output else ids

    def _text(self, before: str, whole: str, output: Any) -> str:
        # Nothing before: the first word has nothing that keeps its space.
        if before and whole.startswith(before) and _REPLACEMENT not in whole:
            return whole[len(before) :]
        return self._step_by_step(output)

    def _step_by_step(self, output: Any) -> str:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        answer = output.outputs[0]
        request = SimpleNamespace(
            request_id=output.request_id,
            prompt_token_ids=list(output.prompt_token_ids),
            prompt_embeds=None,
            sampling_params=self._params,
        )
        detokenizer: Any = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        detokenizer.update(list(answer.token_ids), answer.finish_reason == "stop")
        return str(detokenizer.get_next_output_text(finished=True, delta=False))


def bulk_text(tokenizer: Any, params: Any) -> BulkText | None:
    """What decodes answers to requests with `params` that have `detokenize` off; None where vLLM has to do it.

    That is where a stop string is looked for in the text, where special tokens are shown without spaces between them,
    and where the tokenizer is none of the `tokenizers` library.
    """
    from tokenizers import Tokenizer

    joins = not (params.skip_special_tokens or params.spaces_between_special_tokens)
    if params.stop or joins or not isinstance(getattr(tokenizer, "_tokenizer", None), Tokenizer):
        return None
    return BulkText(tokenizer, params)
