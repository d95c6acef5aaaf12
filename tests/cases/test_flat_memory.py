"""Memory stays flat while documents flow: what telemetry samples of a long run grows by the done index alone."""

import subprocess
import sys

import pytest
from helpers_run import write_job

from batchgen.reporting.stats import read_telemetry

INDEX_BYTES = 16  # a document that is new in this pass: its key
NOISE = 8 << 20  # what allocators keep for later: buffers of a part, of a batch, of a window; 2 to 4 MiB were seen


def samples(tmp_path, count, **fake) -> list[tuple[int, int]]:
    """(documents done, bytes resident) of a run over so many documents of 1 kB, sampled after each part."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as stream:
        for n in range(count):
            words = " ".join(f"word{(n * 31 + k * 7) % 977}" for k in range(120))
            stream.write(f'{{"id": {n}, "title": "Minutes {n}", "text": "{words}"}}\n')
    job = write_job(
        tmp_path,
        [{"path": str(path), "id_field": "id", "keep": ["title"]}],
        engine={"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 128}, "fake": fake},
        checkpoint={"rows": 500},
    )
    done = subprocess.run([sys.executable, "-m", "batchgen", "run", str(job)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = list(read_telemetry(tmp_path / "out/telemetry-00000-00001.jsonl"))
    found = [(event["counts"]["ok"], event["rss_bytes"]) for event in events if event["event"] == "sample"]
    assert found[-1][0] == count
    assert len(found) >= 20
    return found


def assert_flat(found, count):
    """Between the first sample after a fifth of the documents and all later ones."""
    begin = next(bytes_ for ok, bytes_ in found if ok >= count / 5)
    most = max(bytes_ for ok, bytes_ in found if ok >= count / 5)
    assert most - begin <= INDEX_BYTES * count + NOISE, [(ok, bytes_ >> 20) for ok, bytes_ in found]


def test_ten_thousand_documents(tmp_path):
    assert_flat(samples(tmp_path, 10_000), 10_000)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_thousand_documents_at_500_a_second(tmp_path):
    assert_flat(samples(tmp_path, 100_000, docs_per_s=500), 100_000)
