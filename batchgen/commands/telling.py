"""Results on stdout, the talk on stderr. Text of others is shown harmless."""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import click

from batchgen.errors import BUG, BatchgenError
from batchgen.text import harmless


def show_json(value: Mapping[str, Any]) -> None:
    show(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def show(text: str, *, end: str = "\n") -> None:
    click.echo(f"{harmless(text)}{end}", nl=False)


def say(text: str) -> None:
    logging.getLogger("batchgen").info("%s", text)


def reader_has_gone() -> int:
    """The exit status once whoever read our stdout has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def tell_error(e: Exception) -> int:
    """Tell what ended a command on stderr; its exit status."""
    if isinstance(e, BrokenPipeError):
        return reader_has_gone()
    log = logging.getLogger("batchgen")
    if isinstance(e, BatchgenError):
        log.error("%s", e)  # a user's error has no traceback
        return e.exit_status
    log.error("this is a bug in batchgen; please report it with these lines", exc_info=e)
    return BUG
