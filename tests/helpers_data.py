"""Small values for tests of what lies on disk: jobs, files of documents, records, run directories."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import settings

from batchgen.data import Document, Record, Split
from batchgen.job.config import Input, Job
from batchgen.sources.base import Source, place_key
from batchgen.sources.dataset import DatasetSource
from batchgen.sources.jsonl import JsonlSource
from batchgen.sources.parquet import ParquetSource
from batchgen.storage.index import KeySet

PROPERTY = settings()  # how many examples: conftest.py
ALL = 1 << 62  # a target size no file reaches


def job(folder: Path, *inputs, **sections) -> Job:
    """A job on the fake engine; inputs are paths or whole input sections; sections replace keys."""
    items = [{"path": str(one), "id_field": "id"} if isinstance(one, str | Path) else one for one in inputs]
    raw = {
        "name": "test",
        "input": items or [{"path": str(folder / "*.jsonl"), "id_field": "id"}],
        "prompt": {"user": "{{ text }}"},
        "engine": {"backend": "fake"},
        "output": {"dir": str(folder / "out")},
    }
    return Job.model_validate(raw | sections)


def write_lines(path: Path, *records) -> Path:
    """A JSONL file; each record is a value, or the bytes of a line without its end."""
    lines = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def packed(data: bytes, packing: str) -> bytes:
    """The bytes as a gzip member or a zstd frame."""
    return bytes(pa.compress(data, packing, asbytes=True))


def write_groups(path: Path, *groups: pa.Table) -> Path:
    """A Parquet file with these row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, groups[0].schema) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(1, group.num_rows))
    return path


def row(n: int, **more):
    return {"id": f"d{n}", "text": f"text {n}"} | more


def source(path: Path | str, *, prompt=("text",), **item) -> Source:
    """The reader for a file, as the first input of a job; `prompt` are the names its templates read.

    A folder without an ending is a data set of the files in it.
    """
    if Path(path).is_dir() and not Path(path).suffix:
        return DatasetSource(Input(dataset=folder_dataset(path), **item), 0, frozenset(prompt))
    kind = ParquetSource if str(path).endswith(".parquet") else JsonlSource
    return kind(Input(path=str(path), **item), 0, str(path), frozenset(prompt))


def folder_dataset(folder: Path | str) -> dict:
    """The `dataset` section for a folder that holds files of one format."""
    ending = min(Path(folder).iterdir()).suffix
    return {"path": {".jsonl": "json", ".parquet": "parquet"}[ending], "data_files": f"{folder}/*{ending}"}


def read(at: Source, path: Path | str, cuts) -> list[Document]:
    """All documents of these (start, end) pairs, in order, as if they came from split 0."""
    splits = [Split(0, 0, str(path), start, end) for start, end in cuts]
    return [document for split in splits for document in at.read(split)]


def documents(path: Path | str, *, prompt=("text",), target_bytes=ALL, **item) -> list[Document]:
    at = source(path, prompt=prompt, **item)
    return read(at, path, at.cut(begin=0, target_bytes=target_bytes))


def document(n: int, *, source="a.jsonl", text="text", **over) -> Document:
    """A document with id `d<n>`; its key follows from n, its content from the text."""
    found = Document(
        key=hashlib.blake2b(b"key %d" % n, digest_size=16).digest(),
        content=hashlib.blake2b(text.encode(), digest_size=8).digest(),
        source=source,
        place=f"byte {n}",
        id=f"d{n}",
        id_type="str",
        fields={},
        text=text,
        keep={},
        split=0,
    )
    return dataclasses.replace(found, **over)


def placed(at: Document) -> Document:
    """The document as one that is known by its place."""
    return dataclasses.replace(at, key=place_key(at.source, at.place))


def record(at: Document | int, status="ok", **over) -> Record:
    at = document(at) if isinstance(at, int) else at
    return Record(at, status, **({"summary": f"summary of {at.id}"} if status == "ok" else {}) | over)


def keys(*of: int) -> KeySet:
    """The keys of these documents."""
    return KeySet(np.frombuffer(b"".join(document(n).key for n in of), np.uint8).reshape(-1, 16))


def hexes(*of: Document | Record | int) -> set[str]:
    """The doc_key column's values for these documents."""
    found = [document(one) if isinstance(one, int) else one for one in of]
    return {(one.document if isinstance(one, Record) else one).key.hex() for one in found}
