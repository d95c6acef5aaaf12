"""What `validate` finds: faults and warnings, each with its place and, where it is about one, its key."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchgen.data import Document
from batchgen.errors import BatchgenError, ConfigError, InputError, LockedError, OutputError
from batchgen.job.config import Job
from batchgen.job.jobfile import Origin
from batchgen.job.yaml_lines import KeyPath
from batchgen.sources.base import Source

# Of several faults the first of these is the exit status.
_WORST = (ConfigError.exit_status, OutputError.exit_status, LockedError.exit_status, InputError.exit_status)
_KEY = re.compile(rf"((?:{'|'.join(Job.model_fields)})(?:\.[^\s:.]+)*)(: )?")


@dataclass(frozen=True, slots=True)
class Finding:
    """place: file and line or row, or a folder, or `--set KEY`. key: of the job."""

    place: str
    key: str | None
    fault: str

    def value(self) -> dict[str, str]:
        return {"place": self.place, **({"key": self.key} if self.key else {}), "fault": self.fault}

    def __str__(self) -> str:
        is_told = self.key is None or self.key in self.place or self.fault.startswith(self.key)
        return f"{self.place}: {self.fault}" if is_told else f"{self.place}: {self.key}: {self.fault}"


@dataclass(slots=True)
class _Tally:
    """Records of one file with one kind of fault: the first of them, how many, and of how many (None: of all)."""

    place: str
    sentence: str
    of: int | None
    count: int = 0


@dataclass
class Findings:
    """faults: with the exit status of a start that meets them. Both keep the order of finding; nothing stands twice."""

    job_file: Path
    sets: Sequence[str] = ()
    origin: Origin | None = None
    faults: dict[Finding, int] = field(default_factory=dict)
    warnings: dict[Finding, None] = field(default_factory=dict)
    _bad: dict[tuple[str, str], _Tally] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        return next((status for status in _WORST if status in self.faults.values()), 0)

    @contextlib.contextmanager
    def catching(self, about: KeyPath = ()) -> Iterator[None]:
        """An error of batchgen inside is a fault, and the caller goes on behind it.

        about: the key it is about, where it names neither a key nor a place itself.
        """
        try:
            yield
        except BatchgenError as e:
            self.add(e, about)

    def add(self, error: BatchgenError, about: KeyPath = ()) -> None:
        for sentence in self._sentences(str(error)):
            self.fault(self._finding(sentence, about), error.exit_status)

    def fault(self, finding: Finding, exit_status: int) -> None:
        self.faults.setdefault(finding, exit_status)

    def warn(self, finding: Finding | str) -> None:
        self.warnings.setdefault(self._finding(finding, ()) if isinstance(finding, str) else finding)

    def at(self, key: KeyPath, fault: str) -> Finding:
        """The finding about a key of the job."""
        place = self.origin.place(key) if self.origin else str(self.job_file)
        return Finding(place, ".".join(map(str, key)) or None, fault)

    def bad_record(
        self, source: Source, document: Document, error: tuple[str, str] | None, *, count: int = 1, of: int | None
    ) -> None:
        """Records that a run would count as failed, told once for each file and kind; `document` is the first."""
        if error is not None:
            at = document.source, error[0]
            if at not in self._bad:
                self._bad[at] = _Tally(source.where(document), error[1], of)
            self._bad[at].count += count

    def tell_bad_records(self) -> None:
        for tally in self._bad.values():
            of = "" if tally.of is None else f" of {tally.of:,} looked at"
            more = f" ({tally.count:,}{of or ' in this file'})" if tally.count > 1 or of else ""
            # Some sentences begin with the line or row themselves.
            sentence = tally.sentence.removeprefix(f"{tally.place.rpartition(', ')[2]}: ")
            self.warn(Finding(tally.place, None, f"{sentence}{more}"))
        self._bad.clear()

    def _sentences(self, text: str) -> list[str]:
        """Several faults of a job file are lines that each begin with their place; any other text is one fault."""
        lines = text.splitlines()
        is_place = re.compile(rf"{re.escape(str(self.job_file))}[:,]|--set ")
        return lines if all(map(is_place.match, lines)) else [" ".join(line.strip() for line in lines)]

    def _finding(self, sentence: str, about: KeyPath) -> Finding:
        """A sentence as every error of the project is written, `PLACE: KEY: what`, taken apart."""
        for assignment in self.sets:  # in full where its value is at fault: it can hold anything
            sentence = sentence.replace(f"--set {assignment}: ", f"--set {assignment.partition('=')[0]}: ", 1)
        if told := re.match(r"--set ([^\s:]+): (.*)", sentence):
            return Finding(f"--set {told[1]}", told[1], told[2])
        place, rest = "", sentence
        if told := re.match(rf"({re.escape(str(self.job_file))}(?:, line \d+)?): (.*)", sentence):
            place, rest = told[1], told[2]
        if (named := _KEY.match(rest)) and (named[2] or "." in named[1]):
            at = tuple(int(step) if step.isdecimal() else step for step in named[1].split("."))
            found = self.at(at, rest[named.end() :] if named[2] else rest)
            return found if not place else dataclasses.replace(found, place=place)
        path, colon, words = rest.partition(": ")
        if not place and colon and (os.sep in path or os.path.lexists(path)):
            return Finding(path, None, words)
        return Finding(place, None, rest) if place else self.at(about, rest)
