"""`status --watch`: a run as it goes, until nobody works on it any more. Nothing is written to the run."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.executors import inspection
from batchgen.reporting.live import Live, live
from batchgen.storage.rundir import RunDirectory
from batchgen.text import harmless

LOOK_S = 2.0
LINE_S = 30.0  # between two plain lines
_SHARE = 10  # parts are read so seldom that it takes no more than a tenth of the time
_BAR = 30
_UP_AND_CLEAR = "\x1b[{}F\x1b[J"


def watch(path: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the run on stdout: on a terminal in one place, elsewhere a line now and then; at last its status.

    Raises ConfigError where the folder is no run.
    """
    show = _Screen() if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else _Lines()
    found, due = inspection.status(path), 0.0
    while found["running"]:
        show.update(found, live(RunDirectory(path)))
        sleep(LOOK_S)
        begin = time.monotonic()
        if begin >= due:
            found = inspection.status(path)
            now = time.monotonic()
            due = now + _SHARE * (now - begin)
    show.end(found)


def _left(found: Mapping[str, Any], going: Live | None) -> str:
    """What of it is not in parts yet, and when it will be through."""
    if going is None:
        return "no end in sight yet: the engine starts, or a file is read"
    more = f"{going.unwritten:,} more are done" if going.unwritten else ""
    return ", ".join(one for one in (more, going.left(found["pending"])) if one)


class _Screen:
    """Redraws its lines in place."""

    def __init__(self) -> None:
        self._drawn = 0

    def update(self, found: Mapping[str, Any], going: Live | None) -> None:
        now = [] if going is None else [f"  {going.text()}"]
        first = ", ".join(one for one in (_bar(found), _left(found, going)) if one)
        self._draw([*inspection.status_text(found).splitlines(), f"  {first}", *now])

    def end(self, found: Mapping[str, Any]) -> None:
        self._draw(inspection.status_text(found).splitlines(), whole=True)

    def _draw(self, lines: list[str], *, whole: bool = False) -> None:
        columns, rows = shutil.get_terminal_size()
        if not whole:  # a line that wraps, or one above the edge, could not be drawn over
            lines = [harmless(line)[: columns - 1] for line in lines[-(rows - 1) :]]
        back = _UP_AND_CLEAR.format(self._drawn) if self._drawn else ""
        sys.stdout.write(back + "".join(f"{harmless(line)}\n" for line in lines))
        sys.stdout.flush()
        self._drawn = len(lines)


class _Lines:
    """One line now and then, where it says something new."""

    def __init__(self) -> None:
        self._said = ""
        self._due = 0.0

    def update(self, found: Mapping[str, Any], going: Live | None) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LINE_S
        done = found["ok"] + found["failed"] + found["skipped"]
        share = _share(found)
        of = "" if not found["total"] else f"/{'' if found['total_is_exact'] else '~'}{found['total']}"
        told = f"{done}{of} documents{'' if share is None else f' ({share:.0%})'}, {found['failed']} failed"
        now = [_left(found, going), "" if going is None else going.text()]
        line = "; ".join(one for one in (told, *now) if one)
        if line != self._said:
            self._said = line
            self._write(f"{datetime.now().astimezone():%H:%M:%S} {line}")

    def end(self, found: Mapping[str, Any]) -> None:
        self._write(inspection.status_text(found))

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(f"{harmless(text)}\n")
        sys.stdout.flush()


def _share(found: Mapping[str, Any]) -> float | None:
    done = found["ok"] + found["failed"] + found["skipped"]
    return min(1.0, done / found["total"]) if found["total"] else None


def _bar(found: Mapping[str, Any]) -> str:
    share = _share(found)
    if share is None:
        return ""
    full = round(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%} in parts"
