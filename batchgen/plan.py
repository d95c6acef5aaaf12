"""Which files and data sets a job means, and how they are cut into splits.

plan.json keeps every split at its index for the life of the run. A file that grew gets splits for what is new; a
file that changed otherwise is cut anew, and its old splits stay as gaps. Which shard does a split follows from the
sizes of all of them, see shards.py.
"""

import base64
import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import pyarrow as pa

from batchgen import fsio
from batchgen.data import Split
from batchgen.errors import ConfigError, InputError
from batchgen.job.config import Job
from batchgen.sinks.kept import common_type
from batchgen.sources import dataset, is_known, open_source
from batchgen.sources.base import FileFacts, State
from batchgen.sources.streams import digest_before
from batchgen.storage.layout import Layout
from batchgen.storage.rundir import RunDirectory
from batchgen.text import one_line

_TARGET_BYTES = 64 << 20
_LEAST_BYTES = 1 << 10
# Of a small input too there are enough splits for many shards to end together.
_SPLITS = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """files: what the job's inputs hold now, in reading order.

    faults: files that cannot be read. skipped: those of them that the job does without. left_out: other files of
    folders, whose names no format has.
    """

    files: tuple[FileFacts, ...]
    faults: tuple[ConfigError | InputError, ...]
    skipped: tuple[InputError, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """files, skipped, left_out: see Found. splits: those of the shard, in reading order.

    rows, exact: documents in these splits, and whether they are counted. layout: of all splits that there ever were.
    """

    files: tuple[FileFacts, ...]
    splits: tuple[Split, ...]
    rows: int
    exact: bool
    skipped: tuple[InputError, ...] = ()
    left_out: tuple[str, ...] = ()
    layout: Layout = Layout()  # noqa: RUF009  it is frozen

    def kept(self, job: Job) -> dict[str, pa.DataType]:
        """The kept columns and their types: what all files agree on, text where they do not."""
        return _kept(self.files, dict.fromkeys(name for item in job.input for name in item.keep.values()))


def _kept(files: Sequence[FileFacts], names: Iterable[str]) -> dict[str, pa.DataType]:
    return {name: common_type([file.kept[name] for file in files if name in file.kept]) for name in names}


def discover(job: Job, known: Mapping[str, Any] | None = None) -> tuple[FileFacts, ...]:
    """The files of all inputs. Raises InputError, or ConfigError, with all that is wrong and may not be skipped."""
    return _accepted(look(job, known)).files


def _accepted(found: Found) -> Found:
    if found.faults:
        kind = ConfigError if any(isinstance(one, ConfigError) for one in found.faults) else InputError
        raise kind("\n".join(map(str, found.faults)))
    return found


def look(job: Job, known: Mapping[str, Any] | None = None, *, only_known: bool = False) -> Found:
    """The files of all inputs, in the order of the job and by name within an input.

    known: plan.json's value; files it knows in their present state are not opened. only_known: raise _UnknownFileError
    where another would have to be.
    """
    paths: list[tuple[int, str]] = []
    left_out: list[str] = []
    faults: list[ConfigError | InputError] = []
    for number, item in enumerate(job.input):
        if item.dataset or not item.path:
            paths.append((number, item.source))
            continue
        try:
            matched, others = _match(item.path)
        except OSError as e:
            faults.append(InputError(f"input.{number}.path: {e.filename}: cannot be read: {e.strerror}"))
            continue
        if not matched:
            reason = "no file matches" if not others else f"no format batchgen reads: {names(others)}"
            here = f"(working directory {Path.cwd()})"
            faults.append(InputError(f"input.{number}.path: {item.path}: {reason} {here}"))
            continue
        paths += [(number, path) for path in matched]
        left_out += others
    meant: dict[Path | str, int] = {}
    facts: list[FileFacts] = []
    skipped: list[InputError] = []
    for number, path in paths:
        one = path if job.input[number].dataset else Path(path).resolve()
        if (other := meant.setdefault(one, number)) != number:
            what = "data set" if job.input[number].dataset else "file"
            both = f"input.{other} and input.{number} mean this {what}"
            faults.append(ConfigError(f"{path}: {both}; narrow one of them"))
            continue
        try:
            facts.append(_look(job, number, path, known, only_known=only_known))
        except InputError as e:
            (skipped if job.input[number].on_error == "skip" else faults).append(e)
    return Found(tuple(facts), tuple(faults), tuple(skipped), tuple(left_out))


class _UnknownFileError(Exception):
    """plan.json does not know a file as it is now."""


def _look(job: Job, number: int, path: str, known: Mapping[str, Any] | None, *, only_known: bool = False) -> FileFacts:
    if "\n" in path:
        raise InputError(f"{path!a}: its name holds a line end, so no message can tell it; rename the file")
    try:
        path.encode()
        if (data := job.input[number].dataset) is not None:
            now = dataset.state(data)
        else:
            stat = Path(path).stat()
            now = State(stat.st_size, stat.st_mtime_ns)
        entry = known["files"].get(path) if known else None
        if known and entry and now and _state(job, number, now).items() <= entry.items():
            kept = {name: _type(text) for name, text in known["kept"].items()}
            rows, exact, appendable = (entry[k] for k in ("rows", "exact", "appendable"))
            return FileFacts(
                path, number, now.size, now.mtime_ns, rows, exact, kept, appendable=appendable, revision=now.revision
            )
        if only_known:
            raise _UnknownFileError
        return open_source(job, number, path).facts()
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e
    except UnicodeEncodeError as e:
        raise InputError(f"{path!a}: its name is no UTF-8, so no output can tell it; rename the file") from e


def _state(job: Job, number: int, now: State) -> dict[str, Any]:
    """What must be the same for a file to be known: the file, and how it is read."""
    item = job.input[number]
    reading = [item.text_field, item.id_field, sorted(item.keep.items()), sorted(job.prompt.variables)]
    digest = hashlib.blake2b(json.dumps(reading).encode(), digest_size=8).hexdigest()
    return {"input": number, "reading": digest} | dataclasses.asdict(now)


def state(job: Job, file: FileFacts) -> dict[str, Any]:
    return _state(job, file.input, State(file.size, file.mtime_ns, file.revision))


def _text(kind: pa.DataType) -> str:
    return base64.b64encode(pa.schema([("x", kind)]).serialize().to_pybytes()).decode()


def _type(text: str) -> pa.DataType:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field("x").type


def _match(pattern: str) -> tuple[list[str], list[str]]:
    """(files of a path, folder or glob; other files of a folder). Markers and temporaries of other tools are neither.

    Raises OSError for a folder that cannot be listed.
    """
    pattern = str(Path(pattern).expanduser())
    if Path(pattern).is_file():
        return [pattern], []
    if Path(pattern).is_dir():
        files = sorted(_files_below(pattern))
        return [path for path in files if is_known(path)], [path for path in files if not is_known(path)]
    paths = (Path(path) for path in glob.glob(pattern, recursive=True))  # noqa: PTH207  Path.glob wants no absolutes
    return sorted({str(path) for path in paths if path.is_file() and not _is_marker(path.name)}), []


def _files_below(folder: str) -> Iterator[str]:
    """Files in a folder and its folders, linked ones too, each folder once."""
    met: set[str] = set()
    for at, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        met.add(os.path.realpath(at))
        folders[:] = [name for name in sorted(folders) if not _is_marker(name) and _new(met, Path(at, name))]
        yield from (str(Path(at, name)) for name in files if not _is_marker(name))


def _new(met: set[str], folder: Path) -> bool:
    real = os.path.realpath(folder)
    return real not in met and not met.add(real)  # type: ignore[func-returns-value]


def _raise(e: OSError) -> None:
    raise e


def _is_marker(name: str) -> bool:
    """`_SUCCESS`, `.part-0.crc`, `part-0.parquet.tmp` and the like."""
    return name.startswith((".", "_")) or name.endswith((".crc", ".tmp"))


def names(paths: Sequence[str]) -> str:
    """Some of these paths, for a message."""
    return one_line(", ".join(paths[:3])) + (f" and {len(paths) - 3:,} more" if len(paths) > 3 else "")


def make(job: Job, run: RunDirectory) -> Plan:
    """The plan of this start of this shard: plan.json brought up to date.

    Under the run's lock, unless nothing has changed: of many shards at once the first opens what is new, and the others
    need not wait for each other.
    """
    known = _read(run.plan_json)
    try:
        found = _accepted(look(job, known, only_known=True))
        current = _brought_up_to_date(job, known, found.files)
        value = _value(job, known, found.files, current)
        is_new = value != known or [*value["files"]] != [*known["files"]]
    except _UnknownFileError:
        is_new = True
    if is_new:
        with run.alone():
            known = _read(run.plan_json)
            if not known["id"]:  # parts that are there know another plan, or none
                known |= {"id": token_hex(8), "remade": any(run.summaries.glob("part-*"))}
            found = _accepted(look(job, known))
            current = _brought_up_to_date(job, known, found.files)
            _write(run, _value(job, known, found.files, current))
    layout = Layout.of(known, {source: entry["splits"] for source, entry in current.items()}, run.shard)
    splits = [
        Split(index, file.input, file.source, *known["splits"][index][1:3])
        for file in found.files
        for index in layout.mine(file.source)
    ]
    counts = [_rows_in(file, known["splits"], current[file.source]["splits"], layout) for file in found.files]
    return Plan(
        files=found.files,
        splits=tuple(splits),
        rows=sum(rows for rows, _ in counts),
        exact=not found.skipped and all(exact for _, exact in counts),
        layout=layout,
        skipped=found.skipped,
        left_out=found.left_out,
    )


def _value(
    job: Job, known: Mapping[str, Any], files: Sequence[FileFacts], current: Mapping[str, Any]
) -> dict[str, Any]:
    """plan.json with these files as they are now."""
    names = dict.fromkeys(name for item in job.input for name in item.keep.values())
    kept = {name: _text(kind) for name, kind in _kept(files, names).items()}
    # In reading order. A file that is gone keeps its entry: when it comes back unchanged, so do its splits.
    gone = sorted({*known["files"]} - {*current})
    entries = {**current, **{path: known["files"][path] for path in gone}}
    return {**known, "files": entries, "gone": gone, "kept": kept}


def _brought_up_to_date(job: Job, known: dict[str, Any], files: Sequence[FileFacts]) -> dict[str, Any]:
    """The entries of these files. New splits are added to those of `known`."""
    splits, current = known["splits"], {}
    target = min(_TARGET_BYTES, max(_LEAST_BYTES, sum(file.size for file in files) // _SPLITS))
    for file in files:
        entry, now = known["files"].get(file.source), state(job, file)
        indices, tail = (entry["splits"], entry["tail"]) if entry else ([], "")
        if not entry or any(entry[name] != now[name] for name in ("input", "size", "mtime_ns", "revision")):
            grown = entry is not None and _was_appended_to(file, entry)
            cuts = _cut(job, file, begin=entry["size"] if entry and grown else 0, target=target)
            indices = [*(indices if grown else ()), *range(len(splits), len(splits) + len(cuts))]
            splits += [[file.source, *cut] for cut in cuts]
            tail = _tail(file, file.size)
        current[file.source] = now | {
            "rows": file.rows, "exact": file.exact, "appendable": file.appendable, "splits": indices, "tail": tail,
        }  # fmt: skip
    return current


def _was_appended_to(file: FileFacts, entry: Mapping[str, Any]) -> bool:
    """Whether what was there before still stands where it stood: only then do the old splits hold the same rows."""
    return (
        file.appendable
        and entry["appendable"]
        and file.size > entry["size"]
        and entry["input"] == file.input
        and entry["tail"] == _tail(file, entry["size"])
    )


def _tail(file: FileFacts, at: int) -> str:
    if not file.appendable:
        return ""
    try:
        return digest_before(Path(file.source), at)
    except OSError as e:
        raise InputError(f"{file.source}: cannot be read: {e.strerror or e}") from e


def _rows_in(
    file: FileFacts, splits: Sequence[Sequence[Any]], indices: Sequence[int], layout: Layout
) -> tuple[int, bool]:
    """Rows of a file that are the shard's, and whether they are counted: the share of its bytes where it is divided."""
    mine = layout.mine(file.source)
    if len(mine) == len(indices):
        return file.rows, file.exact
    sizes = [sum(splits[index][3] for index in some) for some in (mine, indices)]
    return (round(file.rows * sizes[0] / max(1, sizes[1])), False) if mine else (0, True)


def _cut(job: Job, file: FileFacts, *, begin: int, target: int) -> list[tuple[int, int, int, int]]:
    """What plan.json has of each new split: start, end, bytes, and where the places of its rows begin."""
    source = open_source(job, file.input, file.source)
    cuts = source.cut(begin=begin, target_bytes=target)
    if file.appendable:
        # Lines appended since `file` was looked at are the next start's: its splits begin at file.size.
        cuts = [(start, min(end, file.size)) for start, end in cuts if start < file.size]
    return [(*cut, one.size, one.first) for cut, one in zip(cuts, source.measure(cuts), strict=True)]


def _write(run: RunDirectory, value: Mapping[str, Any]) -> None:
    """Write plan.json where it is another: a split a line."""
    head = json.dumps({name: one for name, one in value.items() if name != "splits"}, indent=1)
    splits = ",\n".join(f"  {json.dumps(split)}" for split in value["splits"])
    text = f'{head[:-2]},\n "splits": [\n{splits}\n ]\n}}\n'
    if not run.plan_json.exists() or run.plan_json.read_text() != text:
        fsio.write_atomic(run.plan_json, text.encode(), owner=run.owner)


def counted(run: RunDirectory, rows: Mapping[str, int]) -> None:
    """Note in plan.json the rows of files that were read to their end: what was an estimate is exact from now on.

    Needs the run's lock.
    """
    value = _read(run.plan_json)
    entries = value["files"]
    exact = {source: entries[source] | {"rows": n, "exact": True} for source, n in rows.items() if source in entries}
    if any(entries[source] != entry for source, entry in exact.items()):
        _write(run, value | {"files": entries | exact})


def known_rows(run: RunDirectory) -> tuple[int | None, bool]:
    """(rows of all files of the latest plan, whether they are counted), without looking at the files.

    None where there is no plan that can be read.
    """
    try:
        known = _read(run.plan_json)
    except ConfigError:
        return None, False
    entries = [entry for path, entry in known["files"].items() if path not in known.get("gone", ())]
    if not entries:
        return None, False
    return sum(entry["rows"] for entry in entries), all(entry["exact"] for entry in entries)


def known_inputs(run: RunDirectory) -> dict[str, int]:
    """The place in the job's `input` of each file of the latest plan; none where there is no plan that can be read."""
    try:
        return {path: int(entry["input"]) for path, entry in _read(run.plan_json)["files"].items()}
    except (ConfigError, KeyError, TypeError, ValueError):
        return {}


def reading_order(run: RunDirectory) -> list[str]:
    """The files of the latest plan in the order they are read; those that are gone come last."""
    return list(_read(run.plan_json)["files"])


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"id": "", "remade": False, "files": {}, "gone": [], "splits": [], "kept": {}}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}; remove it: it is made again") from e
    return value
