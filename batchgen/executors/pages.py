"""`report --html FILE`: a run, or two side by side, as one page wherever it is wanted."""

from pathlib import Path
from secrets import token_hex

from batchgen import fsio
from batchgen.errors import ConfigError
from batchgen.executors import comparison
from batchgen.executors.inspection import open_run
from batchgen.reporting import html
from batchgen.reporting import report as reports
from batchgen.reporting.rows import read_rows
from batchgen.storage.view import View

_OURS = b'<meta name="batchgen-report"'
_HEAD = 1024


def write(run_dir: Path, other: Path | None, out: Path) -> int:
    """Write the page; its bytes. Raises ConfigError where a folder is no run directory, or `out` is no page of ours."""
    _refuse(out)
    if other is None:
        run, _, sink = open_run(run_dir)
        rows = read_rows(run, sink)
        data = html.make(html.Shown(View(run, sink), reports.afresh(run, rows), rows))
    else:
        data = comparison.as_html(*comparison.compare(run_dir, other), run_dir)
    fsio.write_atomic(out, data, owner=f"report-{token_hex(4)}")
    return len(data)


def _refuse(out: Path) -> None:
    """Raise ConfigError where something else would be lost than an older page."""
    try:
        with out.open("rb") as stream:
            ours = _OURS in stream.read(_HEAD)
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"{out}: cannot be looked at: {e.strerror}; name another file") from e
    if not ours:
        raise ConfigError(f"{out}: is there, and is no report of batchgen; name another file")
