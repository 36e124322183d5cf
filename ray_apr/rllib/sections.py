"""A section of a run from what a user gave, and from what RLlib's settings say beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray_apr.config import RolloutConfig
from ray_apr.config.renamed import renew
from ray_apr.core.checks import from_mapping, require

logger = logging.getLogger(__name__)


def section(
    cls: type,
    name: str,
    given: Any,
    of_rllib: Mapping[str, tuple[str, Any]] | None = None,
    *,
    preset: str | None = None,
) -> Any:
    """A section of what was given, and of what RLlib's settings say.

    Args:
        cls: Its class.
        name: For errors.
        given: A config of that class, a mapping, or None.
        of_rllib: Field -> (name of the setting there, value).
        preset: Key of a mapping that names a preset of the class.

    Raises:
        ConfigError: If it is wrong, or a field has two values.
    """
    given, of_rllib = {} if given is None else given, of_rllib or {}
    require(isinstance(given, cls | Mapping), name, given, f"must be a {cls.__name__} or a mapping")
    if cls is RolloutConfig and isinstance(given, Mapping):
        given = renew(given, logger.warning)
    default = cls()
    for path, (theirs, value) in of_rllib.items():
        mine = _find(given, path)
        allowed: tuple[Any, ...] = (None, value)
        if not isinstance(given, Mapping):  # which has all fields, whoever has set them
            allowed += (_find(default, path),)
        remedy = f"is also said by {theirs}, to be {value!r}; leave one of them out"
        require(mine in allowed, f"{name}.{path}", mine, remedy)
        given = _with(given, path, value)
    if not isinstance(given, Mapping):
        return given
    if preset in given:
        values = dict(given)
        return cls.preset(values.pop(preset), **values)  # type: ignore[attr-defined]
    return from_mapping(cls, name, given)


def _find(given: Any, path: str) -> Any:
    """What a config or a mapping has at a dotted path; None if it is not given."""
    for part in path.split("."):
        given = given.get(part) if isinstance(given, Mapping) else getattr(given, part, None)
    return given


def _with(given: Any, path: str, value: Any) -> Any:
    """The same with another value at a dotted path."""
    part, _, rest = path.partition(".")
    if rest:
        value = _with(_find(given, part) or {}, rest, value)
    return {**given, part: value} if isinstance(given, Mapping) else replace(given, **{part: value})
