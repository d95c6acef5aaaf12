"""Printed scripts on a real Slurm: every way in which a task can end, and one row a document after it."""

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_real import real_engine
from helpers_run import by_id, record, rows, write_job, write_jsonl
from helpers_slurm import CPUS, GPUS, Cluster, alive, processes_of, wait_for, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(900),
]
DONE = ("COMPLETED", 0)


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as one:
        yield one


class Job:
    """A job on the fake engine, in a folder of its own, whose scripts are printed and submitted here."""

    def __init__(self, cluster: Cluster, folder: Path, *, documents: int, docs_per_s: float | None, **sections) -> None:
        self.cluster = cluster
        self.folder = folder
        self.documents = documents
        self.out = folder / "out"
        inputs = [
            write_jsonl(folder / f"in/{number}.jsonl", map(record, range(number, documents, 20)))
            for number in range(20)
        ]
        assert len(inputs) <= documents
        engine = {"backend": "fake", "args": {"max_model_len": 2048, "max_num_seqs": 4}}
        given = {"engine": engine | {"fake": {"docs_per_s": docs_per_s}}, "checkpoint": {"interval_s": 1}}
        self.file = write_job(folder, [folder / "in/*"], **(given | {"lifecycle": {"grace_s": 5}} | sections))

    def command(self, *words) -> str:
        """What `batchgen slurm` says to stdout."""
        given = [sys.executable, "-m", "batchgen", "slurm", str(self.file), "--cpus-per-task", "1", "--time", "10"]
        if "--command" not in words:
            given += ["--command", shlex.join([sys.executable, "-m", "batchgen"])]
        if not self.cluster.has_gpus:
            given += ["--gpus-per-task", "0"]
        done = subprocess.run(
            [*given, *map(str, words)], cwd=self.folder, env=self.cluster.environment, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def print(self, *words) -> Path:
        path = self.folder / f"{len(list(self.folder.glob('*.sbatch')))}.sbatch"
        path.write_text(self.command(*words))
        return path

    def parts(self, label: str = "") -> list[Path]:
        return sorted(self.out.glob(f"summaries/part-*-{label}*"))

    def wait_for_parts(self, label: str, count: int = 1, *, but: int = 0, seconds: float = 120) -> None:
        wait_for(lambda: len(self.parts(label)) >= count + but, f"{label} writes nothing", seconds)

    def log(self) -> str:
        return "".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))

    def whole(self) -> None:
        """Fails unless each document has one row, that is ok, and nobody is left at work."""
        wait_for(lambda: not self.cluster.processes(), "processes are left", 10)
        found = by_id(self.out)
        assert len(found) == len(rows(self.out)) == self.documents
        assert {row["status"] for row in found.values()} == {"ok"}
        assert not list(self.out.rglob(".tmp-*"))


@pytest.fixture(scope="module")
def pair():
    """A Slurm of two nodes."""
    with Cluster(nodes=2) as one:
        yield one


@pytest.fixture
def make(tmp_path):
    made = []

    def job(cluster: Cluster, name: str = "one", **given) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Job(cluster, folder, **given))
        return made[-1]

    yield job
    for one in made:
        print(one.log())
        one.cluster.cancel_all()


def test_a_submitted_array_does_each_document_once_and_the_last_task_writes_the_report(cluster, make):
    job = make(cluster, documents=40, docs_per_s=None)
    array, last = job.command("--array", 3, "--submit").split()
    cluster.wait_for_end(array, 60)
    cluster.wait_for_end(last, 60)
    job.whole()
    assert cluster.ends(array, range(3)) == [DONE] * 3
    assert cluster.state(last)["JobState"] == "COMPLETED"
    assert cluster.state(last)["StartTime"] >= max(cluster.state(f"{array}_{task}")["EndTime"] for task in range(3))
    report = json.loads((job.out / "report.json").read_text())
    assert (report["documents"]["ok"], report["documents"]["pending"]) == (40, 0)
    assert all(job.parts(f"{shard:05d}of00003") for shard in range(3))


