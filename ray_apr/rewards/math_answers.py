"""Rewards by mathematical equivalence, through the package math-verify."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from ray_apr.core.checks import of_type, require, whole
from ray_apr.core.exceptions import RewardError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.rewards.answers import column_of, optional_package, response_of
from ray_apr.rewards.math_sizes import is_small

_BOXED = "\\boxed{"
_LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")
_EMPHASIS = re.compile(r"(?<![\w^{)\]}])(\*{1,3}|`)([^\s*`](?:[^*`\n]*[^\s*`])?)\1(?!\w)")
"""Of Markdown: **42**, but neither 2*3*4 nor x^*."""
_DOLLAR_OR_SPACE = re.compile(r"\\\$|(?<=\d)(?:\\[,!;:]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
"""What LaTeX writes for a sum of money, and for thousands: \\$12\\,500; and spaces that hold these
together."""
_SPACED = re.compile(r"(?<![\w.,^])(?<!\d )\d{1,3}(?: \d{3})+(?![\w/^]| \d)")
"""A number whose thousands are apart: 1 000 000, but no list of numbers."""
_EN_DASH = re.compile(r"(?<![\d)}\]])(?<![\d)}\]] )\u2013(?=[\d.\\])")
"""As the sign of a number; between two it is a range."""
_STOP = re.compile(r"(?<=[\w)}\]])(?<!\\right)[.,;](?=\$|\s*\Z)")
"""At the end of a formula."""
_SCIENTIFIC = re.compile(
    r"(?<![\w.])\d{1,15}(?:\.\d{1,15})?[eE][-+]?\d{1,3}(?![\w^{]|\.\d)", re.ASCII
)
"""A number as programs write it, which in LaTeX is a product with Euler's number: 1.5e-3."""
_RUN = re.compile(r"[\d.\s+\-*\u00d7/^()\u00f7]{2000,}")
"""Of numbers and signs, at each of which math-verify reads on to the end of the run."""
_OPENED = {r"(?<!\\)\\\(": "\\)", r"(?<!\\)\\\[": "\\]"}
"""What begins a formula, but for line breaks as in \\\\[2pt], and what ends it."""
_NESTED = re.compile(r"(?:[({\[]\s*){7}")
"""Brackets for which the parser of LaTeX takes hours, as twice as long for each more."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MIXED = re.compile(r"(?<![\w.,/^])(\d{1,15}) (\d{1,15})/(\d{1,15})(?![\w/^])")
"""A whole number and a fraction: 3 1/2."""
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{0,15})\.(\d{0,15})\\(?:overline|bar)\s*(?:\{(\d{1,15})\}|(\d))"
)
"""A decimal whose last digits repeat: 0.1\\overline{6}."""
_BARE_BASE, _BASE = re.compile(r"(?<=\d)_(\d{1,3})"), re.compile(r"(?<=\d)_\{(\d{1,3})\}")
"""That of a number: 25_7 and 25_{7}."""


@dataclass(frozen=True, kw_only=True)
class MathEqual:
    """What `math_equal` returns; its fields are the maker's arguments."""

    column: str
    boxed_only: bool
    float_digits: int

    def __post_init__(self) -> None:
        s = "math_equal"
        of_type(s, self, str, "the name of a column", "column")
        of_type(s, self, bool, "True or False", "boxed_only")
        whole(s, self, "float_digits")
        require(bool(self.column), f"{s}.column", self.column, "must be the name of a column")
        require(self.float_digits >= 0, f"{s}.float_digits", self.float_digits, "must be 0 or more")

    def __call__(self, sample: Sample) -> RewardResult:
        """1.0 or 0.0, with `math_answer_found`."""
        math_verify: Any = optional_package("math_verify", "math-verify", "rewards")
        for name in ("parser", "grader"):
            logging.getLogger(f"math_verify.{name}").addFilter(_is_no_advice)
        text, reference = _plain(response_of(sample)), _plain(self._text_of(sample))
        expected = self._expected(math_verify, sample, reference)
        given = sample.row[self.column]
        if isinstance(given, str) and _SCIENTIFIC.fullmatch(given.strip()):  # 2e-1 may be 2·e − 1
            expected += self._expected(math_verify, sample, given.strip())
        answers = self._answers(math_verify, text)
        # Without time limits: math-verify keeps them by SIGALRM, which only the main thread may
        # set, and rewards run in threads. Scoring has a limit of its own.
        if all(map(is_small, (*expected, *answers))):
            equal = bool(answers) and math_verify.verify(
                expected, answers, float_rounding=self.float_digits, timeout_seconds=None
            )
        else:
            equal = any(answer in expected for answer in answers)
        if equal:  # math-verify takes no notice of bases
            bases = _last_base(reference), _last_base(last_boxed(text) or text)
            equal = None in bases or bases[0] == bases[1]
        return RewardResult(
            reward=float(equal), metrics={"math_answer_found": float(bool(answers))}
        )

    def _expected(self, math_verify: Any, sample: Sample, text: str) -> list[Any]:
        """The reference as SymPy expressions; bare LaTeX is set between dollar signs first."""
        marked = any(mark in text for mark in _LATEX_MARKS)
        expressions: list[Any] = math_verify.parse(
            text if marked else f"${text}$", fallback_mode="no_fallback", parsing_timeout=None
        )
        if not expressions:
            detail = f"column {self.column!r} of its row holds {text!r}, which is no mathematics"
            raise RewardError(sample.sample_id, "invalid", detail)
        return expressions

    def _text_of(self, sample: Sample) -> str:
        """The reference as text: numbers without the exponent that Python writes, of which LaTeX
        makes a product."""
        value = column_of(sample, self.column)
        text = str(value).strip()
        number = None
        if "_" not in text:  # which Python takes for a thousands separator, and we for a base
            with contextlib.suppress(InvalidOperation):
                number = Decimal(text)
        if isinstance(value, bool) or (number is not None and not number.is_finite()):
            detail = f"column {self.column!r} of its row holds {text!r}, which is no number"
            raise RewardError(sample.sample_id, "invalid", detail)
        return text if number is None else format(number, "f")

    def _answers(self, math_verify: Any, text: str) -> list[Any]:
        """The response's answer as SymPy expressions; empty if there is none."""
        latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
        content = last_boxed(text)
        if content is not None and _NESTED.search(content):
            return []
        given = []
        if content is not None:  # 2e-1 may be either
            content = _STOP.sub("", content)
            for formula in dict.fromkeys((content, _SCIENTIFIC.sub(_decimal, content))):
                given.append((f"${formula}$", [latex]))
        if not self.boxed_only:  # several boxes may be one answer: 1 and 2
            if not any(mark in text for mark in _LATEX_MARKS):
                text = _SCIENTIFIC.sub(_decimal, text)
            given.append((searchable(text), [latex, math_verify.ExprExtractionConfig()]))
        answers: list[Any] = []
        for one, kinds in given:
            answers += math_verify.parse(
                one,
                extraction_config=kinds,
                fallback_mode="no_fallback",
                extraction_mode="first_match",
                parsing_timeout=None,
            )
        return answers


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Whether math-verify says something else than that its time limits are off."""
    return not record.getMessage().startswith("Timeout is disabled")


def _plain(text: str) -> str:
    """A text without what math-verify does not know to surround a number, or to be its sign."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\N{DEGREE SIGN}", "")
    text = _SPACED.sub(_without_spaces, _EN_DASH.sub("-", text))
    text = _STOP.sub("", _EMPHASIS.sub(r"\2", _DOLLAR_OR_SPACE.sub("", text)))
    text = _BARE_BASE.sub(r"_{\1}", _BOX.sub(lambda _: _BOXED, text))
    return _REPEATING.sub(_fraction_of_repeating, _MIXED.sub(_fraction_of_mixed, text))


