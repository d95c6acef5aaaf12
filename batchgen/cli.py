"""The command line. Heavy imports live in the commands: `batchgen --help` answers at once."""

import logging
import sys
from typing import TYPE_CHECKING

import click

from batchgen import __version__
from batchgen.commands import looking, scheduling, trying, working
from batchgen.commands.telling import tell_error
from batchgen.text import harmless

if TYPE_CHECKING:
    from batchgen.lifecycle import Stop

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="batchgen")
def cli() -> None:
    """Summaries for piles of documents, through vLLM's offline engine.

    A run that was stopped, by whatever, goes on when the same command is given again. Exit statuses are listed in
    docs/exit-codes.md.
    """


for command in (
    working.run,
    working.retry_failed,
    looking.validate,
    looking.status,
    looking.report,
    looking.export,
    scheduling.slurm,
    trying.bench,
    trying.demo_model,
):
    cli.add_command(command)


class _Formatter(logging.Formatter):
    """Names of files and words of other programs come from anywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _set_up_log() -> None:
    """Our sentences go to stderr: bare on a terminal, with the time of day in a file."""
    handler = logging.StreamHandler(sys.stderr)
    stamp = "" if sys.stderr.isatty() else "%(asctime)s "
    handler.setFormatter(_Formatter(f"{stamp}%(message)s", datefmt="%H:%M:%S"))
    log = logging.getLogger("batchgen")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def main(stop: "Stop | None" = None) -> None:
    """Run the command line and end the process with one of the documented exit statuses."""
    _set_up_log()
    try:
        status = cli.main(standalone_mode=False, obj=stop)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except click.exceptions.Abort:
        sys.exit(75)
    except Exception as e:  # noqa: BLE001  each has its exit status
        sys.exit(tell_error(e))
    sys.exit(status if isinstance(status, int) else 0)
