"""Packed files and long lines: nothing before a damage is lost, and no line is too long for memory."""

import contextlib
import gzip
import io
import json
import random
import re
import subprocess
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from helpers_data import PROPERTY, documents, packed, row, source
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data import Split
from batchgen.errors import InputError
from batchgen.sources import streams
from batchgen.sources.streams import (
    DamagedStreamError,
    LongLine,
    format_ending,
    is_packed,
    open_stream,
    position,
    read_line,
)

PACKINGS = ["gzip", "zstd"]
ENDINGS = {"gzip": ".gz", "zstd": ".zst"}
LINES = b"".join(b'{"id": %d, "text": "%s"}\n' % (n, b"harbour %d " % n * 40) for n in range(3000))


def content(path):
    """(all that can be unpacked, the damage)"""
    found = b""
    with open_stream(path) as stream:
        try:
            while block := stream.read1(50_000):
                found += block
        except DamagedStreamError as e:
            return found, str(e)
    return found, None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("pieces", [1, 2, 30])
def test_all_members_and_frames_are_unpacked(tmp_path, packing, pieces):
    size = len(LINES) // pieces + 1
    parts = [packed(LINES[n * size : (n + 1) * size], packing) for n in range(pieces)]
    path = tmp_path / "a"
    path.write_bytes(packed(b"", packing).join(parts))
    assert content(path) == (LINES, None)
    with open_stream(path) as stream:
        assert is_packed(stream)
        stream.read()
        assert position(stream) == path.stat().st_size


@pytest.mark.parametrize(
    ("command", "ending"), [(["pzstd", "-q"], ".zst"), (["gzip"], ".gz"), (["zstd", "-q"], ".zst")]
)
def test_what_the_usual_tools_write_is_unpacked(tmp_path, command, ending):
    (tmp_path / "a").write_bytes(LINES)
    try:
        subprocess.run([*command, str(tmp_path / "a")], check=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    assert content(tmp_path / f"a{ending}") == (LINES, None)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"])
@pytest.mark.parametrize("packing", [None, *PACKINGS])
def test_the_first_bytes_decide_and_not_the_name(tmp_path, name, packing):
    data = b'{"id": "a", "text": "one"}\n'
    path = tmp_path / name
    path.write_bytes(packed(data, packing) if packing else data)
    (document,) = documents(path, id_field="id")
    assert (document.id, document.place, document.error) == ("a", "byte 0", None)
    facts = source(path).facts()
    assert (facts.rows, facts.exact, facts.appendable) == (1, True, packing is None)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("a.jsonl", ".jsonl"), ("a.JSONL.GZ", ".jsonl"), ("a.b.json.zst", ".json"), ("x/y.json/a", ""), ("a.gz", ""),
        ("a.parquet", ".parquet"), ("a.jsonl.bz2", ".bz2"), ("jsonl", ""), (".jsonl", ""),
    ],
)  # fmt: skip
def test_the_ending_tells_the_format(name, ending):
    assert format_ending(name) == ending


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_empty_file_and_an_empty_content_have_no_records(tmp_path, packing):
    for n, data in enumerate((b"", packed(b"", packing), packed(b"\n\n", packing))):
        path = tmp_path / f"{n}.jsonl{ENDINGS[packing]}"
        path.write_bytes(data)
        assert documents(path) == []
        assert source(path).facts().rows == 0


# Damage.


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.67, 0.9999])
def test_all_that_stands_before_a_cut_is_unpacked(tmp_path, packing, share):
    whole = packed(LINES, packing)
    cut = whole[: max(4, int(len(whole) * share))]  # with less than that it is taken for text
    (tmp_path / "a").write_bytes(cut)
    found, damage = content(tmp_path / "a")
    assert damage == f"the {packing} stream is cut short"
    assert found == LINES[: len(found)]
    if packing == "gzip":  # as much as Python's own reader gets out, and that reads as far as a block goes
        reader, best = gzip.GzipFile(fileobj=io.BytesIO(cut)), b""
        with contextlib.suppress(EOFError, gzip.BadGzipFile):
            while block := reader.read1(1000):
                best += block
        assert found == best


@pytest.mark.parametrize("packing", PACKINGS)
def test_whole_records_before_a_cut_are_read_and_their_number_is_told(tmp_path, packing):
    path = tmp_path / f"a.jsonl{ENDINGS[packing]}"
    path.write_bytes(packed(LINES, packing))
    whole = documents(path, id_field="id")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    facts = source(path).facts()
    found, fault = read_all(path)
    assert 1000 < len(found) < len(whole)
    assert found == whole[: len(found)]
    assert fault.startswith(f"{path}: the {packing} stream is cut short after {len(found):,} records")
    assert (facts.rows, facts.exact) == (len(found), False)


def read_all(path):
    """(documents, the fault that ended them)"""
    at, found = source(path, id_field="id"), []
    try:
        for start, end in at.cut(begin=0, target_bytes=1000):
            found.extend(at.read(Split(0, 0, str(path), start, end)))
    except InputError as e:
        return found, str(e)
    return found, None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("tail", [b"garbage at the end", bytes(512)])
