"""JSONL: what a record is, what a broken one becomes, and that splits neither lose nor repeat one."""

import itertools
import json
import tempfile
from pathlib import Path

import pytest
from helpers_data import ALL, PROPERTY, documents, packed, read, row, source, write_lines
from hypothesis import assume, example, given
from hypothesis import strategies as st

from batchgen.errors import InputError

BOM = b"\xef\xbb\xbf"
GOOD = b'{"id": "a", "text": "one"}'


def texts(path, **item):
    return [document.text for document in documents(path, **item)]


def faults(path, **item):
    """(error type, sentence) by place of the documents that are none."""
    return {one.place: one.error for one in documents(path, **item) if one.error}


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\xa0"])
def test_records_end_at_lf_only(tmp_path, odd):
    one = f'{{"id": "a", "text": "left{odd}right"}}' if odd >= "\x20" else json.dumps({"id": "a", "text": f"left{odd}"})
    path = tmp_path / "a.jsonl"
    path.write_bytes(one.encode() + b"\n" + GOOD + b"\n")
    assert texts(path) == [json.loads(one)["text"], "one"]
    assert source(path).facts().rows == 2


def test_a_raw_separator_between_two_objects_makes_no_second_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + "\u2028".encode() + GOOD + b"\n" + GOOD + b"\n")
    found = documents(path)
    assert [document.error and document.error[0] for document in found] == ["bad_json", None]


def test_carriage_returns_before_lf_are_no_part_of_a_record_and_alone_end_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\r\n" + b'{"id": "b",\r"text": "two"}\r\n' + b"\r\n")
    assert texts(path) == ["one", "two"]


def test_a_last_line_without_lf_is_a_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD.replace(b"one", b"two"))
    assert texts(path) == ["one", "two"]
    assert source(path).facts().rows == 2


def test_boms_at_the_start_of_the_file_and_of_lines_are_no_part_of_a_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(BOM + GOOD + b"\n" + BOM + GOOD.replace(b"a", b"b") + b"\r\n" + GOOD.replace(b"a", b"c") + b"\n")
    found = documents(path, id_field="id")
    assert [(document.id, document.error) for document in found] == [("a", None), ("b", None), ("c", None)]
    assert [document.place for document in found] == ["byte 0", f"byte {len(GOOD) + 4}", f"byte {2 * len(GOOD) + 9}"]


def test_a_bom_inside_a_text_stays(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a\ufeffb"})
    assert texts(path) == ["a\ufeffb"]


@pytest.mark.parametrize("blank", [b"", b" ", b"\t \r", BOM, BOM + b"\r", BOM + b" "])
def test_blank_lines_are_no_records_and_are_not_counted(tmp_path, blank):
    path = write_lines(tmp_path / "a.jsonl", blank, GOOD, blank, blank, GOOD, blank)
    assert texts(path) == ["one", "one"]
    facts = source(path).facts()
    assert (facts.rows, facts.exact) == (2, True)


@pytest.mark.parametrize("odd", [b"\x0c", b"\x0b", b"\xc2\xa0"])
def test_white_space_that_json_does_not_know_is_a_broken_record_and_counted(tmp_path, odd):
    path = write_lines(tmp_path / "a.jsonl", odd, GOOD)
    assert [document.error and document.error[0] for document in documents(path)] == ["bad_json", None]
    assert source(path).facts().rows == 2


def test_an_empty_file_has_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    assert source(path).facts().rows == 0
    assert documents(path) == []


@pytest.mark.parametrize(
    "line",
    [b"{", b'{"text": "cut', b"nonsense", b'{"text": "a"} {"text": "b"}', b'{"text": "a"}\x00', b"{'text': 'a'}"],
)
def test_broken_json_is_a_failed_record_with_its_physical_line_and_the_next_line_is_read(tmp_path, line):
    path = write_lines(tmp_path / "a.jsonl", GOOD, b"", b"\r", line, GOOD)
    first, broken, last = documents(path, id_field="id")
    assert first.error is last.error is None
    kind, sentence = broken.error
    assert kind == "bad_json"
    assert sentence.startswith("line 4: ")
    assert "line 1" not in sentence
    assert broken.place == f"byte {len(GOOD) + 4}"
    assert (broken.id, broken.text) == (None, "")


def test_lines_are_numbered_over_the_whole_file_in_every_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[b"bad" if n % 3 == 0 else b'{"text": "%d"}' % 9**n for n in range(40)])
    found = documents(path, target_bytes=50)
    assert len(found) == 40
    numbers = [int(document.error[1].split(":")[0].removeprefix("line ")) for document in found if document.error]
    assert numbers == list(range(1, 41, 3))


