"""Every key has its line, and whatever a file holds, the only error is a ConfigError."""

import json

import pytest
import yaml
from helpers_config import line_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchgen import yaml_lines
from batchgen.errors import ConfigError

ONE_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: name not in {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8),
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
    found, lines = load(tmp_path, text)
    assert found == value
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
        value, lines = yaml_lines.load(path)
    except ConfigError as e:
        assert str(e).startswith(str(path))  # noqa: PT017  no error is fine too
    else:
        assert isinstance(value, dict)
        assert all(line >= 1 for line in lines.values())


@pytest.mark.parametrize(
    ("text", "marker", "reason"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "c: 3", "expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "\tb", "cannot start any token"),
        ("a: 1\nb: 2024-13-01\n", "2024", "month must be in 1..12"),
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
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    where = f"{tmp_path / 'a.yaml'}, line {second}"
    assert str(caught.value) == f"{where}: key {key!r} stands twice (first in line {first})"


def test_the_same_key_in_two_sections_is_no_duplicate(tmp_path):
    value, lines = load(tmp_path, "x: {a: 1}\ny:\n  a: 2\n")
    assert value == {"x": {"a": 1}, "y": {"a": 2}}
    assert (lines["x", "a"], lines["y", "a"]) == (1, 3)


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
    value, lines = load(tmp_path, "\ufeffa: 1\r\nb:\r\n  c: grün\r\n")
    assert value == {"a": 1, "b": {"c": "grün"}}
    assert lines == {(): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3}


def test_json_is_yaml_with_all_its_escapes(tmp_path):
    value = {"a": "a smile \U0001f600", "\U0001f600": ["ü", "\u2028"]}
    assert load(tmp_path, json.dumps(value, ensure_ascii=True))[0] == value


def test_aliases_and_merged_keys_have_their_values(tmp_path):
    value, lines = load(tmp_path, "x: &one\n  a: 1\ny: *one\nz:\n  <<: *one\n  b: 2\n")
    assert value == {"x": {"a": 1}, "y": {"a": 1}, "z": {"a": 1, "b": 2}}
    assert (lines["y",], lines["z", "b"]) == (3, 6)


def test_values_on_the_command_line_are_yaml_too():
    assert yaml_lines.parse("[1, a, {b: ~}]") == [1, "a", {"b": None}]
    assert yaml_lines.parse("") is None
    for text in ("[", "2024-13-01", "@a", "a: b: c", "[" * 3000):
        with pytest.raises(ValueError):
            yaml_lines.parse(text)
