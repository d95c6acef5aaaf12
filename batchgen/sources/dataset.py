"""`dataset:` inputs, whatever datasets.load_dataset reads: streamed shard by shard, splits are runs of shards.

Local data is known by the names, sizes and times of its files, data on the Hub by its commit; neither needs the
library, which is imported only to look inside. Columns, types and the order of shards are the library's.
"""

import contextlib
import glob
import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import Document, Split
from batchgen.errors import BatchgenError, ConfigError, InputError
from batchgen.job.config import Dataset, Input, Job
from batchgen.sources.base import NO_SPLIT, Fetched, FileFacts, Measure, Reader, State, gathered, numbers
from batchgen.sources.parquet import type_of
from batchgen.text import nearest

_BATCH_ROWS = 256
_UNKNOWN_BYTES = 64 << 20  # what a shard counts with where nobody knows how large it is
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ELSEWHERE = re.compile(r"://|::")  # a URL, or a file inside of an archive


def state(item: Dataset) -> State | None:
    """The present state; None where only the library can tell it, because the files lie elsewhere.

    Size and time are sum and maximum over the local files, 0 on the Hub. Raises OSError.
    """
    if is_on_hub(item):
        return State(0, 0, item.revision or "")
    files = _local_files(item)
    if files is None:
        return None
    stats = [file.stat() for file in files]
    told = [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
    mtime_ns = max((stat.st_mtime_ns for stat in stats), default=0)
    return State(sum(stat.st_size for stat in stats), mtime_ns, _digest(told))


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).hexdigest()


@cache
def _builders() -> frozenset[str]:
    """Names of the library's own builders, read from its folder: importing it takes a second."""
    found = importlib.util.find_spec("datasets")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "packaged_modules"
    return frozenset(path.name for path in folder.iterdir() if (path / "__init__.py").exists())


def is_on_hub(item: Dataset) -> bool:
    return item.path not in _builders() and not Path(item.path).is_dir()


def _local_files(item: Dataset) -> list[Path] | None:
    """All files that the data can come from; None where some lie elsewhere.

    Python's glob finds all that the library's finds: hidden files are left out by both.
    """
    base = Path(*([] if item.path in _builders() else [item.path]), item.data_dir or "")
    patterns = list(_flat(item.data_files)) or ["**"]
    if any(_ELSEWHERE.search(one) for one in (*patterns, item.data_dir or "")):
        return None
    found: set[str] = set()
    for pattern in patterns:
        found.update(glob.glob(str(Path(glob.escape(str(base)), pattern)), recursive=True))  # noqa: PTH207  as above
    if item.path not in _builders():  # these say how a folder is read
        found.update(str(Path(item.path, name)) for name in ("README.md", ".huggingface.yaml"))
    return sorted(path for path in map(Path, found) if path.is_file())


def _flat(files: str | list[str] | dict[str, str | list[str]] | None) -> Iterator[str]:
    for one in files.values() if isinstance(files, dict) else [files or []]:
        yield from [one] if isinstance(one, str) else one


def pinned(job: Job, run: Callable[[], Mapping[str, Any] | None]) -> Job:
    """The job with one commit as revision of each data set on the Hub: that of the run, else what the Hub has now.

    run: gives run.json's value. Raises ConfigError for arguments that mean nothing, InputError where no commit is
    to be had.
    """
    if not any(item.dataset for item in job.input):
        return job
    recorded = _recorded(run() or {"job": {"input": []}})
    inputs = []
    for number, item in enumerate(job.input):
        if (found := item.dataset) is None:
            inputs.append(item)
            continue
        where = f"input.{number}.dataset"
        if not is_on_hub(found):
            if found.revision is not None:
                raise ConfigError(f"{where}.revision: local data has none; only a data set on the Hub does")
            if found.path in _builders() and not (found.data_files or found.data_dir):
                raise ConfigError(f"{where}: the builder {found.path!r} needs data_files or data_dir")
        elif not _COMMIT.fullmatch(found.revision or ""):
            commit = recorded.get((found.source, found.revision)) or _commit(found, where)
            found = found.model_copy(update={"revision": commit})
        inputs.append(item.model_copy(update={"dataset": found}))
    return job.model_copy(update={"input": inputs})


def _recorded(run: Mapping[str, Any]) -> dict[tuple[str, str | None], str]:
    """The run's commits by source and the revision that its job asked for."""
    found = {}
    for item in run["job"]["input"]:
        if item.get("dataset"):
            asked = Dataset.model_validate(item["dataset"])
            if commit := run["fingerprint"].get(f"input[{asked.source}].revision"):
                found[asked.source, asked.revision] = commit
    return found


