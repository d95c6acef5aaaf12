"""What every Source promises, tried on each: facts, cuts, documents."""

import dataclasses
import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from helpers_data import ALL, PROPERTY, documents, packed, read, row, source, write_groups, write_lines
from hypothesis import assume, given
from hypothesis import strategies as st

from batchgen.data import Split
from batchgen.errors import InputError
from batchgen.sources.base import NO_SPLIT

ROWS = 40


def write_jsonl(path, rows):
    return write_lines(path.with_suffix(".jsonl"), *rows)


def write_parquet(path, rows):
    path = path.with_suffix(".parquet")
    schema = pa.Table.from_pylist(rows).schema if rows else pa.schema([("id", pa.string()), ("text", pa.string())])
    groups = [rows[n : n + 7] for n in range(0, len(rows), 7)] or [[]]
    return write_groups(path, *[pa.Table.from_pylist(group, schema=schema) for group in groups])


def write_gz(path, rows):
    return pack(write_jsonl(path, rows), "gzip", ".gz")


def write_zst(path, rows):
    return pack(write_jsonl(path, rows), "zstd", ".zst")


def pack(path, packing, ending):
    """The file as two members or frames, in place of the file."""
    data = path.read_bytes()
    path.unlink()
    path = Path(f"{path}{ending}")
    halves = (data[: len(data) // 3], data[len(data) // 3 :])
    path.write_bytes(b"".join(packed(half, packing) for half in halves))
    return path


def write_dataset(path, rows, *, one_file):
    """A data set of several files, each of which is a shard."""
    path.mkdir(parents=True)
    for n in range(0, max(1, len(rows)), 7):
        one_file(path / f"shard-{n:03}", rows[n : n + 7])
    return path


def write_dataset_json(path, rows):
    return write_dataset(path, rows, one_file=write_jsonl)


def write_dataset_parquet(path, rows):
    return write_dataset(path, rows, one_file=write_parquet)


CUTTABLE = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "dataset-json": write_dataset_json,
    "dataset-parquet": write_dataset_parquet,
}
WRITERS = CUTTABLE | {"gz": write_gz, "zst": write_zst}


def files(path):
    return sorted(path.iterdir()) if path.is_dir() else [path]


@pytest.fixture(params=WRITERS)
def write(request, tmp_path):
    """Makes a file of rows, and gives its path."""
    return lambda rows, name="a": WRITERS[request.param](tmp_path / name, list(rows))


@pytest.fixture(params=CUTTABLE)
def write_cuttable(request, tmp_path):
    """The same for files that can be read from their middle."""
    return lambda rows, name="a": CUTTABLE[request.param](tmp_path / name, list(rows))


def test_facts_tell_the_file_as_it_is(write):
    path = write(map(row, range(ROWS)))
    facts = source(path, id_field="id", keep={"text": "copy"}).facts()
    stats = [file.stat() for file in files(path)]
    assert facts.input == 0
    assert facts.source.startswith("dataset:") if path.is_dir() else facts.source == str(path)
    assert facts.size == sum(stat.st_size for stat in stats)
    assert facts.mtime_ns == max(stat.st_mtime_ns for stat in stats)
    assert bool(facts.revision) == path.is_dir()
    assert (facts.rows, facts.exact) == ((0, False) if "dataset:json" in facts.source else (ROWS, True))
    assert facts.kept == {"copy": pa.string()}


@pytest.mark.parametrize("target", [1, 10, 100, 333, 1000, ALL])
def test_whatever_the_target_the_cuts_follow_each_other_and_cover_every_row_once(write, target):
    path = write(map(row, range(ROWS)))
    cuts = source(path).cut(begin=0, target_bytes=target)
    assert cuts[0][0] == 0
    assert all(start < end for start, end in cuts)
    assert [end for _, end in cuts[:-1]] == [start for start, _ in cuts[1:]]
    found = documents(path, id_field="id", target_bytes=target)
    assert [document.id for document in found] == [f"d{n}" for n in range(ROWS)]
    assert found == documents(path, id_field="id")


def test_a_small_target_cuts_more_often_than_a_large_one(write_cuttable):
    path = write_cuttable(map(row, range(ROWS)))
    at = source(path)
    middle = at.facts().size // 2 if path.is_dir() else 600
    assert len(at.cut(begin=0, target_bytes=1)) > len(at.cut(begin=0, target_bytes=middle)) > 1
    assert len(at.cut(begin=0, target_bytes=ALL)) == 1


@pytest.mark.parametrize("target", [1, 300, ALL])
def test_a_split_holds_the_places_from_its_first_to_the_next_ones(write, target):
    path = write(map(row, range(ROWS)))
    at = source(path, id_field="id")
    cuts = at.cut(begin=0, target_bytes=target)
    measures = at.measure(cuts)
    assert len(measures) == len(cuts)
    assert all(one.size > 0 for one in measures)
    bounds = [*(one.first for one in measures), ALL]
    for n, cut in enumerate(cuts):
        places = [int(re.search(r"\d+", one.place)[0]) for one in read(at, path, [cut])]
        assert all(bounds[n] <= place < bounds[n + 1] for place in places)


def test_nothing_is_cut_where_the_last_cut_ended(write):
    at = source(write(map(row, range(ROWS))))
    end = at.cut(begin=0, target_bytes=ALL)[-1][1]
    assert at.cut(begin=end, target_bytes=100) == []


def test_a_later_begin_gives_the_rest(write_cuttable):
    path = write_cuttable(map(row, range(ROWS)))
    at = source(path, id_field="id")
    first, *rest = at.cut(begin=0, target_bytes=300)
    assert rest
    again = at.cut(begin=first[1], target_bytes=ALL)
    assert read(at, path, again) == read(at, path, rest)


def test_a_file_without_rows_gives_no_documents(write):
    path = write([])
    if "jsonl" in {file.suffix[1:] for file in files(path)} and path.is_dir():
        with pytest.raises(InputError, match="holds no rows"):  # the library takes the columns from the first rows
            source(path).facts()
        return
    assert source(path).facts().rows == 0
    assert documents(path, target_bytes=1) == []


def test_documents_tell_their_split_source_and_place(write):
    path = write(map(row, range(ROWS)))
    at = source(path, id_field="id")
    start, end = at.cut(begin=0, target_bytes=ALL)[0]
    found = list(at.read(Split(17, 0, str(path), start, end)))
    assert {document.split for document in found} == {17}
    assert {document.source for document in found} == {at.facts().source}
    assert len({document.place for document in found}) == ROWS
    words = {".parquet": "row 0", "": "shard 0 row 0"}
    assert found[0].place == words.get(path.suffix, "byte 0")


def test_a_split_can_be_read_again(write_cuttable):
    path = write_cuttable(map(row, range(ROWS)))
    at = source(path)
    split = Split(0, 0, str(path), *at.cut(begin=0, target_bytes=300)[1])
    assert list(at.read(split)) == list(at.read(split)) != []


def test_a_reader_that_is_left_early_does_no_harm(write):
    path = write(map(row, range(ROWS)))
    at = source(path, id_field="id")
    begun = at.read(Split(0, 0, str(path), *at.cut(begin=0, target_bytes=ALL)[0]))
    assert next(begun).id == "d0"
    begun.close()
    assert len(documents(path)) == ROWS


def test_keys_by_id_do_not_depend_on_file_or_place_and_those_by_place_do(write):
    here, there = write(map(row, range(ROWS)), "here"), write(map(row, reversed(range(ROWS))), "there")
    by_id = [{one.key for one in documents(path, id_field="id")} for path in (here, there)]
    assert by_id[0] == by_id[1]
    assert len(by_id[0]) == ROWS
    by_place = [{one.key for one in documents(path)} for path in (here, there)]
    assert not by_place[0] & by_place[1]
    assert len(by_place[0] | by_place[1]) == 2 * ROWS


def test_identity_and_content_are_the_same_in_every_format(tmp_path):
    rows = [row(n, title=f"t{n}", year=n) for n in range(5)]
    item = {"prompt": ("text", "title"), "id_field": "id", "keep": ["title", "year"]}
    found = [documents(make(tmp_path / name, rows), **item) for name, make in WRITERS.items()]
    strip = [[dataclasses.replace(document, source="", place="") for document in one] for one in found]
    assert strip.count(strip[0]) == len(WRITERS)


def test_odd_rows_are_told_and_the_others_are_read(write):
    rows = [row(0), {"id": None, "text": "x"}, {"id": "", "text": "x"}, {"id": "d3", "text": None}, row(4)]
    found = documents(write(rows), id_field="id")
    assert [document.error and document.error[0] for document in found] == [None, *["missing_id"] * 2, None, None]
    assert [document.text for document in found] == ["text 0", "x", "x", "", "text 4"]


@pytest.mark.parametrize("text", ["", "\n", "a\r\nb", "\u2028\u2029\x85", "\x00", "𝄞", "\ufeff", '"\\'])
def test_text_comes_as_it_is(write, text):
    assert [document.text for document in documents(write([row(0, text=text), row(1, text=text)]))] == [text, text]


def test_a_missing_file_is_named(write):
    path = write([row(0)])
    at = source(path)
    for file in files(path):
        file.unlink()
    places = ["byte 0", "row 0", "shard 0 row 0"]
    for ask in (
        at.facts,
        lambda: at.cut(begin=0, target_bytes=1),
        lambda: read(at, path, [(0, 1)]),
        lambda: list(at.fetch(places)),
    ):
        with pytest.raises(InputError, match=path.name):
            ask()


def plain(found):
    """Documents without the split, which who fetches by place does not know."""
    return [dataclasses.replace(one, split=NO_SPLIT) for one in found]


def test_what_is_fetched_by_place_is_what_was_read_with_its_record(write):
    path = write(row(n, title=f"t{n}") for n in range(ROWS))
    item = {"id_field": "id", "keep": ["title"], "prompt": ("text", "title")}
    was = documents(path, **item)
    found = list(source(path, **item).fetch([document.place for document in was]))
    assert [one.document for one in found] == plain(was)
    assert [one.record for one in found] == [row(n, title=f"t{n}") for n in range(ROWS)]


@pytest.mark.parametrize("wanted", [[0], [ROWS - 1], [13, 6, 7, 30, 14], [], [0, 1, 2, 39, 38]])
def test_only_what_is_asked_for_is_fetched_in_the_order_of_the_file(write, wanted):
    path = write(map(row, range(ROWS)))
    places = [document.place for document in documents(path)]
    found = source(path, id_field="id").fetch({places[n] for n in wanted})
    assert [one.document.id for one in found] == [f"d{n}" for n in sorted(wanted)]


def test_places_where_nothing_begins_give_nothing(write):
    path = write(map(row, range(ROWS)))
    places = (
        [*documents(path)][3].place,
        "byte 1",
        "byte 999999",
        "row 999",
        "shard 0 row 999",
        "shard 99 row 0",
        "",
        "x",
    )
    assert [one.document.id for one in source(path, id_field="id").fetch(places)] == ["d3"]


def test_odd_rows_are_fetched_with_their_fault(write):
    rows = [row(0), {"id": None, "text": "x"}, {"id": "", "text": "x"}, {"id": "d3", "text": None}, row(4)]
    path = write(rows)
    was = documents(path, id_field="id")
    found = list(source(path, id_field="id").fetch([document.place for document in was]))
    assert [one.document.key for one in found] == [document.key for document in was]
    assert [one.document.content for one in found] == [document.content for document in was]
    assert [one.document.error and one.document.error[0] for one in found] == [None, *["missing_id"] * 2, None, None]
    assert [one.record for one in found] == rows


@PROPERTY
@given(
    kind=st.sampled_from(sorted(WRITERS)),
    lengths=st.lists(st.integers(0, 40) | st.integers(900, 1100), max_size=30),
    target=st.integers(1, 4000) | st.just(ALL),
)
def test_splits_cover_every_row_once_whatever_the_file_and_the_target(kind, lengths, target):
    assume(lengths or kind != "dataset-json")  # refused, see above
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(n, text="x" * length) for n, length in enumerate(lengths)]
        path = WRITERS[kind](Path(folder) / "a", rows)
        at = source(path, id_field="id")
        cuts = at.cut(begin=0, target_bytes=target)
        found = read(at, path, cuts)
        facts = at.facts()
    assert [(one.id, len(one.text), one.error) for one in found] == [(f"d{n}", m, None) for n, m in enumerate(lengths)]
    assert len({one.place for one in found}) == len({one.key for one in found}) == len(lengths)
    assert (facts.rows, facts.exact) == ((0, False) if kind == "dataset-json" else (len(lengths), True))


TEXT_IDS = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=9, unique=True)
NUMBER_IDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9, unique=True)


@PROPERTY
@given(kind=st.sampled_from(sorted(WRITERS)), ids=TEXT_IDS | NUMBER_IDS)
def test_ids_come_out_as_they_came_in_with_their_type(kind, ids):
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[kind](Path(folder) / "a", [{"id": one, "text": "x"} for one in ids])
        found = documents(path, id_field="id")
    assert [{"str": str, "int": int}[one.id_type](one.id) for one in found] == ids
    assert len({one.key for one in found}) == len(ids)
