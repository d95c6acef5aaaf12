"""The engine for tests and dry runs: deterministic text, a set speed, faults on request, no model."""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.data import Completion, Request
from batchgen.engines import start_faults
from batchgen.engines.base import EngineInfo, EngineMetrics, Limits
from batchgen.errors import EngineError
from batchgen.job.config import FakeEngine as Settings
from batchgen.models.tokenizer import Tokenizer

_SUMMARY_TOKENS = 24


class FakeEngine:
    """Answers with the end of the prompt's middle, so that each text belongs to its document and to no other.

    Prompts that hold the `match` of one of the settings' `answers` get its text, as far as max_tokens goes. A pack that
    is to be answered by a schema gets each of its blocks back under its label.

    With `fill_first` it answers window by window, like LLM.generate. Finished requests come out last in, first
    out within a poll: nothing may rely on an order.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int,
        max_model_len: int,
        fill_first: bool,
        life: int = 0,
        start: int = 0,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """life: how many were started before it; start: how many it was tried to start.

        Raises EngineError where the settings want no more of them, StartError where they want this start to fail.
        """
        if start < len(settings.start_faults):
            raise start_faults.error("", settings.start_faults[start])
        if settings.lives is not None and life >= settings.lives:
            raise EngineError(f"the fake engine does not start after {life} others, as its settings say")
        self.limits = Limits(2 * max_num_seqs, max_model_len, fill_first=fill_first)
        gpus = tuple(str(n) for n in range(int(settings.tells.get("gpus", 0))))
        self.info = EngineInfo(backend="fake", args=dict(args or {}), max_num_seqs=max_num_seqs, gpus=gpus)
        self._settings = settings
        self._tokenizer = tokenizer
        self._batch = 2 * max_num_seqs if fill_first else max_num_seqs
        self._waiting: deque[Request] = deque()
        self._completed = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._next = time.monotonic()
        self._hangs_since: float | None = None
        self._killed: str | None = None
        self._end = threading.Event()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def poll(self) -> list[Completion]:
        take = min(len(self._waiting), self._batch)
        if self._settings.docs_per_s and take:
            if not self.limits.fill_first:
                take = min(take, max(1, int(self._settings.docs_per_s / 20)))  # a poll takes about 50 ms
            self._next = max(self._next, time.monotonic()) + take / self._settings.docs_per_s
            self._wait(max(0.0, self._next - time.monotonic()))
        requests = [self._waiting.popleft() for _ in range(take)]
        answers = [self._generate(request) for request in requests]
        if self._settings.output_tokens_per_s:
            self._wait(sum(len(answer.ids) for answer in answers) / self._settings.output_tokens_per_s)
        texts = self._tokenizer.decode_batch([answer.ids for answer in answers])
        tells = self._settings.tells
        times = tells.get("queue_s"), tells.get("ttft_s"), tells.get("tpot_s")
        found = [_completion(*one, times) for one in zip(requests, answers, texts, strict=True)]
        return found[::-1]

    def _wait(self, seconds: float | None) -> None:
        """Work so long, for ever where it is None. Raises EngineError where the engine is killed meanwhile."""
        self._hangs_since = time.monotonic()
        if self._end.wait(seconds):
            raise EngineError(self._killed or "killed")
        self._hangs_since = None

    def _generate(self, request: Request) -> "_Answer":
        """What one request gives. Raises EngineError where the engine is to die of it."""
        reads = self._reads or request.schema is not None
        prompt = self._tokenizer.decode_batch([request.prompt_ids])[0] if reads else ""
        self._fault(prompt)
        self._completed += 1
        self._prompt_tokens += len(request.prompt_ids)
        every, on = self._settings.fail_every, self._settings.fail_on
        if (every and self._completed % every == 0) or (on and on in prompt):
            return _Answer(error="the fake engine failed this request, as its settings say")
        if len(request.prompt_ids) + request.max_tokens > self.limits.max_model_len:
            return _Answer(error=f"longer than max_model_len ({self.limits.max_model_len})")
        told = next((one for one in self._settings.answers if one.match in prompt), None)
        copied = [found[0] for found in re.finditer(self._settings.copies, prompt)] if self._settings.copies else []
        if told is not None:
            answer = self._told(request, told.text, told.finish_reason, prompt)
        elif copied:
            answer = self._told(request, " ".join(dict.fromkeys(copied)), "stop", "")
        elif request.schema is not None:
            answer = self._told(request, _of_pack(prompt), "stop", "")
        else:
            answer = _own(request)
        self._generation_tokens += len(answer.ids)
        return answer

    def _told(self, request: Request, text: str, finish_reason: str, pack: str) -> "_Answer":
        """pack: the prompt whose labels `<1>`, `<2>`, … in the text stand for."""
        for n, (label, _) in enumerate(_blocks(pack), 1):
            text = text.replace(f"<{n}>", label)
        ids = self._tokenizer.encode_batch([text])[0]
        if len(ids) > request.max_tokens:
            return _Answer(ids[: request.max_tokens], "length")
        return _Answer(ids, finish_reason, text=text)

    @property
    def _reads(self) -> bool:
        """Whether anything depends on the words of a prompt."""
        faults = (self._settings.die_on, self._settings.hang_on, self._settings.fail_on)
        return any((*faults, self._settings.copies, self._settings.answers))

    def _fault(self, prompt: str) -> None:
        """Die or hang where the settings say so."""
        if self._settings.die_after is not None and self._completed >= self._settings.die_after:
            raise EngineError(f"the fake engine died after {self._completed} completions, as its settings say")
        die_on, hang_on = self._settings.die_on, self._settings.hang_on
        if die_on is not None and die_on in prompt:
            raise EngineError(f"the fake engine died of {die_on!r}, as its settings say")
        if hang_on is not None and hang_on in prompt:
            self._wait(None)

    def abort(self, custom_ids: Sequence[str]) -> None:
        gone = set(custom_ids)
        self._waiting = deque(request for request in self._waiting if request.custom_id not in gone)

    def metrics(self) -> EngineMetrics:
        tells = self._settings.tells
        names = ("running", "waiting", "preemptions", "prefix_cache_queries", "prefix_cache_hits")
        told: dict[str, Any] = {name: int(tells[name]) for name in names if name in tells}
        return EngineMetrics(
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            kv_cache_usage=tells.get("kv_cache_usage"),
            **told,
        )

    def pulse(self) -> float | None:
        return self._hangs_since

    def kill(self, why: str) -> None:
        self._killed = why
        self._end.set()

    def close(self) -> None:
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Token ids that one request gives. `lead` stands before their text; `text` is it where it is known."""

    ids: Sequence[int] = ()
    finish_reason: str = "stop"
    lead: str = ""
    text: str | None = None
    error: str | None = None


