"""Every error batchgen raises on purpose, with the exit status it ends the program with.

    BatchgenError
    ├── ConfigError            78  the job file, or a setting in it
    │   └── FingerprintError   78  the run directory belongs to other settings
    ├── InputError             65  an input file cannot be read, or none matched
    ├── EngineError            69  the engine cannot start, or died
    │   └── ReplicaDiedError   69  one of several engines died; the others go on
    ├── LockedError            73  another process holds this run
    ├── OutputError            74  the output cannot be written
    └── Interrupted            75  stopped by a signal; what had finished is committed

0, 1 (a bug), 2 (usage, from click) and 3 (too many documents failed) are no errors of this tree.
The text of an error names the place and the way out; `str(error)` is what a user sees.
"""

from typing import ClassVar


class BatchgenError(Exception):
    """Base of the tree. `exit_status` is what the command line ends with."""

    exit_status: ClassVar[int] = 1


class ConfigError(BatchgenError):
    exit_status = 78


class FingerprintError(ConfigError):
    pass


class InputError(BatchgenError):
    exit_status = 65


class EngineError(BatchgenError):
    exit_status = 69


class ReplicaDiedError(EngineError):
    """lost: custom_ids of the requests it had in flight. Its engine starts again by itself."""

    def __init__(self, text: str, lost: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.lost = lost


class LockedError(BatchgenError):
    exit_status = 73


class OutputError(BatchgenError):
    exit_status = 74


class Interrupted(BatchgenError):  # noqa: N818  the name says what happened
    exit_status = 75


OK = 0
BUG = 1
TOO_MANY_FAILED = 3
