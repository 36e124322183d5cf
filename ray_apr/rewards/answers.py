"""What the rewards share: the text of a sample, columns of its row, answers inside a text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ray_apr import rewards
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError, RewardError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardResult

_MOST_SHOWN = 200
"""Characters."""

Extract = Callable[[str], str | None]
"""Finds the answer in a response; None where there is none."""


def response_of(sample: Sample) -> str:
    """The decoded response.

    Raises:
        RewardError: If the sample has none.
    """
    text = sample.response_text
    if text is None:
        raise RewardError(sample.sample_id, "invalid", "it has no response_text; finish it first")
    return text


def column_of(sample: Sample, column: str) -> Any:
    """A column of the prompt's row.

    Raises:
        RewardError: If the row lacks it, or holds None or an empty text there.
    """
    if column not in sample.row:
        known = ", ".join(sorted(map(str, sample.row))) or "no column at all"
        detail = f"its row has no column {column!r}; it has {known}"
        raise RewardError(sample.sample_id, "invalid", detail)
    value = sample.row[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RewardError(sample.sample_id, "invalid", f"column {column!r} of its row is empty")
    return value


def compiled(field: str, pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Compile a regular expression in which ``.`` matches a newline; a compiled one stays.

    Raises:
        ConfigError: If it is none.
    """
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    require(isinstance(pattern, str), field, pattern, "must be a regular expression for text")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        require(False, field, pattern, f"is no regular expression ({error}); correct it")
        raise AssertionError("unreachable") from error


def last_found(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match, if there is one."""
    return next(reversed(list(pattern.finditer(text))), None)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, or all of it if the pattern has no group; None without a match."""
    found = last_found(pattern, text)
    return None if found is None else found.group(1 if pattern.groups else 0)


def extracted(
    text: str, pattern: re.Pattern[str] | None = None, extract: Extract | None = None
) -> str | None:
    """The answer inside a text: by a function, by a pattern's last match, or all of the text.

    Raises:
        TypeError: If the function gives something else than a text or None.
    """
    if extract is not None:
        answer = extract(text)
        if not isinstance(answer, str | None):
            raise TypeError(f"extract returned {shown(answer)}; must be a text, or None")
        return answer
    return text if pattern is None else last_match(pattern, text)


def check_extraction(section: str, pattern: object, extract: object) -> None:
    """Check that there is one way, or none, to extract an answer.

    Raises:
        ConfigError: If there are two, or `extract` is no function.
    """
    require(
        pattern is None or extract is None,
        f"{section}.extract",
        extract,
        "give a pattern or a function, not both",
    )
    require(
        extract is None or callable(extract),
        f"{section}.extract",
        extract,
        "must be a function of the response's text, or None",
    )


def optional_package(module: str, package: str, extra: str) -> ModuleType:
    """Import a package that is installed with an extra of ray_apr.

    Raises:
        ImportError: If it is not there; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"install it with `pip install 'ray_apr[{extra}]'` or `pip install {package}`"
        raise ImportError(f"{package} is missing ({error}); {remedy}") from error


def shown(value: object) -> str:
    """A value for a message; of a long one its begin."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def called(function: Callable[[Sample], Any], sample: Sample) -> Any:
    """Call a plain function in a thread: a future takes no `StopIteration`, and would never end.

    Raises:
        RuntimeError: If it raises that, as ``next`` does where nothing is left.
    """
    try:
        return function(sample)
    except StopIteration as error:
        raised = RuntimeError("raised StopIteration; give next() a default")
        raise raised.with_traceback(error.__traceback__) from error  # where it was raised


def as_result(sample: Sample, value: Any, who: str = "") -> RewardResult:
    """Take what a reward function returned.

    Args:
        sample: What it was called for.
        value: What it returned.
        who: Which function, of several.

    Raises:
        RewardError: If it is no finite number, or a text of one; names the function.
    """
    if isinstance(value, RewardResult):
        return value
    try:
        return RewardResult(reward=value)
    except ValueError as error:
        detail = f"returned {shown(value)}; must be a finite number, or a RewardResult"
        detail = f"{who} {detail}" if who else detail
        raise RewardError(sample.sample_id, "invalid", detail) from error


def check_is_made(field: str, given: object) -> None:
    """Check that a reward is none of the functions that make one.

    Raises:
        ConfigError: If it is.
    """
    name = getattr(given, "__name__", None)
    if name in rewards.__all__ and getattr(rewards, name) is given:
        remedy = f"makes rewards: give what {name}(...) returns, in YAML by a name in a file"
        raise ConfigError(field, name, remedy)


def longest_s(reward: object) -> float:
    """Seconds that programs may take in a call of a reward that was made here; 0 of any other."""
    if not type(reward).__module__.startswith("ray_apr.rewards"):
        return 0.0
    parts: Mapping[str, tuple[float, object]] = getattr(reward, "parts", {})
    own = float(getattr(reward, "total_time_limit_s", 0.0))
    return max([own, *(longest_s(part) for _, part in parts.values())])
