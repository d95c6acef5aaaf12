"""Data sets through `datasets.load_dataset`: what only they can get wrong, and how they are known without the library.

The Hub is not reached in these tests: its answers are put in the place of huggingface_hub's and datasets' functions.
"""

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import ALL, read, row, write_groups, write_lines

from batchgen.errors import ConfigError, InputError, Interrupted
from batchgen.job.config import Dataset, Input, Job
from batchgen.sources import dataset as module
from batchgen.sources.dataset import DatasetSource, pinned, state

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


def source(dataset, **item) -> DatasetSource:
    return DatasetSource(Input(dataset=dataset, **item), 0, frozenset(["text"]))


def documents(dataset, **item):
    at = source(dataset, **item)
    return read(at, "", at.cut(begin=0, target_bytes=ALL))


def parquet(path, *rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), **options), path)
    return path


# What the library makes of the data comes out as it is.


def test_files_are_shards_and_places_are_rows_in_them(tmp_path):
    for name, numbers in (("a", range(2)), ("b", range(2, 5))):
        parquet(tmp_path / f"{name}.parquet", *map(row, numbers))
    found = documents({"path": "parquet", "data_files": f"{tmp_path}/*.parquet"}, id_field="id")
    assert [(one.id, one.place) for one in found] == [
        ("d0", "shard 0 row 0"), ("d1", "shard 0 row 1"),
        ("d2", "shard 1 row 0"), ("d3", "shard 1 row 1"), ("d4", "shard 1 row 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("files", ["{}/a.jsonl", ["{}/a.jsonl", "{}/b.jsonl"], {"train": "{}/a.jsonl"}])
def test_files_are_named_by_one_path_by_several_or_by_split(tmp_path, files):
    write_lines(tmp_path / "a.jsonl", row(0))
    write_lines(tmp_path / "b.jsonl", row(1))
    files = json.loads(json.dumps(files).replace("{}", str(tmp_path)))
    found = documents({"path": "json", "data_files": files}, id_field="id")
    assert [one.id for one in found] == (["d0", "d1"] if isinstance(files, list) else ["d0"])


def test_a_folder_is_read_by_its_files_and_their_splits(tmp_path):
    parquet(tmp_path / "data/train-00000-of-00001.parquet", row(0))
    parquet(tmp_path / "data/test-00000-of-00001.parquet", row(1), row(2))
    for split, ids in (("train", ["d0"]), ("test", ["d1", "d2"]), ("train+test", ["d0", "d1", "d2"])):
        assert [one.id for one in documents({"path": str(tmp_path), "split": split}, id_field="id")] == ids


@pytest.mark.parametrize("empty", ["a", "b", "c"])
def test_an_empty_file_among_others_does_no_harm(tmp_path, empty):
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", *([] if name == empty else [row(ord(name))]))
    found = documents({"path": "json", "data_files": f"{tmp_path}/*.jsonl"}, id_field="id")
    assert [one.id for one in found] == [f"d{ord(name)}" for name in "abc" if name != empty]


def test_nested_fields_and_renamed_ones_are_reached(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"meta": {"id": 7, "lang": "de"}, "body": {"text": "x"}, "side": 1})
    item = {"id_field": "meta.id", "text_field": "body.text", "keep": {"meta.lang": "language"}}
    at = source({"path": "json", "data_files": f"{tmp_path}/a.jsonl"}, **item)
    (found,) = read(at, "", [(0, 1)])
    assert (found.id, found.id_type, found.text, found.keep) == ("7", "int", "x", {"language": "de"})
    assert at.facts().kept == {"language": pa.string()}


def test_only_the_columns_of_the_job_are_read(tmp_path):
    parquet(tmp_path / "a.parquet", row(0, title="t", side="x", more=1))
    at = source({"path": "parquet", "data_files": f"{tmp_path}/a.parquet"}, id_field="id", keep=["title", "none"])
    assert at._opened.builder.config.columns == ["id", "text", "title"]
    assert [one.keep for one in read(at, "", [(0, 1)])] == [{"title": "t", "none": None}]


def test_media_are_not_decoded(tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    picture = {"bytes": b"no picture", "path": "a.png"}
    parquet(tmp_path / "a.parquet", {"text": "x", "image": picture}, schema=features.arrow_schema)
    where = {"path": "parquet", "data_files": f"{tmp_path}/a.parquet"}
    assert [one.text for one in documents(where)] == ["x"]
    assert [one.keep for one in documents(where, keep=["image"])] == [{"image": picture}]


def test_media_in_a_folder_are_not_opened(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    write_lines(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "a caption", "id": 3})
    assert [(one.id, one.text) for one in documents({"path": str(tmp_path)}, id_field="id")] == [("3", "a caption")]


def test_values_of_several_types_are_what_they_were(tmp_path):
    """The library keeps such columns as JSON text; a text that is JSON itself is the one that it cannot tell."""
    rows = [{"id": 1, "text": "a", "tag": {"x": 1}}, {"id": "b", "text": "b", "tag": [1]}, {"id": 3, "text": "c"}]
    write_lines(tmp_path / "a.jsonl", *rows)
    at = source({"path": "json", "data_files": f"{tmp_path}/a.jsonl"}, id_field="id", keep=["tag"])
    assert at.facts().kept == {"tag": pa.string()}
    found = read(at, "", [(0, 1)])
    assert [(one.id, one.id_type) for one in found] == [("1", "int"), ("b", "str"), ("3", "int")]
    assert [one.keep["tag"] for one in found] == [{"x": 1}, [1], None]


def test_kept_types_are_those_of_the_library_and_text_where_it_knows_none(tmp_path):
    kinds = {"year": pa.int32(), "score": pa.float64(), "tags": pa.list_(pa.string())}
    schema = pa.schema([("text", pa.string()), *kinds.items()])
    parquet(tmp_path / "a.parquet", {"text": "x", "year": 1, "score": 0.5, "tags": ["a"]}, schema=schema)
    at = source({"path": "parquet", "data_files": f"{tmp_path}/a.parquet"}, keep=[*kinds, "none"])
    assert at.facts().kept == kinds
    (tmp_path / "a.csv").write_text("text,year\nx,1\n")
    csv = source({"path": "csv", "data_files": f"{tmp_path}/a.csv"}, keep=["year"])
    assert csv.facts().kept == {"year": pa.string()}
    assert [one.keep for one in read(csv, "", [(0, 1)])] == [{"year": 1}]


def test_a_value_that_python_cannot_hold_is_told_and_the_others_are_read(tmp_path):
    times = pa.array([0, 300_000 * 31_556_952, 86_400], pa.timestamp("s"))
    table = pa.table({"id": ["a", "b", "c"], "text": ["x"] * 3, "when": times})
    write_groups(tmp_path / "a.parquet", table)
    found = documents({"path": "parquet", "data_files": f"{tmp_path}/a.parquet"}, id_field="id", keep=["when"])
    assert [one.error and one.error[0] for one in found] == [None, "bad_value", None]
    assert found[1].error[1].startswith("shard 0 row 1: ")
    assert found[2].keep == {"when": datetime(1970, 1, 2)}  # noqa: DTZ001


@pytest.mark.parametrize("split", [{"split": "test"}, {"split": "train[:3]"}])
def test_an_unknown_split_is_told_with_those_there_are(tmp_path, split):
    parquet(tmp_path / "a.parquet", row(0))
    with pytest.raises(InputError, match=r"\(input\.0\.dataset\): .*Available splits: \['train'\]"):
        source({"path": "parquet", "data_files": f"{tmp_path}/a.parquet"} | split).facts()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"text_field": "body"}, r"has no column 'body' \(text_field\); it has: id, text, title"),
        ({"id_field": "key"}, r"has no column 'key' \(id_field\); it has: id, text, title"),
        ({"text_field": "text.body"}, r"has no column 'text\.body' \(text_field\)"),
    ],
)
def test_a_missing_column_is_told_with_those_there_are(tmp_path, item, words):
    parquet(tmp_path / "a.parquet", row(0, title="t"))
    with pytest.raises(InputError, match=words):
        source({"path": "parquet", "data_files": f"{tmp_path}/a.parquet"}, **item).facts()


