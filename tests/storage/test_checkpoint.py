"""What is done is read from the parts: newest rows, damage, whole files, commits, orphans."""

import json
import os
import shutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import document, job, keys, record, row, write_lines

from batchgen import plan
from batchgen.errors import OutputError
from batchgen.sinks.base import DamagedPartError
from batchgen.sinks.parquet import ParquetSink
from batchgen.sources import open_source
from batchgen.storage import checkpoint
from batchgen.storage.checkpoint import Committer, load, settle
from batchgen.storage.index import Visit
from batchgen.storage.rundir import RunDirectory
from batchgen.storage.view import View


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path / "out") as held:
        yield held


@pytest.fixture
def sink(run):
    return ParquetSink({}, owner=run.owner)


class Runs:
    """Attempts over the files of one folder, without engine and pipeline."""

    def __init__(self, folder, run, sink, **sections):
        self.folder, self.run, self.sink = folder, run, sink
        self.job = job(folder, **sections)

    def load(self, **over):
        self.plan = plan.make(self.job, self.run)
        return load(over.pop("job", self.job), self.plan.files, View(self.run, self.sink, self.plan.layout), **over)

    def committer(self, **over):
        files = {file.source: file for file in self.plan.files}
        attempt = self.run.next_attempt()
        self.run.telemetry(attempt).touch()
        return Committer(
            over.pop("job", self.job), self.run, self.sink, "f00d", attempt, files, layout=self.plan.layout
        )

    def attempt(self, *, stop_after=None):
        """Do what is not done, as the pipeline would: each file read, each document one row, one part at the end."""
        loaded = self.load()
        committer, done = self.committer(), 0
        for source in dict.fromkeys(split.source for split in self.plan.splits):
            if source in loaded.whole:
                continue
            for split in (one for one in self.plan.splits if one.source == source):
                for one in open_source(self.job, split.input, source).read(split):
                    new = loaded.index.visit(one.key, one.content) in (Visit.NEW, Visit.EDITED)
                    committer.read(one, waiting=new)
                    if new and (stop_after is None or done < stop_after):
                        committer.add([record(one)])
                        done += 1
            committer.ended(source)
        committer.commit()
        return loaded

    def rows(self):
        """(id, summary) of all rows, part by part."""
        found = [self.sink.read(path, ["id", "summary"]).to_pylist() for path in self.run.parts(".parquet")]
        return [[(one["id"], one["summary"]) for one in part] for part in found]


@pytest.fixture
def runs(tmp_path, run, sink):
    return Runs(tmp_path, run, sink)


def put(run, sink, attempt, number, *records, footer=None):
    path = run.part(attempt, number, sink.suffix)
    sink.write_part(path, records, fingerprint="f00d", footer=footer or {"version": 1, "attempt": attempt, "files": {}})
    return path


def versions(*texts):
    """Records of one document, each with another text."""
    return [record(document(1, text=text), summary=text) for text in texts]


# Loading: the newest row of a key


def test_without_parts_nothing_is_done(tmp_path, runs):
    write_lines(tmp_path / "a.jsonl", row(0))
    loaded = runs.load()
    assert (loaded.index.done, loaded.whole, loaded.damaged) == (0, {}, ())
    assert loaded.index.visit(document(1).key, document(1).content) is Visit.NEW


def test_every_committed_row_is_done_with_its_content(run, sink):
    put(run, sink, 1, 1, *map(record, range(3)))
    put(run, sink, 2, 1, *map(record, range(3, 5)))
    index = load(job(run.path), [], View(run, sink)).index
    assert index.done == 5
    assert set(index.unseen()) == {document(n).key for n in range(5)}
    for n in range(4):
        assert index.visit(document(n).key, document(n).content) is Visit.DONE
    assert index.visit(document(4).key, document(4, text="new").content) is Visit.EDITED


