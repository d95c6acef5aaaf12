"""Text to token ids and back, without an engine.

Document text never becomes a control token: it is always encoded as plain text, apart from the chat template.
"""

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from batchgen.errors import ConfigError

Message = dict[str, str]


class Tokenizer(Protocol):
    """Contract of every tokenizer; shapes are lists of ids per text."""

    def frame(self, system: str | None, content: str) -> tuple[list[int], list[int]]:
        """The ids the chat template puts before and after the user turn's content.

        `content` is a stand-in for the content that the template must repeat exactly once.
        Raises ConfigError where the model has no chat template or the template does not repeat the content.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as text: nothing added, and none of the special tokens whatever the text holds."""
        ...

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts again, control tokens left out."""
        ...


class HuggingFaceTokenizer:
    """The model's own tokenizer through transformers (imported here: 1.4 s)."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        # The read-ahead thread encodes in batches: the Rust threads are wanted, the fork warning is not.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            from transformers import AutoTokenizer
        except ImportError as e:
            raise ConfigError("a model's tokenizer needs transformers: pip install 'batchgen[vllm]' (or [cpu])") from e
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as e:  # a damaged file makes it raise nearly anything
            raise ConfigError(
                f"{folder}: holds no tokenizer that can be loaded: {type(e).__name__}: {e}{_torchvision_hint()}"
            ) from e

    def frame(self, system: str | None, content: str) -> tuple[list[int], list[int]]:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{self._tokenizer.name_or_path}: the model has no chat template; "
                "use an instruction-tuned model, or put a chat_template.jinja into its folder"
            )
        text = self._render(system, content)
        before, found, after = text.partition(content)
        if not found or content in after:
            raise ConfigError(f"{self._tokenizer.name_or_path}: the chat template does not repeat the user's text once")
        # The template writes BOS itself, so nothing is added here.
        both = self._tokenizer([before, after], add_special_tokens=False)["input_ids"]
        return list(both[0]), list(both[1])

    def _render(self, system: str | None, content: str) -> str:
        user: Message = {"role": "user", "content": content}
        if system is not None:
            with contextlib.suppress(Exception):
                text = self._template([{"role": "system", "content": system}, user])
                if system.strip() in text:
                    return text
            # Some templates refuse a system role, others leave it out: the instruction then leads the user's turn.
            user["content"] = f"{system}\n\n{content}"
        try:
            return self._template([user])
        except Exception as e:  # the model's own template: anything may come out
            raise ConfigError(f"{self._tokenizer.name_or_path}: the chat template fails: {e}") from e

    def _template(self, messages: list[Message]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        return list(encoded["input_ids"])

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        if not ids:
            return []
        return list(self._tokenizer.batch_decode([list(one) for one in ids], skip_special_tokens=True))


def _torchvision_hint() -> str:
    """The way out where torchvision is there and broken: transformers imports it, and tells something else."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):
        return ". torchvision does not match torch: pip uninstall torchvision torchaudio torchcodec (text needs none)"
    return ""


class BytesTokenizer:
    """One id per UTF-8 byte, 256 and above for control tokens: no model, no download."""

    SYSTEM, USER, ASSISTANT, END = 256, 257, 258, 259

    def frame(self, system: str | None, content: str) -> tuple[list[int], list[int]]:  # noqa: ARG002
        lead = [] if system is None else [self.SYSTEM, *system.encode(), self.END]
        return [*lead, self.USER], [self.END, self.ASSISTANT]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(i for i in one if i < 256).decode(errors="replace") for one in ids]
