"""What a run does now, by the last minute of the telemetry of whoever works on it."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from batchgen.reporting.live import Live, live
from batchgen.storage.rundir import RunDirectory

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def sample(ago, ok, **more):
    """So many seconds ago; each document has 100 tokens in and 10 out."""
    counts = {"ok": ok, "failed": 1, "skipped": 0, "prompt_tokens": 100 * ok, "generated_tokens": 10 * ok}
    at = (NOW - timedelta(seconds=ago)).isoformat()
    state = {"running": 8, "waiting": 4, "kv_cache_usage": 0.5, "gpus": None}
    return {"event": "sample", "at": at, "counts": counts} | state | more


@pytest.fixture
def run(tmp_path):
    """Writes telemetry files of a run."""

    def write(**files):
        for name, events in files.items():
            path = tmp_path / f"telemetry-{name[1:].replace('_', '-')}.jsonl"
            path.write_text("".join(json.dumps(one) + "\n" for one in events))
        return live(RunDirectory(tmp_path), now=NOW)

    return write


def test_rates_are_of_the_last_minute(run):
    found = run(t00000_00001=[sample(300, 0), sample(60, 1000), sample(30, 1030), sample(0, 1120)])
    assert found == Live(2.0, 200.0, 20.0, 8, 4, 0.5, None, None, unwritten=1121)
    assert found.text() == "2.0 docs/s, 200 tok/s in, 20 tok/s out; 8 running, 4 waiting, KV cache 50%"


def test_shards_are_added_up_and_only_their_last_attempts_count(run):
    gpus = [{"gpu": "0", "utilization": 1.0, "power_w": 600.0}], [{"gpu": "0", "utilization": 0.5, "power_w": None}]
    found = run(
        t00000_00001=[sample(10, 0), sample(5, 500)],
        t00000_00002=[sample(10, 0), sample(0, 20, gpus=gpus[0])],
        t00001_00001=[sample(20, 0), sample(0, 20, gpus=gpus[1], kv_cache_usage=0.9)],
        t00002_00001=[sample(20, 0), sample(0, 20), {"event": "end", "exit_status": 0}],
    )
    assert (found.docs_per_s, found.running) == (3.0, 16)
    assert (found.kv_cache_usage, found.utilization, found.watts) == (0.7, 0.75, 600.0)
    assert found.text().endswith("; 16 running, 8 waiting, KV cache 70%; GPU 75%, 600 W")


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"event": "start"}],
        [sample(200, 0), sample(100, 500)],  # killed, or it hangs
        [sample(5, 0), {"event": "engine_died"}],
        [sample(5, 0), {"event": "end"}],
    ],
)
def test_where_nobody_tells_anything_there_is_nothing(run, events):
    assert run(t00000_00001=events) is None


def test_documents_that_are_in_no_part_yet_are_not_waited_for(run):
    found = run(t00000_00001=[sample(10, 0), {"event": "commit", "rows": 15, "total": 15}, sample(0, 20)])
    assert found.unwritten == 6  # one of the 21 has failed
    assert found.left(26) == "0:00:10 left"
    assert found.left(6) == ""


@pytest.mark.parametrize(
    ("going", "pending", "told"),
    [
        (Live(), None, "no end in sight: nobody knows how many documents there are"),
        (Live(), 5, "no end in sight yet"),
        (Live(docs_per_s=0.0), 5, "no end in sight: nothing has finished of late"),
        (Live(docs_per_s=0.5), 3600, "2:00:00 left"),
    ],
)
def test_why_there_is_no_end_in_sight(going, pending, told):
    assert going.left(pending) == told


def test_a_torn_line_and_a_long_file_are_read_from_their_ends(tmp_path):
    path = tmp_path / "telemetry-00000-00001.jsonl"
    noise = json.dumps({"event": "commit", "rows": 1, "total": 1, "pad": "x" * 1000}) + "\n"
    path.write_text(noise * 1000 + "".join(json.dumps(one) + "\n" for one in (sample(10, 0), sample(0, 20))) + '{"eve')
    assert live(RunDirectory(tmp_path), now=NOW).docs_per_s == 2.0
