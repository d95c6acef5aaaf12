"""One engine life that contestants share: batchgen's real run, and vLLM as a person feeds it by hand."""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from batchgen import plan
from batchgen.bench.figures import OURS, Turn
from batchgen.bench.work import Work, mark
from batchgen.data import Completion, Request
from batchgen.engines.base import Engine, EngineMetrics, Limits
from batchgen.errors import OK, BatchgenError, ConfigError, EngineError
from batchgen.executors import local
from batchgen.executors.checking import tokenizer_of
from batchgen.executors.starting import Starter
from batchgen.lifecycle import Stop
from batchgen.reporting.stats import last_told, peak_rss_bytes, read_telemetry
from batchgen.storage.rundir import RunDirectory

_WARM_UP = 16  # documents
_EMPTY_S = 10.0  # what the engine takes to free the last blocks
_WORD = (1 << 64) - 1


class _GoneError(BatchgenError):
    """The shared engine died; no EngineError, which a run would answer with another engine."""

    exit_status = EngineError.exit_status


class Lent:
    """The shared engine as one run sees it: closing it leaves it to the next turn. Notes what is sent, and since when.

    since: of the first request, by time.time().
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info = engine.info
        self.since: float | None = None
        self.mark = 0
        self._death: str | None = None

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    def take(self, _: int | None) -> Engine:
        """What a run calls to start its engine, with the documents it is for."""
        if self._death is not None:
            raise _GoneError(self._death)
        return self

    def submit(self, request: Request) -> None:
        if self.since is None:
            self.since = time.time()
        self.mark = (self.mark + mark(request.prompt_ids)) & _WORD
        self._engine.submit(request)

    def poll(self) -> list[Completion]:
        try:
            return self._engine.poll()
        except EngineError as e:
            self._death = str(e)
            raise

    def abort(self, custom_ids: Sequence[str]) -> None:
        self._engine.abort(custom_ids)

    def metrics(self) -> EngineMetrics:
        return self._engine.metrics()

    def pulse(self) -> float | None:
        return self._engine.pulse()

    def kill(self, why: str) -> None:
        self._engine.kill(why)

    def close(self) -> None:
        """The next turn needs it."""


@dataclass(frozen=True, slots=True)
class Life:
    """An engine, and the turns in it. folder: for what they write."""

    engine: Engine
    work: Work
    folder: Path
    stop: Stop

    def warm_up(self) -> None:
        """What only the first requests of a life and the first run of a process pay for."""
        _generate_of(self.engine)(self.work.prompts[:_WARM_UP], self.work.job.sampling.max_tokens)
        with _quiet():
            out = self.folder / "warm-up"
            local.run(self.work.into(out), local.Options(limit=_WARM_UP), self.stop, engine=Lent(self.engine).take)

    def turn(self, contestant: str, round_: int, window: int | None) -> Turn:
        """All the work, by batchgen or in windows. window: documents a call; None is all in one."""
        _forget_prefixes(self.engine)
        gc.collect()
        measured = _reset_peak()
        out = self.folder / f"{round_}-{contestant}"
        if contestant == OURS:
            turn = self._run(round_, out)
        else:
            with self.stop.raising():
                turn = self._by_hand(contestant, round_, window or len(self.work.prompts), out)
        return dataclasses.replace(turn, peak_bytes=peak_rss_bytes()) if measured else turn

    def _run(self, round_: int, out: Path) -> Turn:
        """A run as `batchgen run` makes it, but for its engine."""
        lent = Lent(self.engine)
        begin = time.time()
        with _quiet():
            outcome = local.run(self.work.into(out), local.Options(), self.stop, engine=lent.take)
        end = time.time()
        if self.stop.requested:
            raise self.stop.interrupted()
        if outcome.exit_status != OK or lent.since is None:
            raise EngineError(f"the run of batchgen ended with {outcome.exit_status}: {outcome.reason}")
        if lent.mark != self.work.mark:
            raise EngineError("batchgen sent other prompts than the other contestants: their times are not compared")
        (telemetry,) = RunDirectory(out).telemetries()
        commits = [event for event in read_telemetry(telemetry) if event["event"] == "commit"]
        durable = [datetime.fromisoformat(event["at"]).timestamp() for event in commits]
        counts, _ = last_told(telemetry)
        shutil.rmtree(out)
        seconds = max(durable[-1] - lent.since, 0.001)  # telemetry tells milliseconds
        return Turn(
            contestant=OURS,
            round=round_,
            seconds=seconds,
            documents=sum(event["rows"] for event in commits),
            prompt_tokens=counts.prompt_tokens,
            output_tokens=counts.completion_tokens,
            first_s=max(durable[0] - lent.since, 0.001),
            commits=len(commits),
            before_s=lent.since - begin,
            after_s=max(0.0, end - durable[-1]),
            starved=counts.starved_s / seconds,
        )

    def _by_hand(self, contestant: str, round_: int, window: int, out: Path) -> Turn:
        """Token ids that are there already, a call a window, its answers as JSON lines on disk after each."""
        prompts, max_tokens = self.work.prompts, self.work.job.sampling.max_tokens
        generate = _generate_of(self.engine)
        done: list[tuple[int, int]] = []
        first_s = 0.0
        with out.open("w", encoding="utf-8") as stream:
            begin = time.monotonic()
            for at in range(0, len(prompts), window):
                for n, one in enumerate(generate(prompts[at : at + window], max_tokens), at):
                    stream.write(json.dumps({"id": f"d{n}", "summary": one.text}, ensure_ascii=False) + "\n")
                    done.append((one.prompt_tokens, one.completion_tokens))
                stream.flush()
                os.fsync(stream.fileno())
                first_s = first_s or time.monotonic() - begin
            seconds = time.monotonic() - begin
        out.unlink()
        return Turn(
            contestant=contestant,
            round=round_,
            seconds=seconds,
            documents=len(done),
            prompt_tokens=sum(one for one, _ in done),
            output_tokens=sum(one for _, one in done),
            first_s=first_s,
        )


@contextlib.contextmanager
def shared_life(work: Work, folder: Path, stop: Stop, *, by_hand: bool) -> Iterator[Life]:
    """Start the job's engine, as a run would, and close it at the end. by_hand: others than batchgen use it too.

    Raises ConfigError where these could not: `LLM.generate` is a call of one engine.
    """
    directory = RunDirectory(folder / "engine")
    files = plan.make(work.job, directory)
    starter = Starter(work.checked, directory, files, 1, lambda: tokenizer_of(work.checked))
    if by_hand and len(starter.replicas) > 1:
        raise ConfigError(
            f"--against generate and loops need one engine, and the job has {len(starter.replicas)}: --set "
            "engine.replicas_per_gpu=1 (and one GPU in CUDA_VISIBLE_DEVICES), or --against batchgen alone"
        )
    with stop.raising():
        engine = starter.engine(0)
    try:
        life = Life(engine, work, folder, stop)
        life.warm_up()
        yield life
    finally:
        engine.close()


def _generate_of(engine: Engine) -> Callable[[Sequence[Sequence[int]], int], Sequence[Completion]]:
    """LLM.generate of vLLM; the fake engine has none, so it gets the same windows request by request."""
    from batchgen.engines.vllm import VllmEngine

    if isinstance(engine, VllmEngine):
        return engine.generate
    return lambda prompts, max_tokens: _through(engine, prompts, max_tokens)


def _through(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
    """All of them by submit and poll, in the order of the prompts."""
    for n, ids in enumerate(prompts):
        engine.submit(Request(f"by-hand-{n}", ids, max_tokens))
    found: dict[str, Completion] = {}
    while len(found) < len(prompts):
        found |= {one.custom_id: one for one in engine.poll()}
    return [found[f"by-hand-{n}"] for n in range(len(prompts))]


def _forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache. Raises EngineError where the engine does not come to rest."""
    forget = getattr(engine, "forget_prefixes", None)  # the fake engine has no cache
    end = time.monotonic() + _EMPTY_S
    while forget is not None and not forget():
        if time.monotonic() > end:
            raise EngineError("the prefix cache could not be emptied between two turns")
        time.sleep(0.1)


def _reset_peak() -> bool:
    """Let the kernel measure this process's peak anew; False where it does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A run's sentences about itself tell nothing here; its warnings do."""
    log = logging.getLogger("batchgen")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
