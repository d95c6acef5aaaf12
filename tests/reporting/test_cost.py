"""Costs are hours times GPUs times price, over all attempts, and nothing else."""

import pytest
from helpers_run import record, start, write_job, write_jsonl

from batchgen.reporting.cost import cost
from batchgen.reporting.report import _money

REPORT = {
    "run": {"gpu": {"gpu_seconds": 7200.0}, "tokens": {"prompt": 4_000_000, "output": 500_000}},
    "documents": {"ok": 10_000},
}
PRICE = {"report": {"cost": {"currency": "EUR", "per_gpu_hour": 3.0}}}


def test_a_worked_example():
    assert cost(REPORT, PRICE) == {
        "currency": "EUR", "per_gpu_hour": 3.0, "gpu_hours": 2.0, "total": 6.0, "per_1000_documents": 0.6,
        "per_million_prompt_tokens": 1.5, "per_million_output_tokens": 12.0,
    }  # fmt: skip


@pytest.mark.parametrize("job", [{}, {"report": None}, {"report": {"cost": None}}])
def test_without_a_price_there_is_no_cost(job):
    assert cost(REPORT, job) is None


def test_without_a_gpu_or_without_documents_there_is_nothing_to_divide():
    without = REPORT | {"run": REPORT["run"] | {"gpu": {"gpu_seconds": 0.0}}}
    found = cost(without, PRICE)
    assert (found["total"], found["per_1000_documents"], found["gpu_hours"]) == (None, None, 0)
    found = cost(REPORT | {"documents": {"ok": 0}}, PRICE)
    assert (found["total"], found["per_1000_documents"]) == (6.0, None)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234.5, "1,234.50"),
        (100.0, "100.00"),
        (12.3456, "12.35"),
        (0.85, "0.8500"),
        (0.0012341, "0.001234"),
        (0, "0.00"),
    ],
)
def test_money_is_shown_so_that_it_says_something(value, shown):
    assert _money(value) == shown


def test_the_price_can_change_between_attempts_and_the_last_holds_for_all(tmp_path):
    job = write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(9)))])
    sets = ("engine.fake.tells={gpus: 2}", "engine.fake.docs_per_s=100")
    start(job, *sets, "report.cost.per_gpu_hour=5", limit=4)
    found = start(job, *sets, "report.cost={currency: CHF, per_gpu_hour: 3600}").report
    assert found["exit_status"] == 0  # the price is no setting that a summary depends on
    assert found["run"]["attempts"] == 2
    assert found["cost"]["total"] == pytest.approx(found["run"]["gpu"]["gpu_seconds"], rel=0.01)
    text = (tmp_path / "out/report.md").read_text()
    assert f"| a million output tokens | {_money(found['cost']['per_million_output_tokens'])} |" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert "## Cost" in headings
    assert len(headings) == len(set(headings))  # each section once
