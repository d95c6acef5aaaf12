"""What a run cost: the hours of its GPUs, over all attempts, by the price in the job."""

from collections.abc import Mapping
from typing import Any


def cost(report: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a report without it; None where the job names no price. Sums are null where the run had no GPU.

    An attempt counts from its start to its end, with the start of the engine: so long its GPUs were taken. Each of the
    unit costs divides all of the money: those of prompt and of output tokens do not add up.
    """
    price = (job.get("report") or {}).get("cost")
    if not price:
        return None
    run = report["run"]
    hours = run["gpu"]["gpu_seconds"] / 3600
    total = hours * price["per_gpu_hour"] if hours else None

    def of_each(count: int, many: int) -> float | None:
        return None if total is None or not count else float(f"{total / count * many:.6g}")

    return {
        "currency": price["currency"],
        "per_gpu_hour": price["per_gpu_hour"],
        "gpu_hours": round(hours, 6),
        "total": None if total is None else float(f"{total:.6g}"),
        "per_1000_documents": of_each(report["documents"]["ok"], 1000),
        "per_million_prompt_tokens": of_each(run["tokens"]["prompt"], 10**6),
        "per_million_output_tokens": of_each(run["tokens"]["output"], 10**6),
    }
