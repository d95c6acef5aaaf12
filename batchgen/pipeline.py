"""The loop. Read this first.

A thread reads documents, looks each up in the done index, and turns those that are left into token ids (reader.py).
The loop keeps the engine full of requests, makes records of its completions, and commits them as parts (feed.py):

    splits ─ read_documents ─→ Document ─ PromptBuilder ─→ Prepared ─ queue ─→ run_pass
    run_pass:  Prepared ─ workflow ─→ Request ─ engine ─→ Completion ─ workflow ─→ Record ─ committer ─→ part
"""

from batchgen.errors import EngineError
from batchgen.feeding.feed import Feed
from batchgen.feeding.line import Line, Reading
from batchgen.feeding.reader import ReadAhead


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
