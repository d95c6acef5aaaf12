"""The scripts that `batchgen slurm` prints, without a Slurm: what they hold, and what bash makes of them."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers_run import record, write_job, write_jsonl

from batchgen.cli import cli
from batchgen.errors import ConfigError
from batchgen.job import jobfile
from batchgen.slurm import script
from batchgen.slurm.script import Wish

# A stand-in for batchgen: writes down how it was called.
CALLED = """\
import json, os, sys
ours = ("VLLM_", "TRITON_", "HF_", "TRANSFORMERS_")
told = {name: value for name, value in os.environ.items() if name.startswith(ours)}
told |= {"words": sys.argv[1:], "cwd": os.getcwd()}
open(os.environ["CALLS"], "a").write(json.dumps(told) + "\\n")
"""
TOP = Path(__file__).parents[2]
HOSTILE = 'a b\'s "$(touch pwned)" `id` ;&|*?\\ é\x1b[2J'


@pytest.fixture
def job(tmp_path) -> Path:
    return write_job(tmp_path, [write_jsonl(tmp_path / "a.jsonl", map(record, range(7)))])


def wish(job: Path, **more) -> Wish:
    given = {"sets": (), "folder": job.parent, "tasks": 4, "time": "04:00:00"} | more
    return Wish(file=jobfile.load(job, given["sets"]), **given)


def head(text: str) -> dict[str, str]:
    """The options in a script's head."""
    return dict(re.findall(r"^#SBATCH (--[\w-]+)(?:=(.*))?$", text, flags=re.MULTILINE))


