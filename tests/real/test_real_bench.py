"""`batchgen bench` on real vLLM: the run, one LLM.generate and a loop do equal work on one engine."""

import json
import subprocess
import sys

import pytest
from helpers_real import engine_processes, real_engine
from helpers_run import record, write_job, write_jsonl

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_equal_work_on_one_engine(tmp_path, model_folder):
    write_jsonl(tmp_path / "in.jsonl", map(record, range(10)))
    job = write_job(
        tmp_path,
        [tmp_path / "in.jsonl"],
        engine=real_engine(model_folder, max_num_seqs=4),
        checkpoint={"rows": 4, "interval_s": 30},
        sampling={"max_tokens": 64, "stop": ["."]},
    )
    words = ["--documents", "12", "--tokens", "16", "--rounds", "2", "--against", "generate", "--against", "loop-4"]
    with subprocess.Popen(
        [sys.executable, "-m", "batchgen", "bench", str(job), "--json", *words],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as child:  # fmt: skip
        found = json.loads(child.communicate(timeout=800)[0])
    assert child.returncode == 0
    assert not engine_processes(child.pid)
    assert list(found["contestants"]) == ["batchgen", "generate", "loop-4"]
    assert {(one["documents"], one["output_tokens"]) for one in found["turns"]} == {(12, 12 * 16)}
    assert [one["commits"] for one in found["turns"] if one["contestant"] == "batchgen"] == [3, 3]
    assert (found["conditions"]["documents"], found["conditions"]["different_documents"]) == (12, 10)
    assert found["conditions"]["versions"].keys() > {"batchgen", "torch"}