def test_one_reader_numbers_lines_rightly_when_it_goes_back(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", b"", *[b"bad"] * 9)
    found = read(source(path), path, [(25, 37), (13, 25), (0, 13)])
    assert [document.error[1].split(":")[0] for document in found] == [
        f"line {n}" for n in (8, 9, 10, 5, 6, 7, 2, 3, 4)
    ]


def bytes_read():
    with Path("/proc/self/io").open() as stream:
        return int(stream.readline().removeprefix("rchar: "))


def test_numbering_the_lines_of_a_file_of_nothing_but_faults_reads_it_once_more_not_once_a_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[b"bad" * 30] * 2000)
    before = bytes_read()
    assert len(faults(path)) == 2000
    assert bytes_read() - before < 5 * path.stat().st_size


@pytest.mark.parametrize(
    ("line", "name"), [(b"[1]", "list"), (b'"a"', "str"), (b"7", "int"), (b"null", "NoneType"), (b"true", "bool")]
)
def test_a_line_that_is_no_object_is_a_failed_record(tmp_path, line, name):
    path = write_lines(tmp_path / "a.jsonl", GOOD, line)
    kind, sentence = documents(path)[1].error
    assert kind == "bad_json"
    assert sentence == f"line 2: the line is no object but {name}"


@pytest.mark.parametrize("odd", [b"\xff", b"\xc3", b"\xe2\x80", b"\xc0\xaf", b"\xf8\x88\x80\x80\x80"])
def test_bytes_that_are_no_utf8_harm_their_own_line_only(tmp_path, odd):
    path = write_lines(tmp_path / "a.jsonl", b'{"text": "' + odd + b'"}', GOOD)
    broken, good = documents(path)
    assert broken.error[0] == "bad_json"
    assert broken.error[1].startswith("line 1: ")
    assert (good.error, good.text) == (None, "one")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("bom", [True, False])
def test_a_utf16_file_is_refused_whole(tmp_path, encoding, bom):
    if not bom and encoding in ("utf-16", "utf-32"):
        encoding = "utf-16-le"
    path = tmp_path / "a.jsonl"
    path.write_bytes((GOOD.decode() + "\n").encode(encoding))
    with pytest.raises(InputError, match=r"a\.jsonl: is UTF-16"):
        source(path).facts()


def test_a_tail_of_nuls_is_one_broken_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + bytes(4096))
    good, tail = documents(path)
    assert (good.text, good.error) == ("one", None)
    assert tail.error[0] == "bad_json"
    assert tail.error[1].startswith("line 2: ")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 4096])
def test_a_record_after_nuls_does_not_pass_for_a_whole_one(tmp_path, count):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(count) + GOOD + b"\n" + GOOD + b"\n")
    found = documents(path)
    assert [document.error and document.error[0] for document in found] == ["bad_json", None]


@pytest.mark.parametrize("where", ["text", "k", "unread"])
def test_a_number_with_too_many_digits_harms_its_own_line_only(tmp_path, where):
    path = write_lines(tmp_path / "a.jsonl", b'{"text": "a", "%s": %s}' % (where.encode(), b"9" * 5000), GOOD)
    assert [document.error and document.error[0] for document in documents(path, keep=["k"])] == ["bad_json", None]


@pytest.mark.parametrize("depth", [*range(900, 1010, 3), 100_000])
def test_deep_nesting_harms_its_own_line_only(tmp_path, depth):
    path = write_lines(tmp_path / "a.jsonl", b'{"text": "a", "k": ' + b"[" * depth + b"]" * depth + b"}", GOOD)
    deep, good = documents(path, prompt=("text", "k"), keep=["k"])
    assert deep.error is None or deep.error[0] == "bad_json"
    assert good.error is None


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"id": "a", "text": "one", "text": "two"}', "text"),
        (b'{"id": "a", "id": "b", "text": "one"}', "id"),
        (b'{"id": "a", "text": "one", "k": 1, "k": 1}', "k"),
        (b'{"id": "a", "text": "one", "te\\u0078t": "two"}', "text"),
        (b'{"id": "a", "text": "one", "m": {"n": 1, "n": 2}}', "n"),
        (b'{"id": "a", "text": "one", "m": {"n": 1}, "m": 2}', "m"),
        (b'{"id": "a", "text": "one", "x.y": 1, "x.y": 2}', "x.y"),
    ],
)
def test_a_key_that_the_job_reads_and_that_stands_twice_is_a_failed_record(tmp_path, line, key):
    path = write_lines(tmp_path / "a.jsonl", GOOD, line, GOOD)
    first, broken, last = documents(path, id_field="id", keep=["k", "m.n", "x.y"])
    assert broken.error == ("bad_json", f"line 2: key {key!r} stands twice")
    assert (first.error, last.error, broken.id) == (None, None, None)


