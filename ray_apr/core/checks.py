"""Checks of settings: each names the field, the value and the remedy (`ConfigError`)."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

from ray_apr.core.exceptions import ConfigError, UnknownKeyError

_MOST, _BOUNDED_UNITS = 1e9, ("_s", "_mb")
"""What a wait of Python's and a size in memory may come to, and a little less."""


def require(ok: bool, name: str, value: Any, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(name, value, remedy)


def is_number(value: Any) -> bool:
    """Whether it is a finite int or float; bool, text, NaN and what no float can hold are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_whole(value: Any, minimum: float = -math.inf) -> bool:
    """Whether it is a whole number of at least `minimum`; bool is none."""
    return isinstance(value, int) and is_number(value) and value >= minimum


def at_least(section: str, config: Any, minimum: float, *names: str) -> None:
    """Check that fields are finite numbers of at least `minimum`."""
    for name in names:
        value = getattr(config, name)
        require(
            is_number(value) and minimum <= value <= _most(name),
            f"{section}.{name}",
            value,
            f"must be a finite number of at least {minimum:g}{_at_most(name)}",
        )


def positive(section: str, config: Any, *names: str) -> None:
    """Check that fields are finite numbers above 0."""
    for name in names:
        value = getattr(config, name)
        require(
            is_number(value) and 0 < value <= _most(name),
            f"{section}.{name}",
            value,
            f"must be a finite number above 0{_at_most(name)}",
        )


def _most(name: str) -> float:
    """Largest value of a field, by the unit that its name ends with."""
    is_bounded = name.endswith(_BOUNDED_UNITS) and not name.endswith("_per_s")
    return _MOST if is_bounded else math.inf


def _at_most(name: str) -> str:
    most = _most(name)
    return "" if math.isinf(most) else f", at most {most:,.0f}"


def whole(section: str, config: Any, *names: str) -> None:
    """Check that fields are whole numbers."""
    for name in names:
        value = getattr(config, name)
        require(
            is_whole(value),
            f"{section}.{name}",
            value,
            "must be a whole number",
        )


def whole_or_none(section: str, config: Any, minimum: int, *names: str) -> None:
    """Check that fields are None or whole numbers of at least `minimum`."""
    for name in names:
        if getattr(config, name) is not None:
            whole(section, config, name)
            at_least(section, config, minimum, name)


def of_type(section: str, config: Any, kind: Any, words: str, *names: str) -> None:
    """Check that fields are of a type, named in `words`."""
    for name in names:
        value = getattr(config, name)
        require(isinstance(value, kind), f"{section}.{name}", value, f"must be {words}")


def one_of(section: str, config: Any, choices: Mapping[str, Any]) -> None:
    """Check that fields are among the choices of their ``Literal``."""
    for name, literal in choices.items():
        allowed: Collection[str] = get_args(literal)
        value = getattr(config, name)
        require(
            value in allowed, f"{section}.{name}", value, f"must be one of {', '.join(allowed)}"
        )


def takes_one(field: str, function: Any, remedy: str) -> None:
    """Check that code of the user's can be called with one argument; what is compiled may not tell.

    Args:
        field: Dotted name of the setting.
        function: The code.
        remedy: What it must be.
    """
    try:
        inspect.signature(function).bind(None)
    except ValueError:
        return
    except TypeError as error:
        name = getattr(function, "__qualname__", function)
        raise ConfigError(field, name, f"{remedy}: {error}") from error


def answers_at_once(field: str, function: Any) -> None:
    """Check that code of the user's is not async, where nobody would wait for its answer.

    Args:
        field: Dotted name of the setting.
        function: The code.
    """
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    name = getattr(function, "__qualname__", function)
    require(not is_async, field, name, "must not be async: nobody would wait for its answer")


def from_mapping(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    """Build a config of class `cls` from a mapping, naming unknown keys.

    Raises:
        UnknownKeyError: For a key that is no field of `cls`.
        ConfigError: If `values` is no mapping, or a value is wrong.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    require(isinstance(values, Mapping), section, values, "must be a mapping of settings")
    for key in values:
        if key not in names:
            raise UnknownKeyError(f"{section}.{key}", values[key], names)
    return cls(**values)
