"""Shares of a run: whatever the files are, each row in exactly one, and equal but for one piece that cannot be cut."""

import json
import tempfile
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import PROPERTY, job, packed, row, write_groups, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import plan
from batchgen.shards import Shard, of_label, shares
from batchgen.sources import open_source
from batchgen.storage.rundir import RunDirectory

TARGET = 2000
SIZES = st.lists(st.integers(0, 1 << 40), max_size=60)
COUNTS = st.integers(1, 12)


@PROPERTY
@given(sizes=SIZES, count=COUNTS)
def test_shares_differ_by_the_largest_split_at_most(sizes, count):
    has = [0] * count
    for size, number in zip(sizes, shares(sizes, count), strict=True):
        has[number] += size
    assert max(has) - min(has) <= max(sizes, default=0)


@PROPERTY
@given(sizes=SIZES, more=SIZES, count=COUNTS)
def test_splits_that_are_added_move_none(sizes, more, count):
    assert shares([*sizes, *more], count)[: len(sizes)] == shares(sizes, count)


def test_splits_of_one_size_go_to_the_shards_in_turn():
    assert shares([5] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 4), Shard(99_999, 100_000)])
def test_a_label_tells_the_shard(shard):
    assert of_label(shard.label) == shard


@pytest.mark.parametrize("label", ["", "x", "1of", "of2", "export", "00001-2"])
def test_other_names_are_no_labels(label):
    assert of_label(label) is None


def write_file(folder: Path, number: int, kind: str, counts: list[int]) -> None:
    """A file of so many rows; of Parquet, so many in each row group."""
    numbers = iter(range(sum(counts)))
    rows = [row(f"{number}-{next(numbers)}", text="x" * 40) for count in counts for _ in range(count)]
    if kind == "parquet":
        bounds = iter(rows)
        groups = [[next(bounds) for _ in range(count)] for count in counts]
        schema = pa.schema([("id", pa.string()), ("text", pa.string())])
        write_groups(folder / f"{number}.parquet", *(pa.Table.from_pylist(group, schema) for group in groups))
    elif kind == "gz":
        lines = b"".join(json.dumps(one).encode() + b"\n" for one in rows)
        (folder / f"{number}.jsonl.gz").write_bytes(packed(lines, "gzip"))
    else:
        write_lines(folder / f"{number}.jsonl", *rows)


FILES = st.lists(
    st.tuples(st.sampled_from(["jsonl", "parquet", "gz"]), st.lists(st.integers(0, 60), min_size=1, max_size=5)),
    min_size=1, max_size=6,
)  # fmt: skip


def planned(folder: Path, count: int) -> list[plan.Plan]:
    """The plan of each shard."""
    asked = job(folder, {"path": str(folder / "in/*"), "id_field": "id"})
    made = []
    for number in range(count):
        with RunDirectory(folder / "out", Shard(number, count)) as run:
            made.append(plan.make(asked, run))
    return made


def ids(folder: Path, made: plan.Plan) -> list[str]:
    asked = job(folder, {"path": str(folder / "in/*"), "id_field": "id"})
    return [one.id for split in made.splits for one in open_source(asked, 0, split.source).read(split)]


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_every_row_is_in_exactly_one_shard_and_shards_are_equal(examples):
    @settings(PROPERTY, max_examples=examples)
    @given(files=FILES, more=FILES, count=st.integers(1, 6))
    def check(files, more, count):
        _check_shares(files, more, count)

    check()


def _check_shares(files, more, count):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_TARGET_BYTES", TARGET)
        folder = Path(name)
        (folder / "in").mkdir()
        for number, (kind, counts) in enumerate(files):
            write_file(folder / "in", number, kind, counts)
        before = [ids(folder, one) for one in planned(folder, count)]
        every = [f"d{n}-{m}" for n, (_, counts) in enumerate(files) for m in range(sum(counts))]
        assert sorted(id_ for one in before for id_ in one) == sorted(every)
        _equal(folder, count)
        for number, (kind, counts) in enumerate(more, start=len(files)):
            write_file(folder / "in", number, kind, counts)
        after = [ids(folder, one) for one in planned(folder, count)]
        assert all(set(old) <= set(new) for old, new in zip(before, after, strict=True))
        _equal(folder, count)


def _equal(folder: Path, count: int) -> None:
    """Bytes of shards differ by a piece of the target's size, or by one that cannot be cut."""
    splits = json.loads((folder / "out/plan.json").read_text())["splits"]
    whole = [TARGET]
    for path in (folder / "in").iterdir():
        if path.suffix == ".gz":
            whole.append(path.stat().st_size)
        elif path.suffix == ".parquet":
            meta = pq.read_metadata(path)
            whole += [meta.row_group(n).total_byte_size for n in range(meta.num_row_groups)]
    has = [0] * count
    for split, number in zip(splits, shares([split[3] for split in splits], count), strict=True):
        has[number] += split[3]
    assert max(has) - min(has) <= max(whole)


def test_a_large_file_and_many_small_ones_are_spread(tmp_path):
    folder = tmp_path
    (folder / "in").mkdir()
    write_file(folder / "in", 0, "jsonl", [4000])
    for number in range(1, 40):
        write_file(folder / "in", number, "jsonl", [5])
    made = planned(folder, 4)
    counts = [len(ids(folder, one)) for one in made]
    assert sum(counts) == 4000 + 39 * 5
    assert max(counts) - min(counts) < 30
    assert [one.rows for one in made] == pytest.approx(counts, abs=30)
    assert all(len({split.source for split in one.splits}) > 8 for one in made)
    for one in made:  # in reading order
        sources = [source for source, _ in groupby(split.source for split in one.splits)]
        assert len(sources) == len(set(sources))


def test_a_file_that_was_only_appended_to_keeps_its_splits_and_one_that_was_not_is_cut_anew(tmp_path):
    path = write_lines(tmp_path / "in/a.jsonl", *map(row, range(200)))
    first = planned(tmp_path, 1)[0]
    with path.open("ab") as stream:
        stream.write(json.dumps(row(200)).encode() + b"\n")
    grown = planned(tmp_path, 1)[0]
    assert grown.splits[: len(first.splits)] == first.splits
    assert len(grown.splits) == len(first.splits) + 1
    assert grown.layout.gaps == {}
    path.write_bytes(json.dumps(row("x")).encode() + b"\n" + path.read_bytes())
    shifted = planned(tmp_path, 1)[0]
    assert set(shifted.layout.gaps) == {split.index for split in grown.splits}
    assert len(ids(tmp_path, shifted)) == 202