@pytest.mark.parametrize(
    "side",
    [b'"side": 1, "side": 2', b'"side": {"text": 1, "text": 2}', b'"m": {"o": 1, "o": 2}', b'"x": 1, "x": {"y": 2}'],
)
def test_a_key_that_nobody_reads_may_stand_twice(tmp_path, side):
    path = write_lines(tmp_path / "a.jsonl", b'{"id": "a", "text": "one", ' + side + b"}")
    (document,) = documents(path, id_field="id", keep=["m.n"])
    assert (document.text, document.error) == ("one", None)


def test_of_a_kept_object_with_doubled_keys_the_last_value_holds(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", b'{"text": "one", "m": {"n": 1, "n": 2}}')
    (document,) = documents(path, prompt=("text", "m"), keep=["m"])
    assert (document.keep, document.error) == ({"m": {"n": 2}}, None)


def test_what_is_wrong_with_a_record_is_told_with_its_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD, b"", {"id": "b"}, {"id": "c", "text": 7}, {"text": "x"}, GOOD)
    found = [document.error for document in documents(path, id_field="id", target_bytes=20) if document.error]
    assert [(kind, sentence.split(":")[0]) for kind, sentence in found] == [
        ("missing_text", "line 3"), ("text_type", "line 4"), ("missing_id", "line 5"),
    ]  # fmt: skip


@pytest.mark.parametrize("packing", [None, "gzip", "zstd"])
@pytest.mark.parametrize("target", [10, 100, ALL])
def test_a_line_over_the_limit_is_a_failed_record_and_the_next_line_is_read(tmp_path, monkeypatch, packing, target):
    monkeypatch.setattr("batchgen.sources.streams.MAX_LINE_BYTES", 60)
    path = write_lines(tmp_path / "a.jsonl", GOOD, b"", row("b", text="x" * 100), {"id": "c"}, b"y" * 61, GOOD)
    data = path.read_bytes()
    path.write_bytes(packed(data, packing) if packing else data)
    first, long, short, odd, last = documents(path, id_field="id", target_bytes=target)
    size = len(json.dumps(row("b", text="x" * 100)))
    assert long.error == ("record_too_large", f"line 3: the line has {size + 1} bytes, more than 60")
    assert long.place == f"byte {len(GOOD) + 2}"
    assert short.error[1].startswith("line 4: ")
    assert odd.error[0] == "record_too_large"
    assert (first.text, last.text, last.error) == ("one", "one", None)
    assert last.place == f"byte {len(data) - len(GOOD) - 1}"
    assert (long.id, long.text) == (None, "")
    assert long.content != odd.content
    assert source(path).facts().rows == 5


# Files of the ending .json.


@pytest.mark.parametrize("packing", [None, "gzip", "zstd"])
@pytest.mark.parametrize(
    ("value", "indent", "way"),
    [
        ([row(0), row(1)], None, r"one JSON array.*jq -c '\.\[\]'"),
        ([row(0)], 2, r"one JSON array.*jq -c '\.\[\]'"),
        ([], None, "one JSON array"),
        (row(0), 2, r"over several lines.*jq -c \. "),
        ({"k": [1]}, 4, "over several lines"),
    ],
)
@pytest.mark.parametrize("lead", ["", "\ufeff", "\n \n", "\ufeff \r\n"])
def test_json_that_is_not_one_record_a_line_is_one_error_with_the_way_out(tmp_path, value, indent, way, packing, lead):
    data = (lead + json.dumps(value, indent=indent) + "\n").encode()
    path = tmp_path / f"a.json{'.gz' if packing else ''}"
    path.write_bytes(packed(data, packing) if packing else data)
    with pytest.raises(InputError, match=way) as e:
        source(path).facts()
    assert str(e.value).startswith(f"{path}: ")
    assert str(e.value).endswith("or narrow input.0.path")


