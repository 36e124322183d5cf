"""Rewards of form and length, and weighted sums of rewards."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ray_apr.core.checks import is_number, of_type, require, whole, whole_or_none
from ray_apr.core.exceptions import RewardError, one_line
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.rewards.answers import as_result, called, check_is_made, compiled, response_of

logger = logging.getLogger(__name__)

_NUM_THREADS = 4096
"""Parts of weighted sums that are plain functions, at once in one process: more than there will be,
as ``rollout.reward.concurrency`` bounds the sums. A thread is made when none is idle."""


@dataclass(frozen=True, kw_only=True)
class FormatReward:
    """What `format_reward` returns; its fields are the maker's arguments."""

    pattern: re.Pattern[str]
    full_match: bool

    def __post_init__(self) -> None:
        of_type("format_reward", self, bool, "True or False", "full_match")

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0."""
        match = self.pattern.fullmatch if self.full_match else self.pattern.search
        return float(match(response_of(sample)) is not None)


def format_reward(pattern: str | re.Pattern[str], *, full_match: bool = True) -> RewardFunction:
    """Make a reward that is 1.0 if the response has a form, else 0.0.

    Args:
        pattern: Regular expression; a text is compiled with ``re.DOTALL``. Of a response that
            repeats its tags, one with several ``.*`` tries all pairs and triples of them, half a
            minute for 40,000 characters; atomic groups ``(?>...)`` try the first of each alone.
        full_match: The whole response must match; False looks for a match anywhere.

    Returns:
        A function of a finished `Sample`.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> reward = format_reward(r"<think>(?>.*?</think>)(?>.*?<answer>)(?>.*</answer>)")
    """
    return FormatReward(pattern=compiled("format_reward.pattern", pattern), full_match=full_match)


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """What `length_penalty` returns; its fields are the maker's arguments."""

    target: int
    limit: int | None

    def __post_init__(self) -> None:
        s = "length_penalty"
        whole(s, self, "target")
        whole_or_none(s, self, 1, "limit")
        require(self.target >= 0, f"{s}.target", self.target, "must be 0 or more, in tokens")
        require(
            self.limit is None or self.limit > self.target,
            f"{s}.limit",
            self.limit,
            f"must exceed target = {self.target}, or be None",
        )

    def __call__(self, sample: Sample) -> float:
        """A number in [-1, 0]."""
        limit = sample.max_response_tokens if self.limit is None else self.limit
        if limit <= self.target:
            detail = f"its budget of {limit} tokens does not exceed the target of {self.target}"
            raise RewardError(sample.sample_id, "invalid", f"length_penalty: {detail}")
        excess = (sample.num_generated - self.target) / (limit - self.target)
        return 0.0 - min(max(excess, 0.0), 1.0)  # 0.0 and not -0.0 within the target


def length_penalty(target: int, limit: int | None = None) -> RewardFunction:
    """Make a penalty for long responses, to be added to a reward by `weighted_sum`.

    For a response of n generated tokens it is::

        -clip((n - target) / (limit - target), 0, 1)

    which is the soft overlong punishment of DAPO (2503.14476, eq. 13) with L_max = limit and
    L_cache = limit - target. Tokens that an environment said do not count.

    Args:
        target: Tokens up to which the penalty is 0.
        limit: Tokens from which on it is -1; None takes the sample's budget.

    Returns:
        A function of a finished `Sample`. It raises `RewardError` if the sample's budget, where it
        is the limit, does not exceed the target.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> penalty = length_penalty(target=3072, limit=4096)
    """
    return LengthPenalty(target=target, limit=limit)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reward-part")


