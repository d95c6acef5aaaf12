"""Which files a job means, and that a split keeps its index whatever happens to the files."""

import gzip
import json
import os
import shutil

import pyarrow as pa
import pytest
from helpers_data import job, row, write_groups, write_lines

from batchgen import plan
from batchgen.errors import ConfigError, InputError
from batchgen.plan import discover
from batchgen.sources import open_source
from batchgen.storage.rundir import RunDirectory


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path / "out") as held:
        yield held


@pytest.fixture
def opened(monkeypatch):
    """Paths of the input files that were opened, in order."""
    paths = []

    def spy(job, number, path):
        paths.append(path)
        return open_source(job, number, path)

    monkeypatch.setattr(plan, "open_source", spy)
    return paths


def names(files):
    return [file.source.rsplit("/", 1)[-1] for file in files]


def ids(job, made):
    """Ids of all documents of a plan, split by split."""
    return [one.id for split in made.splits for one in open_source(job, split.input, split.source).read(split)]


def cuts(made):
    return [(split.index, split.source.rsplit("/", 1)[-1], split.start, split.end) for split in made.splits]


def age(path, seconds=1000):
    """Make a file look written at another time."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + seconds * 10**9))


# Which files


def test_files_come_in_the_order_of_the_inputs_and_by_name_within_one(tmp_path):
    for name in ("b2", "b10", "b1", "a1"):
        write_lines(tmp_path / f"{name}.jsonl", row(0))
    found = discover(job(tmp_path, tmp_path / "b*.jsonl", tmp_path / "a*.jsonl"))
    assert names(found) == ["b1.jsonl", "b10.jsonl", "b2.jsonl", "a1.jsonl"]
    assert [file.input for file in found] == [0, 0, 0, 1]


def test_markers_hidden_files_and_temporaries_of_other_tools_are_no_inputs(tmp_path):
    write_lines(tmp_path / "data" / "a.jsonl", row(0))
    for name in ("_SUCCESS", "_metadata", ".a.jsonl.crc", "a.jsonl.crc", ".hidden.jsonl", "b.jsonl.tmp", "_b.jsonl"):
        (tmp_path / "data" / name).write_text("{}\n")
    (tmp_path / "data" / "folder.jsonl").mkdir()
    assert names(discover(job(tmp_path, tmp_path / "data" / "*"))) == ["a.jsonl"]


def test_a_path_that_is_named_is_taken_whatever_its_name(tmp_path):
    write_lines(tmp_path / "_a.jsonl", row(0))
    write_lines(tmp_path / "b[1]*.jsonl", row(0))
    write_lines(tmp_path / "b1c.jsonl", row(0))
    found = discover(job(tmp_path, tmp_path / "_a.jsonl", tmp_path / "b[1]*.jsonl"))
    assert names(found) == ["_a.jsonl", "b[1]*.jsonl"]


def test_a_glob_may_cross_folders_and_names_each_file_once(tmp_path):
    for name in ("a.jsonl", "x/a.jsonl", "x/y/a.jsonl"):
        write_lines(tmp_path / "data" / name, row(0))
    found = discover(job(tmp_path, tmp_path / "data" / "**" / "**" / "*.jsonl"))
    assert [file.source.split("/data/")[1] for file in found] == ["a.jsonl", "x/a.jsonl", "x/y/a.jsonl"]


def test_relative_paths_start_at_the_working_directory_and_tilde_at_home(tmp_path, monkeypatch):
    write_lines(tmp_path / "here" / "a.jsonl", row(0))
    write_lines(tmp_path / "home" / "b.jsonl", row(0))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = discover(job(tmp_path, "./*.jsonl", "~/b.jsonl"))
    assert [file.source for file in found] == ["a.jsonl", str(tmp_path / "home" / "b.jsonl")]


# Folders


def test_a_folder_means_every_file_of_a_known_format_in_it_by_name(tmp_path):
    known = [
        "b.jsonl",
        "a/z.NDJSON",
        "a/b/c.parquet",
        "c.json",
        "d.jsonl.gz",
        "e.ndjson.zst",
        "f.JSON.GZ",
        "a.b/x.jsonl",
    ]
    for name in known:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            write_groups(tmp_path / "data" / name, pa.table({"id": ["a"], "text": ["x"]}))
        else:
            write_lines(tmp_path / "data" / name, row(0))
    found = plan.look(job(tmp_path, tmp_path / "data"))
    assert [file.source for file in found.files] == sorted(str(tmp_path / "data" / name) for name in known)
    assert plan.look(job(tmp_path, f"{tmp_path}/data/")).files == found.files
    assert found.left_out == ()


def test_files_of_a_folder_that_have_no_format_are_left_out_and_told(tmp_path):
    write_lines(tmp_path / "data" / "a.jsonl", row(0))
    for name in ("README.md", "x/notes.txt", "x/b.jsonl.bz2"):
        write_lines(tmp_path / "data" / name, b"no record")
    found = plan.look(job(tmp_path, tmp_path / "data"))
    assert names(found.files) == ["a.jsonl"]
    assert found.left_out == tuple(
        str(tmp_path / "data" / name) for name in ("README.md", "x/b.jsonl.bz2", "x/notes.txt")
    )
    with pytest.raises(InputError, match=r"README\.md: not a format"):
        discover(job(tmp_path, tmp_path / "data" / "*"))


def test_markers_and_hidden_files_and_folders_of_a_folder_are_no_inputs_and_not_told(tmp_path):
    write_lines(tmp_path / "data" / "a.jsonl", row(0))
    for name in ("_SUCCESS", ".b.jsonl", "c.jsonl.tmp", ".a.jsonl.crc", "_temporary/0/d.jsonl", ".git/e.jsonl"):
        write_lines(tmp_path / "data" / name, row(0))
    found = plan.look(job(tmp_path, tmp_path / "data"))
    assert (names(found.files), found.left_out) == (["a.jsonl"], ())


def test_linked_files_and_folders_of_a_folder_are_followed_once_and_circles_do_no_harm(tmp_path):
    write_lines(tmp_path / "elsewhere" / "a.jsonl", row(0))
    write_lines(tmp_path / "one.jsonl", row(1))
    (tmp_path / "data" / "own").mkdir(parents=True)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "own" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "own" / "b.jsonl").symlink_to(tmp_path / "one.jsonl")
    found = discover(job(tmp_path, tmp_path / "data"))
    assert [file.source.split("/data/")[1] for file in found] == ["link/a.jsonl", "own/b.jsonl"]


def test_a_folder_with_other_files_only_is_refused_with_their_names(tmp_path):
    write_lines(tmp_path / "data" / "a.csv", b"id,text")
    with pytest.raises(InputError, match=r"input\.0\.path: .*no format batchgen reads: .*a\.csv"):
        discover(job(tmp_path, tmp_path / "data"))


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    write_lines(tmp_path / "data" / "a.jsonl", row(0))

    def closed(top, *, onerror, **_):
        onerror(PermissionError(13, "Permission denied", f"{top}/sub"))
        return []

    monkeypatch.setattr(plan.os, "walk", closed)
    with pytest.raises(InputError, match=r"input\.0\.path: .*data/sub: cannot be read: Permission denied"):
        discover(job(tmp_path, tmp_path / "data"))


# Files that cannot be read


def test_files_that_may_be_skipped_are_told_and_the_others_planned(tmp_path, run):
    write_lines(tmp_path / "data" / "good.jsonl", row(0))
    (tmp_path / "data" / "a.parquet").write_bytes(b"")
    (tmp_path / "data" / "b.jsonl").write_bytes('{"text": "x"}'.encode("utf-16"))
    asked = job(tmp_path, {"path": str(tmp_path / "data"), "on_error": "skip"})
    made = plan.make(asked, run)
    assert names(made.files) == ["good.jsonl"]
    assert [str(one).split(": ")[0].rsplit("/", 1)[-1] for one in made.skipped] == ["a.parquet", "b.jsonl"]
    assert (made.rows, made.exact) == (1, False)
    assert plan.make(asked, run) is not None


def test_only_the_inputs_that_say_so_skip_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    asked = job(tmp_path, {"path": str(tmp_path / "a.*"), "on_error": "skip"}, {"path": str(tmp_path / "b.*")})
    with pytest.raises(InputError) as e:
        discover(asked)
    assert "b.parquet" in str(e.value)
    assert "a.parquet" not in str(e.value)


def test_a_skipped_file_that_is_repaired_is_planned(tmp_path, run):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    write_lines(tmp_path / "b.jsonl", row(0))
    asked = job(tmp_path, {"path": str(tmp_path / "*.*"), "on_error": "skip"})
    assert len(plan.make(asked, run).skipped) == 1
    write_groups(path, pa.table({"id": ["a"], "text": ["x"]}))
    made = plan.make(asked, run)
    assert (names(made.files), made.skipped) == (["a.parquet", "b.jsonl"], ())


@pytest.mark.parametrize("pattern", ["none.jsonl", "*.none", "empty/*", "empty"])
def test_an_input_that_matches_nothing_is_told_with_its_number(tmp_path, pattern):
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "a.jsonl", row(0))
    with pytest.raises(InputError, match=r"input\.1\.path: .*no file matches"):
        discover(job(tmp_path, tmp_path / "a.jsonl", tmp_path / pattern))


def test_all_files_that_cannot_be_read_are_listed(tmp_path):
    write_lines(tmp_path / "data" / "good.jsonl", row(0))
    (tmp_path / "data" / "a.parquet").write_bytes(b"")
    (tmp_path / "data" / "b.jsonl").write_bytes('{"text": "x"}'.encode("utf-16"))
    (tmp_path / "data" / "c.txt").write_bytes(b"")
    (tmp_path / "data" / "d.jsonl.bz2").write_bytes(b"")
    write_groups(tmp_path / "data" / "e.parquet", pa.table({"id": ["a"], "body": ["x"]}))
    with pytest.raises(InputError) as e:
        discover(job(tmp_path, tmp_path / "data" / "*"))
    lines = str(e.value).splitlines()
    assert [line.split(": ")[0].rsplit("/", 1)[-1] for line in lines] == [
        "a.parquet", "b.jsonl", "c.txt", "d.jsonl.bz2", "e.parquet",
    ]  # fmt: skip
    assert "UTF-16" in lines[1]
    assert "not a format" in lines[2]
    assert "no column 'text'" in lines[4]


def test_a_file_that_vanishes_while_it_is_looked_for_is_listed(tmp_path, monkeypatch):
    gone = str(tmp_path / "gone.jsonl")
    monkeypatch.setattr(plan, "_match", lambda _: ([gone], []))
    with pytest.raises(InputError, match=r"gone\.jsonl: cannot be read: No such file"):
        discover(job(tmp_path))


def test_a_file_name_that_is_no_utf8_is_listed(tmp_path):
    path = os.fsencode(tmp_path) + b"/a\xff.jsonl"
    with open(path, "wb") as stream:  # noqa: PTH123  a name in bytes
        stream.write(b"{}\n")
    with pytest.raises(InputError, match=r"a\\udcff\.jsonl.*no UTF-8"):
        discover(job(tmp_path))


def test_a_name_with_a_line_end_is_refused_and_told_on_one_line(tmp_path):
    write_lines(tmp_path / "a\nb.jsonl", row(1))
    write_lines(tmp_path / "c.jsonl", row(1))
    with pytest.raises(InputError, match=r"a\\nb\.jsonl'?: its name holds a line end") as caught:
        plan.discover(job(tmp_path))
    assert "\n" not in str(caught.value)
    assert plan.names(["a\nb", "c\x1b"]) == r"a\nb, c\u001b"


@pytest.mark.parametrize("other", ["a.jsonl", "*.jsonl", "../data/./a.jsonl", "link.jsonl"])
def test_a_file_that_two_inputs_mean_is_refused(tmp_path, other):
    write_lines(tmp_path / "data" / "a.jsonl", row(0))
    if other == "link.jsonl":
        (tmp_path / "data" / other).symlink_to(tmp_path / "data" / "a.jsonl")
    with pytest.raises(ConfigError, match=r"input\.0 and input\.1 mean this file"):
        discover(job(tmp_path, tmp_path / "data" / "a.jsonl", f"{tmp_path}/data/{other}"))


# Splits over starts


def test_splits_come_in_reading_order_with_the_index_of_plan_json(tmp_path, run, monkeypatch):
    monkeypatch.setattr(plan, "_TARGET_BYTES", 40)
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", *[row(f"{name}{n}") for n in range(4)])
    asked = job(tmp_path)
    made = plan.make(asked, run)
    assert len(made.splits) > 4
    assert [split.index for split in made.splits] == list(range(len(made.splits)))
    stored = json.loads(run.plan_json.read_text())["splits"]
    assert stored == [
        [split.source, split.start, split.end, split.end - split.start, split.start] for split in made.splits
    ]
    assert ids(asked, made) == [f"d{name}{n}" for name in "ab" for n in range(4)]
    assert (made.rows, made.exact) == (8, True)


def test_a_second_start_has_the_same_plan_and_does_not_write_it_again(tmp_path, run):
    write_lines(tmp_path / "a.jsonl", row(0))
    made = plan.make(job(tmp_path), run)
    before = run.plan_json.stat()
    assert plan.make(job(tmp_path), run) == made
    assert run.plan_json.stat().st_ino == before.st_ino


def test_known_files_in_their_present_state_are_not_opened_again(tmp_path, run, opened):
    write_lines(tmp_path / "a.jsonl", row(0))
    write_groups(tmp_path / "b.parquet", pa.table({"id": ["a"], "text": ["x"]}))
    asked = job(tmp_path, tmp_path / "*.jsonl", tmp_path / "*.parquet")
    made = plan.make(asked, run)
    assert set(opened) == {str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")}
    opened.clear()
    assert plan.make(asked, run) == made
    assert opened == []


def test_only_files_that_changed_or_are_new_are_opened(tmp_path, run, opened):
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", row(0))
    plan.make(job(tmp_path), run)
    opened.clear()
    age(tmp_path / "b.jsonl")
    write_lines(tmp_path / "d.jsonl", row(0))
    plan.make(job(tmp_path), run)
    assert set(opened) == {str(tmp_path / "b.jsonl"), str(tmp_path / "d.jsonl")}


@pytest.mark.parametrize("change", [{"id_field": None}, {"text_field": "body"}, {"keep": ["k"]}])
def test_files_that_are_read_in_another_way_are_opened_and_keep_their_splits(tmp_path, run, opened, change):
    path = write_lines(tmp_path / "a.jsonl", row(0, body="x"))
    first = {"path": str(path), "id_field": "id"}
    before = cuts(plan.make(job(tmp_path, first), run))
    opened.clear()
    assert cuts(plan.make(job(tmp_path, first | change), run)) == before
    assert opened == [str(path)]


def test_an_edited_min_chars_opens_nothing(tmp_path, run, opened):
    path = write_lines(tmp_path / "a.jsonl", row(0))
    plan.make(job(tmp_path, {"path": str(path)}), run)
    opened.clear()
    plan.make(job(tmp_path, {"path": str(path), "min_chars": 1}), run)
    assert opened == []


def test_a_new_file_appends_splits_wherever_its_name_stands(tmp_path, run):
    write_lines(tmp_path / "b.jsonl", row(0))
    before = plan.make(job(tmp_path), run)
    write_lines(tmp_path / "a.jsonl", row(1))
    after = plan.make(job(tmp_path), run)
    assert [(index, name) for index, name, *_ in cuts(after)] == [(1, "a.jsonl"), (0, "b.jsonl")]
    assert cuts(before)[0] in cuts(after)
    assert ids(job(tmp_path), after) == ["d1", "d0"]


@pytest.mark.parametrize("end", ["\n", ""])
def test_an_appended_jsonl_gets_splits_for_its_tail_only(tmp_path, run, end):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1)) + end)
    old = path.stat().st_size
    before = plan.make(job(tmp_path), run)
    with path.open("a") as stream:
        stream.write(("" if end else "\n") + json.dumps(row(2)) + "\n" + json.dumps(row(3)) + "\n")
    after = plan.make(job(tmp_path), run)
    assert cuts(before) == [(0, "a.jsonl", 0, old)]
    assert cuts(after) == [(0, "a.jsonl", 0, old), (1, "a.jsonl", old, path.stat().st_size)]
    assert ids(job(tmp_path), after) == ["d0", "d1", "d2", "d3"]
    assert after.rows == 4


def test_a_line_that_was_half_written_belongs_to_the_split_it_began_in(tmp_path, run):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row(n)) + "\n" for n in range(3)]
    path.write_text(lines[0] + lines[1][:9])
    plan.make(job(tmp_path), run)
    with path.open("a") as stream:
        stream.write(lines[1][9:] + lines[2])
    after = plan.make(job(tmp_path), run)
    found = [[one.id for one in open_source(job(tmp_path), 0, str(path)).read(split)] for split in after.splits]
    assert found == [["d0", "d1"], ["d2"]]


def test_a_jsonl_that_grows_between_the_look_and_the_cut_is_cut_to_what_was_looked_at(tmp_path, run, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", row(0))

    def grow_then_open(job, number, name):
        at = open_source(job, number, name)
        facts = at.facts

        def grow():
            found = facts()
            with path.open("a") as stream:
                stream.write(json.dumps(row(1)) + "\n")
            return found

        at.facts = grow
        return at

    with monkeypatch.context() as patch:
        patch.setattr(plan, "open_source", grow_then_open)
        first = plan.make(job(tmp_path), run)
    assert ids(job(tmp_path), first) == ["d0"]
    assert ids(job(tmp_path), plan.make(job(tmp_path), run)) == ["d0", "d1"]


@pytest.mark.parametrize("records", [[row(7)], [row(7), row(8)], [row(0, text="so much longer than before" * 3)]])
def test_a_rewritten_file_keeps_no_row_of_the_old_one(tmp_path, run, records):
    path = write_lines(tmp_path / "a.jsonl", row(0), row(1))
    plan.make(job(tmp_path), run)
    write_lines(path, *records)
    age(path)
    after = plan.make(job(tmp_path), run)
    assert ids(job(tmp_path), after) == [f"{one['id']}" for one in records]


def test_a_rewritten_file_gets_new_splits_and_the_old_ones_stay_as_gaps(tmp_path, run):
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", row(0), row(1))
    plan.make(job(tmp_path), run)
    size = (tmp_path / "b.jsonl").stat().st_size
    age(write_lines(tmp_path / "b.jsonl", row(1), row(0)))
    assert (tmp_path / "b.jsonl").stat().st_size == size
    after = cuts(plan.make(job(tmp_path), run))
    assert [(index, name) for index, name, *_ in after] == [(0, "a.jsonl"), (3, "b.jsonl"), (2, "c.jsonl")]
    assert len(json.loads(run.plan_json.read_text())["splits"]) == 4


def test_a_parquet_file_that_grew_is_cut_anew(tmp_path, run):
    group = pa.table({"id": ["a"], "text": ["x"]})
    path = write_groups(tmp_path / "a.parquet", group)
    plan.make(job(tmp_path, path), run)
    write_groups(path, group, group)
    assert cuts(plan.make(job(tmp_path, path), run)) == [(1, "a.parquet", 0, 2)]


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_packed_file_that_grew_is_cut_anew(tmp_path, run, before, after):
    path = tmp_path / "a.jsonl"

    def write(count, packed):
        lines = b"".join(json.dumps(row(n, text=f"text {n}" * 99)).encode() + b"\n" for n in range(count))
        path.write_bytes(gzip.compress(lines) if packed else lines)
        return path.stat().st_size

    asked = job(tmp_path)
    old = write(2, before)
    plan.make(asked, run)
    size = write(2000, after)
    assert size > old
    made = plan.make(asked, run)
    indices, _, starts, ends = zip(*cuts(made), strict=True)
    assert 0 not in indices
    assert (starts[0], ends[-1]) == (0, size)
    assert (len(indices) == 1) is after
    assert len(ids(asked, made)) == 2000


def test_a_file_that_another_input_means_now_is_cut_anew(tmp_path, run):
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", row(0))
    plan.make(job(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl"), run)
    after = plan.make(job(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl"), run)
    assert [(split.index, split.input) for split in after.splits] == [(2, 0), (3, 1)]


def test_a_deleted_file_leaves_the_plan_and_finds_its_splits_when_it_returns(tmp_path, run, opened):
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", row(name))
    before = plan.make(job(tmp_path), run)
    shutil.move(tmp_path / "a.jsonl", tmp_path / "aside")
    without = plan.make(job(tmp_path), run)
    assert cuts(without) == cuts(before)[1:]
    shutil.move(tmp_path / "aside", tmp_path / "a.jsonl")
    opened.clear()
    assert plan.make(job(tmp_path), run) == before
    assert opened == []


def test_the_rows_that_are_known_are_those_of_the_files_that_are_there(tmp_path, run):
    write_lines(tmp_path / "a.jsonl", *map(row, range(3)))
    write_lines(tmp_path / "b.jsonl", *map(row, range(4)))
    assert plan.known_rows(run) == (None, False)
    plan.make(job(tmp_path), run)
    assert plan.known_rows(run) == (7, True)
    (tmp_path / "b.jsonl").rename(tmp_path / "b")
    plan.make(job(tmp_path), run)
    assert plan.known_rows(run) == (3, True)
    (tmp_path / "b").rename(tmp_path / "b.jsonl")
    plan.make(job(tmp_path), run)
    assert plan.known_rows(run) == (7, True)


def test_an_estimate_stays_one_over_starts(tmp_path, run, monkeypatch):
    monkeypatch.setattr("batchgen.sources.jsonl._COUNT_BYTES", 10)
    monkeypatch.setattr("batchgen.sources.jsonl._SAMPLE_BYTES", 10)
    write_lines(tmp_path / "a.jsonl", *map(row, range(3)))
    assert not plan.make(job(tmp_path), run).exact
    assert not plan.make(job(tmp_path), run).exact
    assert plan.known_rows(run)[1] is False


@pytest.mark.parametrize("data", [b"", b"{"])
def test_of_a_plan_that_cannot_be_read_no_rows_are_known(run, data):
    run.plan_json.parent.mkdir(parents=True, exist_ok=True)
    run.plan_json.write_bytes(data)
    assert plan.known_rows(run) == (None, False)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff"])
def test_a_plan_that_cannot_be_read_is_named_with_the_way_out(tmp_path, run, data):
    write_lines(tmp_path / "a.jsonl", row(0))
    run.plan_json.write_bytes(data)
    with pytest.raises(ConfigError, match=r"plan\.json: cannot be read: .*remove it"):
        plan.make(job(tmp_path), run)
    run.plan_json.unlink()
    assert len(plan.make(job(tmp_path), run).splits) == 1


# Types of kept fields


def kept(tmp_path, run, *columns):
    """The plan's type for a field kept from these files: an array is a Parquet column, None a JSONL file."""
    for n, column in enumerate(columns):
        if column is None:
            write_lines(tmp_path / f"{n}.jsonl", row(n, k=n))
        else:
            write_groups(tmp_path / f"{n}.parquet", pa.table({"text": ["x"] * len(column), "k": column}))
    inputs = [{"path": str(tmp_path / f"{n}.*"), "keep": ["k"]} for n in range(len(columns))]
    asked = job(tmp_path, *inputs)
    first = plan.make(asked, run).kept(asked)["k"]
    assert plan.make(asked, run).kept(asked)["k"] == first  # from plan.json, without the files
    return first


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ([pa.array([1])], pa.int64()),
        ([pa.array([1]), pa.array([2])], pa.int64()),
        ([pa.array([1], pa.int32()), pa.array([2], pa.int64())], pa.int64()),
        ([pa.array([1]), pa.nulls(1)], pa.int64()),
        ([pa.nulls(1), pa.array([1])], pa.int64()),
        ([pa.nulls(1)], pa.string()),
        ([pa.array([1]), pa.array([1.5])], pa.float64()),
        ([pa.array([1]), pa.array(["a"])], pa.string()),
        ([pa.array(["a"]), pa.array([1])], pa.string()),
        ([pa.array([1]), pa.array(["a"]), pa.array([1])], pa.string()),
        ([pa.array([True]), pa.array([1])], pa.string()),
        ([pa.array([["a"]])], pa.list_(pa.string())),
        ([None], pa.string()),
        ([None, pa.array([1])], pa.string()),
        ([pa.array([1]), None], pa.string()),
        ([pa.array([{"a": 1}]), pa.array([{"b": "x"}])], pa.struct([("a", pa.int64()), ("b", pa.string())])),
    ],
)
def test_the_type_of_a_kept_field_is_what_all_files_agree_on_else_text(tmp_path, run, columns, kind):
    assert kept(tmp_path, run, *columns) == kind


def test_a_field_that_one_file_lacks_has_the_type_of_the_others(tmp_path, run):
    write_groups(tmp_path / "a.parquet", pa.table({"text": ["x"], "k": [1]}))
    write_groups(tmp_path / "b.parquet", pa.table({"text": ["x"]}))
    asked = job(tmp_path, {"path": str(tmp_path / "*.parquet"), "keep": {"k": "ours", "none": "empty"}})
    assert plan.make(asked, run).kept(asked) == {"ours": pa.int64(), "empty": pa.string()}


def test_a_new_file_widens_the_type_the_plan_knows(tmp_path, run):
    write_groups(tmp_path / "a.parquet", pa.table({"text": ["x"], "k": [1]}))
    asked = job(tmp_path, {"path": str(tmp_path / "*.parquet"), "keep": ["k"]})
    assert plan.make(asked, run).kept(asked) == {"k": pa.int64()}
    write_groups(tmp_path / "b.parquet", pa.table({"text": ["x"], "k": ["a"]}))
    assert plan.make(asked, run).kept(asked) == {"k": pa.string()}