@pytest.mark.parametrize("text", ["x", "x" * 200_000, "," * 100_000, "[{,\n"])
def test_json_lines_may_have_the_ending_json(tmp_path, text):
    path = write_lines(tmp_path / "a.json", row(0, text=text), row(1))
    assert [document.text for document in documents(path)] == [text, "text 1"]
    assert source(path).facts().rows == 2
    write_lines(path, b"{broken", row(1))
    assert [one.error and one.error[0] for one in documents(path)] == ["bad_json", None]
    assert source(path).facts().rows == 2


@pytest.mark.parametrize("line", [b"[1, 2]", b"{"])
def test_an_odd_first_line_of_jsonl_is_one_failed_record(tmp_path, line):
    path = write_lines(tmp_path / "a.jsonl", line, GOOD)
    assert source(path).facts().rows == 2
    assert [one.error and one.error[0] for one in documents(path)] == ["bad_json", None]


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_packed_utf16_is_refused_whole(tmp_path, packing):
    path = tmp_path / "a.jsonl"
    path.write_bytes(packed((GOOD.decode() + "\n").encode("utf-16"), packing))
    with pytest.raises(InputError, match=r"a\.jsonl: is UTF-16"):
        source(path).facts()


def test_broken_lines_are_known_by_place_and_their_content_by_their_bytes(tmp_path):
    before = documents(write_lines(tmp_path / "a.jsonl", b"bad", b"bad"))
    after = documents(write_lines(tmp_path / "a.jsonl", b"BAD", b"bad"))
    assert before[0].key != before[1].key
    assert [document.key for document in before] == [document.key for document in after]
    assert before[0].content != after[0].content
    assert before[1].content == after[1].content
    assert {len(document.key) for document in before} == {16}
    assert {len(document.content) for document in before} == {8}


