"""What one pass over the documents works with, and what its reader finds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from batchgen.data import Document
from batchgen.engines.base import Engine, EngineInfo
from batchgen.engines.watchdog import Watchdog
from batchgen.job.config import Job
from batchgen.lifecycle import Stop
from batchgen.plan import Plan
from batchgen.prompting.prompts import PromptBuilder
from batchgen.reporting.progress import Progress
from batchgen.reporting.stats import Stats, Telemetry
from batchgen.storage.checkpoint import Committer, Tally
from batchgen.storage.index import DoneIndex
from batchgen.storage.kept_answers import KeptAnswers
from batchgen.storage.strikes import Strikes
from batchgen.workflows.base import Workflow


@dataclass(slots=True)
class Reading:
    """What the reader found in a pass. `complete`: every row of every file was seen."""

    edited: int = 0
    retried: int = 0
    duplicates: int = 0
    admitted: int = 0
    file_errors: list[str] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """What one pass works with; `prompts` and `engine` are made when the first document needs them.

    engine: takes how many documents there are for it, None where there may be more than the reader counted.
    documents: gives those to do, in the reader's thread. kept: where documents are done in pieces. twins: see Loaded.
    """

    job: Job
    plan: Plan
    whole: Mapping[str, Tally]
    index: DoneIndex
    prompts: Callable[[], PromptBuilder]
    engine: Callable[[int | None], Engine]
    workflow: Workflow
    committer: Committer
    strikes: Strikes
    watchdog: Watchdog
    stats: Stats
    telemetry: Telemetry
    progress: Progress
    stop: Stop
    engine_ready: Callable[[EngineInfo], None]
    documents: Callable[["Line", Reading], Iterator[Document]]
    limit: int | None = None
    kept: KeptAnswers | None = None
    twins: frozenset[bytes] = frozenset()
