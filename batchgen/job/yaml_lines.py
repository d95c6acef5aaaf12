"""YAML 1.2 with the line of every key, so that an error can name its place; nothing is read as what it does not say.

PyYAML follows YAML 1.1, which reads `1e-5` as text, `12:30:45` and `1_000` as numbers, `010` as 8 and `no` as false.
Here plain values follow the core schema of YAML 1.2, and a plain yes, no, on or off is a fault.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from batchgen.errors import ConfigError

KeyPath = tuple[str | int, ...]
_AMBIGUITY = "is a text to some and true or false to others"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A YAML text: its value, the line of each path in it, from 1, and what is wrong with it, by path."""

    value: Any
    lines: dict[KeyPath, int]
    faults: dict[KeyPath, str]


_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)
_MERGE = re.compile(r"<<\Z")
# YAML 1.1 reads them as true and false, YAML 1.2 as text: who writes one may mean either.
_AMBIGUOUS = re.compile(r"(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)\Z")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema: what comes out is null, true, false, numbers, text, lists and mappings.

    Merge keys (`<<`) are YAML 1.1's, and kept.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str) and not value.isascii():
                # JSON writes some characters as two escapes, and JSON is YAML too.
                value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as e:
            raise yaml.constructor.ConstructorError(None, None, "half a character", node.start_mark) from e
        except ValueError as e:  # `!!int few`, or more digits than Python reads
            raise yaml.constructor.ConstructorError(None, None, str(e), node.start_mark) from e
        return value

    def construct_bool(self, node: yaml.ScalarNode) -> bool:
        return self._text(node, _BOOL).lower() == "true"

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = self._text(node, _INT)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text if base == 10 else text[2:], base)

    def construct_float(self, node: yaml.ScalarNode) -> float:
        return _float(self._text(node, _FLOAT))

    def construct_ambiguous(self, node: yaml.ScalarNode) -> str:
        return str(self.construct_scalar(node))

    def _text(self, node: yaml.ScalarNode, pattern: re.Pattern[str]) -> str:
        text = str(self.construct_scalar(node))
        if not pattern.match(text):
            raise ValueError(f"{text!r} is no {node.tag.removeprefix(_TAG)}")
        return text


def _float(text: str) -> float:
    return float(re.sub(r"\.(?=[in])", "", text.lower()))  # Python writes inf and nan without a dot


_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in ("null", "str", "seq", "map")
}
for _tag, _pattern, _first in (
    ("null", _NULL, "~nN"), ("bool", _BOOL, "tTfF"), ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"), ("merge", _MERGE, "<"), ("ambiguous", _AMBIGUOUS, "yYnNoO"),
):  # fmt: skip
    _Loader.add_implicit_resolver(_TAG + _tag, _pattern, [*_first, ""] if _tag == "null" else list(_first))
_Loader.add_constructor(f"{_TAG}bool", _Loader.construct_bool)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_float)
_Loader.add_constructor(f"{_TAG}ambiguous", _Loader.construct_ambiguous)


def parse(text: str) -> Parsed:
    """The value of a YAML text. Raises ValueError where it is none."""
    try:
        return _parse(text)
    except yaml.MarkedYAMLError as e:
        raise ValueError(e.problem) from e
    except yaml.reader.ReaderError as e:
        raise ValueError(e.reason) from e
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def load(file: Path) -> Parsed:
    """The mapping in `file`. Raises ConfigError where the file cannot be read, is no YAML, or no mapping."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read: {e}") from e
    try:
        parsed = _parse(text)
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else "?"
        raise ConfigError(f"{file}, line {line}: no valid YAML: {e.problem}") from e
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise ConfigError(f"{file}, line {line}: no valid YAML: {e.reason}") from e
    except RecursionError as e:
        raise ConfigError(f"{file}: is nested too deeply, or an alias stands inside what it names") from e
    if not isinstance(parsed.value, dict):
        raise ConfigError(f"{file}: a job file is a mapping of keys (name, input, prompt, engine, …)")
    return parsed


def _parse(text: str) -> Parsed:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Parsed(None, {}, {})
        found = _Collector()
        found.lines[()] = root.start_mark.line + 1
        found.collect(root, ())
        return Parsed(loader.construct_document(root), found.lines, found.faults)
    finally:
        loader.dispose()


@dataclass(slots=True)
class _Collector:
    """The lines of all paths, and the faults: one that several aliases lead to is told once."""

    lines: dict[KeyPath, int] = field(default_factory=dict)
    faults: dict[KeyPath, str] = field(default_factory=dict)
    faulty: set[int] = field(default_factory=set)  # ids of nodes

    def collect(self, node: yaml.Node, at: KeyPath) -> None:
        """Note the lines of all below a node, and its faults and theirs."""
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, at)
        elif isinstance(node, yaml.SequenceNode):
            for index, entry in enumerate(node.value):
                self.lines[(*at, index)] = entry.start_mark.line + 1
                self.collect(entry, (*at, index))
        elif node.tag == f"{_TAG}ambiguous":
            self._fault(node, at, f"a bare {node.value} {_AMBIGUITY}: write true or false, or quote it")
        elif node.tag == f"{_TAG}float" and _FLOAT.match(node.value) and not math.isfinite(_float(node.value)):
            self._fault(node, at, f"a finite number is wanted (given: {node.value})")

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> None:
        for key_node, value_node in node.value:  # first: a key of the mapping's own holds against a merged one
            if key_node.tag == f"{_TAG}merge":
                merged = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for section in reversed(merged):  # of two, the first holds
                    self.collect(section, at)
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a key is a plain text, not a list or a mapping"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            key, line = key_node.value, key_node.start_mark.line + 1
            if key_node.tag != f"{_TAG}merge":
                self.lines[(*at, key)] = line
                self.collect(value_node, (*at, key))
            if key in seen:
                self.lines[(*at, key)] = line
                self._fault(key_node, (*at, key), f"this key stands twice (first in line {seen[key]})")
            elif key_node.tag == f"{_TAG}ambiguous":
                self._fault(key_node, (*at, key), f"a bare {key} {_AMBIGUITY}: quote this key")
            seen.setdefault(key, line)

    def _fault(self, node: yaml.Node, at: KeyPath, words: str) -> None:
        if id(node) not in self.faulty:
            self.faulty.add(id(node))
            self.faults[at] = words
