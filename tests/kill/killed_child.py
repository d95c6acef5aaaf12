"""A run that kills itself at a named point:  python killed_child.py POINT NTH run JOB.yaml …

Not collected by pytest. POINT is `module:object.attribute@before` or `…@after`; the process dies at its NTH call.
"""

import functools
import importlib
import os
import signal
import sys

from batchgen.cli import main


def arm(point: str, nth: int) -> None:
    where, _, when = point.partition("@")
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def armed(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        value = original(*args, **kwargs)
        if calls == nth and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(owner, name, armed)


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.argv = ["batchgen", *sys.argv[3:]]
    main()