ENVIRONMENT = f"""#!{sys.executable}
import json, os, sys, time
told = {{name: value for name, value in os.environ.items() if name.startswith(("CUDA", "VLLM", "HF_"))}}
told |= {{"words": sys.argv[1:], "cwd": os.getcwd()}}
open("told-" + sys.argv[-1].replace("/", "of"), "w").write(json.dumps(told))
time.sleep(2)
"""


@pytest.mark.long
@pytest.mark.parametrize("form", [("--array", 3), ("--nodes", 1, "--tasks-per-node", 3)], ids=lambda form: form[0])
def test_tasks_on_one_node_have_gpus_and_ports_of_their_own(cluster, make, form):
    if not cluster.has_gpus:
        pytest.skip("device files for GPUs cannot be made here")
    job = make(cluster, documents=20, docs_per_s=None)
    stub = job.folder / "stub"
    stub.write_text(ENVIRONMENT)
    stub.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cluster.environment, "VLLM_CACHE_ROOT", "/scratch/cache")
        number = cluster.submit(job.print(*form, "--command", stub))
    cluster.wait_for_end(number, 60)
    told = [json.loads((job.folder / f"told-{shard}of3").read_text()) for shard in range(3)]
    assert [one["words"] for one in told] == [["run", str(job.file), "--shard", f"{shard}/3"] for shard in range(3)]
    assert len({one["CUDA_VISIBLE_DEVICES"] for one in told}) == 3 <= GPUS
    ports = sorted(int(one["VLLM_PORT"]) for one in told)
    assert min(ports[1] - ports[0], ports[2] - ports[1]) >= 64
    assert {one["HF_HUB_OFFLINE"] for one in told} == {"1"}
    assert {one["VLLM_CACHE_ROOT"] for one in told} == {"/scratch/cache/n1"}


@pytest.mark.long
def test_every_way_in_which_a_task_can_end(cluster, make):
    job = make(cluster, documents=2000, docs_per_s=8)
    script = job.print("--array", 4)
    array = cluster.submit(script)
    labels = [f"{shard:05d}of00004" for shard in range(4)]
    for label in labels:
        job.wait_for_parts(label)

    # One is preempted, one comes to its limit, one is killed.
    committed = {path: path.stat().st_mtime_ns for path in job.parts()}
    cluster.call("scontrol", "requeue", f"{array}_0")
    cluster.call("scontrol", "update", f"JobId={array}_1", "TimeLimit=1")
    (victim,) = processes_of(f"{job.file} --shard 2/4")
    victim.send_signal(signal.SIGKILL)
    wait_for(lambda: cluster.state(f"{array}_2")["JobState"] == "FAILED", "nobody was killed")
    assert cluster.ends(array, range(4))[2] == ("FAILED", 137)
    wait_for(lambda: cluster.state(f"{array}_0")["Restarts"] == "1", "no requeue")
    wait_for(lambda: cluster.state(f"{array}_1")["Restarts"] == "1", "no warning", 120)
    cluster.call("scontrol", "update", f"JobId={array}_1", "TimeLimit=10")
    log = (job.folder / f"test-{array}_1.out").read_text()
    assert "stopped by SIGUSR1" in log
    assert "stopped by SIGTERM" in (job.folder / f"test-{array}_0.out").read_text()
    assert cluster.state(f"{array}_3")["Restarts"] == "0"
    for path, stamp in committed.items():
        assert path.stat().st_mtime_ns == stamp

    # The killed one is submitted again; then the node is lost.
    again = cluster.submit(script, options=("--array=2",))
    for task in (f"{array}_0", f"{array}_1", f"{again}_2"):
        cluster.wait_until_running(task)
    job.wait_for_parts(labels[2], but=len(job.parts(labels[2])))
    job.wait_for_parts(labels[0], but=len(job.parts(labels[0])))
    cluster.lose_node("n1")
    cluster.start_node("n1")
    for number in (array, again):
        cluster.wait_for_end(number, 600)
    job.whole()
    assert cluster.ends(array, range(4)) == [DONE, DONE, ("FAILED", 137), DONE]
    assert cluster.ends(again, [2]) == [DONE]
    assert "another process holds this shard" in job.log()  # its former self