@pytest.mark.parametrize("name", ["missing.jsonl", "folder.jsonl"])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name):
    (tmp_path / "folder.jsonl").mkdir()
    at = source(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: cannot be read: (No such file|Is a directory)"):
        at.facts()
    with pytest.raises(InputError, match=rf"{name}: cannot be read: (No such file|Is a directory)"):
        read(at, tmp_path / name, [(0, 10)])


def test_a_file_that_is_gone_when_it_is_cut_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    at = source(path)
    path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be read: No such file"):
        at.cut(begin=0, target_bytes=ALL)


def test_a_large_file_is_estimated_from_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.sources.jsonl._COUNT_BYTES", 1000)
    monkeypatch.setattr("batchgen.sources.jsonl._SAMPLE_BYTES", 500)
    path = write_lines(tmp_path / "a.jsonl", *[b"x" * 49] * 10, *[b"x" * 99] * 100)
    facts = source(path).facts()
    assert not facts.exact
    assert facts.rows == 10_500 // 50


# Pieces that make lines of every kind, and glue that makes other lines of them.
PIECES = st.one_of(
    st.sampled_from([
        b"\n", b"\n\n", b"\r\n", b"\r", BOM, b" ", b"\x00", b"\xe2\x80\xa8", b"\xc2\x85", b"{", b"[]", b'{"text": "x"}',
        b'{"id": 1, "text": "x"}', b'{"id": "1", "text": "\\u2028"}\n', b'{"id": null, "text": null}\n', b"\xff", b'"',
    ]),
    st.binary(max_size=6),
)  # fmt: skip
FILES = st.lists(PIECES, max_size=14).map(b"".join)


@PROPERTY
@given(data=FILES, cuts=st.sets(st.integers(0, 120)))
@example(data=GOOD + b"\n" + GOOD, cuts={len(GOOD), len(GOOD) + 1})
@example(data=b"\n\n" + GOOD + b"\n", cuts={1, 2, 3})
def test_any_cuts_give_each_record_once_and_in_order(data, cuts):
    assume(not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")))  # packed, and no whole stream
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(data)
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        whole = documents(path, id_field="id")
        pieces = read(source(path, id_field="id"), path, itertools.pairwise(edges))
        assert pieces == whole
        if not data.startswith((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{\0")):
            assert source(path).facts().rows == len(whole)
        # Against a reader that knows nothing of splits.
        lines = data.split(b"\n")
        starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
        filled = [
            f"byte {at}" for at, line in zip(starts, lines, strict=True) if line.removeprefix(BOM).strip(b" \t\r")
        ]
        assert [document.place for document in whole] == filled


@PROPERTY
@given(size=st.integers(0, 500), begin=st.integers(0, 500), target=st.one_of(st.integers(1, 600), st.just(ALL)))
def test_cuts_cover_every_byte_from_begin_to_the_end_once(size, begin, target):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(b"x" * size)
        cuts = source(path).cut(begin=begin, target_bytes=target)
    assert [at for start, end in cuts for at in range(start, end)] == list(range(begin, size))
    assert all(start < end <= start + 2 * target for start, end in cuts)


TEXTS = st.text(max_size=8)
RECORDS = st.lists(st.fixed_dictionaries({"id": st.one_of(TEXTS, st.integers())}, optional={"text": TEXTS}), max_size=6)


@PROPERTY
@given(
    records=RECORDS, ascii_only=st.booleans(), drop=st.integers(0, 400), fill=st.sampled_from([b"", bytes(7), b"\n"])
)
def test_after_any_truncation_all_whole_records_survive(records, ascii_only, drop, fill):
    lines = [json.dumps(one, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b"\n" for one in records]
    data = b"".join(lines)
    left = data[: max(0, len(data) - drop)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(data)
        before = documents(path, id_field="id")
        path.write_bytes(left + fill)
        after = documents(path, id_field="id")
    whole = left.count(b"\n")
    assert after[:whole] == before[:whole]
    assert len(after) <= whole + 1
    if len(after) > whole:
        torn = left[left.rfind(b"\n") + 1 :]
        complete = whole < len(lines) and torn == lines[whole][:-1] and fill != bytes(7)
        assert after[whole] == before[whole] if complete else after[whole].error[0] == "bad_json"
    assert len(before) == len(records)


def test_the_rows_of_a_file_that_grows_while_it_is_read_are_those_of_its_splits(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", row(0), row(1))
    at = source(path, id_field="id")
    cuts = at.cut(begin=0, target_bytes=ALL)
    with path.open("ab") as stream:
        stream.write(b'{"id": "d2", "text": "late"}\n')
    assert [document.id for document in read(at, path, cuts)] == ["d0", "d1"]
    tail = at.cut(begin=cuts[-1][1], target_bytes=ALL)
    assert [document.id for document in read(at, path, tail)] == ["d2"]


# Records by their place.


def test_lines_that_are_no_records_are_fetched_as_their_bytes(tmp_path):
    lines = [row(0), b"{", b'{"id": "d2", "id": "x"}', b"\xff\xfe [", b"  \xef\xbb\xbf 7 "]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    was = documents(path, id_field="id")
    found = list(source(path, id_field="id").fetch([document.place for document in was]))
    assert [one.raw for one in found] == [None, b"{", b'{"id": "d2", "id": "x"}', b"\xff\xfe [", b"\xef\xbb\xbf 7"]
    assert [one.record is None for one in found] == [False, True, True, True, True]
    assert [one.document.key for one in found] == [document.key for document in was]


def test_a_line_that_is_too_long_is_fetched_without_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.sources.streams.MAX_LINE_BYTES", 100)
    path = write_lines(tmp_path / "a.jsonl", row(0), row(1, text="x" * 200), row(2))
    found = list(source(path).fetch([document.place for document in documents(path)]))
    assert [(one.record is None, one.raw) for one in found] == [(False, None), (True, None), (False, None)]
    assert found[1].document.error[0] == "record_too_large"


@pytest.mark.parametrize("at", [1, 5, 23, 24])
def test_the_middle_of_a_line_is_no_place(tmp_path, at):
    path = write_lines(tmp_path / "a.jsonl", row(0), row(1))
    assert documents(path)[1].place == "byte 31"
    assert list(source(path).fetch([f"byte {at}", "byte 30"])) == []


def test_a_record_behind_gigabytes_is_fetched_without_reading_them(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.seek(1 << 40)  # nothing is written there
        stream.write(b"\n" + json.dumps(row(7)).encode() + b"\n")
    found = list(source(path, id_field="id").fetch([f"byte {(1 << 40) + 1}"]))
    assert [one.document.id for one in found] == ["d7"]