@pytest.mark.parametrize("places", [[(1, 1), (1, 2)], [(1, 2), (1, 10)], [(2, 9), (10, 1)], [(1, 1), (2, 1), (3, 1)]])
def test_of_rows_with_one_key_the_one_in_the_latest_part_holds(run, sink, places):
    texts = [f"text {n}" for n in range(len(places))]
    for place, one in sorted(zip(places, versions(*texts), strict=True), reverse=True):
        put(run, sink, *place, one, record(100 + place[0] * 20 + place[1]))
    index = load(job(run.path), [], View(run, sink)).index
    assert index.done == 1 + len(places)
    assert index.visit(document(1).key, document(1, text=texts[-1]).content) is Visit.DONE


def test_superseded_rows_are_removed_from_their_parts_at_load(run, sink):
    old, new = versions("old", "new")
    first = put(run, sink, 1, 1, record(0), old, record(2))
    second = put(run, sink, 1, 2, new)
    untouched = second.read_bytes()
    load(job(run.path), [], View(run, sink))
    assert sink.read(first, ["id"]).column("id").to_pylist() == ["d0", "d2"]
    assert second.read_bytes() == untouched
    again = first.read_bytes()
    load(job(run.path), [], View(run, sink))
    assert first.read_bytes() == again


def test_a_part_whose_rows_are_all_superseded_is_removed(run, sink):
    old, new = versions("old", "new")
    first, second = put(run, sink, 1, 1, old), put(run, sink, 2, 1, new)
    assert load(job(run.path), [], View(run, sink)).index.done == 1
    assert run.parts(".parquet") == [second]
    assert not first.exists()


def test_superseded_rows_of_several_keys_and_parts_are_told_apart(run, sink):
    """Random rows over parts, against a dict that later parts overwrite."""
    dice = np.random.default_rng(7)
    newest, expected = {}, {}
    for attempt in range(1, 8):
        ids = sorted({int(n) for n in dice.integers(0, 30, 12)})
        path = put(run, sink, attempt, 1, *[record(document(n, text=f"{attempt}"), summary=f"{attempt}") for n in ids])
        newest |= dict.fromkeys(ids, (path, attempt))
    for n, (path, _) in newest.items():
        expected.setdefault(path, set()).add(f"d{n}")
    index = load(job(run.path), [], View(run, sink)).index
    assert index.done == len(newest)
    found = {path: set(sink.read(path, ["id"]).column("id").to_pylist()) for path in run.parts(".parquet")}
    assert found == expected
    for n, (_, attempt) in newest.items():
        assert index.visit(document(n).key, document(n, text=f"{attempt}").content) is Visit.DONE


def test_keys_that_share_a_half_are_told_apart(run, sink):
    halves = [b"\x00" * 8, b"\x01" * 8, b"\xff" * 8]
    keys = [one + other for one in halves for other in halves]
    put(run, sink, 1, 1, *[record(document(n, key=key)) for n, key in enumerate(keys)])
    put(run, sink, 2, 1, *[record(document(n, key=key, text="new")) for n, key in enumerate(keys[:7])])
    index = load(job(run.path), [], View(run, sink)).index
    assert index.done == 9
    edited = [index.visit(key, document(0).content) is Visit.EDITED for key in keys]
    assert edited == [True] * 7 + [False] * 2


def test_rows_without_an_id_are_known_by_their_key_alone(run, sink):
    put(run, sink, 1, 1, *[record(document(n, id=None, id_type=None)) for n in range(3)])
    assert load(job(run.path), [], View(run, sink)).index.done == 3


# Loading: damage


