"""What the plugin does in processes of an engine, shown on processes of our own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from batchgen.engines import vllm_plugin

# A process that starts a child, both with the plugin in them, and then ends by an error; the child works on.
CORE = """
import multiprocessing, sys, time
from batchgen.engines import vllm_plugin

def work(pipe):
    vllm_plugin.register()
    pipe.send("works")
    time.sleep(100)

def core(pipe):
    vllm_plugin.register()
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,), daemon={daemon})
    child.start()
    ours.recv()
    pipe.send(child.pid)
    raise SystemExit(7)

context = multiprocessing.get_context("fork")
if __name__ == "__main__":
    ours, theirs = context.Pipe()
    process = context.Process(target=core, args=(theirs,))
    process.start()
    print(ours.recv(), flush=True)
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("daemon", [True, False])
def test_a_process_that_ends_by_itself_does_not_wait_for_children_that_ignore_signals(daemon):
    began = time.monotonic()
    env = os.environ | vllm_plugin.environment(vllm_plugin.Path.cwd()) | {vllm_plugin.STACKS: ""}
    done = subprocess.run(
        [sys.executable, "-c", CORE.replace("{daemon}", str(daemon))],
        capture_output=True, text=True, timeout=60, env=env,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIGTERM)
