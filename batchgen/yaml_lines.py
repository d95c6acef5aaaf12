"""YAML with the line of every key, so that an error can name its place; duplicate keys are errors."""

from pathlib import Path
from typing import Any

import yaml

from batchgen.errors import ConfigError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str) and not value.isascii():
                # JSON writes some characters as two escapes, and JSON is YAML too.
                value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as e:
            raise yaml.constructor.ConstructorError(None, None, "half a character", node.start_mark) from e
        except ValueError as e:  # 2024-13-01 looks like a date and is none
            raise yaml.constructor.ConstructorError(None, None, str(e), node.start_mark) from e
        return value


def parse(text: str) -> Any:
    """The value of a YAML text. Raises ValueError where it is none."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as e:
        raise ValueError(str(e)) from e
    finally:
        loader.dispose()


def _check_keys(node: yaml.MappingNode, file: Path) -> None:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{file}, line {line}: a key is a plain text, not a list or a mapping")
        if key in seen:
            raise ConfigError(f"{file}, line {line}: key {key!r} stands twice (first in line {seen[key]})")
        seen[key] = line


def _collect(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], file: Path) -> None:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, file)
        for key_node, value_node in node.value:
            lines[(*at, key_node.value)] = key_node.start_mark.line + 1
            _collect(value_node, (*at, key_node.value), lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value_node in enumerate(node.value):
            _collect(value_node, (*at, index), lines, file)


def load(file: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The mapping in `file` and the line of each path in it, from 1.

    Raises ConfigError where the file cannot be read, is no YAML, no mapping, or holds a key twice.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read: {e}") from e
    lines: dict[KeyPath, int] = {}
    value = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            _collect(root, (), lines, file)
            value = loader.construct_document(root)
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else "?"
        raise ConfigError(f"{file}, line {line}: no valid YAML: {e.problem}") from e
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise ConfigError(f"{file}, line {line}: no valid YAML: {e.reason}") from e
    except RecursionError as e:
        raise ConfigError(f"{file}: is nested too deeply, or an alias stands inside what it names") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: a job file is a mapping of keys (name, input, prompt, engine, …)")
    return value, lines
