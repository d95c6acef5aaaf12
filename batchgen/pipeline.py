"""The loop. Read this first.

A thread reads documents, looks each up in the done index, and turns those that are left into token ids (reader.py).
The loop keeps the engine full of requests, makes records of its completions, and commits them as parts (feed.py):

    splits ─ read_documents ─→ Document ─ PromptBuilder ─→ Prepared ─ queue ─→ run_pass
    run_pass:  Prepared ─ workflow ─→ Request ─ engine ─→ Completion ─ workflow ─→ Record ─ committer ─→ part
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batchgen.checkpoint import Committer
from batchgen.config import Job
from batchgen.engines.base import Engine, EngineInfo
from batchgen.errors import EngineError
from batchgen.feed import Feed
from batchgen.index import DoneIndex
from batchgen.lifecycle import Stop
from batchgen.plan import Plan
from batchgen.progress import Progress
from batchgen.prompts import PromptBuilder
from batchgen.reader import ReadAhead, Reading
from batchgen.stats import Stats, Telemetry
from batchgen.strikes import Strikes
from batchgen.watchdog import Watchdog
from batchgen.workflows.base import Workflow


@dataclass(frozen=True, slots=True)
class Line:
    """What one pass works with; `prompts` and `engine` are made when the first document needs them."""

    job: Job
    plan: Plan
    whole: Mapping[str, int]
    index: DoneIndex
    prompts: Callable[[], PromptBuilder]
    engine: Callable[[], Engine]
    workflow: Workflow
    committer: Committer
    strikes: Strikes
    watchdog: Watchdog
    stats: Stats
    telemetry: Telemetry
    progress: Progress
    stop: Stop
    engine_ready: Callable[[EngineInfo], None]
    limit: int | None = None


def run_pass(line: Line, reading: Reading) -> None:
    """Do every document that has no row yet, and tell in `reading` what was met.

    What has finished is committed, however this ends. Raises EngineError, OutputError, ConfigError, and Interrupted
    after a signal or at the deadline.
    """
    feed = Feed(line)
    try:
        with line.watchdog, ReadAhead(line, reading) as ahead:
            while not line.stop.requested:
                try:
                    feed.fill(ahead)
                    if ahead.ended and feed.done:
                        return
                    feed.collect()
                except EngineError as e:
                    feed.recover(e)
            feed.drain()
    except EngineError:
        if not line.stop.requested:
            raise
        # It died while we were stopping: no fault of it, and nobody's strike.
    finally:
        feed.close()
    raise line.stop.interrupted()