@pytest.mark.parametrize("damage", [b"", b"PAR1 and nothing", None])
def test_a_damaged_part_is_set_aside_and_named_and_its_documents_are_not_done(run, sink, damage):
    good = put(run, sink, 1, 1, record(0))
    bad = put(run, sink, 1, 2, record(1))
    data = bad.read_bytes()
    bad.write_bytes(data[: len(data) // 2] if damage is None else damage)
    kept = bad.read_bytes()
    loaded = load(job(run.path), [], View(run, sink))
    (told,) = loaded.damaged
    assert told.startswith(f"{bad.name}: ")
    assert "moved to damaged/" in told
    assert (run.damaged / bad.name).read_bytes() == kept
    assert run.parts(".parquet") == [good]
    assert loaded.index.done == 1
    assert loaded.index.visit(document(1).key, document(1).content) is Visit.NEW
    assert load(job(run.path), [], View(run, sink)).damaged == ()


def test_when_the_part_with_the_newer_row_is_damaged_the_older_row_holds(run, sink):
    old, new = versions("old", "new")
    put(run, sink, 1, 1, old)
    put(run, sink, 2, 1, new).write_bytes(b"")
    index = load(job(run.path), [], View(run, sink)).index
    assert index.visit(document(1).key, document(1, text="new").content) is Visit.EDITED


def test_all_parts_damaged_is_a_run_with_nothing_done(run, sink):
    for number in (1, 2):
        put(run, sink, 1, number, record(number)).write_bytes(b"x")
    loaded = load(job(run.path), [], View(run, sink))
    assert (loaded.index.done, len(loaded.damaged)) == (0, 2)


def break_summaries(path):
    """Damage that a look at the keys does not meet."""
    meta = pq.read_metadata(path).row_group(0)
    column = next(meta.column(n) for n in range(meta.num_columns) if meta.column(n).path_in_schema == "summary")
    data = bytearray(path.read_bytes())
    at = column.dictionary_page_offset
    data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)


def long(*numbers):
    return [record(n, summary=f"{n} summary " * 30) for n in numbers]


def test_damage_that_shows_when_superseded_rows_are_removed_sets_the_part_aside(run, sink):
    bad = put(run, sink, 1, 1, *long(*range(20)))
    put(run, sink, 2, 1, record(document(3, text="new")))
    break_summaries(bad)
    loaded = load(job(run.path), [], View(run, sink))
    (told,) = loaded.damaged
    assert told.startswith(f"{bad.name}: ")
    assert (run.damaged / bad.name).exists()
    assert loaded.index.done == 1
    assert loaded.index.visit(document(3).key, document(3, text="new").content) is Visit.DONE
    assert loaded.index.visit(document(4).key, document(4).content) is Visit.NEW


def test_damage_that_shows_when_orphans_move_ends_with_the_part_set_aside(run, sink):
    bad = put(run, sink, 1, 1, *long(*range(20)))
    break_summaries(bad)
    with pytest.raises(OutputError, match=rf"{bad.name}: .*start the same command again"):
        settle(View(run, sink), keys(3))
    assert (run.damaged / bad.name).exists()
    assert load(job(run.path), [], View(run, sink)).index.done == 0


def test_a_damaged_part_found_when_settling_is_set_aside_and_ends_the_run(run, sink):
    put(run, sink, 1, 1, record(0))
    put(run, sink, 1, 2, record(1)).write_bytes(b"")
    with pytest.raises(OutputError, match="start the same command again"):
        settle(View(run, sink), keys())
    settle(View(run, sink), keys())


def test_a_damaged_part_that_cannot_be_moved_is_an_output_error(run, sink):
    put(run, sink, 1, 1, record(0)).write_bytes(b"")
    run.damaged.write_bytes(b"in the way")
    with pytest.raises(OutputError, match=r"part-00001-00000-000001\.parquet: cannot be written"):
        load(job(run.path), [], View(run, sink))


# Whole files


def two_files(tmp_path):
    write_lines(tmp_path / "a.jsonl", *map(row, range(4)))
    write_lines(tmp_path / "b.jsonl", *map(row, range(10, 13)))


def whole(loaded):
    return sorted(source.rsplit("/", 1)[-1] for source in loaded.whole)


def told(runs):
    """Names of the files that a part calls whole."""
    footers = [runs.sink.read_keys(path).footer for path in runs.run.parts(".parquet")]
    return sorted(source.rsplit("/", 1)[-1] for footer in footers for source in footer["files"])


def test_files_are_whole_when_every_row_is_committed(tmp_path, runs):
    two_files(tmp_path)
    assert whole(runs.attempt()) == []
    loaded = runs.load()
    assert whole(loaded) == ["a.jsonl", "b.jsonl"]
    assert sorted(tally.rows for tally in loaded.whole.values()) == [3, 4]
    assert list(loaded.index.unseen()) == []


@pytest.mark.parametrize("stop_after", range(1, 8))
def test_a_file_is_told_whole_only_when_its_last_row_is_committed(tmp_path, runs, stop_after):
    two_files(tmp_path)
    runs.attempt(stop_after=stop_after)
    expected = [] if stop_after < 4 else ["a.jsonl"] if stop_after < 7 else ["a.jsonl", "b.jsonl"]
    assert told(runs) == whole(runs.load()) == expected
    runs.attempt()
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl"]
    assert sum(map(len, runs.rows())) == 7


def test_rows_committed_before_the_file_was_read_to_its_end_do_not_make_it_whole(tmp_path, runs):
    two_files(tmp_path)
    runs.load()
    source = runs.plan.files[0].source
    committer = runs.committer()
    for n in range(4):
        one = document(n, source=source)
        committer.read(one, waiting=True)
        committer.add([record(one)])
    committer.commit()
    assert whole(runs.load()) == []
    committer.add([record(document(99, source="b.jsonl"))])
    committer.ended(source)
    committer.commit()
    assert whole(runs.load()) == ["a.jsonl"]


def test_a_whole_file_is_told_once(tmp_path, runs):
    two_files(tmp_path)
    runs.load()
    source = runs.plan.files[0].source
    committer = runs.committer()
    committer.read(document(0, source=source), waiting=True)
    committer.ended(source)
    for n in range(3):
        committer.add([record(document(n, source=source if n == 0 else "b.jsonl"))])
        committer.commit()
    told = [sorted(runs.sink.read_keys(path).footer["files"]) for path in runs.run.parts(".parquet")]
    assert told == [[source], [], []]


def test_rows_done_in_an_earlier_attempt_count_for_a_whole_file(tmp_path, runs):
    two_files(tmp_path)
    runs.attempt(stop_after=3)
    runs.attempt()
    files = runs.sink.read_keys(runs.run.parts(".parquet")[-1]).footer["files"]
    assert {source.rsplit("/", 1)[-1]: told["rows"] for source, told in files.items()} == {"a.jsonl": 4, "b.jsonl": 3}


def finished(tmp_path, runs):
    two_files(tmp_path)
    runs.attempt()
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl"]


def test_a_file_that_grew_is_not_whole(tmp_path, runs):
    finished(tmp_path, runs)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write(json.dumps(row(5)) + "\n")
    loaded = runs.load()
    assert whole(loaded) == ["b.jsonl"]
    assert set(loaded.index.unseen()) == {
        one.key for split in runs.plan.splits if split.source.endswith("a.jsonl")
        for one in open_source(runs.job, 0, split.source).read(split) if one.id != "d5"
    }  # fmt: skip


def test_a_file_with_another_time_is_not_whole(tmp_path, runs):
    finished(tmp_path, runs)
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))
    assert whole(runs.load()) == ["b.jsonl"]


