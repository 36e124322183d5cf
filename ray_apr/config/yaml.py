"""YAML text -> plain values, strictly: no duplicate keys, numbers as people read them.

PyYAML follows YAML 1.1, where ``1e-6`` is a string, ``012`` is ten and ``1:30`` is ninety; here the
first is a number, and the others are refused.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from ray_apr.core.checks import from_mapping
from ray_apr.core.exceptions import ConfigError, UnknownKeyError


class _Loader(yaml.SafeLoader):
    """SafeLoader that knows ``1e-6``, and refuses duplicate keys and numbers of base 8 or 60."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a key that is there twice is an error."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Build a number; one that YAML 1.1 alone reads so is an error."""
        if re.match(r"[-+]?0[\d_]+$|.*:", node.value):
            problem = f"{node.value} is a number of base 8 or 60 to YAML"
            remedy = f"{problem}; write it in decimals, or as text in quotes"
            raise yaml.constructor.ConstructorError(None, None, remedy, node.start_mark)
        if node.tag.endswith("int"):
            return int(self.construct_yaml_int(node))
        return float(self.construct_yaml_float(node))


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _Loader.construct_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse(text: str, name: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else 1
        lines = text.splitlines()
        seen = lines[line - 1].strip() if line <= len(lines) else ""
        problem = error.problem or "not valid YAML"
        raise ConfigError(f"{name}, line {line}", seen, f"{problem}; correct this line") from error
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(name, text[:80], f"not valid YAML: {error}") from error  # a date, say


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: If it is missing, unreadable, no YAML (with the line), or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError("config", str(path), "no such file; check the path") from error
    except IsADirectoryError as error:
        files = ", ".join(sorted(file.name for file in path.glob("*.yaml"))) or "none that ends so"
        remedy = f"is a folder; name its file of settings (.yaml: {files})"
        raise ConfigError("config", str(path), remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"cannot be read as text: {error}") from error
    values = _parse(text, path.name)
    if not isinstance(values, dict):
        raise ConfigError(
            "config", str(path), "must hold `key: value` lines; it is empty or a list"
        )
    return values


def set_override(values: dict[str, Any], text: str) -> None:
    """Apply ``"a.b=c"`` to nested values, in place; the value is read as YAML.

    Raises:
        ConfigError: If the text has no ``=`` or no key, or goes into something that is no section.
    """
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError("--set", text, "write it as key=value, e.g. --set train.steps=10")
    parent = values
    for i, part in enumerate(parts[:-1]):
        if parent.get(part) is None:
            parent[part] = {}
        elif i == 0 and part == "prompts" and isinstance(parent[part], str | list):
            key = "path" if isinstance(parent[part], str) else "files"
            parent[part] = {key: parent[part]}
        if not isinstance(parent[part], dict):
            where = ".".join(parts[: i + 1])
            raise ConfigError("--set", text, f"{where} is no section but {parent[part]!r}")
        parent = parent[part]
    parent[parts[-1]] = _parse(value, f"--set {key}")


def as_mapping(name: str, given: Any) -> dict[str, Any]:
    """A section as it is in a file; one without a line is empty.

    Raises:
        ConfigError: If it is none.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(name, given, "must be a section of `key: value` lines")
    return dict(given)


def section_of(name: str, cls: type, given: Any) -> Any:
    """Build the settings of a section.

    Args:
        name: Of the section.
        cls: Class of its settings.
        given: The section as it is in a file.

    Raises:
        ConfigError: For an unknown key, or a value that is wrong.
    """
    values = as_mapping(name, given)
    check_section(name, cls, values)
    return from_mapping(cls, name, values)


def check_section(name: str, cls: type, values: Mapping[str, Any]) -> None:
    """Check keys and types of a section.

    Raises:
        ConfigError: Names the first key that is unknown, or has a value of the wrong type.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    for key, value in values.items():
        if key not in names:
            raise UnknownKeyError(f"{name}.{key}", value, names)
    check_types(cls, name, values)


def check_types(cls: type, section: str, values: Mapping[str, Any]) -> None:
    """Check the types of values against the fields of a dataclass of the same names.

    Raises:
        ConfigError: Names the first key with a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            known = {field.name for field in dataclasses.fields(hints[key])}
            inner = {name: part for name, part in value.items() if name in known}
            check_types(hints[key], f"{section}.{key}", inner)  # its constructor names the others
        elif not _fits(value, hints[key]):
            raise ConfigError(f"{section}.{key}", value, f"must be {_in_words(hints[key])}")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        ends_open = len(args) == 2 and args[1] is Ellipsis
        inner = args[:1] * len(value) if ends_open and isinstance(value, list) else args
        return (
            isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
        )
    if origin is Callable:
        return False  # text that names one is taken out before
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)  # which checks its values itself
    if hint in (int, float):
        number = int if hint is int else (int, float)
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return f"a list, each item {_in_words(args[0])}"
    if origin is Callable:
        return 'a function as "file.py:name"'
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return "null" if hint is type(None) else names.get(hint, "a section of `key: value` lines")