def searchable(text: str) -> str:
    """A text without what costs math-verify the square of its length: long runs of numbers but for
    their ends, and begins of formulas that have none."""
    for begin, end in _OPENED.items():
        before, closed, rest = text.rpartition(end)
        text = before + closed + re.sub(begin, " ", rest)
    return _RUN.sub(lambda found: found[0][-2000:], text)


def _without_spaces(found: re.Match[str]) -> str:
    return found[0].replace(" ", "")


def _decimal(found: re.Match[str]) -> str:
    return format(Decimal(found[0]), "f")


def _fraction_of_mixed(found: re.Match[str]) -> str:
    whole_part, numerator, denominator = map(int, found.groups())
    is_mixed = 0 < numerator < denominator
    return f"{whole_part * denominator + numerator}/{denominator}" if is_mixed else found[0]


def _fraction_of_repeating(found: re.Match[str]) -> str:
    whole_part, once, several, one = found.groups()
    again = several or one
    nines = 10 ** len(again) - 1
    numerator = int(whole_part + once + again) - int(whole_part + once or "0")
    return f"\\frac{{{numerator}}}{{{nines * 10 ** len(once)}}}"


def _last_base(text: str) -> str | None:
    """Base of the last number of a plain text that has one written behind it; None without any."""
    found: list[str] = _BASE.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """What is inside the last LaTeX ``boxed`` command; None without one that is closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start, depth = start + len(_BOXED), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def math_equal(
    column: str = "answer", *, boxed_only: bool = False, float_digits: int = 6
) -> RewardFunction:
    r"""Make a reward that is 1.0 if the response's final answer equals a column mathematically.

    It needs the package math-verify: ``pip install 'ray_apr[rewards]'``. What math-verify can
    neither parse nor compare counts as not equal. Numbers of more than 20,000 digits, such as
    9^(9^9), are not worked out: they have to be written alike. Its time limits are off, as they
    need the main thread; ``rollout.reward.timeout_s`` bounds the call, and a call that hangs in
    SymPy costs its worker process.

    Args:
        column: Holds the right answer: a number, or LaTeX with or without dollar signs.
        boxed_only: Take only the last ``\boxed{...}`` for an answer. False takes the last
            formula or number where nothing is boxed.
        float_digits: Decimal places that decide whether two numbers are equal.

    Returns:
        A function of a finished `Sample` that returns a `RewardResult` with the metric
        ``math_answer_found`` (1.0 if the response has an answer that can be parsed). It raises
        `RewardError` if the reference is missing or no mathematics, and `ImportError`, naming the
        extra, without math-verify.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> reward = math_equal("solution", boxed_only=True)
    """
    return MathEqual(column=column, boxed_only=boxed_only, float_digits=float_digits)
