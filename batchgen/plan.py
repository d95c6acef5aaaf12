"""Which files a job means, and how they are cut into splits.

plan.json keeps every split at its index for the life of the run. A file that grew gets splits for what is new; a
file that changed otherwise is cut anew, and its old splits stay as gaps.
"""

import base64
import glob
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen import fsio
from batchgen.config import Job
from batchgen.data import Split
from batchgen.errors import ConfigError, InputError
from batchgen.rundir import RunDirectory
from batchgen.sources import open_source
from batchgen.sources.base import FileFacts

_TARGET_BYTES = 64 << 20
_APPENDABLE = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Plan:
    """files: what the job's inputs hold now, in reading order. splits: theirs, in reading order."""

    files: tuple[FileFacts, ...]
    splits: tuple[Split, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def exact(self) -> bool:
        return all(file.exact for file in self.files)

    def kept(self, job: Job) -> dict[str, pa.DataType]:
        """The kept columns and their types: what all files agree on, text where they do not."""
        names = dict.fromkeys(name for item in job.input for name in item.keep.values())
        return {name: _common([file.kept[name] for file in self.files if name in file.kept]) for name in names}


def _common(kinds: list[pa.DataType]) -> pa.DataType:
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
    try:
        schemas = [pa.schema([("x", kind)]) for kind in kinds]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type if kinds else pa.string()
    except pa.ArrowException:
        return pa.string()


def discover(job: Job, known: Mapping[str, Any] | None = None) -> tuple[FileFacts, ...]:
    """The files of all inputs, in the order of the job and by name within an input.

    known: plan.json's value; files it knows in their present state are not opened. Raises InputError with every file
    that cannot be read, and where an input matches nothing; ConfigError where two inputs mean the same file.
    """
    found: list[tuple[int, str]] = []
    for number, item in enumerate(job.input):
        paths = _match(item.path)
        if not paths:
            raise InputError(f"input.{number}.path: {item.path}: no file matches (working directory {Path.cwd()})")
        found += [(number, path) for path in paths]
    meant: dict[Path, int] = {}
    for number, path in found:
        if (other := meant.setdefault(Path(path).resolve(), number)) != number:
            raise ConfigError(f"{path}: input.{other} and input.{number} mean this file; narrow one of their paths")
    facts, faults = [], []
    for number, path in found:
        try:
            facts.append(_look(job, number, path, known))
        except InputError as e:
            faults.append(str(e))
    if faults:
        raise InputError("\n".join(faults))
    return tuple(facts)


def _look(job: Job, number: int, path: str, known: Mapping[str, Any] | None) -> FileFacts:
    try:
        path.encode()
        stat = Path(path).stat()
        entry = known["files"].get(path) if known else None
        if known and entry and _state(job, number, stat.st_size, stat.st_mtime_ns).items() <= entry.items():
            kept = {name: _type(text) for name, text in known["kept"].items()}
            size, mtime, rows, exact = (entry[k] for k in ("size", "mtime_ns", "rows", "exact"))
            return FileFacts(path, number, size, mtime, rows, exact, kept)
        return open_source(job, number, path).facts()
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e
    except UnicodeEncodeError as e:
        raise InputError(f"{path!a}: its name is no UTF-8, so no output can tell it; rename the file") from e


def _state(job: Job, number: int, size: int, mtime_ns: int) -> dict[str, Any]:
    """What must be the same for a file to be known: the file, and how it is read."""
    item = job.input[number]
    reading = [item.text_field, item.id_field, sorted(item.keep.items()), sorted(job.prompt.variables)]
    digest = hashlib.blake2b(json.dumps(reading).encode(), digest_size=8).hexdigest()
    return {"input": number, "size": size, "mtime_ns": mtime_ns, "reading": digest}


def state(job: Job, file: FileFacts) -> dict[str, Any]:
    return _state(job, file.input, file.size, file.mtime_ns)


def _text(kind: pa.DataType) -> str:
    return base64.b64encode(pa.schema([("x", kind)]).serialize().to_pybytes()).decode()


def _type(text: str) -> pa.DataType:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field("x").type


def _match(pattern: str) -> list[str]:
    """Files of a path or glob; markers and temporaries of other tools are no inputs."""
    pattern = str(Path(pattern).expanduser())
    if Path(pattern).is_file():
        return [pattern]
    paths = (Path(path) for path in glob.glob(pattern, recursive=True))  # noqa: PTH207  Path.glob wants no absolutes
    return sorted({str(path) for path in paths if path.is_file() and not _is_marker(path.name)})


def _is_marker(name: str) -> bool:
    """`_SUCCESS`, `.part-0.crc`, `part-0.parquet.tmp` and the like."""
    return name.startswith((".", "_")) or name.endswith((".crc", ".tmp"))


def make(job: Job, run: RunDirectory) -> Plan:
    """The plan of this start: plan.json brought up to date. Needs the run's lock."""
    known = _read(run.plan_json)
    files = discover(job, known)
    entries, splits = known["files"], known["splits"]
    current: dict[str, Any] = {}
    for file in files:
        entry = entries.get(file.source)
        now = state(job, file)
        if not entry or any(entry[name] != now[name] for name in ("input", "size", "mtime_ns")):
            grown = (
                entry is not None
                and file.source.endswith(_APPENDABLE)
                and file.size > entry["size"]
                and entry["input"] == file.input
            )
            begin = entry["size"] if grown else 0
            cuts = _cut(job, file, begin)
            kept = entry["splits"] if grown else []
            splits += [[file.source, start, end] for start, end in cuts]
            indices = [*kept, *range(len(splits) - len(cuts), len(splits))]
        else:
            indices = entry["splits"]
        current[file.source] = now | {"rows": file.rows, "exact": file.exact, "splits": indices}
    ordered = [
        Split(index, file.input, file.source, splits[index][1], splits[index][2])
        for file in files
        for index in current[file.source]["splits"]
    ]
    plan = Plan(files, tuple(ordered))
    kept = {name: _text(kind) for name, kind in plan.kept(job).items()}
    # A file that is gone keeps its entry: when it comes back unchanged, so do its splits.
    gone = sorted({*entries} - {*current})
    value = {"files": entries | current, "gone": gone, "splits": splits, "kept": kept}
    text = json.dumps(value, indent=1)
    if not run.plan_json.exists() or run.plan_json.read_text() != text:
        fsio.write_atomic(run.plan_json, text.encode(), owner=run.owner)
    return plan


def _cut(job: Job, file: FileFacts, begin: int) -> list[tuple[int, int]]:
    cuts = open_source(job, file.input, file.source).cut(begin=begin, target_bytes=_TARGET_BYTES)
    if not file.source.endswith(_APPENDABLE):
        return cuts
    # Lines appended since `file` was looked at are the next start's: its splits begin at file.size.
    return [(start, min(end, file.size)) for start, end in cuts if start < file.size]


def known_rows(run: RunDirectory) -> tuple[int, bool]:
    """(rows of all files of the latest plan, whether they are counted), without looking at the files."""
    known = _read(run.plan_json)
    entries = [entry for path, entry in known["files"].items() if path not in known.get("gone", ())]
    return sum(entry["rows"] for entry in entries), all(entry["exact"] for entry in entries)


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"files": {}, "gone": [], "splits": [], "kept": {}}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}; remove it: it is made again") from e
    return value
