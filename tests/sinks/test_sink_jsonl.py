"""Parts as JSON Lines: what a line holds, the footer beside, damage, kills between the steps, other readers."""

import contextlib
import datetime as dt
import decimal
import hashlib
import json

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json as pj
import pytest
from helpers_data import PROPERTY, document, hexes, placed, record
from hypothesis import given
from hypothesis import strategies as st

from batchgen import fsio
from batchgen.data import Record
from batchgen.errors import OutputError
from batchgen.sinks import columns, jsonl
from batchgen.sinks.base import DamagedPartError
from batchgen.sinks.columns import KEPT_FIELD_UNFIT
from batchgen.sinks.jsonl import JsonlSink

AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
FOOTER = {"version": 1, "files": {"a.jsonl": {"rows": 4}}}


@pytest.fixture
def part(tmp_path):
    return tmp_path / "summaries" / "part-00001-00000-000001.jsonl"


def write(path, *records, kept=(), footer=FOOTER):
    sink = JsonlSink(dict.fromkeys(kept, pa.string()), owner="00000")
    sink.write_part(path, records, fingerprint="f00d", footer=footer)
    return sink


def beside(part):
    return part.parent / ".part-00001-00000-000001.footer.json"


def lines(path):
    """The rows as any plain reader of lines sees them."""
    return [json.loads(line) for line in path.read_text(encoding="ascii").split("\n")[:-1]]


def test_a_line_has_every_column_in_order_with_values_of_json(part):
    full = Record(
        document(
            7,
            id="7",
            id_type="int",
            source="data/ä.jsonl",
            place="byte 70",
            keep={"title": "T", "more": [1, {}]},
            whole_chars=321,
        ),
        "ok",
        summary="A summary,\nof two lines: 𝄞 \u2028",
        finish_reason="length",
        flags=("summary_cut", "copied"),
        prompt_tokens=1,
        cached_tokens=2,
        completion_tokens=3,
        reasoning_tokens=6,
        dropped_tokens=7,
        pack_size=8,
        pack_fallback="missing",
        requests=4,
        pieces=9,
        depth=10,
        attempts=5,
        finished_at=AT,
    )
    write(part, full, kept=["title", "more"])
    (row,) = lines(part)
    assert row == {
        "id": 7, "id_type": "int", "title": "T", "more": [1, {}], "summary": "A summary,\nof two lines: 𝄞 \u2028",
        "status": "ok", "error_type": None, "error": None, "finish_reason": "length",
        "flags": ["summary_cut", "copied"], "document_chars": 321,
        "prompt_tokens": 1, "cached_tokens": 2, "completion_tokens": 3,
        "reasoning_tokens": 6, "dropped_tokens": 7, "pack_size": 8, "pack_fallback": "missing",
        "requests": 4, "pieces": 9, "depth": 10, "attempts": 5,
        "source": "data/ä.jsonl", "place": "byte 70", "doc_key": full.document.key.hex(),
        "content_hash": full.document.content.hex(), "fingerprint": "f00d",
        "finished_at": "2026-01-02T03:04:05.678901+00:00",
    }  # fmt: skip
    assert list(row) == columns.order(["title", "more"])


def test_records_end_at_lf_and_nothing_else_looks_like_a_line_end(part):
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFEFF])) + "é𝄞"
    write(part, record(document(0, keep={"k": text}), summary=text), record(1), kept=["k"])
    data = part.read_bytes()
    assert data.isascii()
    assert not any(byte < 0x20 and byte != 0x0A for byte in data)
    assert len(data.decode().splitlines()) == data.count(b"\n") == 2
    assert [lines(part)[0][name] for name in ("summary", "k")] == [text] * 2


@pytest.mark.parametrize("digits", [1, 19, 100, 400])
def test_ids_are_what_they_were(part, digits):
    number = -(10**digits) + 1
    sink = write(part, record(document(0, id=str(number), id_type="int")), record(document(1, id="07")))
    assert [row["id"] for row in lines(part)] == [number, "07"]
    assert sink.read(part, ["id", "id_type"]).to_pylist() == [
        {"id": str(number), "id_type": "int"},
        {"id": "07", "id_type": "str"},
    ]
    assert len(sink.read_keys(part).keys) == 2  # pyarrow's reader refuses integers above 1.8e308