def test_an_unknown_configuration_is_told_with_those_there_are(tmp_path):
    parquet(tmp_path / "train.parquet", row(0))
    with pytest.raises(InputError, match=r"'big' not found\. Available: \['default'\]"):
        source({"path": str(tmp_path), "name": "big"}).facts()


@pytest.mark.parametrize("files", ["none/*.parquet", "none/a.parquet"])
def test_files_that_are_not_there_are_told_with_the_working_directory(tmp_path, monkeypatch, files):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"no file matches \(working directory {re.escape(str(tmp_path))}\)"):
        source({"path": "parquet", "data_files": files}).facts()


# Errors in the middle.


def test_rows_before_a_broken_file_are_kept_and_the_place_is_told(tmp_path):
    parquet(tmp_path / "a.parquet", *map(row, range(3)))
    parquet(tmp_path / "b.parquet", *map(row, range(3, 6))).write_bytes(b"PAR1 no more")
    at = source({"path": "parquet", "data_files": f"{tmp_path}/*.parquet"}, id_field="id")
    assert (at.facts().rows, at.facts().exact) == (0, False)
    found = []
    with pytest.raises(InputError, match=r"dataset:parquet/train#\w{8} .*: shard 1 row 0: cannot be read: "):
        found.extend(one.id for one in read_lazily(at))
    assert found == ["d0", "d1", "d2"]