def printed(*words) -> str:
    done = CliRunner().invoke(cli, ["slurm", *map(str, words)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.stdout


# What stands in it.


def test_the_head_of_an_array(job):
    text = script.tasks(wish(job, at_once=2, gpus=2, cpus=12, partition="long", options=("--account=us", "-q high")))
    assert head(text) == {
        "--job-name": "test",
        "--array": "0-3%2",
        "--nodes": "1",
        "--ntasks": "1",
        "--cpus-per-task": "12",
        "--gpus-per-task": "2",
        "--time": "04:00:00",
        "--partition": "long",
        "--signal": "B:USR1@90",
        "--requeue": "",
        "--open-mode": "append",
        "--output": "test-%A_%a.out",
        "--account": "us",
    }
    assert "#SBATCH -q high" in text


def test_the_head_of_one_job_over_nodes(job):
    text = script.tasks(wish(job, tasks=6, nodes=3, gpus=0))
    assert {"--nodes": "3", "--ntasks-per-node": "2", "--signal": "USR1@90"}.items() <= head(text).items()
    assert not {"--array", "--gpus-per-task", "--partition"} & set(head(text))
    assert "--gpus" not in text


def test_the_warning_leaves_time_for_what_is_in_flight(job):
    long = wish(job, sets=("lifecycle.grace_s=200",))
    assert head(script.tasks(long))["--signal"] == "B:USR1@270"


def test_a_task_gets_the_gpus_that_an_engine_needs(job):
    sets = ("engine.args.tensor_parallel_size=2", "engine.args.pipeline_parallel_size=2")
    assert head(script.tasks(wish(job)))["--gpus-per-task"] == "1"
    assert head(script.tasks(wish(job, sets=sets)))["--gpus-per-task"] == "4"
    assert head(script.tasks(wish(job, sets=sets, gpus=8)))["--gpus-per-task"] == "8"
    with pytest.raises(ConfigError, match="an engine of this job needs 4"):
        script.tasks(wish(job, sets=sets, gpus=2))


def test_the_report_asks_for_no_gpu(job):
    text = script.report(wish(job, gpus=4, partition="long", options=("--account=us",)))
    assert {"--partition": "long", "--account": "us", "--job-name": "test-report"}.items() <= head(text).items()
    assert not {"--array", "--gpus-per-task", "--signal"} & set(head(text))
    assert shlex.split(text.splitlines()[-1]) == ["exec", "batchgen", "report", str(job.parent / "out"), "--write"]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("4:00:00", 14400), ("2-12", 216000), ("1-1:30", 91800), ("1-0:0:5", 86405),
        ("UNLIMITED", None), ("0", None),
    ],
)  # fmt: skip
def test_time_is_read_as_slurm_reads_it(time, seconds):
    assert script.seconds(time) == seconds


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"time": "4h"}, "--time 4h: write it as Slurm does"),
        ({"time": "3"}, "give it 4 minutes or more"),
        ({"options": ("--array=0-9",)}, "--sbatch --array=0-9"),
        ({"options": ("--arr=0-9",)}, "--sbatch --arr=0-9"),
        ({"options": ("-t 5",)}, "--sbatch -t 5"),
        ({"options": ("--no-requeue",)}, "--sbatch --no-requeue"),
        ({"partition": "gpu\n#SBATCH --no-requeue"}, "no name of a partition"),
        ({"options": ("account=x",)}, "an option of sbatch is wanted"),
        ({"options": ("--account=x\nrm -rf /",)}, "an option of sbatch is wanted"),
    ],
)
def test_what_would_break_the_script_is_refused(job, more, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        script.tasks(wish(job, **more))


def test_options_that_only_begin_alike_are_taken(job):
    options = ("--time-min=10", "--mem=64G", "--constraint=h100", "--exclusive", "--nodelist=n1")
    assert {option.split("=")[0] for option in options} < set(head(script.tasks(wish(job, options=options))))


def deployed(name: str) -> str:
    """What a file in deploy/ holds: in /srv/batchgen, `.venv/bin/batchgen slurm jobs/summarize.yaml --array 8 …`."""
    given = Wish(
        jobfile.load(Path("jobs/summarize.yaml")), (), Path("/srv/batchgen"), tasks=8, time="04:00:00", partition="gpu",
        batchgen=(".venv/bin/batchgen",),
    )  # fmt: skip
    return {"array.sbatch": script.tasks, "report.sbatch": script.report}[name](given)


@pytest.mark.parametrize("name", ["array.sbatch", "report.sbatch"])
def test_the_scripts_in_deploy_are_printed_ones(name, monkeypatch):
    monkeypatch.chdir(TOP)
    path = TOP / "deploy" / name
    if "BATCHGEN_RENEW" in os.environ:
        path.write_text(deployed(name))
    assert path.read_text() == deployed(name), "write it anew: BATCHGEN_RENEW=1 pytest tests/slurm/test_script.py"


# What bash makes of it.


def every_script(folder: Path, monkeypatch) -> list[Path]:
    """All forms of the scripts, with names in them that a shell could stumble over."""
    inside = folder / HOSTILE
    inside.mkdir()
    monkeypatch.chdir(inside)
    path = write_job(inside, ["a.jsonl"], output={"dir": f"{inside}/out put"})
    job = inside / f"{HOSTILE}.yaml"
    path.rename(job)
    found = []
    for container in (None, f"/images/{HOSTILE}.sif"):
        for requeue in (True, False):
            for more in ({"nodes": 2}, {"nodes": None}):
                one = wish(
                    job, requeue=requeue, container=container, modules=(f"cuda/{HOSTILE}",),
                    sets=("prompt.system='two\nlines $(touch pwned)'",), **more,
                )  # fmt: skip
                found += [script.tasks(one), script.report(one)]
    paths = [folder / f"{number}.sbatch" for number in range(len(found))]
    for path, text in zip(paths, found, strict=True):
        path.write_text(text)
    return paths


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_reads_all_scripts_whatever_names_are_in_them(tmp_path, monkeypatch):
    for path in every_script(tmp_path, monkeypatch):
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), path.read_text()
        assert "\x1b" not in path.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (Debian: shellcheck)")
