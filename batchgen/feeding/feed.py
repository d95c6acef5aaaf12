"""The engine's side of the loop: requests in, records out; an engine that dies is started again.

What was in flight when an engine died is sent again under new ids, and each of those documents gets a strike. One with
`failures.strikes` of them is tried alone, when nothing else is left to do. Where the engine dies then too, the next is
asked for one token first: if it answers, engines work and the document has failed; if not, the fault is the engine's.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable

from batchgen.data import Prepared, Record, Request
from batchgen.engines.base import Engine
from batchgen.errors import EngineError, ReplicaDiedError
from batchgen.feeding.line import Line
from batchgen.feeding.reader import ReadAhead
from batchgen.workflows.single import unsent

# So many deaths with no finished request between them: the engine, not a document, is at fault.
DEATHS = 5
_PROBE_TOKENS = 1  # of a prompt: none of them is the document's
_ECHO_S = 1.0  # a signal to all processes can reach the engine's first
_HELD_S = 1.0  # with an idle engine, what a workflow holds back waits no longer for further documents
_PAUSES_S = (0.0, 1.0, 5.0, 15.0)  # before a start: what held the memory may need a while to go
log = logging.getLogger("batchgen")


class Feed:
    """State of one pass: what is in flight, what is to be sent again, and who is tried alone."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._engine: Engine | None = None
        self._in_flight: set[str] = set()
        self._again: deque[str] = deque()
        self._suspects: deque[str] = deque()
        self._alone: str | None = None
        self._condemned: tuple[str, str] | None = None  # the custom_id of one that died alone, and of what
        self._probe: str | None = None
        self._found: int | None = None  # documents of this pass, once the reader has them all
        self._deaths = 0  # since the last finished request
        self._came = 0.0  # the latest document
        self._hungry = False  # the engine could run more than it has, and no document is ready

    @property
    def done(self) -> bool:
        """Whether nothing that was put in is still to come."""
        return not (self._in_flight or self._again or self._suspects or self._condemned)

    def fill(self, ahead: ReadAhead) -> None:
        """Put documents in until the engine has what it wants, or none is ready."""
        self._hungry = False
        if self._condemned:
            self._ask_for_a_token(self._condemned[0])
            return
        while self._again and self._has_room:
            self._submit([self._line.workflow.again(self._again.popleft())])
        while not ahead.ended and self._has_room and not self._line.workflow.full:
            patient = self._engine is None or not self._in_flight or self._engine.limits.fill_first
            begin = time.monotonic()
            prepared = ahead.take(wait_s=0.2 if patient else 0.0)
            if self._engine is not None:
                self._line.stats.counts.starved_s += time.monotonic() - begin
            self._hungry = prepared is None and not ahead.ended and self._could_run_more
            self._take_in(prepared, ahead)
            if self._due:
                self.commit()
            if self._line.stop.requested or (prepared is None and not patient):
                return
        if ahead.ended:
            self._send(self._line.workflow.flush())
            self._line.stats.no_more_documents()
            if self._suspects and not self._in_flight and not self._again:
                request = self._line.workflow.again(self._suspects.popleft())
                self._alone = request.custom_id
                self._submit([request])

    def _take_in(self, prepared: Prepared | None, ahead: ReadAhead) -> None:
        """Admit a document; where none comes and the engine idles, what the workflow holds back is all there is."""
        if prepared is not None:
            self._found = ahead.found
            self._came = time.monotonic()
            self._admit(prepared)
        elif not self._in_flight and time.monotonic() - self._came > _HELD_S:
            self._send(self._line.workflow.flush())

    def _ask_for_a_token(self, custom_id: str) -> None:
        """Send the beginning of the prompt that killed the engine before."""
        if self._probe is None:
            request = self._line.workflow.again(custom_id)
            assert self._condemned
            self._condemned = (request.custom_id, self._condemned[1])
            self._probe = f"{request.custom_id}-probe"
            self._submit([dataclasses.replace(
                request, custom_id=self._probe, prompt_ids=request.prompt_ids[:_PROBE_TOKENS], max_tokens=1
            )])  # fmt: skip

    @property
    def _has_room(self) -> bool:
        return self._engine is None or len(self._in_flight) < self._engine.limits.in_flight

    @property
    def _could_run_more(self) -> bool:
        """Half of what an engine wants is what it runs, the other half waits inside of it."""
        return self._engine is not None and len(self._in_flight) < self._engine.limits.in_flight // 2

    def _admit(self, prepared: Prepared) -> None:
        record = unsent(prepared)
        if record is not None:
            self._record([record])
            return
        self._send(self._line.workflow.admit(prepared))

    def _send(self, requests: Iterable[Request]) -> None:
        """Submit them, but for those with a suspect: its documents go one by one, and the suspect at the end."""
        for request in requests:
            if not self._is_suspect(request.custom_id):
                self._submit([request])
                continue
            for one in self._line.workflow.apart(request.custom_id):
                (self._suspects if self._is_suspect(one) else self._again).append(one)

    def _is_suspect(self, custom_id: str) -> bool:
        return self._line.strikes.suspects(one.key for one in self._line.workflow.documents(custom_id))

    def _submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            # First: whatever happens to the engine now, this one is to be sent again.
            self._in_flight.add(request.custom_id)
            if self._engine is None:
                self._start()
            assert self._engine is not None
            self._engine.submit(request)

    def _start(self) -> None:
        begin = time.monotonic()
        # An engine's start has nothing of ours half done: a signal ends it at once.
        with self._line.stop.raising():
            time.sleep(_PAUSES_S[min(self._deaths, len(_PAUSES_S) - 1)])
            self._engine = engine = self._line.engine(self._found)
        self._line.watchdog.watch(engine)
        self._line.stats.engine_started(time.monotonic() - begin)
        self._line.telemetry.engine(engine.info)
        self._line.engine_ready(engine.info)

    def collect(self) -> None:
        """Take finished requests out of the engine, and commit when it is time."""
        if self._engine is None:
            return
        self._line.stats.in_flight = len(self._in_flight)
        begin = time.monotonic()
        completions = self._engine.poll()
        if self._hungry:
            self._line.stats.counts.starved_s += time.monotonic() - begin
        for completion in completions:
            self._in_flight.remove(completion.custom_id)
            self._deaths = 0
            self._alone = None
            if completion.custom_id == self._probe:
                self._condemn()
                continue
            self._line.stats.completed(completion)
            records, requests = self._line.workflow.complete(completion)
            self._record(records)
            if self._line.stop.requested is None:  # no new request after a signal
                self._submit(requests)
        # A sample follows each part, so that what telemetry sums up is never behind the rows.
        if (self._due and self.commit()) or self._line.telemetry.due:
            self._line.telemetry.sample(self._line.stats, self._engine.metrics())
        self._line.progress.update(self._line.stats)

    def _condemn(self) -> None:
        assert self._condemned
        custom_id, reason = self._condemned
        self._condemned, self._probe = None, None
        # Its document's other requests, suspects themselves, end with it.
        others = {one.key for one in self._line.workflow.documents(custom_id)}
        self._suspects = deque(
            one for one in self._suspects if others.isdisjoint(two.key for two in self._line.workflow.documents(one))
        )
        self._record(self._line.workflow.give_up(custom_id, ("engine_died", f"tried alone: {reason}")))

    def _record(self, records: Iterable[Record]) -> None:
        for record in records:
            self._line.stats.recorded(record)
            self._line.committer.add([record])

    def recover(self, death: EngineError) -> None:
        """After an engine died: free what is left of it, and note what it had in flight.

        The next request starts another; one of several replicas starts again by itself, and the others go on. Raises
        the error where no engine ever started, or where they die again and again without finishing anything.
        """
        if self._line.stats.counts.engine_starts == 0:
            raise death
        end = time.monotonic() + _ECHO_S
        while time.monotonic() < end and not self._line.stop.requested:
            time.sleep(0.05)
        if self._line.stop.requested:
            return
        lived = self._engine is not None
        lost = set(death.lost) if isinstance(death, ReplicaDiedError) else set(self._in_flight)
        self._deaths += 1
        self._line.stats.engine_died(str(death))
        self._line.telemetry.event("engine_died", reason=str(death), in_flight=len(lost))
        if not isinstance(death, ReplicaDiedError):  # of several engines the others go on
            self._free()
        if self._deaths >= DEATHS:
            raise EngineError(
                f"{self._deaths} engines in a row ended without finishing a request; the last one: {death}. "
                "What has finished is committed, the same command goes on"
            ) from death
        log.error("%s; starting it again, %s requests in flight are sent again", death, len(lost))
        self._in_flight -= lost
        lost.discard(self._probe or "")
        self._probe = None
        lost = {one for custom_id in lost for one in self._line.workflow.apart(custom_id)}
        self._again += self._strike(lost, death) if lived and lost else sorted(lost)
        self._alone = None

    def _strike(self, lost: set[str], death: EngineError) -> list[str]:
        """A strike for each document of these requests; those to be sent again now.

        One that was alone is condemned, one with too many strikes is suspected.
        """
        documents = {one.key for custom_id in lost for one in self._line.workflow.documents(custom_id)}
        self._line.strikes.add(sorted(documents))
        again = []
        for custom_id in sorted(lost):
            if custom_id == self._alone:
                self._condemned = (custom_id, str(death))
            elif self._is_suspect(custom_id):
                self._suspects.append(custom_id)
            else:
                again.append(custom_id)
        return again

    def drain(self) -> None:
        """After a request to stop: take what still finishes in time; the watchdog ends what does not."""
        if self._engine is None or self._engine.limits.fill_first:
            return  # a window that has not begun is not begun any more
        at, grace_s = self._line.stop.at or 0.0, self._line.job.lifecycle.grace_s
        log.info("%s: finishing what is in flight, for %g s at most", self._line.stop.requested, grace_s)
        while self._in_flight and time.monotonic() - at < grace_s:
            try:
                self.collect()
            except ReplicaDiedError as e:
                self._in_flight -= e.lost

    @property
    def _due(self) -> bool:
        kept = self._line.kept
        return self._line.committer.due or (kept is not None and kept.due)

    def commit(self) -> int:
        """Write what has gathered as a part, and then the finished pieces of documents without a row; its rows."""
        rows = self._line.committer.commit()
        if self._line.kept is not None:
            self._line.kept.write()
        self._line.stats.counts.commit_s = self._line.committer.seconds
        if rows:
            self._line.stats.committed(rows)
            self._line.telemetry.event("commit", rows=rows, total=self._line.committer.rows)
        return rows

    def _free(self) -> None:
        """Close the engine, where there is one."""
        engine, self._engine = self._engine, None
        self._line.stats.in_flight = 0
        self._line.watchdog.watch(None)
        if engine is not None:
            engine.close()
            self._line.stats.engine_closed()

    def close(self) -> None:
        """Commit what has finished, then free the engine."""
        try:
            self.commit()
            if self._engine is not None and self._engine.pulse() is None:
                self._line.telemetry.sample(self._line.stats, self._engine.metrics())
        finally:
            self._free()
        self._line.telemetry.rest(self._line.stats)