def test_rows_before_values_that_do_not_fit_are_kept(tmp_path):
    """The library takes the types from the first file; what cannot be cast to them ends the data set."""
    write_lines(tmp_path / "a.jsonl", *[{"id": n, "text": "x"} for n in range(300)])
    write_lines(tmp_path / "b.jsonl", {"id": 300, "text": "x"}, {"id": "three", "text": "x"})
    at = source({"path": "json", "data_files": f"{tmp_path}/*.jsonl"}, id_field="id")
    found = []
    with pytest.raises(InputError, match="shard 1 row 0: cannot be read: "):
        found.extend(one.id for one in read_lazily(at))
    assert found == [str(n) for n in range(300)]


def test_every_row_before_an_error_is_kept_whatever_the_error(tmp_path, monkeypatch):
    from datasets.packaged_modules.json.json import Json

    write_lines(tmp_path / "a.jsonl", *map(row, range(500)))
    at = source({"path": "json", "data_files": f"{tmp_path}/a.jsonl"}, id_field="id")
    at.facts()
    whole = Json._generate_tables

    def cut_short(self, *args, **kwargs):
        for key, table in whole(self, *args, **kwargs):
            yield key, table.slice(0, 401)
            raise EOFError("the line went dead\nin the middle")

    monkeypatch.setattr(Json, "_generate_tables", cut_short)
    fresh = source({"path": "json", "data_files": f"{tmp_path}/a.jsonl"}, id_field="id")
    found = []
    with pytest.raises(InputError, match="shard 0 row 401: cannot be read: the line went dead in the middle"):
        found.extend(one.id for one in read_lazily(fresh))
    assert found == [f"d{n}" for n in range(401)]


def read_lazily(at):
    from batchgen.data import Split

    for start, end in at.cut(begin=0, target_bytes=1):
        yield from at.read(Split(0, 0, "", start, end))


def test_a_data_set_that_lost_shards_is_told(tmp_path):
    parquet(tmp_path / "a.parquet", row(0))
    at = source({"path": "parquet", "data_files": f"{tmp_path}/a.parquet"})
    with pytest.raises(InputError, match="had 2 shards and has 1"):
        read(at, "", [(0, 2)])


# What it is called, and its state.


def test_names_tell_data_sets_apart_and_depend_on_nothing_else():
    assert Dataset(path="org/data").source == "dataset:org/data/train"
    assert Dataset(path="org/data", name="en", split="test", revision="v1").source == "dataset:org/data/en/test"
    names = [
        Dataset(path="parquet", data_files=files, data_dir=folder).source
        for files, folder in [("a", None), (["a"], None), ("b", None), ("a", "c"), (None, "c"), ({"train": "a"}, None)]
    ]
    assert len({*names}) == len(names)
    assert all(re.fullmatch(r"dataset:parquet/train#[0-9a-f]{8}", name) for name in names)


def dataset_state(folder, **more):
    return state(Dataset(**({"path": "parquet", "data_files": f"{folder}/*.parquet"} | more)))