@pytest.mark.long
def test_another_number_of_tasks_in_the_middle(cluster, make):
    job = make(cluster, documents=2000, docs_per_s=40)
    first = cluster.submit(job.print("--array", 4))
    job.wait_for_parts("", 8)
    cluster.call("scancel", first)
    second, last = job.command("--array", 3, "--submit").split()
    cluster.wait_for_end(second)
    cluster.wait_for_end(last)
    job.whole()
    assert {state for state, _ in cluster.ends(first, range(4))} == {"CANCELLED"}
    assert cluster.ends(second, range(3)) == [DONE] * 3
    assert json.loads((job.out / "report.json").read_text())["documents"]["ok"] == 2000


@pytest.mark.long
def test_both_numbers_of_tasks_at_the_same_time(cluster, make):
    """The tasks of the second array wait in the queue until those of the first have ended."""
    job = make(cluster, documents=400, docs_per_s=8)
    first = cluster.submit(job.print("--array", 4, "--gpus-per-task", 0))
    job.wait_for_parts("", 4)
    second = cluster.submit(job.print("--array", 3, "--gpus-per-task", 0))
    for number in (first, second):
        cluster.wait_for_end(number, 600)
    job.whole()
    assert cluster.ends(first, range(4)) == [DONE] * 4
    assert cluster.ends(second, range(3)) == [DONE] * 3
    assert "this run is at work in 4 shards" in job.log()


@pytest.mark.long
def test_a_script_of_ones_own_without_a_signal_stops_before_its_limit(cluster, make):
    job = make(cluster, documents=2000, docs_per_s=20)
    script = job.folder / "own.sbatch"
    command = f"{sys.executable} -m batchgen run {job.file}"
    script.write_text(f"#!/bin/bash\n#SBATCH --time=1 --output=own.out\n{command}\n")
    number = cluster.submit(script)
    cluster.wait_for_end(number, 120)
    assert cluster.state(number)["ExitCode"] == "75:0"
    assert "stopped by the deadline" in job.log()
    assert 0 < len(rows(job.out)) < 2000


@pytest.mark.long
def test_at_the_limit_a_task_can_also_just_end(cluster, make):
    job = make(cluster, documents=2000, docs_per_s=20)
    number = cluster.submit(job.print("--array", 1, "--at-limit", "exit"), options=("--time=1",))
    cluster.wait_for_end(number, 120)
    assert cluster.ends(number, range(1)) == [("FAILED", 75)]
    assert "stopped by SIGUSR1" in job.log()
    assert cluster.state(f"{number}_0")["Restarts"] == "0"


@pytest.mark.long
def test_a_task_that_was_cancelled_stays_out_of_the_queue(cluster, make):
    job = make(cluster, documents=2000, docs_per_s=20)
    number, last = job.command("--array", 2, "--submit").split()
    job.wait_for_parts("", 2)
    cluster.call("scancel", number)
    cluster.wait_for_end(number)
    cluster.wait_for_end(last)
    assert {state for state, _ in cluster.ends(number, range(2))} == {"CANCELLED"}
    logs = [path.read_text() for path in job.folder.glob(f"test-{number}_*.out")]
    assert [log.count("stopped by SIGTERM") for log in logs] == [1, 1]
    found = json.loads((job.out / "report.json").read_text())["documents"]
    assert found["ok"] + found["pending"] == 2000
    assert found["ok"] > 0