@pytest.mark.parametrize(
    ("value", "written", "unfit"),
    [
        ({"a": [1, 2.5, None, {"b": True}], "ä": "x"}, {"a": [1, 2.5, None, {"b": True}], "ä": "x"}, False),
        (10**100, 10**100, False),
        (dt.date(2020, 2, 29), "2020-02-29", False),
        (AT, "2026-01-02T03:04:05.678901+00:00", False),
        (dt.time(1, 2), "01:02:00", False),
        (decimal.Decimal("1.50"), "1.50", False),
        ([b"\x00\xff"], ["AP8="], False),
        ((1, "a"), [1, "a"], False),
        (float("nan"), None, True),
        ([1.5, float("-inf")], [1.5, None], True),
        ({"a": "x\udc80", "b": "y"}, {"a": None, "b": "y"}, True),
        ({"a\udc80": 1}, None, True),
        ({1: 2}, None, True),
    ],
)
def test_kept_values_are_written_as_they_came_or_flagged(part, value, written, unfit):
    write(part, record(document(0, keep={"k": value}), flags=("copied",)), record(1), kept=["k"])
    first, second = lines(part)
    assert first["k"] == written
    assert first["flags"] == (["copied", KEPT_FIELD_UNFIT] if unfit else ["copied"])
    assert (second["k"], second["flags"]) == (None, [])


def test_a_value_that_nests_too_deep_is_cut_and_flagged_and_the_part_can_be_read(part):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    try:
        sink = write(part, record(document(0, keep={"k": deep})), record(1), kept=["k"])
    finally:
        while deep:  # unwound by hand: the interpreter would do it recursively
            (deep,) = deep
    assert sink.rows(part)[0]["flags"] == [KEPT_FIELD_UNFIT]
    assert len(sink.read_keys(part).keys) == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@PROPERTY
@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_any_value_of_json_comes_back(tmp_path_factory, values):
    part = tmp_path_factory.mktemp("any") / "part-1.jsonl"
    sink = write(part, *[record(document(n, keep={"k": value})) for n, value in enumerate(values)], kept=["k"])
    found = [(row["k"], row["flags"]) for row in sink.rows(part)]
    assert found == [(value, []) for value in values]
    assert len(part.read_text().splitlines()) == len(values)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], pa.int64()),
        ([1, 2**63], pa.string()),
        ([1, 1.5], pa.float64()),
        ([2**53 + 1, 1.5], pa.string()),
        ([1.5], pa.float64()),
        ([True, False], pa.bool_()),
        ([True, 1], pa.string()),
        (["a", None], pa.string()),
        (["a", 1], pa.string()),
        ([[1]], pa.string()),
        ([{"a": 1}, None], pa.string()),
        ([None], pa.string()),
    ],
)
def test_types_for_a_column_are_the_narrowest_that_holds_all_values(part, values, kind):
    sink = write(part, *[record(document(n, keep={"k": value})) for n, value in enumerate(values)], kept=["k"])
    assert sink.kept_types([part]) == {"k": kind}


# The footer beside the part.


def test_the_footer_is_hidden_and_holds_the_parts_digest(part):
    write(part, record(0))
    told = json.loads(beside(part).read_text())
    assert told == {"sha256": hashlib.sha256(part.read_bytes()).hexdigest(), "footer": FOOTER}
    assert [path.name for path in part.parent.glob("part-*")] == [part.name]


@pytest.mark.parametrize("rest", [None, b"", b"{", b"[]", b"{}", b'{"sha256": 1, "footer": 2}', b"\0" * 20])
def test_a_part_whose_footer_is_missing_or_unreadable_is_taken_for_what_its_lines_say(part, rest):
    sink = write(part, record(0), record(1))
    beside(part).unlink()
    if rest is not None:
        beside(part).write_bytes(rest)
    held = sink.read_keys(part)
    assert (len(held.keys), held.footer) == (2, {})
    sink.drop(part, hexes(0), to=part.parent.parent / "orphans" / part.name)
    assert [row["id"] for row in sink.rows(part)] == ["d1"]


def test_a_footer_of_another_content_is_damage(part):
    sink = write(part, record(0), record(1))
    part.write_bytes(part.read_bytes().replace(b"summary of d1", b"summary of d7"))
    with pytest.raises(DamagedPartError, match="SHA-256"):
        sink.read_keys(part)