def test_shellcheck_finds_nothing_in_any_script(tmp_path, monkeypatch):
    done = subprocess.run(
        ["shellcheck", "--shell=bash", *every_script(tmp_path, monkeypatch)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


class Stage:
    """Runs printed scripts in bash with stand-ins for what they call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.stub("batchgen", f"#!{sys.executable}\n{CALLED}")
        self.stub("scontrol", f'#!/bin/sh\necho "$@" >> {shlex.quote(str(folder))}/scontrol\n')
        self.stub("apptainer", '#!/bin/sh\necho "$@" > "$CALLS.apptainer"\nshift 2\n[ "$1" = --nv ] || exec "$@"\n')
        self.calls = folder / "calls"

    def stub(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def environment(self, **more: object) -> dict[str, str]:
        given = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "77",
            "SLURM_ARRAY_JOB_ID": "77",
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "VLLM", "HF_"))}
        return clean | given | {name: str(value) for name, value in more.items()}

    def start(self, text: str, *words: str, **environment: object) -> subprocess.Popen:
        path = self.folder / "script.sbatch"
        path.write_text(text)
        return subprocess.Popen(
            ["bash", path, *words], env=self.environment(**environment), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, text: str, *words: str, **environment: object) -> tuple[int, str]:
        child = self.start(text, *words, **environment)
        _, err = child.communicate(timeout=30)
        return child.returncode, err

    def called(self) -> list[dict]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []

    def shares(self) -> list[str]:
        return [one["words"][-1] for one in self.called()]

    def requeued(self) -> list[str]:
        path = self.folder / "scontrol"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def tasks_of(spec: str) -> list[dict]:
    """What Slurm gives each task of `--array=spec`."""
    numbers = []
    for part in spec.partition("%")[0].split(","):
        first, _, rest = part.partition("-")
        last, _, step = (rest or first).partition(":")
        numbers += range(int(first), int(last) + 1, int(step or 1))
    about = {"COUNT": len(numbers), "MIN": min(numbers), "MAX": max(numbers)}
    return [
        {f"SLURM_ARRAY_TASK_{name}": value for name, value in {**about, "ID": number}.items()} for number in numbers
    ]


@pytest.mark.parametrize(
    ("spec", "offset", "shares"),
    [
        ("0-3", (), [0, 1, 2, 3]),
        ("0-3%1", (), [0, 1, 2, 3]),
        ("1,3", (), [1, 3]),  # the count of tasks is 2 here, of shares it is 4
        ("3", (), [3]),
        ("0-3:2", (), [0, 2]),
        ("1-4", ("-1",), [0, 1, 2, 3]),
        ("100-103", ("-100",), [0, 1, 2, 3]),
        ("0-1", ("2",), [2, 3]),  # the second window, where an array may not be longer
    ],
)
def test_a_task_does_the_same_share_whichever_others_run(stage, job, spec, offset, shares):
    text = script.tasks(wish(job))
    for task in tasks_of(spec):
        assert stage.run(text, *offset, **task) == (0, "")
        # Not every Slurm tells all of this.
        assert stage.run(text, *offset, SLURM_ARRAY_TASK_ID=task["SLURM_ARRAY_TASK_ID"]) == (0, "")
    assert stage.shares() == [f"{share}/4" for share in shares for _ in range(2)]


@pytest.mark.parametrize(
    ("spec", "offset", "words"),
    [
        ("1-4", (), "sbatch --array=1-4 FILE -1"),  # whoever counts from one would miss the first share
        ("0-9", (), "tasks 0-3"),
        ("4", (), "tasks 0-3"),
        ("0-3", ("2",), "tasks 0-3"),
        ("0-3", ("-1",), "tasks 0-3"),
        ("0-3", ("x",), "a number is wanted"),
        ("0-3", ("$(touch pwned)",), "a number is wanted"),
    ],
)
def test_an_array_that_would_miss_shares_is_refused_as_a_whole(stage, job, spec, offset, words):
    text = script.tasks(wish(job))
    for task in tasks_of(spec):
        status, err = stage.run(text, *offset, **task)
        assert status == 78
        assert words in err
    assert stage.called() == []


def test_without_slurm_nothing_is_begun(stage, job):
    for more in ({}, {"tasks": 6, "nodes": 3}):
        status, err = stage.run(script.tasks(wish(job, **more)))
        assert status == 78
        assert "this is a script for sbatch" in err
    assert stage.called() == []


def test_the_environment_of_a_task(stage, job):
    text = script.tasks(wish(job))
    for number in range(100, 104):
        assert stage.run(text, **tasks_of("0")[0] | {"SLURM_JOB_ID": number})[0] == 0
    found = stage.called()
    assert all(one["cwd"] == str(job.parent) for one in found)
    assert all(
        one["HF_HUB_OFFLINE"] == one["TRANSFORMERS_OFFLINE"] == one["HF_DATASETS_OFFLINE"] == "1" for one in found
    )
    ports = sorted(int(one["VLLM_PORT"]) for one in found)
    assert min(after - before for before, after in itertools.pairwise(ports)) == 64
    assert all(20_000 <= port < 60_000 for port in ports)


def test_folders_with_compiled_code_are_of_one_node(stage, job):
    task = tasks_of("0")[0] | {"VLLM_CACHE_ROOT": "/scratch/my caches", "SLURMD_NODENAME": "n7", "TRITON_HOME": ""}
    assert stage.run(script.tasks(wish(job)), **task) == (0, "")
    (found,) = stage.called()
    assert (found["VLLM_CACHE_ROOT"], found["TRITON_HOME"]) == ("/scratch/my caches/n7", "")


def test_names_arrive_as_they_are(stage, tmp_path, monkeypatch):
    inside = tmp_path / HOSTILE
    inside.mkdir()
    job = inside / f"{HOSTILE}.yaml"
    write_job(inside, ["a.jsonl"]).rename(job)
    sets = ("prompt.system='two\nlines, $(touch pwned)'",)
    for more in ({"requeue": True}, {"requeue": False}):
        assert stage.run(script.tasks(wish(job, sets=sets, **more)), **tasks_of("2")[0]) == (0, "")
    assert [one["words"] for one in stage.called()] == [["run", str(job), "--set", sets[0], "--shard", "2/4"]] * 2
    assert {one["cwd"] for one in stage.called()} == {str(inside)}
    assert not list(tmp_path.rglob("pwned"))


def test_a_folder_that_is_gone_and_a_module_that_is_not_there_begin_nothing(stage, job, tmp_path):
    text = script.tasks(wish(job, folder=tmp_path / "gone"))
    assert stage.run(text, **tasks_of("0")[0])[0] == 78
    text = script.tasks(wish(job, modules=("cuda",))).replace("#!/bin/bash -l", "#!/bin/bash")
    assert stage.run(text, **tasks_of("0")[0])[0] == 78
    stage.stub("module", f'#!/bin/sh\necho "$@" > {stage.folder}/modules\n')
    assert stage.run(text, **tasks_of("0")[0]) == (0, "")
    assert (stage.folder / "modules").read_text() == "load cuda\n"
    assert len(stage.called()) == 1


def test_a_container_is_laid_around_the_command(stage, job):
    stage.run(script.tasks(wish(job, container="/images/batch gen.sif")), **tasks_of("1")[0])
    told = stage.calls.with_suffix(".apptainer").read_text()
    assert told == f"exec --nv /images/batch gen.sif batchgen run {job} --shard 1/4\n"
    stage.run(script.tasks(wish(job, container="/images/batch gen.sif", gpus=0)), **tasks_of("1")[0])
    assert stage.calls.with_suffix(".apptainer").read_text().startswith("exec /images")
    text = script.report(wish(job, container="/images/x.sif"))
    assert shlex.split(text.splitlines()[-1])[1:5] == ["apptainer", "exec", "/images/x.sif", "batchgen"]


# Ends of a task, with a stand-in that behaves like a run.

RUN = """\
import os, pathlib, signal, sys, time
def stop(number, frame):
    print("got", signal.Signals(number).name, file=sys.stderr, flush=True)
    time.sleep(0.2)  # it drains
    if os.environ.get("WRITES"):
        pathlib.Path(os.environ["WRITES"]).write_text("")
    os._exit(75)
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
open(os.environ["CALLS"], "a").write('{"words": ["run"]}\\n')
if "STATUS" in os.environ:
    sys.exit(int(os.environ["STATUS"]))
time.sleep(30)
"""


@pytest.fixture
def run_stage(stage, job):
    stage.stub("batchgen", f"#!{sys.executable}\n{RUN}")
    (job.parent / "out/summaries").mkdir(parents=True)
    return stage


def begun(stage: Stage) -> None:
    end = time.monotonic() + 20
    while not stage.called():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("requeue", [True, False])
def test_the_warning_to_the_shell_alone_reaches_the_run(run_stage, job, requeue):
    """As `--signal=B:USR1` sends it: the run drains, its status is the task's, and it goes back into the queue."""
    part = job.parent / "out/summaries/part-00001-00002of00004-000001.parquet"
    child = run_stage.start(script.tasks(wish(job, requeue=requeue)), **tasks_of("2")[0], WRITES=part)
    begun(run_stage)
    child.send_signal(signal.SIGUSR1)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 75
    assert err.splitlines()[:1] == ["got SIGUSR1"]
    assert run_stage.requeued() == (["requeue 77_2"] if requeue else [])


def test_what_was_written_by_others_or_before_is_no_progress(run_stage, job):
    """A limit that a start does not fit into would otherwise send the task round for ever."""
    summaries = job.parent / "out/summaries"
    old = summaries / "part-00001-00002of00004-000001.parquet"
    old.touch()
    os.utime(old, (time.time() - 60,) * 2)
    other = summaries / "part-00002-00001of00004-000001.parquet"
    child = run_stage.start(script.tasks(wish(job)), **tasks_of("2")[0], WRITES=other)
    begun(run_stage)
    child.send_signal(signal.SIGUSR1)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 75
    assert "nothing was finished in this time" in err
    assert run_stage.requeued() == []


def test_a_task_that_is_cancelled_stays_cancelled(run_stage, job):
    part = job.parent / "out/summaries/part-00001-00002of00004-000001.parquet"
    child = run_stage.start(script.tasks(wish(job)), **tasks_of("2")[0], WRITES=part)
    begun(run_stage)
    os.killpg(child.pid, signal.SIGTERM)
    _, err = child.communicate(timeout=20)
    assert (child.returncode, err) == (75, "got SIGTERM\n")
    assert run_stage.requeued() == []


def test_a_signal_before_the_run_begins_is_not_lost(run_stage, job):
    run_stage.stub("module", f"#!/bin/sh\ntouch {run_stage.folder}/loading\nsleep 1\n")
    text = script.tasks(wish(job, modules=("slow",))).replace("#!/bin/bash -l", "#!/bin/bash")
    child = run_stage.start(text, **tasks_of("2")[0])
    end = time.monotonic() + 20
    while not (run_stage.folder / "loading").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    child.send_signal(signal.SIGUSR1)
    child.communicate(timeout=20)
    assert child.returncode == 75
    assert run_stage.called() == []


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, 0), (3, 0, 0), (65, 1, 0), (69, 0, 0), (73, 0, 1), (73, 99, 1), (73, 100, 0), (137, 0, 0)],
)
def test_other_ends_stay_as_they_are(run_stage, job, status, restarts, requeued):
    """73 alone is tried again, for some hours: its former self still works, or another array."""
    environment = tasks_of("2")[0] | {"STATUS": status, "SLURM_RESTART_COUNT": restarts}
    assert run_stage.run(script.tasks(wish(job)), **environment)[0] == status
    assert run_stage.requeued() == ["requeue 77_2"] * requeued