@dataclass(frozen=True, kw_only=True)
class WeightedSum:
    """What `weighted_sum` returns."""

    parts: Mapping[str, tuple[float, RewardFunction]]
    """Name -> (weight, reward function)."""

    def __post_init__(self) -> None:
        field = "weighted_sum.parts"
        require(
            isinstance(self.parts, Mapping) and bool(self.parts),
            field,
            self.parts,
            'must be {"name": (weight, reward function)}, with at least one part',
        )
        for name, part in self.parts.items():
            require(
                isinstance(name, str) and name.isidentifier(),
                field,
                name,
                "the name of a part becomes that of a metric; use letters, digits and _",
            )
            require(
                isinstance(part, tuple | list)
                and len(part) == 2
                and is_number(part[0])
                and callable(part[1]),
                f"{field}[{name!r}]",
                part,
                "must be (weight, reward function), with a finite number as weight",
            )
            check_is_made(f"{field}[{name!r}]", part[1])

    async def __call__(self, sample: Sample) -> RewardResult:
        """The sum, with each part's value in the metrics.

        Waits for: all parts; where it fails or is cancelled, for those that run in threads.
        Unblocked by: their ends, or that of the process, which the caller kills where one does not
        return.
        """
        tasks: dict[str, asyncio.Task[RewardResult]] = {}
        threads: list[Future[Any]] = []
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    for name, (_, function) in self.parts.items():
                        part = _value_of(name, function, sample, threads)
                        tasks[name] = group.create_task(part, name=f"reward-part-{name}")
            except ExceptionGroup as errors:
                error = errors.exceptions[0]
                if any(thread.running() for thread in threads):  # one may never end
                    logger.warning("a part of weighted_sum failed: %s", one_line(error))
                    await _have_ended(threads)
                raise error from errors
        except asyncio.CancelledError:
            await _have_ended(threads)
            raise
        results = {name: task.result() for name, task in tasks.items()}
        metrics = {name: result.reward for name, result in results.items()}
        for name, result in results.items():
            own = {f"{name}_{key}": value for key, value in result.metrics.items()}
            for key in own.keys() & metrics.keys():
                detail = f"two parts of weighted_sum have a metric {key!r}; rename part {name!r}"
                raise RewardError(sample.sample_id, "invalid", detail)
            metrics |= own
        total = sum(self.parts[name][0] * result.reward for name, result in results.items())
        return as_result(sample, RewardResult(reward=total, metrics=metrics), "weighted_sum")


async def _have_ended(threads: Sequence[Future[Any]]) -> None:
    """Let nothing go on behind the call: of threads that hang there would soon be none left.

    Waits for: those that run. Unblocked by: their ends, or that of the process.
    """
    begun = [asyncio.wrap_future(thread) for thread in threads if thread.running()]
    await asyncio.gather(*begun, return_exceptions=True)


async def _value_of(
    name: str, function: RewardFunction, sample: Sample, threads: list[Future[Any]]
) -> RewardResult:
    """Call one part: a plain function in a thread, as it may block; that is added to `threads`.

    Waits for: the part. Unblocked by: its answer, or `rollout.reward.timeout_s`, which ends the
    whole call.
    """
    value: Any
    try:
        if inspect.iscoroutinefunction(function):
            value = await function(sample)
        else:
            thread = _threads().submit(called, function, sample)
            threads.append(thread)
            value = await asyncio.wrap_future(thread)
            if inspect.isawaitable(value):
                value = await value
    except (SystemExit, KeyboardInterrupt) as error:  # out of a task it would end the event loop
        detail = f"part {name!r} of weighted_sum: {type(error).__name__}: {error}"
        raise RewardError(sample.sample_id, "raised", detail) from error
    return as_result(sample, value, f"part {name!r} of weighted_sum")


def weighted_sum(parts: Mapping[str, tuple[float, RewardFunction]]) -> RewardFunction:
    """Make a reward that is the sum of weight x value over named rewards.

    The parts run concurrently, plain functions in threads. The first one that fails fails the sum:
    the others are cancelled, plain functions once they return. One that takes longer than
    ``rollout.reward.timeout_s`` costs the worker process, as it does alone.

    Args:
        parts: Name -> (weight, reward function ``def`` or ``async def``). A weight of 0 records a
            part without counting it.

    Returns:
        An async function of a finished `Sample` that returns a `RewardResult`. Its metrics hold
        the value of each part, without the weight, under the part's name, and the part's own
        metrics as ``<name>_<metric>``. It raises what the first failing part raises, and
        `RewardError` if a part returns no finite number, or two have a metric of one name.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> from ray_apr.rewards import exact_match, format_reward
        >>> reward = weighted_sum({
        ...     "right": (1.0, exact_match(pattern=r"<answer>(.*?)</answer>")),
        ...     "form": (0.1, format_reward(r"<think>(?>.*?</think>).+")),
        ... })
    """
    return WeightedSum(parts=parts)