@pytest.mark.parametrize("change", [{"id_field": None}, {"text_field": "title"}, {"keep": ["title"]}])
def test_files_that_are_read_in_another_way_are_not_whole(tmp_path, runs, change):
    finished(tmp_path, runs)
    other = {"path": str(tmp_path / "*.jsonl"), "id_field": "id"} | change
    assert whole(runs.load(job=job(tmp_path, other))) == []


def test_files_that_another_prompt_reads_are_not_whole(tmp_path, runs):
    finished(tmp_path, runs)
    assert whole(runs.load(job=job(tmp_path, prompt={"user": "{{ title }} {{ text }}"}))) == []


def test_a_file_whose_rows_moved_to_a_damaged_part_is_not_whole(tmp_path, runs):
    two_files(tmp_path)
    runs.attempt(stop_after=3)
    runs.attempt()
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl"]
    runs.run.parts(".parquet")[0].write_bytes(b"")
    loaded = runs.load()
    assert whole(loaded) == ["b.jsonl"]
    runs.attempt()
    assert sorted(one for part in runs.rows() for one, _ in part) == sorted(f"d{n}" for n in (0, 1, 2, 3, 10, 11, 12))


def test_a_file_with_a_row_too_many_in_the_parts_is_not_whole(tmp_path, runs, run, sink):
    finished(tmp_path, runs)
    put(run, sink, 9, 1, record(document(50, source=str(tmp_path / "a.jsonl"))))
    assert whole(runs.load()) == ["b.jsonl"]


