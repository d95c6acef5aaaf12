"""The entry point. Signals are caught before anything is imported: one during start-up is no death."""

import sys

from batchgen.lifecycle import Stop

_CATCHING = ("run", "retry-failed", "bench")  # others change nothing, and a signal just ends them


def main() -> None:
    stop = Stop()
    if sys.argv[1:2] and sys.argv[1] in _CATCHING:
        stop.install()
    from batchgen.cli import main as command_line

    command_line(stop)


# The guard matters: spawned engine processes import the main module again.
if __name__ == "__main__":
    main()