def test_the_state_tells_every_change_of_the_files(tmp_path):
    one, other = (parquet(tmp_path / name, row(0)) for name in ("a.parquet", "b.parquet"))
    seen = [dataset_state(tmp_path)]
    assert dataset_state(tmp_path) == seen[0]
    assert seen[0].size == one.stat().st_size + other.stat().st_size
    (tmp_path / "b.txt").write_text("not matched")
    assert dataset_state(tmp_path) == seen[0]
    (tmp_path / "c.parquet").touch()
    seen.append(dataset_state(tmp_path))
    os.utime(one, ns=(1, 1))
    seen.append(dataset_state(tmp_path))
    other.rename(tmp_path / "d.parquet")
    seen.append(dataset_state(tmp_path))
    (tmp_path / "d.parquet").unlink()
    seen.append(dataset_state(tmp_path))
    assert len({found.revision for found in seen}) == len(seen)


def test_the_state_of_a_folder_is_that_of_all_its_files(tmp_path):
    parquet(tmp_path / "data/train.parquet", row(0))
    seen = [state(Dataset(path=str(tmp_path)))]
    for name in ("README.md", "data/deep/train-2.parquet", ".huggingface.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        seen.append(state(Dataset(path=str(tmp_path))))
    assert len({found.revision for found in seen}) == len(seen)


def test_the_state_sees_every_file_that_the_library_reads(tmp_path):
    """Whatever the pattern: a file that is read and not watched could change unnoticed."""
    import datasets

    for name in ("a", "b1", "deep/c", "deep/deeper/d", "odd [x]/e"):
        parquet(tmp_path / f"{name}.parquet", row(0))
    patterns = ["*.parquet", "**", "**/*.parquet", "deep/*", "deep/**", "?.parquet", "b[0-9].parquet", "a.parquet"]
    for pattern in patterns:
        item = Dataset(path="parquet", data_files=pattern, data_dir=str(tmp_path))
        builder = datasets.load_dataset_builder(**item.model_dump(exclude={"split"}, exclude_none=True))
        assert {str(path) for path in module._local_files(item)} == set(builder.config.data_files["train"]), pattern


@pytest.mark.parametrize("files", ["https://example.org/a.parquet", "zip://*.parquet::a.zip", ["a", "s3://b/c"]])
def test_only_the_library_can_tell_the_state_of_what_lies_elsewhere(files):
    assert state(Dataset(path="parquet", data_files=files)) is None


def test_builders_are_known_without_the_library():
    code = (
        "import sys; from batchgen.sources.dataset import _builders; found = _builders()\n"
        "assert 'datasets' not in sys.modules\n"
        "from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as there; print(sorted({*there} - found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_are_told_by_the_footers_or_the_card(tmp_path):
    parquet(tmp_path / "train.parquet", *map(row, range(3)))
    at = source({"path": str(tmp_path)})
    assert (at.facts().rows, at.facts().exact) == (3, True)
    (tmp_path / "train.parquet").unlink()
    write_lines(tmp_path / "train.jsonl", *map(row, range(3)))
    told = source({"path": str(tmp_path)}).facts()
    assert (told.rows, told.exact) == (0, False)
    card = "dataset_info: {splits: [{name: train, num_examples: 77, num_bytes: 1}]}"
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    told = source({"path": str(tmp_path)}).facts()
    assert (told.rows, told.exact) == (77, False)


# The Hub, at the seam: the answers of huggingface_hub's and datasets' functions are made up here.


def hub_job(**dataset) -> Job:
    return Job.model_validate(
        {
            "name": "t",
            "input": [{"dataset": {"path": "org/data"} | dataset}],
            "prompt": {"user": "{{ text }}"},
            "engine": {"backend": "fake"},
            "output": {"dir": "out"},
        }
    )


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub's answers: what `answer` holds, an error or a commit; `asked` are the questions."""
    import huggingface_hub.constants

    hub = SimpleNamespace(answer=COMMIT, asked=[], cache=tmp_path / "hub")

    def dataset_info(self, path, *, revision=None):
        hub.asked.append((path, revision))
        if isinstance(hub.answer, Exception):
            raise hub.answer
        return SimpleNamespace(sha=hub.answer)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub.cache))
    return hub


def commit_of(job: Job, run=None) -> str:
    return pinned(job, lambda: run).input[0].dataset.revision


def run_json(job: Job, commit: str) -> dict:
    return {"job": job.model_dump(), "fingerprint": {f"input[{job.input[0].source}].revision": commit}}