@pytest.mark.long
def test_jobs_that_are_preempted(cluster, make):
    """Slurm puts one back into the queue by itself, and another not: there PreemptMode is CANCEL."""
    jobs = {}
    for name in ("main", "cheap"):
        job = make(cluster, name, documents=300, docs_per_s=15)
        script = job.print("--array", 1, "--partition", name)
        jobs[name] = job, script, cluster.submit(script)
    for job, _, _ in jobs.values():
        job.wait_for_parts("")
    urgent = job.folder / "urgent.sbatch"
    urgent.write_text(
        f"#!/bin/bash\n#SBATCH --partition=urgent --ntasks={CPUS} --time=10 --output=urgent.out\nsleep 1\n"
    )
    cluster.wait_for_end(cluster.submit(urgent), 120)
    job, script, number = jobs["cheap"]
    assert cluster.state(f"{number}_0")["JobState"] == "PREEMPTED"
    assert cluster.state(f"{number}_0")["Restarts"] == "0"
    again = cluster.submit(script)
    for number in (jobs["main"][2], again):
        cluster.wait_for_end(number)
        assert cluster.ends(number, [0]) == [DONE]
    assert cluster.state(f"{jobs['main'][2]}_0")["Restarts"] == "1"
    for job, _, _ in jobs.values():
        assert "stopped by SIGTERM" in job.log()
        job.whole()


@pytest.mark.long
def test_one_job_over_nodes_goes_back_into_the_queue_as_a_whole(pair, make):
    job = make(pair, documents=2000, docs_per_s=10)
    number, last = job.command("--nodes", 2, "--tasks-per-node", 2, "--submit").split()
    labels = [f"{shard:05d}of00004" for shard in range(4)]
    for label in labels:
        job.wait_for_parts(label)
    pair.call("scontrol", "update", f"JobId={number}", "TimeLimit=1")
    wait_for(lambda: pair.state(number)["Restarts"] == "1", "no warning", 120)
    pair.call("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    logs = [(job.folder / f"test-{number}-{task}.out").read_text() for task in range(4)]
    assert [log.count("stopped by SIGUSR1") for log in logs] == [1] * 4

    pair.wait_until_running(number)
    for label in labels:
        job.wait_for_parts(label, but=len(job.parts(label)))
    pair.lose_node("n2")
    pair.start_node("n2")
    pair.wait_for_end(number, 600)
    pair.wait_for_end(last)
    job.whole()
    assert pair.state(number)["JobState"] == "COMPLETED"
    assert int(pair.state(number)["Restarts"]) >= 2
    assert json.loads((job.out / "report.json").read_text())["documents"]["ok"] == 2000


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(1500)
def test_real_vllm_ended_by_its_limit_goes_on_by_itself(cluster, make, model_folder):
    job = make(
        cluster, documents=600, docs_per_s=None, engine=real_engine(model_folder, max_num_seqs=4),
        checkpoint={"rows": 8}, sampling={"max_tokens": 48}, lifecycle={"grace_s": 20},
    )  # fmt: skip
    number, last = job.command("--array", 1, "--submit").split()
    task = f"{number}_0"
    job.wait_for_parts("", seconds=500)
    engines = cluster.processes()
    assert any("VLLM::" in " ".join(one.cmdline()) for one in engines)
    before = cluster.state(task)["StartTime"]
    ran = time.time() - time.mktime(time.strptime(before, "%Y-%m-%dT%H:%M:%S"))
    # Slurm counts in minutes, looks twice in each, and warns half a minute before: there must be time for both.
    cluster.call("scontrol", "update", f"JobId={task}", f"TimeLimit={math.ceil((ran + 65) / 60)}")
    wait_for(lambda: cluster.state(task)["Restarts"] == "1", "no warning", 180)
    wait_for(lambda: not any(map(alive, engines)), "the engine outlives the task", 10)
    found = len(rows(job.out))
    assert 0 < found < 600
    cluster.call("scontrol", "update", f"JobId={task}", "TimeLimit=20")
    cluster.wait_for_end(number, 900)
    cluster.wait_for_end(last)
    assert cluster.ends(number, [0]) == [DONE]
    assert cluster.state(task)["StartTime"] > before
    assert "stopped by SIGUSR1" in job.log()
    job.whole()
