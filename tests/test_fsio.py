"""Files come to be whole or not at all, and a failure says where and how much room is left."""

import errno
import os
import re
from pathlib import Path

import pytest

from batchgen import fsio
from batchgen.errors import OutputError


def failing(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_file_holds_what_was_written_and_its_folder_nothing_else(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    fsio.write_atomic(path, b"one")
    fsio.write_atomic(path, memoryview(b"two"))
    assert path.read_bytes() == b"two"
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_file_and_folder_are_on_disk_before_the_write_returns(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor):
        done.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        if done[-1][1].endswith("-file"):
            assert os.fstat(descriptor).st_size == 1  # nothing is left in a buffer
        fsync(descriptor)

    def spy_replace(one, other, **more):
        done.append(("replace", str(other)))
        replace(one, other, **more)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    path = tmp_path / "file"
    fsio.write_atomic(path, b"x", owner="7")
    assert done == [("fsync", str(tmp_path / ".tmp-7-file")), ("replace", str(path)), ("fsync", str(tmp_path))]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_leaves_the_old_content_and_tells_place_reason_and_room(tmp_path, monkeypatch, call, code):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(OutputError) as e:
            fsio.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    text = str(e.value)
    assert text.startswith(f"{path}: cannot be written: {os.strerror(code)}; ")
    assert int(re.search(r"([\d,]+) bytes are free", text)[1].replace(",", "")) > 0
    assert "\n" not in text
    assert e.value.__cause__.errno == code
    assert e.value.exit_status == 74


def test_a_write_into_no_folder_tells_so(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"file/below: cannot be written: (Not a directory|File exists)"):
        fsio.write_atomic(tmp_path / "file" / "below", b"x")


def test_a_write_over_a_folder_tells_so_and_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="folder: cannot be written: Is a directory"):
        fsio.write_atomic(tmp_path / "folder", b"x")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_a_failure_that_also_stops_the_clearing_up_is_told_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EROFS))
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))
    with pytest.raises(OutputError, match="Read-only file system"):
        fsio.write_atomic(tmp_path / "file", b"x")


def test_the_room_is_left_out_where_nobody_can_tell_it(tmp_path):
    text = str(fsio.output_error(tmp_path / "none" / "file", OSError(errno.EIO, "Input/output error")))
    assert "bytes are free" not in text
    assert "Input/output error" in text


def test_only_the_temporary_files_of_the_owner_are_cleared(tmp_path):
    names = [
        ".tmp-00000-a",
        ".tmp-00000-b-1",
        ".tmp-00001-a",
        ".tmp-0-a",
        "tmp-00000-a",
        "a",
        "part-00000-.tmp-00000-a",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    fsio.clear_temporary(tmp_path, "00000")
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(names[2:])
    fsio.clear_temporary(tmp_path / "none", "00000")


def test_a_temporary_file_that_cannot_be_cleared_is_told(tmp_path, monkeypatch):
    (tmp_path / ".tmp-00000-a").write_bytes(b"")
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))
    with pytest.raises(OutputError, match=r"\.tmp-00000-a: .*Read-only"):
        fsio.clear_temporary(tmp_path, "00000")


def test_a_rest_of_a_killed_write_does_not_stop_the_next_one(tmp_path):
    (tmp_path / ".tmp-00000-file").write_bytes(b"a longer rest than what is written now")
    fsio.write_atomic(tmp_path / "file", b"new", owner="00000")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_write_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  no Path is opened meanwhile
    for _ in range(20):
        fsio.write_atomic(tmp_path / "file", b"x")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_removal_is_on_disk_before_it_returns(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    fsio.remove(tmp_path / "file")
    assert synced == [tmp_path]


def test_a_removed_file_is_gone_and_none_is_fine(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    fsio.remove(tmp_path / "file")
    fsio.remove(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_is_left_by_an_error_changes_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    class Killed(BaseException):
        pass

    def leave(error):
        with fsio.atomic(path, owner="7") as stream:
            stream.write(b"half of it")
            raise error

    for error in (ValueError, Killed):
        with pytest.raises(error):
            leave(error)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    with fsio.atomic(path, owner="7") as stream:
        stream.write(b"ne")
        stream.write(b"w")
    assert path.read_bytes() == b"new"


def test_a_file_moves_into_a_folder_once(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fsio.move(path, tmp_path / "folder")
    fsio.move(path, tmp_path / "folder")
    assert (tmp_path / "folder/file").read_bytes() == b"x"
    assert not path.exists()
    (tmp_path / "other").write_bytes(b"")
    path.write_bytes(b"x")
    with pytest.raises(OutputError, match="cannot be written"):
        fsio.move(path, tmp_path / "other")


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("before", [None, b"", b"{}\n", b'{"x": "' + b"y" * 200_000 + b'"}\n'])
def test_what_is_whole_is_gone_on_with(tmp_path, before, records):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with fsio.open_append(path, records=records) as stream:
        stream.write("ä\n")
        assert path.read_bytes() == (before or b"") + "ä\n".encode()  # each line goes out at once


@pytest.mark.parametrize("room", [0, 1, 70_000])
@pytest.mark.parametrize("length", [10, 200_000])
def test_a_torn_last_line_of_any_length_is_cut_off(tmp_path, length, room):
    path = tmp_path / "file"
    path.write_bytes(b"{}\n" + b'{"x": "' + b"y" * length + bytes(room))
    with fsio.open_append(path, records=True) as stream:
        stream.write("{}\n")
    assert path.read_bytes() == b"{}\n{}\n"
