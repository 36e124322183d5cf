"""Settings of the evaluation on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_apr.config.common import LEAST_TEMPERATURE
from ray_apr.core.checks import at_least, of_type, positive, require, whole, whole_or_none
from ray_apr.core.user import RewardFunction


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the policy is evaluated on held-out prompts, on the run's own servers."""

    every: int = 10
    """Policy versions between evaluations; the last version is always evaluated. Only versions that
    the servers get can be: with ``sync_every`` above 1, the first one at or past each multiple."""
    at_start: bool = True
    """Evaluate the base model, too."""
    samples: int = 1
    """Responses to each prompt."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest that have this probability together."""
    max_response_tokens: int | None = None
    """Budget of a response; None takes that of the rollouts."""
    max_inflight: int = 32
    """Responses under generation at once, over all servers; in an engine's queue they go first."""
    pass_threshold: float = 1.0
    """Least reward of a response that passes, for pass@k."""
    suite_column: str | None = None
    """Column with the name of each prompt's suite, of each of which there are figures of its own;
    None: the prompts are one suite. Several files have "suite" by themselves."""
    rewards: Mapping[str, RewardFunction] = field(default_factory=dict, hash=False)
    """By the name of a suite: what scores it instead of the run's reward. Refused beside an
    environment."""
    timeout_s: float = 600.0
    """Longest time without progress of the last evaluation, which the run waits for: no call that
    ends, no token. Where engines and trainer take turns, also the longest time that a turn waits
    for an evaluation, which is then interrupted and goes on later."""

    def __post_init__(self) -> None:
        s = "evaluation"
        whole(s, self, "every", "samples", "max_inflight")
        at_least(s, self, 1, "every", "samples", "max_inflight")
        at_least(s, self, 0, "temperature")
        positive(s, self, "top_p", "timeout_s")
        require(
            self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
            f"{s}.temperature",
            self.temperature,
            f"must be 0 or at least {LEAST_TEMPERATURE}: engines draw with no smaller one",
        )
        require(self.top_p <= 1, f"{s}.top_p", self.top_p, "must be in (0, 1]")
        whole_or_none(s, self, 1, "max_response_tokens")
        of_type(s, self, bool, "true or false", "at_start")
        at_least(s, self, -math.inf, "pass_threshold")
        column = self.suite_column
        is_name = column is None or (isinstance(column, str) and bool(column))
        require(is_name, f"{s}.suite_column", column, "must be the name of a column")
        self._check_rewards()
        require(
            self.samples == 1 or self.temperature > 0,
            f"{s}.samples",
            self.samples,
            "needs a temperature above 0: greedy responses to one prompt are all the same",
        )

    def _check_rewards(self) -> None:
        rewards: object = self.rewards
        remedy = "must be a mapping: a function for the name of a suite"
        require(isinstance(rewards, Mapping), "evaluation.rewards", rewards, remedy)
        for suite, reward in self.rewards.items():
            name = f"evaluation.rewards.{suite}"
            require(isinstance(suite, str), name, suite, "must have text as the name of the suite")
            require(callable(reward), name, reward, "must be a function of a Sample")
        require(
            self.suite_column is not None or not self.rewards,
            "evaluation.rewards",
            list(self.rewards),
            "need suites: give evaluation.suite_column, or several files of prompts",
        )

    def is_due(self, policy_version: int, last_version: int | None = None) -> bool:
        """Whether a version is evaluated: the first one at or past a multiple of `every`.

        Args:
            policy_version: What the servers have now.
            last_version: What they had before; None: the version before that.
        """
        if policy_version == 0:
            return self.at_start
        last = policy_version - 1 if last_version is None else last_version
        return policy_version // self.every > last // self.every
