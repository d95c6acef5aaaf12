"""A start that dies at a named point."""

import signal
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).with_name("killed_child.py")


def killed(point: str, nth: int, *options: str) -> bool:
    """One start that dies at the point; False where it ended before it came there."""
    words = [sys.executable, CHILD, point, str(nth), "run", "job.yaml", *options]
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode != 0