def _blocks(prompt: str) -> list[tuple[str, str]]:
    """(label, text) of each document of a pack; none where the prompt is no pack."""
    block = r"^--- block ([a-f][0-9a-f]{3} [0-9a-f]{16})\n(.*?)\n--- end \1$"
    return [(mark.split()[0], text) for mark, text in re.findall(block, prompt, flags=re.MULTILINE | re.DOTALL)]


def _of_pack(prompt: str) -> str:
    items = [{"label": label, "summary": f"[pack] {text}"} for label, text in _blocks(prompt)]
    return json.dumps(items, ensure_ascii=False)


def _own(request: Request) -> _Answer:
    """The middle of the prompt."""
    middle = len(request.prompt_ids) // 2
    ids = request.prompt_ids[middle : middle + min(_SUMMARY_TOKENS, request.max_tokens)]
    finish_reason = "length" if request.max_tokens < _SUMMARY_TOKENS else "stop"
    return _Answer(ids, finish_reason, lead=f"[{len(request.prompt_ids)}] ")


_Times = tuple[float | None, float | None, float | None]


def _completion(request: Request, answer: _Answer, decoded: str, times: _Times) -> Completion:
    """times: `queue_s`, `ttft_s` and `tpot_s`."""
    if answer.error is not None:
        return Completion(request.custom_id, error=answer.error)
    queue_s, ttft_s, tpot_s = times
    return Completion(
        request.custom_id,
        text=answer.lead + decoded if answer.text is None else answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(answer.ids),
        queue_s=queue_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )
