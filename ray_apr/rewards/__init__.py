"""Ready-made reward functions, and makers that combine them; names load lazily.

Each maker checks its arguments at once (`ConfigError`) and returns a function of a finished
`Sample` that Ray can pickle. A wrong answer is 0.0; an answer that could not be judged is an
exception, never a number.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_apr.rewards.judge import llm_judge
    from ray_apr.rewards.matching import exact_match
    from ray_apr.rewards.math_answers import math_equal
    from ray_apr.rewards.programs import code_tests
    from ray_apr.rewards.reasoning import reasoning_gym_score
    from ray_apr.rewards.shaping import format_reward, length_penalty, weighted_sum

__all__ = [
    "code_tests",
    "exact_match",
    "format_reward",
    "length_penalty",
    "llm_judge",
    "math_equal",
    "reasoning_gym_score",
    "weighted_sum",
]

_HOMES = {
    "code_tests": "programs",
    "exact_match": "matching",
    "format_reward": "shaping",
    "length_penalty": "shaping",
    "llm_judge": "judge",
    "math_equal": "math_answers",
    "reasoning_gym_score": "reasoning",
    "weighted_sum": "shaping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
