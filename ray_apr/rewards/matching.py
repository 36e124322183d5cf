"""Rewards by comparing texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ray_apr.core.checks import of_type, require
from ray_apr.core.exceptions import RewardError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction
from ray_apr.rewards.answers import (
    Extract,
    check_extraction,
    column_of,
    compiled,
    extracted,
    response_of,
)


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """What `exact_match` returns; its fields are the maker's arguments."""

    column: str
    pattern: re.Pattern[str] | None
    extract: Extract | None
    ignore_case: bool
    strip: bool
    collapse_whitespace: bool

    def __post_init__(self) -> None:
        s = "exact_match"
        of_type(s, self, str, "the name of a column", "column")
        of_type(s, self, bool, "True or False", "ignore_case", "strip", "collapse_whitespace")
        require(bool(self.column), f"{s}.column", self.column, "must be the name of a column")
        check_extraction(s, self.pattern, self.extract)

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0."""
        answer = extracted(response_of(sample), self.pattern, self.extract)
        expected = self._expected(sample)
        return float(answer is not None and self._normalized(answer) in expected)

    def _expected(self, sample: Sample) -> set[str]:
        """The right answers, normalised."""
        value = column_of(sample, self.column)
        values = value if isinstance(value, list | tuple) else [value]
        texts = [_text(sample, self.column, v) for v in values]
        # a column of whole numbers and others has floats alone, and 7 is there as 7.0
        texts += [str(int(v)) for v in values if isinstance(v, float) and v.is_integer()]
        expected = {self._normalized(text) for text in texts}
        if not expected or "" in expected:
            detail = f"column {self.column!r} of its row holds no answer, or an empty one"
            raise RewardError(sample.sample_id, "invalid", detail)
        return expected

    def _normalized(self, text: str) -> str:
        text = " ".join(text.split()) if self.collapse_whitespace else text
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


def _text(sample: Sample, column: str, value: Any) -> str:
    if isinstance(value, str | int) or (isinstance(value, float) and isfinite(value)):
        return str(value)
    detail = f"column {column!r} of its row holds {value!r}; must be texts or numbers"
    raise RewardError(sample.sample_id, "invalid", detail)


def exact_match(
    column: str = "answer",
    *,
    pattern: str | re.Pattern[str] | None = None,
    extract: Extract | None = None,
    ignore_case: bool = False,
    strip: bool = True,
    collapse_whitespace: bool = False,
) -> RewardFunction:
    r"""Make a reward that is 1.0 if the answer equals a column of the prompt's row, else 0.0.

    Args:
        column: Holds the right answer: a text, a number (compared as Python writes it, 7.0 also
            as 7), or a list of those, of which any counts.
        pattern: Regular expression; the answer is group 1 of its last match in the response, or
            all of the match if there is no group. A text is compiled with ``re.DOTALL``. Without
            a match the reward is 0.0. None takes the whole response.
        extract: Instead of a pattern, a function of the response's text that returns the answer,
            or None where there is none.
        ignore_case: Compare case-folded texts.
        strip: Leave out white space at both ends.
        collapse_whitespace: Count each run of white space as one space, and none at the ends.

    Returns:
        A function of a finished `Sample`. It raises `RewardError` if the row has no such column,
        or no answer in it.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> from ray_apr.core.sample import Prompt, Sample
        >>> reward = exact_match(pattern=r"answer is (\d+)")
        >>> prompt = Prompt(prompt_id="p", token_ids=(1,), row={"answer": 42})
        >>> sample = Sample(sample_id="p-0", group_id="p", prompt=prompt, max_response_tokens=9,
        ...                 response_text="So the answer is 42.")
        >>> reward(sample)
        1.0
    """
    return ExactMatch(
        column=column,
        pattern=None if pattern is None else compiled("exact_match.pattern", pattern),
        extract=extract,
        ignore_case=ignore_case,
        strip=strip,
        collapse_whitespace=collapse_whitespace,
    )
