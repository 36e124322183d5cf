"""Suites of held-out prompts: what scores each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray_apr.config import EvaluationConfig
from ray_apr.core.checks import require
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction


def check_suites(names: Iterable[Any], config: EvaluationConfig) -> None:
    """Check that there is a suite for all that the settings have of one.

    Args:
        names: What the prompts have in ``evaluation.suite_column``.
        config: Settings and rewards of suites.

    Raises:
        ConfigError: If there is none of that name.
    """
    known = dict.fromkeys(map(str, names))
    remedy = f"is no suite of the held-out prompts, which are {', '.join(known)}; name another"
    for field in ("suites", "rewards"):
        for suite in getattr(config, field):
            require(suite in known, f"evaluation.{field}", suite, remedy)


def reward_of_suites(
    reward: RewardFunction | None, config: EvaluationConfig
) -> RewardFunction | None:
    """What scores the responses of an evaluation: of each suite its own reward, or the run's.

    Args:
        reward: The run's; None: the environment gives them, beside which no suite has its own.
        config: Rewards of suites.
    """
    rewards, column = dict(config.rewards), config.suite_column
    if not rewards or column is None:
        return reward

    def score(sample: Sample) -> Any:
        """The number, or what waits for it where the reward is ``async``."""
        function = rewards.get(str(sample.row[column]), reward)
        assert function is not None  # `run.checks` wants one
        return function(sample)

    return score
