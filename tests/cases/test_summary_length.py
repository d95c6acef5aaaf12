"""A job that says nothing of the answer's length gets whole answers (vllm-project/vllm#5395, #7024)."""

import pytest
import yaml
from helpers_run import by_id, record, start, watch_requests, write_job, write_jsonl

from batchgen.job.config import Sampling


def smallest(tmp_path):
    """A job with the keys that must be there."""
    docs = write_jsonl(tmp_path / "in/a.jsonl", map(record, range(3)))
    job = {
        "name": "least",
        "input": [{"path": str(docs)}],
        "prompt": {"user": "{{ text }}"},
        "engine": {"backend": "fake"},
        "output": {"dir": str(tmp_path / "out")},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_each_request_carries_a_length_of_its_own(tmp_path, monkeypatch):
    sent = watch_requests(monkeypatch)
    start(smallest(tmp_path))
    assert [request.max_tokens for request in sent] == [256] * 3


@pytest.mark.real
@pytest.mark.filterwarnings("default")
@pytest.mark.xdist_group("engine")
def test_the_engine_is_told_that_length():
    from batchgen.engines.vllm import _sampling_params

    assert _sampling_params(Sampling(), Sampling().max_tokens).max_tokens == 256


def test_a_summary_that_is_cut_is_told_in_its_row_and_counted(tmp_path, out):
    docs = write_jsonl(tmp_path / "in/a.jsonl", map(record, range(3)))
    outcome = start(write_job(tmp_path, [docs], sampling={"max_tokens": 5}))
    rows = by_id(out).values()
    assert {(row["status"], row["finish_reason"], *row["flags"]) for row in rows} == {("ok", "length", "summary_cut")}
    assert outcome.report["documents"]["flags"] == {"summary_cut": 3}
