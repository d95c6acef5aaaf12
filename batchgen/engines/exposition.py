"""vLLM's own metrics: of an engine in this process, and as text out of the processes of several.

vLLM keeps them in prometheus-client's registry of the process that has its `LLM`, not in the EngineCore's, and only
where log stats are on.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

_PREFIX = "vllm:"


class Here:
    """The metrics of this process' engine; none where it has none."""

    @staticmethod
    def collect() -> "Iterator[Metric]":
        if "vllm" not in sys.modules:
            return
        from prometheus_client import REGISTRY

        for family in REGISTRY.collect():
            if family.name.startswith(_PREFIX):
                # When a counter began is of no use, and would be as many lines again.
                family.samples = [one for one in family.samples if not one.name.endswith("_created")]
                yield family


def text() -> str:
    """What `Here` has, in Prometheus' text format."""
    from prometheus_client import generate_latest

    return generate_latest(Here()).decode()


def merged(texts: Mapping[str, str]) -> "list[Metric]":
    """Those of several processes: each sample has its process' key as label `replica`."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, Metric] = {}
    for replica, told in sorted(texts.items()):
        for family in text_string_to_metric_families(told):
            samples = [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
            family.samples = [] if family.name in found else family.samples
            kept = found.setdefault(family.name, family)
            kept.samples = (kept.samples if kept is not family else []) + samples
    return list(found.values())
