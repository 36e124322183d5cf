"""Rewards: one call a sample, on Ray CPU workers, as soon as the sample ends.

Invariants, kept by `Scorer`:
    * A reward is a finite number or a `RewardError` with its kind; a failure is never a zero.
    * A call that does not return costs its worker, not the run: after the time limit the process is
      killed and replaced, and the innocent calls it held are made again.
    * At most ``reward_concurrency`` calls run at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ray_apr.config import RolloutConfig
from ray_apr.exceptions import RewardError
from ray_apr.protocols import RewardFunction
from ray_apr.types import RewardResult, Sample

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How much longer than the worker's own limit the caller waits before it kills the worker."""


class RewardWorker:
    """Async actor that runs a reward function; plain functions run in threads."""

    def __init__(self, reward: RewardFunction, num_threads: int) -> None:
        self._reward = reward
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reward")

    async def score(self, sample: Sample, timeout_s: float) -> RewardResult:
        """Call the reward function once.

        Raises:
            RewardError: If it raised, returned no finite number, or timed out while it awaited.
        """
        limit = asyncio.timeout(timeout_s)
        try:
            value = await self._call(sample, limit)
        except Exception as error:
            if limit.expired():
                raise RewardError(sample.sample_id, "timeout", f"over {timeout_s:g} s") from error
            detail = f"{type(error).__name__}: {error}"
            raise RewardError(sample.sample_id, "raised", detail) from error
        return _checked(sample, value)

    async def _call(self, sample: Sample, limit: asyncio.Timeout) -> Any:
        """Call the function; only what awaits can be stopped by `limit` in here."""
        value: Any = None
        if not inspect.iscoroutinefunction(self._reward):
            loop = asyncio.get_running_loop()
            value = await loop.run_in_executor(self._threads, self._reward, sample)
            if not inspect.isawaitable(value):
                return value
        async with limit:
            pending: Any = self._reward(sample) if value is None else value
            return await pending


def _checked(sample: Sample, value: Any) -> RewardResult:
    """Turn what a reward function returned into a `RewardResult`."""
    if isinstance(value, RewardResult):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            sample.sample_id, "invalid", f"returned {value!r}; must be a finite number"
        )
    return RewardResult(reward=number)


class Scorer:
    """Spreads reward calls over workers, with time limits and retries.

    Args:
        reward: The user's function.
        config: Limits, retries, concurrency and number of workers.
        make_worker: Makes one worker handle; for tests.
    """

    def __init__(
        self,
        reward: RewardFunction,
        config: RolloutConfig,
        make_worker: Callable[[], Any] | None = None,
    ) -> None:
        self._config = config
        self._make_worker = make_worker or (lambda: _start_worker(reward, config))
        self._workers = [self._make_worker() for _ in range(config.num_reward_workers)]
        self._load = [0] * config.num_reward_workers
        self._slots = asyncio.Semaphore(config.reward_concurrency)

    async def score(self, sample: Sample) -> RewardResult:
        """Return the reward of a finished sample.

        Raises:
            RewardError: If the last try failed, too.
        """
        for tries_left in range(self._config.reward_retries, -1, -1):
            try:
                async with self._slots:
                    return await self._try(sample)
            except RewardError as error:
                logger.warning("%s", error)
                if not tries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    async def _try(self, sample: Sample) -> RewardResult:
        """One try; calls that died with a worker that another call blocked are made again."""
        for _ in range(1 + self._config.reward_concurrency):
            index = min(range(len(self._workers)), key=self._load.__getitem__)
            worker = self._workers[index]
            self._load[index] += 1
            try:
                async with asyncio.timeout(self._config.reward_timeout_s + _GRACE_S):
                    return await worker.score.remote(sample, self._config.reward_timeout_s)
            except TimeoutError:
                self._replace(index, worker)
                limit = f"did not return within {self._config.reward_timeout_s:g} s"
                raise RewardError(sample.sample_id, "timeout", limit) from None
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, RewardError):
                    raise RewardError(*cause.args) from error
                raise RewardError(sample.sample_id, "raised", str(cause)) from error
            except RayActorError:
                self._replace(index, worker)
            finally:
                self._load[index] -= 1
        raise RewardError(sample.sample_id, "raised", "its worker process died again and again")

    def _replace(self, index: int, worker: Any) -> None:
        """Kill a worker that hangs or is dead, unless another call has already done so."""
        if self._workers[index] is worker:
            logger.warning("reward worker %d is replaced", index)
            ray.kill(worker)
            self._workers[index] = self._make_worker()

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            ray.kill(worker)


def _start_worker(reward: RewardFunction, config: RolloutConfig) -> Any:
    threads = min(config.reward_concurrency, 32 + (os.cpu_count() or 1))
    actor: Any = ray.remote(
        num_cpus=config.num_cpus_per_reward, max_concurrency=config.reward_concurrency + 8
    )(RewardWorker)
    return actor.remote(reward, threads)