@pytest.mark.parametrize("footer", [True, False])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda data: data[:-1], r"its last line, at byte \d+, is torn"),
        (lambda data: data[:-200], r"its last line, at byte \d+, is torn"),
        (lambda data: data + b"\0" * 64, r"its last line, at byte \d+, is torn"),
        (lambda data: data + b"\0" * 64 + b"\n", r"its line 3, at byte \d+, is no JSON object"),
        (lambda data: data.replace(b"\n", b"", 1), r"its line 1, at byte 0, is no JSON object"),
        (lambda data: data[: data.index(b"\n") - 30] + data[data.index(b"\n") + 1 :], r"line 1, at byte 0"),
        (lambda data: data + b"[]\n", r"its line 3, at byte \d+, is no JSON object"),
        (lambda data: data + b"\n", r"its line 3"),
        (lambda data: data.replace(b'"prompt_tokens":0', b'"prompt_tokens":NaN', 1), "line 1"),
        (lambda data: b"", "it is empty"),
    ],
)
def test_a_line_that_is_none_is_damage_with_its_place(part, footer, spoil, told):
    sink = write(part, record(0), record(1))
    if not footer:
        beside(part).unlink()
    part.write_bytes(spoil(part.read_bytes()))
    with pytest.raises(DamagedPartError, match=told):
        sink.read_keys(part)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"doc_key"', b'"doc_kex"'),
        (b'"prompt_tokens":0', b'"prompt_tokens":"x"'),
        (b'"finished_at":"2', b'"finished_at":"x'),
        (b'"flags":[]', b'"flags":7'),
        (b'"source":"a', b'"sourca":"a'),
        (b'"content_hash":"', b'"content_hash":"z'),
    ],
)
def test_a_line_that_is_no_row_is_damage_where_no_footer_tells_it_before(part, old, new):
    sink = write(part, record(0), record(1))
    beside(part).unlink()
    part.write_bytes(part.read_bytes().replace(old, new, 1))
    with pytest.raises(DamagedPartError):
        sink.read_keys(part)


ROWS = [record(document(n, text=f"t{n}"), finished_at=AT) for n in range(5)]


@PROPERTY
@given(data=st.data())
def test_no_truncation_and_no_flipped_byte_of_a_part_gives_other_rows(tmp_path_factory, data):
    part = tmp_path_factory.mktemp("flip") / "part-00001-00000-000001.jsonl"
    sink = write(part, *ROWS)
    whole, want = part.read_bytes(), sink.rows(part)
    if data.draw(st.booleans()):
        part.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        flipped = bytearray(whole)
        flipped[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        part.write_bytes(flipped)
    with pytest.raises(DamagedPartError):
        sink.read_keys(part)
    part.write_bytes(whole)
    assert sink.rows(part) == want


@PROPERTY
@given(left=st.integers(0, 2500))
def test_a_truncated_part_without_footer_is_damaged_or_holds_its_first_rows(tmp_path_factory, left):
    part = tmp_path_factory.mktemp("cut") / "part-00001-00000-000001.jsonl"
    sink = write(part, *ROWS)
    beside(part).unlink()
    want = sink.rows(part)
    part.write_bytes(part.read_bytes()[:left])
    try:
        found = sink.rows(part)
    except DamagedPartError:
        return
    assert found
    assert found == want[: len(found)]


# Kills: the steps are writes and removals of whole files, so between two of them is where a kill can come.


class Killed(BaseException):
    pass


def kill_at(patch, step):
    """Let all but the first `step` writes and removals raise; the rest is what a kill would have left."""
    calls = []

    def counted(original):
        def call(*args, **more):
            if len(calls) >= step:
                raise Killed
            calls.append(args)
            return original(*args, **more)

        return call

    for one in (fsio.write_atomic, fsio.remove):
        patch.setattr(fsio, one.__name__, counted(one))


def readable(sink, path):
    """Ids in a part, by every reader of it; none where it is not there."""
    if not path.exists():
        return []
    ids = [row["id"] for row in sink.rows(path)]
    assert len(sink.read_keys(path).keys) == len(ids)
    return ids


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("stale", [True, False])
def test_killed_while_writing_a_part(part, monkeypatch, stale, step):
    if stale:  # a part of this name was there, and somebody removed it
        write(part, record(9))
        part.unlink()
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        try:
            sink = write(part, record(0), record(1))
        except Killed:
            sink = JsonlSink({}, owner="00000")
    assert readable(sink, part) in ([], ["d0", "d1"])
    write(part, record(0), record(1))
    assert sink.read_keys(part).footer == FOOTER


@pytest.mark.parametrize("step", range(9))
@pytest.mark.parametrize("keys", [(1, 3), (0, 1, 2, 3)], ids=["some", "all"])
@pytest.mark.parametrize("moved_before", [True, False])
def test_killed_while_rows_are_taken_out_and_moved(part, monkeypatch, moved_before, keys, step):
    other = part.parent.parent / "orphans" / part.name
    sink = write(part, *map(record, range(5 if moved_before else 4)))
    if moved_before:
        sink.drop(part, hexes(4), to=other)
    before = readable(sink, part)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        kill_at(patch, step)
        sink.drop(part, hexes(*keys), to=other)
    here, there = readable(sink, part), readable(sink, other)
    assert here in (before, [one for one in before if int(one[1:]) not in keys])
    assert {*here, *there} >= {*before}
    if here == before:  # as the next start does
        sink.drop(part, hexes(*keys), to=other)
    assert [*readable(sink, part), *sorted(readable(sink, other))] == [
        *(f"d{n}" for n in range(4) if n not in keys),
        *(f"d{n}" for n in (*keys, *([4] if moved_before else []))),
    ]
    assert part.exists() or list(part.parent.iterdir()) == []


def test_a_footer_that_cannot_be_written_stops_the_write_and_loses_no_row(part, monkeypatch):
    write_atomic = fsio.write_atomic

    def full(path, data, **more):
        if path.name.endswith(".json"):
            raise OutputError("No space left on device")
        write_atomic(path, data, **more)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "write_atomic", full)
        with pytest.raises(OutputError):
            write(part, record(0))
    assert readable(JsonlSink({}, owner="00000"), part) == ["d0"]


