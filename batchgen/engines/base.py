"""The seam to an engine: what it takes, what it gives back, and what it promises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchgen.data import Completion, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """in_flight: requests the engine wants at most. max_model_len: tokens of prompt and answer together.

    fill_first: `poll` answers when all that is in flight is done, so it is called with as much as there is.
    """

    in_flight: int
    max_model_len: int
    fill_first: bool = False


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Counters since this engine started, in tokens and requests; None where the engine does not tell.

    rss_bytes: memory that its processes have now, besides this one. exposition: of several engines, by replica, vLLM's
    own metrics in Prometheus' text format, where they are wanted.
    """

    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    preemptions: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    rss_bytes: int | None = None
    exposition: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine turned out to be, for run.json and the report. KV cache in tokens.

    adapter: name and, from the Hub, commit of the LoRA adapter it works with. replicas: engines like this one that work
    side by side. gpus: those it works on, each once, as CUDA_VISIBLE_DEVICES names them.
    """

    backend: str
    args: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    kv_cache_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    max_num_seqs: int | None = None
    replicas: int = 1
    gpus: tuple[str, ...] = ()


class Engine(Protocol):
    """Contract: any order; exactly one completion per submitted request that is not aborted.

    A problem of one request is a completion with `error`; a problem of the engine raises EngineError, after which
    only `close` may be called. Of several engines behind one, ReplicaDiedError tells that one has died: what it had in
    flight gives no completion, and the others go on. All calls come from the thread that made the engine, but `pulse`
    and `kill`.
    """

    info: EngineInfo

    @property
    def limits(self) -> Limits:
        """What it wants now; it can change while replicas start and end."""
        ...

    def submit(self, request: Request) -> None: ...

    def poll(self) -> list[Completion]:
        """Work for a while; the completions that are ready, none where nothing is in flight."""
        ...

    def abort(self, custom_ids: Sequence[str]) -> None:
        """Forget these requests; they give no completion."""
        ...

    def metrics(self) -> EngineMetrics: ...

    def pulse(self) -> float | None:
        """Moment (time.monotonic) since which `poll` waits for a sign of work; None while nobody waits for one.

        Minus infinity where the engine is known to be dead. Any thread may ask.
        """
        ...

    def kill(self, why: str) -> None:
        """End the engine as it stands: a `poll` that waits, or the next one, raises EngineError with `why`.

        Any thread may call it.
        """
        ...

    def close(self) -> None:
        """Free everything; no process of the engine is left."""
        ...