def test_a_name_on_the_hub_is_pinned_to_the_commit_it_has(hub):
    assert commit_of(hub_job()) == COMMIT
    assert commit_of(hub_job(revision="v2")) == COMMIT
    assert commit_of(hub_job(path="hf://datasets/org/data")) == COMMIT
    assert hub.asked == [("org/data", None), ("org/data", "v2"), ("org/data", None)]


def test_a_commit_in_the_job_needs_no_question(hub):
    assert commit_of(hub_job(revision=OTHER)) == OTHER
    assert hub.asked == []


def test_a_run_keeps_its_commit_while_the_job_asks_for_the_same(hub):
    run = run_json(hub_job(revision="main"), OTHER)
    assert commit_of(hub_job(revision="main"), run) == OTHER
    assert hub.asked == []
    assert commit_of(hub_job(revision="v2"), run) == COMMIT
    assert commit_of(hub_job(name="en"), run) == COMMIT
    assert len(hub.asked) == 2


def test_without_the_hub_the_local_cache_tells_the_commit(hub):
    hub.answer = ConnectionError("no network")
    for revision in ("main", "v2"):
        ref = hub.cache / "datasets--org--data/refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(COMMIT if revision == "main" else OTHER)
    assert commit_of(hub_job()) == COMMIT
    assert commit_of(hub_job(revision="v2")) == OTHER
    with pytest.raises(InputError, match="nothing in the local cache, and the Hub does not give it: no network"):
        commit_of(hub_job(revision="v3"))


def not_found(kind):
    from huggingface_hub import errors

    error = getattr(errors, kind)
    return error.__new__(error)  # their constructors want whole HTTP responses


@pytest.mark.parametrize(
    ("kind", "dataset", "words"),
    [
        ("RepositoryNotFoundError", {"path": "parqet"}, "did you mean 'parquet'.*the Hub has none"),
        ("RevisionNotFoundError", {"revision": "v9"}, r"input\.0\.dataset\.revision: org/data has no 'v9' on the Hub"),
        ("HFValidationError", {"path": "a/b/c"}, "no such folder .*, and no name the Hub could have"),
    ],
)
def test_what_is_nowhere_is_told(hub, kind, dataset, words):
    hub.answer = not_found(kind)
    with pytest.raises(InputError, match=words):
        commit_of(hub_job(**dataset))


def test_a_signal_while_the_hub_is_asked_ends_the_start(hub):
    hub.answer = Interrupted("stopped by SIGTERM")
    with pytest.raises(Interrupted):
        commit_of(hub_job())


def test_arguments_that_mean_nothing_are_refused(hub, tmp_path):
    file = parquet(tmp_path / "a.parquet", row(0))
    for dataset, words in (
        ({"path": str(tmp_path), "revision": "main"}, r"input\.0\.dataset\.revision: local data has none"),
        ({"path": "parquet"}, "the builder 'parquet' needs data_files or data_dir"),
        ({"path": str(file)}, r"a\.parquet is a file: give it as data_files"),
    ):
        with pytest.raises(ConfigError, match=words):
            commit_of(hub_job(**dataset))
    assert hub.asked == []


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Puts a local folder in the place of org/data on the Hub; `asked` are the arguments of the library."""
    import datasets

    real, asked = datasets.load_dataset_builder, []

    def load_dataset_builder(path, **arguments):
        asked.append({"path": path} | arguments)
        builder = real(str(tmp_path))
        builder.hash = OTHER
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return asked


def test_the_commit_is_the_revision_that_is_opened(opened, tmp_path):
    parquet(tmp_path / "train.parquet", row(0))
    at = source({"path": "org/data", "revision": OTHER, "name": "en"}, id_field="id")
    facts = at.facts()
    assert (facts.source, facts.revision, facts.size) == ("dataset:org/data/en/train", OTHER, 0)
    assert [one.id for one in read(at, "", [(0, 1)])] == ["d0"]
    assert opened == [{"path": "org/data", "revision": OTHER, "name": "en"}]


def test_another_commit_out_of_the_local_cache_is_refused(opened, tmp_path):
    parquet(tmp_path / "train.parquet", row(0))
    with pytest.raises(InputError, match=f"the local cache holds {OTHER}, not {COMMIT}"):
        source({"path": "org/data", "revision": COMMIT}).facts()
