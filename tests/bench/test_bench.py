"""`bench` on the fake engine: real runs and windows in turn, peers in processes of their own."""

import json
import logging
import os
import signal
import sys
import threading
import time

import helpers_tokenizers
import psutil
import pytest
from helpers_run import command, record, write_job, write_jsonl

from batchgen.bench import life, measure
from batchgen.bench.figures import UnequalWorkError
from batchgen.engines.fake import FakeEngine
from batchgen.errors import ConfigError, EngineError, Interrupted
from batchgen.job import jobfile
from batchgen.lifecycle import Stop
from batchgen.reporting.stats import peak_rss_bytes


@pytest.fixture
def job(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", map(record, range(20)))
    return write_job(tmp_path, [tmp_path / "in.jsonl"], checkpoint={"rows": 8, "interval_s": 30})


def measured(job, *sets, against=("generate",), documents=30, tokens=12, rounds=2, python=None, stop=None):
    wish = measure.Wish(against, documents, tokens, rounds, python)
    return measure.bench(jobfile.load(job, sets), wish, stop or Stop())


def test_contestants_take_turns_on_one_engine(job, tmp_path, monkeypatch, caplog):
    closed, asked = [], []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self))  # noqa: PLW0108  bound to it
    submit = FakeEngine.submit
    monkeypatch.setattr(
        FakeEngine, "submit", lambda self, one: (asked.append((self, one.custom_id)), submit(self, one))
    )
    with caplog.at_level(logging.INFO, "batchgen"):
        found = measured(job, against=("loop-7", "generate"))
    turns = found["turns"]
    assert [(one["round"], one["contestant"]) for one in turns] == [
        (n, name) for n in (1, 2) for name in ("batchgen", "loop-7", "generate")
    ]
    said = [one.getMessage().split(": ")[1] for one in caplog.records if one.getMessage().startswith("round")]
    assert said == ["batchgen", "loop-7", "generate", "generate", "loop-7", "batchgen"]
    assert len({id(engine) for engine, _ in asked}) == 1
    assert closed == [asked[0][0]]
    assert {(one["documents"], one["output_tokens"]) for one in turns} == {(30, 360)}
    assert len({one["prompt_tokens"] for one in turns}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "job.yaml"]


def test_batchgen_is_the_real_run_with_the_jobs_checkpoints(job):
    found = measured(job, rounds=1)
    ours, other = found["turns"]
    assert ours["commits"] == 4  # 30 rows, 8 a part
    assert 0 < ours["first_s"] <= ours["seconds"]
    assert ours["before_s"] > 0
    assert ours["after_s"] > 0
    assert 0 <= ours["starved"] <= 1
    assert other["commits"] is None
    assert other["first_s"] == pytest.approx(other["seconds"], abs=0.01)
    conditions = found["conditions"]
    assert (conditions["documents"], conditions["different_documents"]) == (30, 20)
    assert (conditions["checkpoint"], conditions["answer_tokens"]) == ({"rows": 8, "interval_s": 30}, {"each": 12})
    assert conditions["prompt_tokens"]["sum"] == ours["prompt_tokens"]
    assert conditions["generate_and_loops"].startswith("windows over the fake engine")


def test_a_window_is_durable_before_the_next_begins(job):
    loop = measured(job, "engine.fake.docs_per_s=100", against=("loop-10",), rounds=1)["turns"][1]
    assert 0.05 < loop["first_s"] < 0.6 * loop["seconds"]  # a third where nothing else runs


def test_the_peak_of_memory_is_that_of_the_turn():
    if not life._reset_peak():
        pytest.skip("this system does not measure the peak anew")
    before = peak_rss_bytes()
    assert bytearray(b"1") * (128 << 20)
    assert peak_rss_bytes() > before + (100 << 20)
    life._reset_peak()
    assert peak_rss_bytes() < before + (64 << 20)


def test_generate_is_not_measured_on_several_engines(job):
    with pytest.raises(ConfigError, match=r"the job has 2: --set engine\.replicas_per_gpu=1"):
        measured(job, "engine.replicas_per_gpu=2", against=("generate",), rounds=1)
    found = measured(job, "engine.replicas_per_gpu=2", against=("batchgen",), rounds=1)
    assert list(found["contestants"]) == ["batchgen"]


def test_unequal_work_is_refused(job, monkeypatch):
    through = life._through
    monkeypatch.setattr(life, "_through", lambda engine, prompts, n: through(engine, prompts, n)[:-1])
    with pytest.raises(UnequalWorkError, match="unequal work in round 1: batchgen did 30 documents, generate 29"):
        measured(job)


def test_other_prompts_than_those_of_the_others_are_refused(job, monkeypatch):
    made = measure.works.make

    def other(*args, **options):
        work = made(*args, **options)
        work.prompts[3][40] += 1
        return work

    monkeypatch.setattr(measure.works, "make", other)
    with pytest.raises(EngineError, match="batchgen sent other prompts than the other contestants"):
        measured(job)


def test_a_run_that_fails_is_told_and_its_files_are_kept(job, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "batchgen"), pytest.raises(EngineError, match="the fake engine died after 40"):
        measured(job, "engine.fake.die_after=40", against=())
    (folder,) = tmp_path.glob(".bench-*")
    assert str(folder) in caplog.text


def test_a_signal_ends_it_and_leaves_nothing(job, tmp_path, monkeypatch):
    stop, turn = Stop(), life.Life.turn

    def interrupted(self, contestant, *args):
        if contestant == "generate":
            stop.request("SIGTERM")
        return turn(self, contestant, *args)

    monkeypatch.setattr(life.Life, "turn", interrupted)
    with pytest.raises(Interrupted):
        measured(job, stop=stop)
    assert list(tmp_path.glob(".bench-*")) == []


