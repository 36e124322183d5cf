"""Rewards of Reasoning Gym's tasks (2505.24760), through the package reasoning-gym."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_apr.core.checks import of_type, require
from ray_apr.core.exceptions import RewardError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.rewards.answers import (
    Extract,
    as_result,
    check_extraction,
    column_of,
    compiled,
    extracted,
    optional_package,
    response_of,
)

ANSWER_TAGS = r"<answer>\s*+((?:[^\s<]++|<(?!/?answer>)|\s++(?!</answer>))*+)\s*+</answer>"
"""How Reasoning Gym's own prompts ask for the answer, without white space at its ends.

Nothing is looked at twice, as a response may be thousands of line breaks after an opening tag, and
no tag is inside: one that is only mentioned begins no answer.
"""

_TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks whose scorers compare grids of tuples, which JSON has made lists."""

_LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
_FORMULAS = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
"""Tasks whose scorers evaluate an answer: these through SymPy, which calls `eval` as those do."""

_FUNCTIONS = {
    "Abs", "Rational", "abs", "acos", "acosh", "acot", "acsc", "asec", "asin", "asinh", "atan",
    "atanh", "cbrt", "cos", "cosh", "cot", "coth", "csc", "csch", "exp", "ln", "log", "sec", "sech",
    "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip
"""What a formula may call."""

_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a scorer may raise that takes an answer for well-formed."""

Scorer = Callable[[str, Mapping[str, Any]], float]


@functools.cache
def _scorer(task: str) -> Scorer:
    """The task's own scoring function; making one builds a dataset, hence the cache."""
    package: Any = optional_package("reasoning_gym", "reasoning-gym", "rewards-gym")
    scorer: Scorer = package.get_score_answer_fn(task)
    return scorer


@dataclass(frozen=True, kw_only=True)
class ReasoningGymScore:
    """What `reasoning_gym_score` returns; its fields are the maker's arguments."""

    task_column: str
    entry_column: str
    pattern: re.Pattern[str] | None
    extract: Extract | None

    def __post_init__(self) -> None:
        s = "reasoning_gym_score"
        for name in ("task_column", "entry_column"):
            of_type(s, self, str, "the name of a column", name)
            value = getattr(self, name)
            require(bool(value), f"{s}.{name}", value, "must be the name of a column")
        check_extraction(s, self.pattern, self.extract)

    def __call__(self, sample: Sample) -> RewardResult:
        """The task's score, with `gym_answer_found`."""
        text = response_of(sample)
        task, entry = str(column_of(sample, self.task_column)), self._entry(sample)
        try:
            score = _scorer(task)
        except (AssertionError, ValueError) as error:
            raise RewardError(sample.sample_id, "invalid", f"task {task!r}: {error}") from error
        if task in _TUPLE_TASKS:
            entry = _with_tuples(entry)
        answer = extracted(text, self.pattern, self.extract)
        value = None
        # the entry's own answer may hold what no other may, such as an integral that nobody solved
        if answer is not None and (answer == entry["answer"] or is_harmless(task, answer)):
            value = _value(score, answer, entry)
        if value is None:
            return RewardResult(reward=0.0, metrics={"gym_answer_found": 0.0})
        result = as_result(sample, value, f"the scorer of {task}")
        return RewardResult(reward=result.reward, metrics={"gym_answer_found": 1.0})

    def _entry(self, sample: Sample) -> Mapping[str, Any]:
        value = column_of(sample, self.entry_column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                detail = f"column {self.entry_column!r} of its row is no JSON: {error}"
                raise RewardError(sample.sample_id, "invalid", detail) from error
        if not isinstance(value, Mapping) or "answer" not in value:
            detail = f"column {self.entry_column!r} of its row is no entry with an answer"
            raise RewardError(sample.sample_id, "invalid", detail)
        return value


def _value(score: Scorer, answer: str, entry: Mapping[str, Any]) -> float | None:
    """The scorer's value; None if it can read the entry's own answer, but not this one."""
    try:
        return score(answer, entry)
    except _UNREADABLE:
        score(entry["answer"], entry)  # raises, too, if it is not the answer's fault
        return None


def is_harmless(task: str, answer: str) -> bool:
    """Whether the task's scorer does not run a program by evaluating an answer."""
    if task not in (*_LITERALS, *_FORMULAS):
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return task in _LITERALS  # to `eval` it is none either; SymPy has a syntax of its own
    return all(_is_allowed(node, is_formula=task in _FORMULAS) for node in ast.walk(tree))


def _is_allowed(node: ast.AST, *, is_formula: bool) -> bool:
    """Whether a part of an expression belongs to a formula, or to lists of values."""
    if isinstance(node, ast.Constant):  # SymPy evaluates what is in a string, too
        return isinstance(node.value, int | float) or not is_formula
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        return is_formula and name in _FUNCTIONS and not node.keywords
    allowed = (ast.Expression, ast.Name, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    lists = () if is_formula else (ast.List, ast.Tuple)
    return isinstance(node, (*allowed, ast.expr_context, *lists))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def reasoning_gym_score(
    *,
    task_column: str = "task",
    entry_column: str = "entry",
    pattern: str | re.Pattern[str] | None = ANSWER_TAGS,
    extract: Extract | None = None,
) -> RewardFunction:
    """Make a reward that is the score of a Reasoning Gym task, in [0, 1].

    It needs the package reasoning-gym: ``pip install 'ray_apr[rewards-gym]'``. Make the rows so::

        rows = [
            {"prompt": entry["question"], "task": task, "entry": json.dumps(entry)}
            for entry in reasoning_gym.create_dataset(task, size=1000, seed=0)
        ]

    Args:
        task_column: Holds the name of the task's dataset, such as ``"chain_sum"``.
        entry_column: Holds the dataset's entry (question, answer, metadata), as JSON text or as a
            mapping.
        pattern: The answer is group 1 of its last match in the response; without a match the
            reward is 0.0. None takes the whole response.
        extract: Instead of a pattern, a function of the response's text that returns
            the answer, or None where there is none.

    Returns:
        A function of a finished `Sample` that returns a `RewardResult` with the metric
        ``gym_answer_found`` (0.0 if the response has no answer, one that makes the scorer raise,
        or one that would run a program: some scorers evaluate an answer as Python). It raises
        `RewardError` if the task does not exist or the entry cannot be read, what the scorer
        raises for the entry's own answer, too, and `ImportError`, naming the extra, without
        reasoning-gym. Tasks are scored with their default settings.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> reward = reasoning_gym_score(pattern=r"Answer: (.*)")
    """
    if extract is not None and pattern == ANSWER_TAGS:
        pattern = None
    field = "reasoning_gym_score.pattern"
    return ReasoningGymScore(
        task_column=task_column,
        entry_column=entry_column,
        pattern=None if pattern is None else compiled(field, pattern),
        extract=extract,
    )