# The command line.


def test_the_command_prints_what_sbatch_takes(job, monkeypatch):
    monkeypatch.chdir(job.parent)
    text = printed("job.yaml", "--array", "8%3", "--time", "2:00:00", "--partition", "gpu", "--set", "failures.max=3")
    assert {"--array": "0-7%3", "--gpus-per-task": "1", "--partition": "gpu"}.items() <= head(text).items()
    assert "run job.yaml --set failures.max=3 --shard" in text
    assert f"cd {job.parent} ||" in text
    text = printed("job.yaml", "--nodes", "2", "--tasks-per-node", "4", "--time", "60", "--command", "uv run batchgen")
    assert {"--nodes": "2", "--ntasks-per-node": "4"}.items() <= head(text).items()
    assert "  uv run batchgen run job.yaml &\n" in text
    text = printed("job.yaml", "--array", "8", "--time", "60", "--report", "--container", "x.sif")
    assert text.endswith(f"exec apptainer exec x.sif batchgen report {job.parent}/out --write\n")


def test_the_nodes_call_the_very_batchgen_that_printed_the_script(job):
    text = printed(job, "--array", "2", "--time", "60")
    line = next(line for line in text.splitlines() if line.endswith("&"))
    assert shlex.split(line)[0].startswith(str(Path(sys.executable).parent))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--time", "60"), "--array N or --nodes N is wanted"),
        (("--time", "60", "--array", "2", "--nodes", "2"), "one of the two"),
        (("--time", "60", "--array", "2", "--tasks-per-node", "2"), "--tasks-per-node goes with --nodes"),
        (("--time", "60", "--array", "0"), "a number of tasks is wanted"),
        (("--time", "60", "--array", "0-7"), "a number of tasks is wanted"),
        (("--array", "2"), "--time"),
        (("--time", "60", "--array", "2", "--report", "--submit"), "leave --report out"),
    ],
)
def test_a_wrong_command_line_is_told(job, words, told):
    done = CliRunner().invoke(cli, ["slurm", str(job), *words])
    assert done.exit_code == 2
    assert told in done.output


