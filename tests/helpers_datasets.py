"""More than twenty small data sets of many shapes, and the rows that a run of them all must give."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from helpers_run import SENTENCE


class Corpus:
    """Data sets in the working directory: `inputs` for a job, `expected` the (id_type, id) of all rows with ids."""

    def __init__(self) -> None:
        self.inputs: list[dict] = []
        self.expected: set[tuple[str, str]] = set()
        self.without_id = 0
        self._next = 0

    @property
    def rows(self) -> int:
        return len(self.expected) + self.without_id

    def records(self, count: int, *, ids="str") -> list[dict]:
        """New records. ids: their type, or None for records without."""
        numbers = range(self._next, self._next + count)
        self._next += count
        found = [{"title": f"Minutes {n}", "text": SENTENCE.format(n=n)} for n in numbers]
        if ids is None:
            self.without_id += count
            return found
        self.expected |= {(ids, f"d{n}" if ids == "str" else str(n)) for n in numbers}
        return [{"id": f"d{n}" if ids == "str" else n} | one for n, one in zip(numbers, found, strict=True)]

    def add(self, dataset: dict, *, id_field="id", text_field="text", keep=None) -> None:
        self.inputs.append(
            {"dataset": dataset, "text_field": text_field, "keep": keep or ["title"]}
            | ({"id_field": id_field} if id_field else {})
        )


def parquet(path: str, records, *, schema=None, order=None, group=5) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(records, schema=schema)
    pq.write_table(table.select(order) if order else table, path, row_group_size=group)


def jsonl(path: str, records) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records)
    Path(path).write_bytes(gzip.compress(text.encode()) if path.endswith(".gz") else text.encode())


def in_files(records, files: int):
    size = -(-len(records) // files)
    return [records[n : n + size] for n in range(0, len(records), size)]


def write_corpus() -> Corpus:
    """Twenty-four data sets below the working directory."""
    corpus = Corpus()
    _parquet_sets(corpus)
    _json_sets(corpus)
    _folders(corpus)
    assert len(corpus.inputs) == 24
    return corpus


def _parquet_sets(corpus: Corpus) -> None:
    parquet("p/one.parquet", corpus.records(16))
    corpus.add({"path": "parquet", "data_files": "p/one.parquet"})
    for n, records in enumerate(in_files(corpus.records(20), 4)):
        parquet(f"p/many/{n}.parquet", records)
    corpus.add({"path": "parquet", "data_files": "p/many/*.parquet"})
    for n, records in enumerate(in_files(corpus.records(14), 3)):
        parquet(f"p/deep/{n}/{n}/part.parquet", records)
    corpus.add({"path": "parquet", "data_files": "p/deep/**/*.parquet"})
    for name in ("b", "a"):
        parquet(f"p/list/{name}.parquet", corpus.records(8))
    corpus.add({"path": "parquet", "data_files": ["p/list/b.parquet", "p/list/a.parquet"]})
    parquet("p/split/test.parquet", corpus.records(9))
    parquet("p/split/train.parquet", [{"id": "unused", "title": "", "text": "not of this split"}])
    files = {"train": "p/split/train.parquet", "test": "p/split/test.parquet"}
    corpus.add({"path": "parquet", "data_files": files, "split": "test"})
    orders = (["id", "title", "text"], ["text", "title", "id"], ["title", "id", "text"])
    for n, order in enumerate(orders):
        parquet(f"p/orders/{n}.parquet", corpus.records(5), order=order)
    corpus.add({"path": "parquet", "data_files": "p/orders/*.parquet"})
    schema = pa.schema([("id", pa.int32()), ("title", pa.large_string()), ("text", pa.large_string())])
    parquet("p/int32.parquet", corpus.records(12, ids="int"), schema=schema)
    corpus.add({"path": "parquet", "data_files": "p/int32.parquet"})
    nested = [
        {"meta": {"id": one["id"], "title": one["title"]}, "body": {"text": one["text"], "side": [1, 2]}}
        for one in corpus.records(13, ids="int")
    ]
    parquet("p/nested.parquet", nested)
    where = {"path": "parquet", "data_files": "p/nested.parquet"}
    corpus.add(where, id_field="meta.id", text_field="body.text", keep={"meta.title": "title"})
    parquet("p/sides.parquet", [one | {"side": b"\xff" * 99, "deep": {"x": None}} for one in corpus.records(11)])
    corpus.add({"path": "parquet", "data_files": "sides.parquet", "data_dir": "p"})
    for n, records in enumerate(in_files(corpus.records(12, ids=None), 2)):
        parquet(f"p/places/{n}.parquet", records)
    corpus.add({"path": "parquet", "data_files": "p/places/*.parquet"}, id_field=None)


def _json_sets(corpus: Corpus) -> None:
    jsonl("j/one.jsonl", corpus.records(15))
    corpus.add({"path": "json", "data_files": "j/one.jsonl"})
    for n, records in enumerate(in_files(corpus.records(21, ids="int"), 3)):
        jsonl(f"j/many/{n}.jsonl", records)
    corpus.add({"path": "json", "data_files": "j/many/*.jsonl"})
    jsonl("j/packed.jsonl.gz", corpus.records(10))
    corpus.add({"path": "json", "data_files": "j/packed.jsonl.gz"})
    Path("j/array.json").write_text(json.dumps(corpus.records(9)))
    corpus.add({"path": "json", "data_files": "j/array.json"})
    shuffled = [dict(random.Random(n).sample(sorted(one.items()), 3)) for n, one in enumerate(corpus.records(12))]
    jsonl("j/order.jsonl", shuffled)
    corpus.add({"path": "json", "data_files": "j/order.jsonl"})
    holes = [
        one if n % 3 else {k: v for k, v in one.items() if k != "title"} for n, one in enumerate(corpus.records(9))
    ]
    jsonl("j/holes.jsonl", holes)
    corpus.add({"path": "json", "data_files": "j/holes.jsonl"})
    nested = [{"id": one["id"], "doc": {"title": one["title"], "text": one["text"]}} for one in corpus.records(8)]
    jsonl("j/nested.jsonl", nested)
    where = {"path": "json", "data_files": "j/nested.jsonl"}
    corpus.add(where, text_field="doc.text", keep={"doc.title": "title"})
    mixed = [one | {"tag": [n, str(n), {"n": n}][n % 3]} for n, one in enumerate(corpus.records(9))]
    jsonl("j/mixed.jsonl", mixed)
    corpus.add({"path": "json", "data_files": "j/mixed.jsonl"}, keep=["title", "tag"])
    jsonl("j/places.ndjson", corpus.records(14, ids=None))
    corpus.add({"path": "json", "data_files": "j/places.ndjson"}, id_field=None)


def _folders(corpus: Corpus) -> None:
    for split, count in (("train", 12), ("test", 7)):
        for n, records in enumerate(in_files(corpus.records(count), 2)):
            parquet(f"f/hub/data/{split}-0000{n}-of-00002.parquet", records)
        corpus.add({"path": "f/hub", "split": split})
    for n, records in enumerate(in_files(corpus.records(10, ids="int"), 2)):
        jsonl(f"f/lines/{n}.jsonl", records)
    corpus.add({"path": "f/lines"})
    for split in ("train", "validation"):
        jsonl(f"f/both/{split}.jsonl", corpus.records(6))
    corpus.add({"path": "f/both", "split": "train+validation"})
    lines = [",".join(map(str, one.values())) for one in corpus.records(7, ids="int")]
    Path("f/table.csv").write_text("\n".join(["id,title,text", *lines, ""]))
    corpus.add({"path": "csv", "data_files": "f/table.csv"})
