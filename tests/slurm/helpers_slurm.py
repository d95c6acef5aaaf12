"""A real Slurm for tests: munged, slurmctld and a slurmd or two below a folder of their own, as root."""

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
CPUS = 16
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
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
{nodes}
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
    """As a context manager it runs. Its nodes are all this machine; each can be lost and start again."""

    def __init__(self, nodes: int = 1) -> None:
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets have short names
        self.environment = os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        self.has_gpus = False
        self._daemons: list[subprocess.Popen] = []
        self._slurmds: dict[str, subprocess.Popen] = {}

    def __enter__(self):
        try:
            self._configure()
            munge = self.folder / "munge"
            munged = self._start(
                "munged", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket",
                f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", "--num-threads=2",
            )  # fmt: skip
            self._daemons.append(munged)
            wait_for((munge / "socket").exists, "munged does not start")
            self._daemons.append(self._start("slurmctld", "-D", "-i"))
            for node in self.nodes:
                self.start_node(node)
        except BaseException:
            for path in (self.folder / "daemons.out", *self.folder.glob("slurm*.log")):
                print(f"{path.name}:\n{path.read_text()}")
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.cancel_all()
        for child in [*self._slurmds.values(), *reversed(self._daemons)]:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for node in self.nodes:
            for one in self.steps(node):
                one.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        for name in ("munge", "state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().partition(".")[0]
        controller, *ports = free_ports(1 + len(self.nodes))
        gres = gpus = ""
        with contextlib.suppress(OSError):  # a container may forbid device files
            for number in range(GPUS):
                os.mknod(self.folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(195, number))
            told = f"NodeName={','.join(self.nodes)} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
            (self.folder / "gres.conf").write_text(told)
            gres, gpus, self.has_gpus = "GresTypes=gpu", f"Gres=gpu:{GPUS}", True
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} {gpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        text = CONFIG.format(host=host, folder=self.folder, port=controller, gres=gres, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)

    def _start(self, *words: str) -> subprocess.Popen:
        with (self.folder / "daemons.out").open("ab") as out:
            return subprocess.Popen(words, stdout=out, stderr=out, env=self.environment, start_new_session=True)

    def start_node(self, node: str) -> None:
        self._slurmds[node] = self._start("slurmd", "-D", "-N", node)
        wait_for(lambda: self.node(node) in {"idle", "mixed"}, f"{node} does not come up")

    def node(self, node: str) -> str:
        """The state of a node."""
        return self.call("sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T")

    def lose_node(self, node: str) -> None:
        """Kill slurmd and the keepers of its jobs, as if the node were gone; the jobs' own processes live on.

        Waits until Slurm has missed it.
        """
        slurmd = self._slurmds.pop(node)
        slurmd.kill()
        slurmd.wait()
        for one in self.steps(node):
            one.kill()
        wait_for(lambda: self.node(node).startswith("down"), "the node is not missed", 90)

    def steps(self, node: str) -> list[psutil.Process]:
        """The slurmstepd processes of a node, known by the log that they write."""
        log = str(self.folder / f"slurmd-{node}.log")
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.name() == "slurmstepd":
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

    def cancel_all(self) -> None:
        """End all jobs at once, and wait for it."""
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        self.call("scancel", "--user=root")
        wait_for(lambda: not self.call("squeue", "--noheader"), "jobs do not end")

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