def test_what_is_no_packed_data_behind_a_whole_stream_is_told_after_all_its_records(tmp_path, packing, tail):
    path = tmp_path / f"a.jsonl{ENDINGS[packing]}"
    path.write_bytes(packed(LINES, packing) + tail)
    found, fault = read_all(path)
    assert re.search(f"the {packing} stream is damaged .* after 3,000 records", fault)
    assert len(found) == 3000


def test_a_bit_that_flipped_is_told(tmp_path):
    data = bytearray(gzip.compress(LINES))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    assert "the gzip stream is damaged" in read_all(path)[1]


def test_a_disk_that_fails_is_no_damaged_stream(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES))
    with open_stream(path) as stream:

        class Failing:
            def readinto(self, _):
                raise OSError(5, "Input/output error")

            def close(self):
                pass

        monkeypatch.setattr(stream.raw, "_stream", Failing())
        with pytest.raises(OSError, match="Input/output error"):
            stream.read(1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_large_file_is_estimated_from_its_beginning(tmp_path, monkeypatch, packing):
    monkeypatch.setattr("batchgen.sources.jsonl._COUNT_PACKED_BYTES", 1000)
    lines = b"".join(b'{"text": "%s"}\n' % random.randbytes(60).hex().encode() for n in range(120_000))
    path = tmp_path / "a.jsonl.x"
    path.write_bytes(packed(lines, packing))
    facts = source(path).facts()
    assert not facts.exact
    assert 108_000 < facts.rows < 132_000


@PROPERTY
@given(
    packing=st.sampled_from(PACKINGS),
    records=st.lists(st.text(max_size=30), max_size=8),
    members=st.integers(1, 3),
    drop=st.integers(0, 400),
)
def test_after_any_truncation_whole_records_are_right_or_the_file_is_told(packing, records, members, drop):
    lines = b"".join(row_line(n, text) for n, text in enumerate(records))
    size = len(lines) // members + 1
    data = b"".join(packed(lines[n * size : (n + 1) * size], packing) for n in range(members))
    left = data[: max(0, len(data) - drop)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl.gz"
        path.write_bytes(left)
        facts = source(path).facts()
        found, fault = read_all(path)
    # A file that is cut between two members is whole to every reader; its last line may be torn then.
    good = [one.text for one in found if not one.error]
    assert good == records[: len(good)]
    assert len(good) >= len(found) - (fault is None)
    assert fault is None or "is cut short after" in fault
    if len(left) == len(data):
        assert (fault, len(found), facts.exact) == (None, len(records), True)
    assert facts.rows == len(found)


def row_line(n, text):
    return json.dumps(row(n, text=text)).encode() + b"\n"


@PROPERTY
@given(head=st.sampled_from([b"\x1f\x8b", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", b"\x1f", b"\x28"]),
       data=st.binary(max_size=60))  # fmt: skip
def test_any_bytes_behind_a_packed_beginning_are_told_or_read(head, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(head + data)
        source(path).facts()
        fault = read_all(path)[1]
    assert fault is None or "stream is" in fault


# Lines.


def split_lines(data, buffer=16):
    stream = io.BufferedReader(io.BytesIO(data), buffer)
    found = []
    while line := read_line(stream):
        found.append(line)
    return found


@PROPERTY
@given(
    data=st.lists(st.sampled_from([b"\n", b"x", b"\r\n", b"yy" * 9, b"z" * 40]), max_size=20).map(b"".join),
    limit=st.integers(1, 50),
)
def test_lines_up_to_the_limit_come_whole_and_longer_ones_as_their_size(data, limit):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streams, "MAX_LINE_BYTES", limit)
        patched.setattr(streams, "_BUFFER", 7)
        found = split_lines(data)
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    lines = [line for line in lines if line]
    assert [len(line) for line in found] == [len(line) for line in lines]
    for one, line in zip(found, lines, strict=True):
        assert isinstance(one, LongLine) if len(line.removesuffix(b"\n")) > limit else one == line


def test_long_lines_differ_where_their_bytes_do(monkeypatch):
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 10)
    one, same, other = split_lines(b"x" * 50 + b"a\n" + b"x" * 50 + b"a\n" + b"x" * 50 + b"b\n")
    assert one == same != other


def test_a_long_line_is_never_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.truncate(64 << 20)  # one line of NULs, none of them on disk
        stream.seek(0, 2)
        stream.write(b"\n" + LINES)
    tracemalloc.start()
    assert len(documents(path)) == 3001
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("size", [0, 10, 5000, 100_000])
def test_what_stands_before_a_byte_is_the_same_where_the_file_was_only_appended_to(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(n * 7 % 251 for n in range(size)))
    before = streams.digest_before(path, size)
    with path.open("ab") as stream:
        stream.write(b"more")
    assert streams.digest_before(path, size) == before
    path.write_bytes(b"x" + path.read_bytes())
    assert size == 0 or streams.digest_before(path, size) != before
