"""Every key has its line, and whatever a file holds, the only error is a ConfigError."""

import json

import pytest
import yaml
from helpers_config import line_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchgen.errors import ConfigError
from batchgen.job import yaml_lines

ONE_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: name not in {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
)
# PyYAML writes 0E0 without quotes: a text to YAML 1.1, a number to 1.2.
TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8).filter(
    lambda one: not one[:1] or one[0] not in "+-.0123456789"
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3),
    max_leaves=12,
)


def paths_of(value, at=()):
    """Every path to a key or to an entry of a list."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield (*at, key)
        yield from paths_of(below, (*at, key))


def load(folder, text, encoding="utf-8"):
    path = folder / "a.yaml"
    path.write_bytes(text.encode(encoding))
    return yaml_lines.load(path)


@ONE_FOLDER
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4))
def test_every_path_has_the_line_it_stands_in(tmp_path, value):
    text = yaml.safe_dump(value, allow_unicode=True, default_flow_style=False, width=10_000)
    parsed = load(tmp_path, text)
    assert (parsed.value, parsed.faults) == (value, {})
    lines = parsed.lines
    shown = text.split("\n")
    for path in paths_of(value):
        key = path[-1]
        line = shown[lines[path] - 1]
        assert f"{key}:" in line if isinstance(key, str) else line.lstrip().startswith("-"), (path, line)


@ONE_FOLDER
@given(
    st.binary(max_size=60)
    | st.text("ab:-?&*!<>|[]{},'\" \n\t#%@\\0123456789.\u00e9\ufeff", max_size=60).map(str.encode)
)
@example(b"? [a, b]\n: c\n")
@example(b"a: 2024-13-01\n")
@example(b"a: &x {b: *x}\n")
@example(b"a: \x07\n")
@example(b'a: "\\ud83d"\n')
@example(b"a: " + b"[" * 3000)
@example(b"a: 0b_\n")
@example(b"a: !!binary x\n")
@example(b"a: *nobody\n")
def test_no_content_raises_anything_but_a_config_error(tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    try:
        parsed = yaml_lines.load(path)
    except ConfigError as e:
        assert str(e).startswith(str(path))  # noqa: PT017  no error is fine too
    else:
        assert isinstance(parsed.value, dict)
        assert all(line >= 1 for line in parsed.lines.values())
        assert set(parsed.faults) <= set(parsed.lines)


@pytest.mark.parametrize(
    ("text", "marker", "reason"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "c: 3", "expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "\tb", "cannot start any token"),
        ("a: 1\nb: !!int few\n", "b:", "'few' is no int"),
        ("a: 1\nb: !!int 1_000\n", "b:", "'1_000' is no int"),
        ("a: 1\nb: !!float 1:30.5\n", "b:", "'1:30.5' is no float"),
        ("a: 1\nb: !!bool yes\n", "b:", "'yes' is no bool"),
        ("a: 1\nb: !!timestamp 2024-12-01\n", "b:", "could not determine a constructor"),
        ("a: 1\nb: !!binary aGk=\n", "b:", "could not determine a constructor"),
        ("a: 1\nb: " + "9" * 5000 + "\n", "b:", "Exceeds the limit"),
        ("a: 1\nb:\n  <<: text\n", "<<", "expected a mapping"),
        ("a: 1\nb: !!python/object:os.system {}\n", "b:", "could not determine a constructor"),
        ("a: 1\nb: \x07\n", "b:", "special characters are not allowed"),
        ("a: 1\n---\nb: 2\n", "---", "another document"),
        ("a: *nobody\n", "a:", "undefined alias"),
        ('a: 1\nb: "\\ud83d"\n', "b:", "half a character"),
        ("a: 1\n? [b, c]\n: 2\n", "[b", "a key is a plain text"),
        ("a: 1\n? {b: c}\n: 2\n", "{b", "a key is a plain text"),
    ],
)
def test_broken_yaml_is_told_with_its_line(tmp_path, text, marker, reason):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'a.yaml'}, line {line_of(text, marker)}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "first", "second"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", 1, 3),
        ("x:\n  a: 1\n  a: 1\n", "a", 2, 3),
        ("x:\n  - {a: 1}\n  - {b: 1,\n     b: 2}\n", "b", 3, 4),
        ("'a': 1\na: 2\n", "a", 1, 2),
    ],
)
def test_a_key_given_twice_is_told_with_both_lines(tmp_path, text, key, first, second):
    parsed = load(tmp_path, text)
    ((path, words),) = parsed.faults.items()
    assert (path[-1], parsed.lines[path]) == (key, second)
    assert words == f"this key stands twice (first in line {first})"


def test_the_same_key_in_two_sections_is_no_duplicate(tmp_path):
    parsed = load(tmp_path, "x: {a: 1}\ny:\n  a: 2\n")
    assert (parsed.value, parsed.faults) == ({"x": {"a": 1}, "y": {"a": 2}}, {})
    assert (parsed.lines["x", "a"], parsed.lines["y", "a"]) == (1, 3)


def test_lines_below_a_key_given_twice_are_those_of_the_second(tmp_path):
    parsed = load(tmp_path, "a: [{b: 1}]\nc: 1\na:\n  - b: 2\n")
    assert parsed.value["a"] == [{"b": 2}]
    assert (parsed.lines["a", 0], parsed.lines["a", 0, "b"]) == (4, 4)


# What a plain value is: the core schema of YAML 1.2, and the traps of YAML 1.1 it does away with.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), ("1e3", 1000.0), ("+.5e+2", 50.0), ("1.", 1.0), ("-.5", -0.5), ("0.0", 0.0),
        ("12", 12), ("-12", -12), ("+12", 12), ("010", 10), ("007", 7), ("0o10", 8), ("0x1F", 31), ("0", 0),
        ("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False), ("FALSE", False),
        ("null", None), ("Null", None), ("NULL", None), ("~", None), ("", None),
        # Text, whatever YAML 1.1 takes it for.
        ("12:30:45", "12:30:45"), ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("1_000", "1_000"), ("1_0.5", "1_0.5"),
        ("0b101", "0b101"), ("-0x1F", "-0x1F"), ("2024-12-01", "2024-12-01"), ("2024-13-01", "2024-13-01"),
        ("2024-12-01 10:00:00", "2024-12-01 10:00:00"), ("y", "y"), ("N", "N"), ("=", "="), ("nULL", "nULL"),
        ("tRUE", "tRUE"), ("yEs", "yEs"), ("nan", "nan"), ("inf", "inf"), ("e5", "e5"), ("1e", "1e"), (".", "."),
        ("1.2.3", "1.2.3"), ("+", "+"),
        # Quoted, or said to be text.
        ('"no"', "no"), ("'1e-5'", "1e-5"), ("!!str no", "no"), ('"true"', "true"), ("|\n  no", "no\n"),
        ("!!float 3", 3.0), ('!!int "12"', 12),
    ],
)  # fmt: skip
def test_a_value_is_what_yaml_1_2_says(tmp_path, text, value):
    parsed = load(tmp_path, f"a: {text}\n")
    found = parsed.value["a"]
    assert (type(found), found, parsed.faults) == (type(value), value, {})
    if not text.startswith("|"):
        assert yaml_lines.parse(text).value == value


@pytest.mark.parametrize("word", ["yes", "Yes", "YES", "no", "No", "NO", "on", "On", "ON", "off", "Off", "OFF"])
def test_a_bare_yes_no_on_off_is_a_fault_wherever_it_stands(tmp_path, word):
    parsed = load(tmp_path, f"a: {word}\nb:\n  - x\n  - {word}\nc: {{{word}: 1, d: {word}}}\n")
    words = f"a bare {word} is a text to some and true or false to others: "
    value = words + "write true or false, or quote it"
    assert parsed.faults == {
        ("a",): value, ("b", 1): value, ("c", word): words + "quote this key", ("c", "d"): value,
    }  # fmt: skip
    assert parsed.lines["b", 1] == 4
    assert yaml_lines.parse(f"[{word}]").faults == {(0,): value}


@pytest.mark.parametrize("word", [".inf", "-.Inf", "+.INF", ".nan", ".NaN", "1e999", "-1e999", "!!float .nan"])
def test_a_number_without_end_is_a_fault(tmp_path, word):
    parsed = load(tmp_path, f"a:\n  b: {word}\n")
    assert parsed.faults == {("a", "b"): f"a finite number is wanted (given: {word.removeprefix('!!float ')})"}


def test_several_faults_are_all_found(tmp_path):
    parsed = load(tmp_path, "a: no\nb: 1\nb: .nan\nc: {d: on, d: off}\n")
    assert set(parsed.faults) == {("a",), ("b",), ("c", "d")}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "- a\n- b\n", "just words\n", "~\n", "3\n"])
def test_what_is_no_mapping_is_no_job_file(tmp_path, text):
    with pytest.raises(ConfigError, match="a job file is a mapping of keys"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "reason"), [("a: &x [*x]\n", "an alias stands inside"), ("a: " + "[" * 3000 + "]" * 3000, "too deeply")]
)
def test_endless_nesting_is_refused(tmp_path, text, reason):
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, text)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_is_told(tmp_path, encoding):
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8' codec can't decode"):
        load(tmp_path, "a: grün\n", encoding=encoding)


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"{path}: cannot be read"):
            yaml_lines.load(path)


def test_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path):
    parsed = load(tmp_path, "\ufeffa: 1\r\nb:\r\n  c: grün\r\n")
    assert parsed.value == {"a": 1, "b": {"c": "grün"}}
    assert parsed.lines == {(): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3}


def test_json_is_yaml_with_all_its_escapes(tmp_path):
    value = {"a": "a smile \U0001f600", "\U0001f600": ["ü", "\u2028"], "b": [1e-5, 1e5, -0.0, 1, True, None, "no"]}
    parsed = load(tmp_path, json.dumps(value, ensure_ascii=True))
    assert (parsed.value, parsed.faults) == (value, {})


# Aliases and merge keys.


def test_aliases_and_merged_keys_have_their_values_and_lines(tmp_path):
    parsed = load(tmp_path, "x: &one\n  a: 1\ny: *one\nz:\n  <<: *one\n  b: 2\n")
    assert parsed.value == {"x": {"a": 1}, "y": {"a": 1}, "z": {"a": 1, "b": 2}}
    lines = parsed.lines
    assert (lines["y",], lines["z", "b"]) == (3, 6)
    assert lines["y", "a"] == lines["z", "a"] == 2  # where the key stands


def test_a_key_of_its_own_holds_against_a_merged_one(tmp_path):
    parsed = load(tmp_path, "x: &one\n  a: no\nz:\n  a: false\n  <<: *one\n")
    assert parsed.value["z"] == {"a": False}
    assert parsed.lines["z", "a"] == 4
    assert list(parsed.faults) == [("x", "a")]


def test_a_fault_that_aliases_lead_to_is_told_once(tmp_path):
    parsed = load(tmp_path, "x: &one\n  a: no\n  b: [on]\n  b: 1\ny: *one\nz:\n  <<: *one\n  c: [*one]\n")
    assert list(parsed.faults) == [("x", "a"), ("x", "b", 0), ("x", "b")]


def test_a_section_that_is_merged_on_the_spot_has_its_faults(tmp_path):
    parsed = load(tmp_path, "z:\n  <<: {a: no}\n  b: 1\n")
    assert list(parsed.faults) == [("z", "a")]
    assert parsed.lines["z", "a"] == 2


def test_merging_twice_is_a_key_given_twice(tmp_path):
    parsed = load(tmp_path, "x: &one {a: 1}\nz:\n  <<: *one\n  <<: *one\n")
    assert parsed.faults == {("z", "<<"): "this key stands twice (first in line 3)"}
    assert parsed.lines["z", "<<"] == 4


def test_of_two_merged_sections_the_first_holds(tmp_path):
    parsed = load(tmp_path, "x: &one\n  a: 1\ny: &two\n  a: 2\n  b: 2\nz:\n  <<: [*one, *two]\n")
    assert parsed.value["z"] == {"a": 1, "b": 2}
    assert (parsed.lines["z", "a"], parsed.lines["z", "b"]) == (2, 5)


def test_a_section_that_merges_itself_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="an alias stands inside"):
        load(tmp_path, "a: &x\n  b: 1\n  <<: *x\n")


def test_values_on_the_command_line_are_yaml_too():
    assert yaml_lines.parse("[1, a, {b: ~}]").value == [1, "a", {"b": None}]
    assert yaml_lines.parse("").value is None
    assert yaml_lines.parse("{a: 1, a: 2}").faults == {("a",): "this key stands twice (first in line 1)"}
    for text in ("[", "!!int x", "@a", "a: b: c", "[" * 3000, "{[a]: 1}"):
        with pytest.raises(ValueError):
            yaml_lines.parse(text)
