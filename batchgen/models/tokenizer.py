"""Text to token ids and back, without an engine.

Document text never becomes a control token: it is always encoded as plain text, apart from the chat template.
"""

import contextlib
import importlib.util
import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from batchgen.errors import ConfigError
from batchgen.models import plain_text

log = logging.getLogger("batchgen")
Message = dict[str, str]
Mode = Literal["chat", "completion"]
NO_CHAT_TEMPLATE = (
    "the model has no chat template; give one with prompt.chat_template: FILE, or set prompt.mode: completion "
    "for a model that was not trained to chat"
)
# Ordinary texts, with all kinds of beginnings and ends: around them the frame must be that of the whole rendering.
_PROBES = (
    "Plain words.", "the end", "I", "\u00c4rger in Z\u00fcrich, 3 \u20ac!", "1234 and 5", "(a) list;", '"Quoted?"',
    "'s", "\u4e16\u754c\u3002", "# Title: 7", "- one, two...", "< 7 > 5", "[1]", "/a/b_c", "$5 & 6%",
    "\u041f\u0440\u0438\u0432\u0435\u0442",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the user turn: ids, and inside of them text that is encoded together with the turn.

    The prompt is  before + encode(lead + user turn + tail) + after.  `lead` and `tail` are what the tokenizer joins
    with the turn's first and last word, mostly nothing.
    """

    before: list[int]
    after: list[int]
    lead: str = ""
    tail: str = ""


class Tokenizer(Protocol):
    """Contract of every tokenizer; shapes are lists of ids per text."""

    def frame(self, system: str | None, content: str) -> Frame:
        """What the chat template puts around the user turn's content; in completion mode the instruction alone.

        `content` is a stand-in for the content that the template must repeat exactly once.
        Raises ConfigError where the model has no chat template or the template does not repeat the content.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as text: nothing added, and none of the control tokens whatever the text holds."""
        ...

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts again, control tokens left out."""
        ...

    def hides(self, text: str) -> bool:
        """Whether a text that the model writes with its own tokens loses a part where control tokens are left out."""
        ...


class HuggingFaceTokenizer:
    """The model's own tokenizer through transformers (imported here: 1.4 s).

    chat_template: one to use instead of the model's own, as text. now: what a template takes for the present day, so
    that all starts of a run have the same prompts; today where it is left out.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        mode: Mode = "chat",
        now: datetime | None = None,
    ) -> None:
        # The read-ahead thread encodes in batches: the Rust threads are wanted, the fork warning is not.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            from transformers import AutoTokenizer
        except ImportError as e:
            raise ConfigError("a model's tokenizer needs transformers: pip install 'batchgen[vllm]' (or [cpu])") from e
        self._mode = mode
        self._chat_template = chat_template
        self._now = now or datetime.now(UTC)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
            self._plain: Any = self._plain_backend()
        except Exception as e:  # a damaged file makes it raise nearly anything
            raise ConfigError(
                f"{folder}: holds no tokenizer that can be loaded: {type(e).__name__}: {e}{_torchvision_hint()}"
            ) from e

    def _plain_backend(self) -> Any:
        """The tokenizer for text; None where the model's is none of the `tokenizers` library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return plain_text.plain_backend(backend)
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        unknown = self._tokenizer.unk_token_id  # stands for what the model has no token for, too
        self._control = {i: t.content for i, t in added.items() if plain_text.is_control(t) and i != unknown}
        self._encode_slowly(["x"])  # whether it can
        return None

    def frame(self, system: str | None, content: str) -> Frame:
        if self._mode == "completion":
            before, after = "" if system is None else f"{system}\n\n", ""
        else:
            before, after = self._around(system, content)
        special = self._mode == "completion"  # a template writes BOS itself
        control = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        probes = [probe for probe in _PROBES if not any(one in probe for one in control)]
        whole = self._tokenizer([before + probe + after for probe in probes], add_special_tokens=special)["input_ids"]
        leads = _ends(before[_last_end(before, control) :])
        tails = [text[::-1] for text in _ends(after[::-1][_last_end(after[::-1], [one[::-1] for one in control]) :])]
        seams = itertools.product([*leads, *(f" {lead}" for lead in leads)], tails)
        frame = self._seamless(probes, [list(ids) for ids in whole], sorted(seams, key=lambda seam: len("".join(seam))))
        if frame is None:
            log.debug("the ids of a prompt are not to the token those of its whole text")
            both = self._tokenizer([before, after], add_special_tokens=False)["input_ids"]
            begin = whole[0][:1] if special and whole[0][0] == self._tokenizer.bos_token_id else []
            frame = Frame([*begin, *both[0]], list(both[1]))
        return Frame(frame.before, [], frame.lead) if special else frame  # EOS ends no prompt

    def _around(self, system: str | None, content: str) -> tuple[str, str]:
        """The chat template's text before and after the content."""
        if not (self._chat_template or self._tokenizer.chat_template):
            raise ConfigError(f"{self._tokenizer.name_or_path}: {NO_CHAT_TEMPLATE}")
        before, found, after = self._render(system, content).partition(content)
        if not found or content in after:
            raise ConfigError(f"{self._tokenizer.name_or_path}: the chat template does not repeat the user's text once")
        return before, after

    def _seamless(
        self, probes: Sequence[str], whole: Sequence[list[int]], seams: Sequence[tuple[str, str]]
    ) -> Frame | None:
        """The frame with the first lead and tail that give the ids of the `whole` prompts; None where none do."""
        for lead, tail in seams:
            plain = self.encode_batch([lead + probe + tail for probe in probes])
            for before, after in _places(whole[0], plain[0]):
                if all(before + ids + after == all_ids for ids, all_ids in zip(plain, whole, strict=True)):
                    return Frame(before, after, lead, tail)
        return None

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
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=True,
                strftime_now=self._now.strftime,
            )
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._plain is None:
            return self._encode_slowly(texts)
        return [one.ids for one in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _encode_slowly(self, texts: Sequence[str]) -> list[list[int]]:
        """By a tokenizer written in Python, which may give control ids for text: such text is encoded in pieces."""

        def encode(some: Sequence[str]) -> list[list[int]]:
            return list(self._tokenizer(list(some), add_special_tokens=False, split_special_tokens=True)["input_ids"])

        found = encode(texts)
        for n, ids in enumerate(found):
            if not self._control.keys().isdisjoint(ids):
                parts = encode(plain_text.pieces(texts[n], list(self._control.values())))
                found[n] = [i for part in parts for i in part if i not in self._control]
        return found

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        if not ids:
            return []
        return list(self._tokenizer.batch_decode([list(one) for one in ids], skip_special_tokens=True))

    def hides(self, text: str) -> bool:
        # By name, not by encoding: that sets something in a tokenizer which the read-ahead thread may be using.
        return any(token.special and token.content in text for token in self._tokenizer.added_tokens_decoder.values())


def _last_end(text: str, contents: Sequence[str]) -> int:
    """Where the last of `contents` in `text` ends; 0 where it holds none."""
    return max((text.rfind(one) + len(one) for one in contents if one and one in text), default=0)


def _ends(text: str) -> list[str]:
    """Ends of `text`, from nothing to all of it: its last white space, its last word with that."""
    found = (re.search(pattern, text) for pattern in (r"\s*$", r"\S*\s*$"))
    return list(dict.fromkeys(["", *(one[0] for one in found if one), text]))


def _places(whole: list[int], part: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """What stands before and after `part` in `whole`, wherever it is."""
    for begin in range(len(whole) - len(part) + 1):
        if whole[begin : begin + len(part)] == part:
            yield whole[:begin], whole[begin + len(part) :]


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

    def __init__(self, *, mode: Mode = "chat") -> None:
        self._mode = mode

    def frame(self, system: str | None, content: str) -> Frame:  # noqa: ARG002
        if self._mode == "completion":
            return Frame([] if system is None else [*system.encode(), *b"\n\n"], [])
        lead = [] if system is None else [self.SYSTEM, *system.encode(), self.END]
        return Frame([*lead, self.USER], [self.END, self.ASSISTANT])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(i for i in one if i < 256).decode(errors="replace") for one in ids]

    def hides(self, text: str) -> bool:  # noqa: ARG002
        return False