def _commit(item: Dataset, where: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if Path(item.path).is_file():
        raise ConfigError(
            f"{where}.path: {item.path} is a file: give it as data_files, and its builder as path; or use input.path"
        )
    name = item.path.removeprefix("hf://datasets/")
    neither = (
        f"{where}.path: {item.path}: no such folder (working directory {Path.cwd()}), no builder of the library"
        f"{nearest(item.path, _builders())}"
    )
    try:
        commit = HfApi().dataset_info(name, revision=item.revision).sha
    except BatchgenError:  # a signal came in between
        raise
    except HFValidationError as e:
        raise InputError(f"{neither}, and no name the Hub could have") from e
    except RevisionNotFoundError as e:
        raise InputError(f"{where}.revision: {item.path} has no {item.revision!r} on the Hub") from e
    except RepositoryNotFoundError as e:
        raise InputError(f"{neither}, and the Hub has none, or not for this HF_TOKEN") from e
    except Exception as e:  # offline, in one of the many ways of two HTTP libraries
        commit = _cached_commit(name, item.revision or "main")
        if commit is None:
            raise InputError(f"{neither}, nothing in the local cache, and the Hub does not give it: {_line(e)}") from e
    if commit is None:
        raise InputError(f"{where}.path: {item.path}: the Hub tells no commit for it")
    return str(commit)


def _cached_commit(name: str, revision: str) -> str | None:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    ref = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"), "refs", revision)
    with contextlib.suppress(OSError):
        return ref.read_text().strip()
    return None


@dataclass(frozen=True, slots=True)
class _Opened:
    """stream: gives tables of one row. schema: of all columns of the data, None where only the rows will tell."""

    builder: Any
    stream: Any
    schema: pa.Schema | None

    def files(self, split: str) -> list[Path]:
        """The local files of a split, in the order of its shards; nothing where that is not known."""
        names = list((self.builder.config.data_files or {}).get(split, ()))
        return [Path(name) for name in names] if not any(map(_ELSEWHERE.search, names)) else []


class DatasetSource:
    """Contract: as `Source`; `start` and `end` of a split are shards of the library's stream."""

    def __init__(self, item: Input, number: int, prompt_fields: frozenset[str]) -> None:
        assert item.dataset is not None
        self._item = item
        self._number = number
        self._dataset = item.dataset
        self._where = f"{item.source} (input.{number}.dataset)"
        self._reader = Reader(item, item.source, prompt_fields)
        self._wanted = [name for name in (item.text_field, item.id_field, *item.keep) if name is not None]

    def facts(self) -> FileFacts:
        known, opened = state(self._dataset), self._opened
        if known is None:
            origins = [files.origin_metadata for files in (opened.builder.config.data_files or {}).values()]
            known = State(0, 0, _digest(origins))
        kept: dict[str, pa.DataType] = dict.fromkeys(self._item.keep.values(), pa.string())
        if opened.schema is not None:
            for what, name in (("text_field", self._item.text_field), ("id_field", self._item.id_field)):
                if name is not None and type_of(opened.schema, name) is None:
                    columns = ", ".join(opened.schema.names)
                    raise InputError(f"{self._where}: has no column {name!r} ({what}); it has: {columns}")
            types = {ours: type_of(opened.schema, theirs) for theirs, ours in self._item.keep.items()}
            kept = {ours: _plain(kind) for ours, kind in types.items() if kind is not None}
        rows, exact = self._rows()
        return FileFacts(
            source=self._item.source,
            input=self._number,
            size=known.size,
            mtime_ns=known.mtime_ns,
            rows=rows,
            exact=exact,
            kept=kept,
            revision=known.revision,
        )

    def _rows(self) -> tuple[int, bool]:
        """Rows of the split, counted in the footers of local Parquet; else, not exact, what its card says, or 0."""
        opened, split = self._opened, self._dataset.split
        files = opened.files(split)
        if files and _reads_columns(opened.builder):
            # What cannot be read is told when it is read: what stands before it is kept.
            with contextlib.suppress(OSError, pa.ArrowException):
                return sum(int(pq.read_metadata(file).num_rows) for file in files), True
        told = (opened.builder.info.splits or {}).get(split)
        return (told.num_examples or 0) if told is not None else 0, False

    def cut(self, *, begin: int, target_bytes: int) -> list[tuple[int, int]]:
        # Without files to look at, a shard is a split: nobody knows how large it is.
        sizes = self._sizes() or [target_bytes] * self._opened.stream.num_shards
        return gathered(sizes, begin=begin, target_bytes=target_bytes)

    def measure(self, cuts: Sequence[tuple[int, int]]) -> list[Measure]:
        sizes = self._sizes()
        return [Measure(sum(sizes[start:end]) if sizes else _UNKNOWN_BYTES, start) for start, end in cuts]

    def _sizes(self) -> list[int]:
        """The bytes of each shard's file; nothing where not every shard has one to look at."""
        files = self._opened.files(self._dataset.split)
        if len(files) != self._opened.stream.num_shards:
            return []
        sizes = []
        for path in files:
            try:
                sizes.append(path.stat().st_size)
            except OSError as e:
                raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e
        return sizes

    def read(self, split: Split) -> Iterator[Document]:
        stream = self._opened.stream
        if split.end > stream.num_shards:
            raise InputError(f"{self._where}: had {split.end} shards and has {stream.num_shards}: start again")
        for shard in range(split.start, split.end):
            for row, record in enumerate(self._records(shard)):
                yield self._fetched(record, f"shard {shard} row {row}", split.index).document

    def where(self, document: Document) -> str:
        return f"{document.source}, {document.place}"

    def fetch(self, places: Collection[str]) -> Iterator[Fetched]:
        wanted: dict[int, list[int]] = {}
        for shard, row in numbers(places, r"shard (\d+) row (\d+)"):
            wanted.setdefault(shard, []).append(row)
        for shard, rows in wanted.items():
            if shard >= self._opened.stream.num_shards:
                return
            left = set(rows)
            for row, record in enumerate(itertools.islice(self._records(shard), rows[-1] + 1)):
                if row in left:
                    yield self._fetched(record, f"shard {shard} row {row}", NO_SPLIT)

    def _fetched(self, record: dict[str, Any] | Exception, place: str, split: int) -> Fetched:
        if isinstance(record, Exception):
            error = ("bad_value", f"{place}: {_line(record)}")
            return Fetched(self._reader.broken(place, split, error, b""), None)
        return Fetched(self._reader.document(record, place, split), record)

    def _records(self, shard: int) -> Iterator[dict[str, Any] | Exception]:
        """The rows of a shard; for one with a value that Python cannot hold the error."""
        stream = self._opened.stream.shard(num_shards=self._opened.stream.num_shards, index=shard)
        # Rows come one by one: with larger batches, rows before one that cannot be read would be lost with it.
        tables, row, schema, encoded = stream.iter(batch_size=1), 0, None, []
        while True:
            try:
                table = next(tables, None)
            except Exception as e:  # the library, and all that it reads through, raise anything
                raise InputError(f"{self._where}: shard {shard} row {row}: cannot be read: {_line(e)}") from e
            if table is None:
                return
            if table.schema != schema:
                schema = table.schema
                encoded = [field for field in schema if _holds_json(field.type)]
            try:
                record = table.to_pylist()[0]
                yield record | {field.name: _decoded(record[field.name], field.type) for field in encoded}
            except (ValueError, OverflowError) as e:
                yield e
            row += 1

    @cached_property
    def _opened(self) -> _Opened:
        try:
            return self._open()
        except Exception as e:  # as above
            raise InputError(f"{self._where}: cannot be opened: {_line(e)}") from e

    def _open(self) -> _Opened:
        datasets = _library()
        item = self._dataset
        if not is_on_hub(item) and _local_files(item) == []:
            raise FileNotFoundError(f"no file matches (working directory {Path.cwd()})")
        builder = datasets.load_dataset_builder(**item.model_dump(exclude={"split"}, exclude_none=True))
        # Without a network the library falls back on whatever commit it prepared last.
        if item.revision and _COMMIT.fullmatch(str(builder.hash)) and builder.hash != item.revision:
            raise ValueError(f"the local cache holds {builder.hash}, not {item.revision}")
        try:
            stream = builder.as_streaming_dataset(item.split)
        except StopIteration:  # the JSON builder takes the columns from the first file, and fails where that is empty
            for files in builder.config.data_files.values():
                files[:] = [name for name in files if _ELSEWHERE.search(name) or Path(name).stat().st_size]
            stream = builder.as_streaming_dataset(item.split)
        if stream.features is None:
            return _Opened(builder, stream.with_format("arrow"), None)
        schema = stream.features.arrow_schema
        there = {name if name in schema.names else name.split(".")[0] for name in self._wanted}
        columns = [name for name in schema.names if name in there]
        if columns and _reads_columns(builder):
            builder.config.columns, builder.config.batch_size = columns, _BATCH_ROWS
            stream = builder.as_streaming_dataset(item.split)
        elif columns:
            stream = stream.select_columns(columns)
        return _Opened(builder, stream.with_format("arrow"), schema)


def _library() -> Any:
    import datasets

    # Streams need no torch, whose import takes seconds; and nobody has to know which builder reads local files.
    datasets.config.TORCH_AVAILABLE = False
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    return datasets


def _reads_columns(builder: Any) -> bool:
    """Whether it is the Parquet builder, the one that can be told to read some columns, in small batches."""
    from datasets.packaged_modules.parquet.parquet import ParquetConfig

    return isinstance(builder.config, ParquetConfig)


def _types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for n in range(kind.num_fields):
        yield from _types_in(kind.field(n).type)


def _holds_json(kind: pa.DataType) -> bool:
    """Whether there is JSON text in it: what the library makes of fields whose values have several types."""
    return any(isinstance(one, getattr(pa, "JsonType", ())) for one in _types_in(kind))


def _decoded(value: Any, kind: pa.DataType) -> Any:
    """The value with its JSON text read."""
    if value is None or not _holds_json(kind):
        return value
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_decoded(one, kind.value_type) for one in value]
    return json.loads(value) if isinstance(value, str) else value


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of a kept column; text where no plain Arrow type fits."""
    return pa.string() if any(isinstance(one, pa.BaseExtensionType) for one in _types_in(kind)) else kind


def _line(e: Exception) -> str:
    text = " ".join(str(e).split())
    if isinstance(e, StopIteration):
        text = "it holds no rows, or its first file none: nobody knows the columns"
    return (text if len(text) <= 300 else f"{text[:300]} …") or type(e).__name__