def test_a_file_whose_rows_were_replaced_from_another_file_is_not_whole(tmp_path, runs):
    finished(tmp_path, runs)
    write_lines(tmp_path / "c.jsonl", row(0, text="edited, and moved here"))
    write_lines(tmp_path / "a.jsonl", *map(row, range(1, 4)))
    runs.attempt()
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    # The old row of d0 came from a.jsonl: it counts no more, and what is left adds up.
    assert [sorted(one for one, _ in part) for part in runs.rows()] == [["d1", "d10", "d11", "d12", "d2", "d3"], ["d0"]]


def test_a_file_that_has_as_many_rows_as_documents_but_others_is_not_whole(tmp_path, runs):
    """Rows keep their source when documents move: after an exchange the numbers still add up."""
    write_lines(tmp_path / "a.jsonl", row(1))
    write_lines(tmp_path / "b.jsonl", row(2))
    runs.attempt()
    write_lines(tmp_path / "a.jsonl", row(2))
    write_lines(tmp_path / "b.jsonl", row(1), row(3))
    runs.attempt()
    assert whole(runs.load()) == []


def test_a_file_whose_rows_hold_another_text_is_not_whole(tmp_path, runs):
    """A pass over an edited file was cut short; then the file of before came back, size and time and all."""
    path = write_lines(tmp_path / "a.jsonl", row(1, text="one"), row(2, text="one"))
    was = path.read_bytes(), path.stat()
    runs.attempt()
    write_lines(path, row(1, text="two, or three"), row(2, text="one"), row(3))
    runs.attempt(stop_after=1)
    path.write_bytes(was[0])
    os.utime(path, ns=(was[1].st_atime_ns, was[1].st_mtime_ns))
    assert whole(runs.load()) == []
    runs.attempt()
    assert whole(runs.load()) == ["a.jsonl"]


def test_of_two_tellings_about_a_file_the_later_holds(tmp_path, runs):
    finished(tmp_path, runs)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write(json.dumps(row(5)) + "\n")
    runs.attempt()
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl"]


def test_a_telling_outlives_the_rewriting_of_its_part(tmp_path, runs):
    finished(tmp_path, runs)
    write_lines(tmp_path / "b.jsonl", row(10, text="edited"), row(11), row(12))
    runs.attempt()
    runs.load()
    assert [sorted(one for one, _ in part) for part in runs.rows()][1] == ["d10"]
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl"]


# Commits


def test_a_commit_writes_what_was_gathered_as_one_part_and_only_once(tmp_path, runs):
    two_files(tmp_path)
    runs.load()
    committer = runs.committer()
    assert committer.commit() == 0
    committer.add(map(record, range(3)))
    committer.add([record(3)])
    assert committer.commit() == 4
    assert committer.commit() == 0
    committer.add([record(4)])
    assert committer.commit() == 1
    names = [path.name for path in runs.run.parts(".parquet")]
    assert names == ["part-00001-00000-000001.parquet", "part-00001-00000-000002.parquet"]
    assert [[one for one, _ in part] for part in runs.rows()] == [["d0", "d1", "d2", "d3"], ["d4"]]
    assert (committer.parts, committer.rows) == (2, 5)
    assert 0 < committer.seconds < 60


