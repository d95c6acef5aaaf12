"""A real Slurm of one node for tests: munged, slurmctld and slurmd below a folder of their own, as root."""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun")
GPUS = 4
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdTimeout=10
SlurmdParameters=config_overrides
ReturnToService=2
{gres}
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 {node} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=cheap Nodes=ALL State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""


def why_not() -> str | None:
    """Why no Slurm can be started here, or None."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"needs Slurm; there is no {', '.join(missing)} (Debian: slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "starts Slurm, for which it has to be root"


class Cluster:
    """As a context manager it runs; `slurmd` can be killed and started again."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets have short names
        self.environment = os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        self.has_gpus = False
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self):
        try:
            self._configure()
            munge = self.folder / "munge"
            self._start(
                "munged", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket",
                f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", "--num-threads=2",
            )  # fmt: skip
            wait_for((munge / "socket").exists, "munged does not start")
            self._start("slurmctld", "-D", "-i")
            self.start_slurmd()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.call("scancel", "--user=root", "--signal=KILL", "--full")
            self.call("scancel", "--user=root")
            wait_for(lambda: not self.call("squeue", "--noheader"), "jobs do not end", 60)
        for child in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for one in self.steps():
            one.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().partition(".")[0]
        gres = node = ""
        with contextlib.suppress(OSError):  # a container may forbid device files
            for number in range(GPUS):
                os.mknod(self.folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(195, number))
            (self.folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
            gres, node, self.has_gpus = "GresTypes=gpu", f"Gres=gpu:{GPUS}", True
        text = CONFIG.format(host=host, folder=self.folder, ports=free_ports(2), gres=gres, node=node)
        (self.folder / "slurm.conf").write_text(text)

    def _start(self, *words: str) -> subprocess.Popen:
        with (self.folder / "daemons.out").open("ab") as out:
            child = subprocess.Popen(words, stdout=out, stderr=out, env=self.environment, start_new_session=True)
        self._daemons.append(child)
        return child

    def start_slurmd(self) -> None:
        self._start("slurmd", "-D")
        wait_for(lambda: self.node() in {"idle", "mixed"}, "no node comes up")

    def node(self) -> str:
        """The state of the node."""
        return self.call("sinfo", "--noheader", "--partition=main", "--format=%T")

    def lose_node(self) -> None:
        """Kill slurmd and the keepers of its jobs, as if the node were gone; the jobs' own processes live on."""
        slurmd = self._daemons.pop()
        slurmd.kill()
        slurmd.wait()
        for one in self.steps():
            one.kill()

    def steps(self) -> list[psutil.Process]:
        """The slurmstepd processes of this Slurm, known by the log that they write."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.name() == "slurmstepd":
                    log = str(self.folder / "slurmd.log")
                    found += [one] if any(file.path == log for file in one.open_files()) else []
        return found

    def processes(self) -> list[psutil.Process]:
        """All processes of its jobs, by what they inherited, and those below them: some hide their environment."""
        found = {}
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                told = one.environ()
                if told.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURM_JOB_ID" in told:
                    found |= {each.pid: each for each in (one, *one.children(recursive=True))}
        return [one for one in found.values() if alive(one)]

    def call(self, *words: str, env: dict[str, str] | None = None) -> str:
        """What a command of Slurm prints; fails where it fails."""
        done = subprocess.run(
            words, env=self.environment | (env or {}), capture_output=True, text=True, timeout=60, cwd=self.folder
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *words: str, options: tuple[str, ...] = (), cwd: Path | None = None) -> str:
        """The number of the job."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script), *words], env=self.environment, capture_output=True,
            text=True, timeout=60, cwd=cwd or script.parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What scontrol tells of one job or task (`12_3`)."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until_running(self, job: str) -> None:
        wait_for(lambda: self.state(job)["JobState"] == "RUNNING", f"job {job} does not run", 120)

    def wait_for_end(self, job: str, seconds: float = 300) -> None:
        """Until nothing of a job, an array too, waits or runs."""
        wait_for(lambda: not self.call("squeue", "--noheader", f"--jobs={job}"), f"job {job} does not end", seconds)

    def ends(self, job: str, tasks: Iterable[int]) -> list[tuple[str, int]]:
        """State and exit status of tasks of an array."""
        states = [self.state(f"{job}_{task}") for task in tasks]
        return [(one["JobState"], int(one["ExitCode"].split(":")[0])) for one in states]


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], object], otherwise: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def processes_of(word: str) -> list[psutil.Process]:
    """Processes whose command line holds this word."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [one] if word in " ".join(one.cmdline()) else []
    return [one for one in found if one.pid != os.getpid()]