@pytest.mark.parametrize(
    ("name", "words"), [("genrate", "did you mean 'generate'"), ("loop-0", "unknown"), ("transformers-0", "unknown")]
)
def test_an_unknown_name_is_refused(job, name, words):
    with pytest.raises(ConfigError, match=f"--against {name}: unknown.*") as e:
        measured(job, against=(name,))
    assert words in str(e.value)


# Peers: a program in the place of Python, with the arguments that Python would get.

PEER = """\
#!{python}
import json, os, sys
assert sys.argv[1] == "-m"
module, work, result = sys.argv[2:]
work = json.load(open(work))
rows = [json.loads(line) for line in open(work["prompts_file"])]
assert os.listdir(os.environ["PYTHONPATH"]) == ["batchgen"]
{more}
json.dump({{"seconds": 0.5, "start_s": 2.0, "first_s": 0.5, "documents": len(rows), "peak_bytes": 1 << 30,
    "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows), "versions": {{"ray": "2"}},
    "output_tokens": work["max_tokens"] * len(rows)}}, open(result, "w"))
"""


@pytest.fixture
def peer(tmp_path):
    def write(more=""):
        path = tmp_path / "peer-python"
        path.write_text(PEER.format(python=sys.executable, more=more))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def job_with_model(job, tmp_path):
    folder = helpers_tokenizers.model("chatml", tmp_path / "model")
    text = job.read_text().replace("max_num_seqs: 4", f"max_num_seqs: 4\n    model: {folder}")
    job.write_text(text)
    return job


def test_a_peer_gets_the_work_and_is_measured_by_itself(job_with_model, tmp_path, peer):
    more = f"json.dump([module, work, rows], open({str(tmp_path / 'told.json')!r}, 'w'))"
    found = measured(job_with_model, against=("transformers-5", "generate"), documents=6, python=peer(more))
    assert [(one["round"], one["contestant"]) for one in found["turns"]][-2:] == [
        (1, "transformers-5"),
        (2, "transformers-5"),
    ]
    assert (found["contestants"]["transformers-5"]["docs_per_s"], found["not_run"]) == (12.0, {})
    assert len(found["ratios"]["transformers-5"]["rounds"]) == 2
    assert found["conditions"]["versions_of_peers"] == {"transformers-5": {"ray": "2"}}
    module, work, rows = json.loads((tmp_path / "told.json").read_text())
    assert module == "batchgen.bench.peers.transformers_batches"
    assert {k: v for k, v in work.items() if k not in ("prompts_file", "out")} == {
        "model": str(tmp_path / "model"), "engine_args": {"max_model_len": 2048, "max_num_seqs": 4}, "max_tokens": 12,
        "ignore_eos": True, "temperature": 0.0, "batch": 5,
    }  # fmt: skip
    assert [row["id"] for row in rows] == [f"d{n}" for n in range(6)]
    assert sum(len(row["prompt_ids"]) for row in rows) == found["turns"][0]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("sys.stderr.write('x\\nray is not installed: pip install ray\\n'); sys.exit(69)", "ray is not installed: pip"),
        pytest.param("sys.exit('Boom')", "it ended with status 1: Boom", marks=pytest.mark.long),
        pytest.param("os.kill(os.getpid(), 9)", "it ended with status -9: without a word", marks=pytest.mark.long),
        ("rows = rows[:-1]", "batchgen did 6 documents, ray-data 5"),
        ("work['max_tokens'] += 1", "batchgen did 72 output tokens, ray-data 78"),
        pytest.param("sys.exit(0)", "its result cannot be read: FileNotFoundError", marks=pytest.mark.long),
    ],
    ids=["not-installed", "fails", "killed", "fewer-documents", "more-tokens", "no-result"],
)
def test_a_peer_that_does_not_do_the_work_is_left_out(job_with_model, peer, more, told):
    found = measured(job_with_model, against=("ray-data",), documents=6, rounds=1, python=peer(more))
    assert told in found["not_run"]["ray-data"]
    assert list(found["contestants"]) == ["batchgen"]


def test_a_signal_ends_a_peer_and_its_children(job_with_model, tmp_path, peer):
    pids = tmp_path / "pids"
    more = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '300'], start_new_session=True); "
        f"open({str(pids)!r}, 'w').write(f'{{child.pid}} {{os.getpid()}} '); time.sleep(300)"
    )

    def when_it_works():
        while not (pids.exists() and pids.read_text().endswith(" ")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    stop = Stop()
    before = signal.signal(signal.SIGUSR1, stop._handle)
    threading.Thread(target=when_it_works, daemon=True).start()
    try:
        with pytest.raises(Interrupted):
            measured(job_with_model, against=("datatrove",), documents=6, rounds=1, python=peer(more), stop=stop)
    finally:
        signal.signal(signal.SIGUSR1, before)
    for pid in map(int, pids.read_text().split()):  # one that nobody has waited for has ended too
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_peers_need_a_model(job):
    with pytest.raises(ConfigError, match="--against datatrove: works with a model only"):
        measured(job, against=("datatrove",))


# The command.


def test_the_command_prints_a_table_or_json_and_writes_a_file(job, tmp_path):
    def call(*words):
        done = command("bench", job, "--documents", 9, "--rounds", 1, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = call("--out", str(tmp_path / "figures.json"))
    assert [line.split()[0] for line in shown.splitlines() if "-" in line.split()[-1:]] == ["batchgen"]
    assert "generate " in shown
    kept = json.loads((tmp_path / "figures.json").read_text())
    printed = json.loads(call("--json"))
    assert set(kept) == set(printed) == {"conditions", "contestants", "ratios", "not_run", "turns"}