def test_a_footer_tells_attempt_and_splits(tmp_path, runs):
    two_files(tmp_path)
    runs.load()
    runs.run.telemetry(6).touch()
    committer = runs.committer()
    committer.add(record(document(n, split=split)) for n, split in enumerate([4, 2, 4, 9]))
    committer.commit()
    (path,) = runs.run.parts(".parquet")
    footer = runs.sink.read_keys(path).footer
    assert (footer["version"], footer["attempt"], footer["splits"]) == (1, 7, [2, 4, 9])
    assert path.name.startswith("part-00007-")
    assert pa.compute.unique(runs.sink.read(path, ["fingerprint"]).column("fingerprint")).to_pylist() == ["f00d"]


def test_a_part_is_due_at_so_many_rows(tmp_path, runs):
    two_files(tmp_path)
    runs.load()
    committer = runs.committer(job=job(tmp_path, checkpoint={"rows": 3, "interval_s": 1000}))
    due = [committer.due]
    for n in range(4):
        committer.add([record(n)])
        due.append(committer.due)
    assert due == [False, False, False, True, True]
    committer.commit()
    assert not committer.due


def test_a_part_is_due_so_long_after_its_first_row(tmp_path, runs, monkeypatch):
    two_files(tmp_path)
    runs.load()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    committer = runs.committer(job=job(tmp_path, checkpoint={"rows": 1000, "interval_s": 30}))
    now[0] += 500
    assert not committer.due  # nothing to write, however long ago
    committer.add([])
    committer.add([record(0)])
    assert not committer.due
    now[0] += 29
    committer.add([record(1)])
    assert not committer.due
    now[0] += 1
    assert committer.due  # counted from the first row, not the last
    committer.commit()
    now[0] += 100
    committer.add([record(2)])
    assert not committer.due


def test_a_commit_that_fails_is_an_output_error_and_tells_no_file_whole(tmp_path, runs, monkeypatch):
    two_files(tmp_path)
    runs.load()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        committer = runs.committer()
        committer.add([record(0)])
        with pytest.raises(OutputError, match="No space left on device"):
            committer.commit()
    assert runs.rows() == []
    runs.attempt()
    assert sum(map(len, runs.rows())) == 7


# Settling


def test_orphans_move_to_a_part_of_the_same_name(run, sink):
    first = put(run, sink, 1, 1, *map(record, range(4)))
    second = put(run, sink, 1, 2, *map(record, range(4, 6)))
    third = put(run, sink, 1, 3, record(6))
    untouched = third.read_bytes()
    settle(View(run, sink), keys(1, 4, 5))
    assert sink.read(first, ["id"]).column("id").to_pylist() == ["d0", "d2", "d3"]
    assert not second.exists()
    assert third.read_bytes() == untouched
    moved = {path.name: sink.read(path, ["id"]).column("id").to_pylist() for path in sorted(run.orphans.iterdir())}
    assert moved == {first.name: ["d1"], second.name: ["d4", "d5"]}
    assert load(job(run.path), [], View(run, sink)).index.done == 4


# A move is two writes, each of them fsync, replace, fsync of the folder: killed at every step of it.
STEPS = ["fsync", "replace", "fsync", "fsync", "replace", "fsync"]


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_settling_that_was_cut_short_is_finished_by_the_next(run, sink, monkeypatch, step):
    path = put(run, sink, 1, 1, *map(record, range(4)))
    met = []

    def killed_at_its_step(name):
        real = getattr(os, name)

        def call(*args, **more):
            if len(met) == step:
                raise KeyboardInterrupt
            met.append(name)
            return real(*args, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, killed_at_its_step(name))
        with pytest.raises(KeyboardInterrupt):
            settle(View(run, sink), keys(1, 3))
    assert met == STEPS[:step]
    moved = step == 5
    assert load(job(run.path), [], View(run, sink)).index.done == (2 if moved else 4)  # nothing is lost in between
    for _ in range(2):
        settle(View(run, sink), keys(1, 3))
    assert sink.read(path, ["id"]).column("id").to_pylist() == ["d0", "d2"]
    assert sink.read(run.orphans / path.name, ["id"]).column("id").to_pylist() == ["d1", "d3"]


