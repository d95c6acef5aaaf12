"""A hundred thousand documents: a bounded number in the engine, rows on disk early, memory that does not grow.

vllm-project/vllm#13259, #1315 and #904: all prompts went in first, nothing came out before the last had finished.
"""

import json
import subprocess
import sys

import pytest
from helpers_run import write_job

# Runs the job, and prints what was seen of it as JSON.
CHILD = """
import json, sys, time
from batchgen.storage.checkpoint import Committer
from batchgen.cli import cli
from batchgen.engines.fake import FakeEngine

largest, polls, durable, taken = 0, [], [], 0

def submit(self, request, original=FakeEngine.submit):
    global largest, taken
    original(self, request)
    taken += 1
    largest = max(largest, len(self._waiting))

def poll(self, original=FakeEngine.poll):
    polls.append(min(len(self._waiting), self._batch) / self._batch)
    time.sleep(float(sys.argv[2]))
    return original(self)

def commit(self, original=Committer.commit):
    rows = original(self)
    durable.append((sum(one.rows.rows for one in self._passes.values()), self.rows))
    return rows

FakeEngine.submit, FakeEngine.poll, Committer.commit = submit, poll, commit
cli.main(["run", sys.argv[1], "--set", sys.argv[3]], standalone_mode=False)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(json.dumps({"largest": largest, "polls": polls, "durable": durable, "taken": taken, "peak": int(peak)}))
"""
FEW, MORE, MANY = 10_000, 30_000, 100_000
SEQS = 128


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What was seen of a run over so many documents."""
    folder = tmp_path_factory.mktemp("many")
    found = {}

    def get(count, feed="rolling"):
        if (count, feed) not in found:
            path = folder / f"{count}.jsonl"
            with path.open("w") as stream:
                for n in range(count):
                    words = " ".join(f"word{(n * 31 + k * 7) % 977}" for k in range(20))
                    stream.write(f'{{"id": {n}, "text": "{words}"}}\n')
            engine = {"backend": "fake", "feed": feed, "args": {"max_model_len": 512, "max_num_seqs": SEQS}}
            job = write_job(
                folder, [{"path": str(path), "id_field": "id"}], prompt={"user": "{{ text }}"}, engine=engine
            )
            out = folder / f"{count}-{feed}"
            words = [sys.executable, "-c", CHILD, str(job), "0.03" if count == FEW else "0", f"output.dir={out}"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=110)
            assert done.returncode == 0, done.stderr
            found[count, feed] = json.loads(done.stdout.splitlines()[-1])
        return found[count, feed]

    return get


@pytest.mark.parametrize("feed", ["rolling", "generate"])
def test_the_engine_never_holds_more_than_its_window_and_is_kept_full(seen, feed):
    """A call costs the same whatever is in it, so the calls that are not full are what is lost."""
    told = seen(FEW, feed)
    assert told["taken"] == FEW
    assert told["largest"] <= 2 * SEQS
    assert sum(told["polls"]) / len(told["polls"]) >= 0.9


@pytest.mark.long
def test_rows_are_on_disk_long_before_the_last_document_is_read(seen):
    told = seen(MANY)
    assert told["taken"] == MANY
    assert told["largest"] <= 2 * SEQS
    on_disk = max(rows for read, rows in told["durable"] if read <= MANY * 0.1)
    assert on_disk >= MANY * 0.05


@pytest.mark.parametrize("count", [MORE, pytest.param(MANY, marks=pytest.mark.long)])
def test_many_times_the_documents_take_no_more_memory(seen, count):
    assert seen(count)["peak"] <= 1.2 * seen(FEW)["peak"]
