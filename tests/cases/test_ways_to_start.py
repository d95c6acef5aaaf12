"""A run starts alike as console script, as module and from a script, also when its engine spawns processes.

A spawned process imports the main module anew: work at import time would run the job twice (vllm-project/vllm#5637).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_run import by_id, record, write_job, write_jsonl

PACKAGE = Path(__file__).parent.parent.parent
# Loaded by every process before anything else: notes who opens what, and lets the fake engine spawn a process.
NOTES = """\
import multiprocessing, os, sys

def note(*words):
    at = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(at, (" ".join(map(str, [os.getpid(), *words])) + "\\n").encode())
    os.close(at)

def audit(event, args):
    if event == "open" and str(args[0]).endswith(("job.yaml", "docs.jsonl")):
        note("opens", os.path.basename(str(args[0])))

sys.addaudithook(audit)

from batchgen.engines import fake

def spawning(self, *args, original=fake.FakeEngine.__init__, **more):
    note("torch" if "torch" in sys.modules else "no-torch")
    child = multiprocessing.get_context("spawn").Process(target=note, args=("child",))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    original(self, *args, **more)

fake.FakeEngine.__init__ = spawning
"""
SCRIPT = """\
import sys
from pathlib import Path
from batchgen.job import config, jobfile
from batchgen.executors.local import Options, run
from batchgen.lifecycle import Stop

if __name__ == "__main__":
    sys.exit(run(jobfile.load(Path("job.yaml")), Options(), Stop()).exit_status)
"""


def console_script():
    script = Path(sys.executable).with_name("batchgen")
    if not script.exists():
        pytest.skip("batchgen is not installed beside this Python")
    return [sys.executable, script, "run", "job.yaml"]


WAYS = {
    "console": console_script,
    "module": lambda: [sys.executable, "-m", "batchgen", "run", "job.yaml"],
    "script": lambda: [sys.executable, "script.py"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_start_opens_its_job_once_whoever_is_spawned(tmp_path, monkeypatch, out, way):
    write_job(tmp_path, [write_jsonl(tmp_path / "docs.jsonl", map(record, range(5)))])
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(NOTES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{PACKAGE}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    done = subprocess.run(WAYS[way](), cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(by_id(out)) == 5
    notes = [line.split(" ", 1) for line in (tmp_path / "notes").read_text().splitlines()]
    (parent,) = {pid for pid, what in notes if what == "opens job.yaml"}
    (child,) = {pid for pid, what in notes if what == "child"}
    assert child != parent
    assert [what for _, what in notes].count("opens job.yaml") == 1
    assert {pid for pid, what in notes if what == "opens docs.jsonl"} == {parent}
    # Nothing of CUDA can have been touched before the engine's processes were there.
    assert [what for pid, what in notes if pid == parent and "torch" in what] == ["no-torch"]


IMPORT_ALL = """\
import importlib, json, pkgutil, sys, threading

sys.argv = ["x", "--version", "run", "job.yaml"]
met = []
watched = ("open", "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "os.exec", "socket.connect")

def audit(event, args):
    if event in watched:
        met.append([event, str(args[0]), str(args[1])])

import batchgen
sys.addaudithook(audit)
for module in pkgutil.walk_packages(batchgen.__path__, "batchgen."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps([met, threading.active_count(), [name for name in ("torch", "vllm") if name in sys.modules]]))
"""


def test_importing_any_module_starts_nothing_and_opens_no_file(tmp_path):
    words = [sys.executable, "-B", "-c", IMPORT_ALL]  # byte code that Python writes is no file of ours
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    met, threads, heavy = json.loads(done.stdout)
    # Where Python and its packages read their own files; psutil asks the kernel.
    code = (sys.prefix, sys.base_prefix, str(PACKAGE), "/proc/")
    assert [one for one in met if one[0] != "open" or not one[1].startswith(code)] == []
    assert (threads, heavy) == (1, [])
    assert list(tmp_path.iterdir()) == []
