"""Settings of the evaluation on held-out prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ray_apr.config.common import LEAST_TEMPERATURE, MOST_TEMPERATURE
from ray_apr.core.checks import (
    at_least,
    from_mapping,
    of_type,
    positive,
    require,
    takes_one,
    whole,
    whole_or_none,
)
from ray_apr.core.user import REWARD_SIGNATURE, RewardFunction


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """How responses to the held-out prompts of one suite are drawn; what is null is as `evaluation`
    has it. In YAML each is under the name of its suite: ``suites: {olympiad: {samples: 8}}``."""

    samples: int | None = None
    """Responses to each prompt."""
    temperature: float | None = None
    """0 takes the likeliest token."""
    top_p: float | None = None
    """Tokens are drawn from the likeliest that have this probability together; below 1 it needs a
    temperature above 0."""
    max_response_tokens: int | None = None
    """Budget of a response; None takes that of the rollouts."""

    def check(self, s: str) -> None:
        """Check what is drawn with all of these.

        Args:
            s: Name of the section.

        Raises:
            ConfigError: Names the setting that is wrong.
        """
        whole(s, self, "samples")
        at_least(s, self, 1, "samples")
        at_least(s, self, 0, "temperature")
        positive(s, self, "top_p")
        temperature, top_p = self.temperature or 0.0, self.top_p or 0.0
        require(
            temperature == 0 or LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE,
            f"{s}.temperature",
            temperature,
            f"must be 0, or at least {LEAST_TEMPERATURE} and at most {MOST_TEMPERATURE:g}: engines "
            "draw with no other",
        )
        require(top_p <= 1, f"{s}.top_p", top_p, "must be in (0, 1]")
        whole_or_none(s, self, 1, "max_response_tokens")
        require(
            self.samples == 1 or temperature > 0,
            f"{s}.samples",
            self.samples,
            "needs a temperature above 0: greedy responses to one prompt are all the same",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(SuiteConfig):
    """When and how the policy is evaluated on held-out prompts, on the run's own servers."""

    every: int = 10
    """Policy versions between evaluations; the last version is always evaluated. Only versions that
    the servers get can be: with ``sync_every`` above 1, the first one at or past each multiple. One
    that comes due while another is evaluated is left out, and counted in the next evaluation."""
    at_start: bool = True
    """Evaluate the base model, too."""
    samples: int = 1
    """Responses to each prompt."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest that have this probability together; below 1 it needs a
    temperature above 0."""
    max_inflight: int = 32
    """Responses under generation at once, over all servers; in an engine's queue they go first."""
    pass_threshold: float = 1.0
    """Least reward of a response that passes, for pass@k."""
    suite_column: str | None = None
    """Column with the name of each prompt's suite, of each of which there are figures of its own;
    None: the prompts are one suite. Several files have "suite" by themselves."""
    suites: Mapping[str, SuiteConfig] = field(default_factory=dict, hash=False)
    """By the name of a suite: how its responses are drawn, where that is other than here."""
    rewards: Mapping[str, RewardFunction] = field(default_factory=dict, hash=False)
    """By the name of a suite: what scores it instead of the run's reward. Refused beside an
    environment."""
    timeout_s: float = 600.0
    """Longest time without progress of the last evaluation, which the run waits for: no call that
    ends, no token. Where engines and trainer take turns, also the longest time that a turn waits
    for an evaluation, which is then interrupted and goes on later."""

    def __post_init__(self) -> None:
        s = "evaluation"
        whole(s, self, "every", "max_inflight")
        at_least(s, self, 1, "every", "max_inflight")
        positive(s, self, "timeout_s")
        self.check(s)
        of_type(s, self, bool, "true or false", "at_start")
        at_least(s, self, -math.inf, "pass_threshold")
        column = self.suite_column
        is_name = column is None or (isinstance(column, str) and bool(column))
        require(is_name, f"{s}.suite_column", column, "must be the name of a column")
        self._check_names("suites", "a mapping of settings")
        require(
            column is not None or not self.suites,
            f"{s}.suites",
            list(self.suites),
            "need suites: give evaluation.suite_column, or several files of prompts",
        )
        made = {
            suite: given
            if isinstance(given, SuiteConfig)
            else from_mapping(SuiteConfig, f"{s}.suites.{suite}", given)
            for suite, given in self.suites.items()
        }
        object.__setattr__(self, "suites", made)
        for suite in made:
            SuiteConfig(**self._drawn(suite)).check(f"{s}.suites.{suite}")
        self._check_names("rewards", "a function")
        require(
            column is not None or not self.rewards,
            f"{s}.rewards",
            list(self.rewards),
            "need suites: give evaluation.suite_column, or several files of prompts",
        )
        for suite, reward in self.rewards.items():
            name = f"{s}.rewards.{suite}"
            require(callable(reward), name, reward, "must be a function of a Sample")
            takes_one(name, reward, REWARD_SIGNATURE)

    def _check_names(self, name: str, what: str) -> None:
        """Check that a field is a mapping by names of suites, which there are."""
        given, s = getattr(self, name), f"evaluation.{name}"
        require(isinstance(given, Mapping), s, given, f"must be {what} for the name of a suite")
        for suite in given:
            remedy = "must have text as the name of the suite"
            require(isinstance(suite, str), f"{s}.{suite}", suite, remedy)

    def _drawn(self, suite: str) -> dict[str, Any]:
        own = self.suites[suite]
        names = [f.name for f in dataclasses.fields(SuiteConfig)]
        of_both = ((name, getattr(own, name), getattr(self, name)) for name in names)
        return {name: other if given is None else given for name, given, other in of_both}

    def of_row(self, row: Mapping[str, Any]) -> EvaluationConfig:
        """What holds for a held-out prompt: these settings, or with those of its suite.

        Args:
            row: Of the dataset.
        """
        if self.suite_column is None or not self._of_suite:
            return self
        return self._of_suite.get(str(row[self.suite_column]), self)

    @cached_property
    def _of_suite(self) -> dict[str, EvaluationConfig]:
        """What `of_row` gives: made once, as it is asked for each response."""
        return {
            suite: dataclasses.replace(self, **self._drawn(suite), suites={})
            for suite in self.suites
        }

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
