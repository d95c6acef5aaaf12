import contextlib
import dataclasses

import psutil
import pytest
from helpers_real import real_engine

STRICT = {"backend": "xgrammar", "disable_any_whitespace": True}  # what batchgen chooses for packs
COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions")


@pytest.fixture(scope="session")
def shared(model_folder, tmp_path_factory):
    """The engine of all tests of this process that take what engine there is: a start costs 17 s of CPU."""
    from batchgen.engines.vllm import VllmEngine
    from batchgen.job.config import Sampling

    args = real_engine(model_folder, enable_lora=True, max_lora_rank=8)["args"]
    args |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 29}
    args |= {"structured_outputs_config": STRICT}
    engine = VllmEngine(args, Sampling(), log=tmp_path_factory.mktemp("engine") / "engine.log")
    yield engine
    engine.close()
    engine.close()
    assert not [one for one in psutil.Process().children(recursive=True) if "VLLM::" in " ".join(one.cmdline())]


@contextlib.contextmanager
def lending(owner):
    """Engines that are made now start nothing: they work on vLLM's object of the owner, and leave it as it was."""
    from batchgen.engines import vllm

    def start(args, sampling, log):
        assert args.get("structured_outputs_config", STRICT) == STRICT
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        return owner.llm

    def metrics(engine, original=vllm.VllmEngine.metrics):
        now = original(engine)
        return dataclasses.replace(now, **{name: getattr(now, name) - getattr(before, name) for name in COUNTERS})

    before, core = owner.metrics(), owner.llm.llm_engine
    step = core.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "_start", start)
        patch.setattr(vllm.VllmEngine, "metrics", metrics)
        patch.setattr(vllm.VllmEngine, "close", lambda engine: engine._unlog())
        yield
    core.step = step  # each engine watches it in a way of its own
    assert not core.has_unfinished_requests()


@pytest.fixture
def lent(shared):
    """Whole runs of this test are given the shared engine."""
    with lending(shared):
        yield shared


@pytest.fixture(scope="module")
def lent_to_module(shared):
    with lending(shared):
        yield shared