def test_settling_removes_superseded_rows(run, sink):
    old, new = versions("old", "new")
    first = put(run, sink, 1, 1, record(0), old)
    put(run, sink, 2, 1, new)
    settle(View(run, sink), keys())
    assert sink.read(first, ["id"]).column("id").to_pylist() == ["d0"]
    assert not run.orphans.exists()


def test_superseded_rows_are_no_orphans_even_in_a_part_that_has_some(run, sink):
    old, new = versions("old", "new")
    first = put(run, sink, 1, 1, record(0), old, record(2))
    second = put(run, sink, 2, 1, new)
    settle(View(run, sink), keys(2))
    assert sink.read(first, ["id"]).column("id").to_pylist() == ["d0"]
    assert sink.read(second, ["id", "summary"]).to_pylist() == [{"id": "d1", "summary": "new"}]
    assert sink.read(run.orphans / first.name, ["id"]).column("id").to_pylist() == ["d2"]


def test_a_part_of_superseded_rows_and_orphans_is_removed(run, sink):
    old, new = versions("old", "new")
    first = put(run, sink, 1, 1, old)
    other = put(run, sink, 1, 2, record(2))
    put(run, sink, 2, 1, new)
    settle(View(run, sink), keys(2))
    assert not first.exists()
    assert not other.exists()


def test_a_superseded_row_of_an_orphan_is_removed_and_the_newest_moves(run, sink):
    old, new = versions("old", "new")
    first, second = put(run, sink, 1, 1, old), put(run, sink, 2, 1, new, record(2))
    settle(View(run, sink), keys(1))
    assert run.parts(".parquet") == [second]
    assert sink.read(second, ["id"]).column("id").to_pylist() == ["d2"]
    assert [path.name for path in run.orphans.iterdir()] == [second.name]
    assert sink.read(run.orphans / second.name, ["summary"]).column("summary").to_pylist() == ["new"]
    assert not first.exists()


def test_documents_of_a_file_that_is_gone_are_orphans_after_a_whole_pass(tmp_path, runs):
    finished(tmp_path, runs)
    (tmp_path / "a.jsonl").unlink()
    loaded = runs.attempt()
    assert len(list(loaded.index.unseen())) == 4
    settle(View(runs.run, runs.sink), loaded.index.unseen())
    assert sorted(one for part in runs.rows() for one, _ in part) == ["d10", "d11", "d12"]
    assert whole(runs.load()) == ["b.jsonl"]


def test_a_document_that_returns_after_it_was_an_orphan_is_done_again(tmp_path, runs):
    finished(tmp_path, runs)
    shutil.move(tmp_path / "a.jsonl", tmp_path / "aside")
    loaded = runs.attempt()
    settle(View(runs.run, runs.sink), loaded.index.unseen())
    shutil.move(tmp_path / "aside", tmp_path / "a.jsonl")
    assert whole(runs.load()) == ["b.jsonl"]
    runs.attempt()
    assert sum(map(len, runs.rows())) == 7
    assert whole(runs.load()) == ["a.jsonl", "b.jsonl"]


def test_the_sink_is_all_that_is_asked(run, sink, monkeypatch):
    """Damage is what the sink says it is: a part it cannot read is set aside whatever lies in it."""
    path = put(run, sink, 1, 1, record(0))

    def refuse(_):
        raise DamagedPartError("on purpose")

    monkeypatch.setattr(sink, "read_keys", refuse)
    assert checkpoint.load(job(run.path), [], View(run, sink)).damaged == (
        f"{path.name}: on purpose; moved to damaged/, its documents are done again",
    )