def test_a_part_that_is_rewritten_while_it_is_read_is_no_damage(part, monkeypatch):
    sink = write(part, *map(record, range(4)))
    look, calls = jsonl._footer, []

    def rewritten(path):
        calls.append(path)
        if len(calls) == 1:  # the lines were read, the footer was not
            with monkeypatch.context() as patch:
                patch.setattr(jsonl, "_footer", look)
                sink.drop(part, hexes(0), to=None)
        return look(path)

    monkeypatch.setattr(jsonl, "_footer", rewritten)
    assert len(sink.read_keys(part).keys) == 3


# Other readers.


@pytest.fixture
def folder(part):
    """Three parts; the first has neither errors nor flags."""
    for number in range(3):
        records = [record(document(n, keep={"k": n})) for n in range(number * 5, number * 5 + 5)]
        if number == 2:
            records[0] = record(
                placed(document(10, id=None, id_type=None)),
                "failed",
                error_type="bad_json",
                error="line 1",
                flags=("x",),
            )
        write(part.with_name(part.name.replace("000001.", f"{number:06d}.")), *records, kept=["k"])
    return part.parent


IDS = [f"d{n}" for n in range(10)] + [None] + [f"d{n}" for n in range(11, 15)]


def test_line_readers_pyarrow_and_pandas_read_each_part(folder):
    import pandas as pd

    paths = sorted(folder.glob("*"))
    paths = [path for path in paths if not path.name.startswith(".")]
    assert [row["id"] for path in paths for row in lines(path)] == IDS
    assert [one for path in paths for one in pj.read_json(path).column("id").to_pylist()] == IDS
    frame = pd.concat([pd.read_json(path, lines=True, dtype=False) for path in paths])
    assert frame["id"].astype(object).where(frame["id"].notna(), None).tolist() == IDS


def test_pyarrow_reads_the_folder_with_the_schema(folder):
    table = ds.dataset(folder, format="json", schema=columns.schema({"k": pa.int64()})).to_table()
    assert table.column("id").to_pylist() == IDS
    assert table.column("flags").to_pylist()[10] == ["x"]


def test_datasets_reads_the_folder_with_the_schema_and_without_where_the_first_part_has_all_types(folder, tmp_path):
    import datasets

    def load(**more):
        files = str(folder / "*.jsonl")
        found = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "c"), **more)
        return sorted(zip(found["doc_key"], found["k"], strict=True))

    features = datasets.Features.from_arrow_schema(columns.schema({"k": pa.int64()}))
    want = sorted((row["doc_key"], row["k"]) for path in folder.glob("*.jsonl") for row in lines(path))
    assert load(features=features) == want
    max(folder.glob("*.jsonl")).unlink()
    assert sorted(k for _, k in load()) == list(range(10))