def test_a_job_with_a_fault_is_refused_here_and_not_on_the_nodes(job):
    with pytest.raises(ConfigError, match="did you mean 'sampling'"):
        printed(job, "--array", "2", "--time", "60", "--set", "samplin.max_tokens=3")


def test_submit_gives_sbatch_both_scripts(stage, job, monkeypatch):
    stage.stub(
        "sbatch", f'#!/bin/sh\necho "$@" >> {stage.folder}/options\ncat >> {stage.folder}/given\necho "41;here"\n'
    )
    monkeypatch.setenv("PATH", stage.environment()["PATH"])
    assert printed(job, "--array", "2", "--time", "60", "--submit") == "41\n41\n"
    assert (stage.folder / "options").read_text() == "--parsable\n--parsable --dependency=afterany:41\n"
    tasks, report = (printed(job, "--array", "2", "--time", "60", *more) for more in ((), ("--report",)))
    assert (stage.folder / "given").read_text() == tasks + report


@pytest.mark.parametrize("form", ["missing", "refusing"])
def test_submit_tells_what_sbatch_says(stage, job, monkeypatch, form):
    told = "there is no sbatch here"
    if form == "refusing":
        stage.stub("sbatch", "#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
        told = "sbatch refuses: sbatch: error: invalid partition"
    monkeypatch.setenv("PATH", str(stage.bin))
    with pytest.raises(ConfigError, match=told):
        printed(job, "--array", "2", "--time", "60", "--partition", "x", "--submit")
