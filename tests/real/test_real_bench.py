"""`batchgen bench` on real vLLM: the run, one LLM.generate and a loop do equal work on one engine."""

from helpers_real import ON_SHARED, real_engine
from helpers_run import record, write_job, write_jsonl

from batchgen.bench import measure
from batchgen.job import jobfile
from batchgen.lifecycle import Stop

pytestmark = ON_SHARED


def test_equal_work_on_one_engine(tmp_path, model_folder, lent):
    write_jsonl(tmp_path / "in.jsonl", map(record, range(6)))
    job = write_job(
        tmp_path,
        [tmp_path / "in.jsonl"],
        engine=real_engine(model_folder),
        checkpoint={"rows": 4, "interval_s": 30},
        sampling={"max_tokens": 64, "stop": ["."]},
    )
    wish = measure.Wish(("generate", "loop-4"), 12, 8, 1, None)
    found = measure.bench(jobfile.load(job), wish, Stop())
    assert list(found["contestants"]) == ["batchgen", "generate", "loop-4"]
    assert {(one["documents"], one["output_tokens"]) for one in found["turns"]} == {(12, 12 * 8)}
    assert [one["commits"] for one in found["turns"] if one["contestant"] == "batchgen"] == [2]  # eight at once
    assert (found["conditions"]["documents"], found["conditions"]["different_documents"]) == (12, 6)
    assert found["conditions"]["versions"].keys() > {"batchgen", "torch"}
