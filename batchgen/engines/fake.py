"""The engine for tests and dry runs: deterministic text, a set speed, faults on request, no model."""

import threading
import time
from collections import deque
from collections.abc import Sequence

from batchgen.config import FakeEngine as Settings
from batchgen.data import Completion, Request
from batchgen.engines.base import EngineInfo, EngineMetrics, Limits
from batchgen.errors import EngineError
from batchgen.tokenizer import Tokenizer

_SUMMARY_TOKENS = 24


class FakeEngine:
    """Answers with the end of the prompt's middle, so that each text belongs to its document and to no other.

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
    ) -> None:
        """life: how many were started before it. Raises EngineError where the settings want no more of them."""
        if settings.lives is not None and life >= settings.lives:
            raise EngineError(f"the fake engine does not start after {life} others, as its settings say")
        self.limits = Limits(2 * max_num_seqs, max_model_len, fill_first=fill_first)
        self.info = EngineInfo(backend="fake", max_num_seqs=max_num_seqs)
        self._settings = settings
        self._tokenizer = tokenizer
        self._batch = 2 * max_num_seqs if fill_first else max_num_seqs
        self._waiting: deque[Request] = deque()
        self._submitted = 0
        self._completed = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._next = time.monotonic()
        self._hangs_since: float | None = None
        self._killed: str | None = None
        self._end = threading.Event()

    def submit(self, request: Request) -> None:
        self._submitted += 1
        self._waiting.append(request)

    def poll(self) -> list[Completion]:
        take = min(len(self._waiting), self._batch)
        if self._settings.docs_per_s and take:
            if not self.limits.fill_first:
                take = min(take, max(1, int(self._settings.docs_per_s / 20)))  # a poll takes about 50 ms
            self._next = max(self._next, time.monotonic()) + take / self._settings.docs_per_s
            time.sleep(max(0.0, self._next - time.monotonic()))
        taken = []
        for request in [self._waiting.popleft() for _ in range(take)]:
            self._fault(request)
            self._completed += 1
            fails = self._settings.fail_every and self._completed % self._settings.fail_every == 0
            taken.append((request, [] if fails else _summary(request), fails))
        texts = self._tokenizer.decode_batch([ids for _, ids, _ in taken])
        return [self._answer(*one, text) for one, text in zip(taken, texts, strict=True)][::-1]

    def _fault(self, request: Request) -> None:
        """Die or hang where the settings say so."""
        if self._settings.die_after is not None and self._completed >= self._settings.die_after:
            raise EngineError(f"the fake engine died after {self._completed} completions, as its settings say")
        die_on, hang_on = self._settings.die_on, self._settings.hang_on
        if die_on is None and hang_on is None:
            return
        prompt = self._tokenizer.decode_batch([request.prompt_ids])[0]
        if die_on is not None and die_on in prompt:
            raise EngineError(f"the fake engine died of {die_on!r}, as its settings say")
        if hang_on is not None and hang_on in prompt:
            self._hangs_since = time.monotonic()
            self._end.wait()
        if self._killed is not None:
            raise EngineError(self._killed)

    def _answer(self, request: Request, ids: Sequence[int], fails: object, text: str) -> Completion:
        prompt_tokens = len(request.prompt_ids)
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += len(ids)
        if fails:
            return Completion(request.custom_id, error="the fake engine failed this request, as its settings say")
        return Completion(
            request.custom_id,
            text=f"[{prompt_tokens}] {text}",
            finish_reason="length" if request.max_tokens < _SUMMARY_TOKENS else "stop",
            prompt_tokens=prompt_tokens,
            completion_tokens=len(ids),
        )

    def abort(self, custom_ids: Sequence[str]) -> None:
        gone = set(custom_ids)
        self._waiting = deque(request for request in self._waiting if request.custom_id not in gone)

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(prompt_tokens=self._prompt_tokens, generation_tokens=self._generation_tokens)

    def pulse(self) -> float | None:
        return self._hangs_since

    def kill(self, why: str) -> None:
        self._killed = why
        self._end.set()

    def close(self) -> None:
        self._waiting.clear()


def _summary(request: Request) -> Sequence[int]:
    """The middle of the prompt."""
    middle = len(request.prompt_ids) // 2
    return request.prompt_ids[middle : middle + min(_SUMMARY_TOKENS, request.max_tokens)]
