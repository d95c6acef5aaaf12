"""benchmarks/variants.py on the fake engine: whole runs of a job in turn on one engine."""

import json
import runpy
import sys
from pathlib import Path

from helpers_run import record, rows, write_job, write_jsonl

from batchgen.engines.fake import FakeEngine

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "variants.py"


def test_variants_take_turns_on_one_engine_and_their_prompts_are_sent_again(tmp_path, monkeypatch):
    text = " ".join(record(n)["text"] for n in range(300))
    job = write_job(tmp_path, [write_jsonl(tmp_path / "in.jsonl", [record(0), record(1, text=text)])])
    made = []
    begin = FakeEngine.__init__
    monkeypatch.setattr(
        FakeEngine, "__init__", lambda self, *of, **more: (made.append(self), begin(self, *of, **more))[1]
    )
    cut = "--variant cut long_documents.policy=truncate"
    words = f"--replay --rounds 2 {cut} --variant whole long_documents.policy=map_reduce"
    monkeypatch.setattr(sys, "argv", ["variants.py", str(job), str(tmp_path / "found"), *words.split()])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    turns = json.loads((tmp_path / "found" / "figures.json").read_text())["turns"]
    assert len(made) == 1
    assert [(one["variant"], one["round"]) for one in turns] == [("cut", 1), ("whole", 1), ("whole", 2), ("cut", 2)]
    requests = {one["variant"]: one["requests"] for one in turns}
    assert requests["cut"] == 2
    assert requests["whole"] > 4
    for one in turns:
        assert (one["ok"], one["exit_status"]) == (2, 0)
        assert one["replay"]["prompt_tokens"] == one["prompt_tokens"]
        assert one["replay"]["output_tokens"] == one["output_tokens"]
    assert sorted(row["pieces"] > 1 for row in rows(tmp_path / "found" / "whole-2")) == [False, True]
