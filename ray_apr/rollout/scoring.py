"""Rewards and environments: one call a sample or turn, on Ray CPU workers, as soon as it ends;
those of a moment travel together (`rollout.calls`).

Invariants, kept by `Scorer`:
    * A reward is a finite number or a `RewardError` with its kind; a failure is never a zero. So it
      is with the steps of an environment and `StepError`.
    * A call that does not return costs its worker, not the run: after the time limit the process is
      killed and replaced, and the innocent calls it held are made again. The limit begins once the
      process has started.
    * A call that ends its worker's process, or keeps the interpreter for itself, is found: those
      that were there run again in ever smaller numbers, so that it costs no call but its own. Where
      several such calls run at once, one may cost others that ran beside them each time.
    * At most ``rollout.reward.concurrency`` calls run at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from ray_apr.compat.forked.environment import have_threads
from ray_apr.config import RolloutConfig
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import StepError, UserCodeError, raised_by_user
from ray_apr.core.sample import Sample
from ray_apr.core.user import Environment, RewardFunction, RewardResult, Step
from ray_apr.rewards.answers import as_result, called, shown
from ray_apr.rollout.calls import ERRORS, Call, Calls, Outcomes

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How much longer than the worker's own limit the caller waits before it kills the worker."""

_DIED = "its worker process died again and again"
"""Of a call that is not tried once more."""

_APART_S = 0.05
"""Calls of which one begins so soon after the other's end are one span of the timeline."""


class RewardWorker:
    """Async actor that runs the user's code; plain functions run in threads."""

    def __init__(
        self,
        reward: RewardFunction | None,
        num_threads: int,
        environment: Environment | None = None,
    ) -> None:
        have_threads()
        self._functions: dict[Call, Callable[[Sample], Any] | None] = {
            "score": reward,
            "reset": getattr(environment, "reset", None),
            "step": getattr(environment, "step", None),
        }
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reward")
        self._outcomes = Outcomes(self.call)

    async def exchange(self, requests: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """See `Outcomes.exchange`."""
        return await self._outcomes.exchange(requests)

    async def lives(self) -> None:
        """Answer, which a process cannot in which a call keeps the interpreter for itself."""

    async def call(self, what: Call, sample: Sample, timeout_s: float) -> RewardResult | Step:
        """Call one of the user's functions once.

        Raises:
            UserCodeError: If it raised, answered with something else than it should, or timed out
                while it awaited.
        """
        function, limit = self._functions[what], asyncio.timeout(timeout_s)
        assert function is not None, f"there is nothing to {what}"
        failure = ERRORS[what]
        try:
            value = await self._call(function, sample, limit)
        except BaseException as error:  # exit() and a cancelled task of the user's among them
            if limit.expired():
                raise failure(sample.sample_id, "timeout", f"over {timeout_s:g} s") from error
            if isinstance(error, failure):
                raise
            detail = f"{type(error).__name__} ({raised_by_user(error)}): {error}"
            raise failure(sample.sample_id, "raised", detail) from error
        return as_result(sample, value) if what == "score" else _checked_step(sample, value)

    async def _call(
        self, function: Callable[[Sample], Any], sample: Sample, limit: asyncio.Timeout
    ) -> Any:
        """Call a function; only what awaits can be stopped by `limit` in here.

        Waits for: the user's function. Unblocked by: its answer, or `limit`; a process whose
        function blocks beyond that is killed by the caller.
        """
        value: Any = None
        if not inspect.iscoroutinefunction(function):
            loop = asyncio.get_running_loop()
            value = await loop.run_in_executor(self._threads, called, function, sample)
            if not inspect.isawaitable(value):
                return value
        async with limit:
            pending: Any = function(sample) if value is None else value
            return await pending


def _checked_step(sample: Sample, value: Any) -> Step:
    """Take what an environment returned; only before the first turn may it say nothing at all."""
    before_first_turn = sample.num_generated == 0 and not sample.awaits_step
    if value is None and before_first_turn:
        return Step()
    if not isinstance(value, Step):
        raise StepError(sample.sample_id, "invalid", f"returned {shown(value)}; must be a Step")
    if value.done and before_first_turn:
        raise StepError(sample.sample_id, "invalid", "is done before the first turn")
    says = value.done or value.token_ids or value.text or value.messages
    if not says and not before_first_turn:
        raise StepError(
            sample.sample_id, "invalid", "says nothing after a turn; say something, or be done"
        )
    return value


class _Lane:
    """When at least one call of a kind was under way: spans of a lane of the timeline.

    Args:
        actor: Name of the lane.
        what: Name of its spans.
    """

    def __init__(self, actor: str, what: str) -> None:
        self._names = {"actor": actor, "what": what}
        self._num_running = 0
        self._since = 0.0
        self._spans: list[tuple[float, float]] = []
        self._num_ended, self._calls_s = 0, 0.0

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of a call, of all that have ended; None before the first one has."""
        return self._calls_s / self._num_ended if self._num_ended else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a call."""
        begin = unix_s()
        if not self._num_running:
            self._since = begin
        self._num_running += 1
        try:
            yield
        finally:
            self._num_ended += 1
            self._calls_s += unix_s() - begin
            self._num_running -= 1
            if not self._num_running:
                self._end_span()

    def take(self) -> list[dict[str, Any]]:
        """Rows since the last time; times are Unix seconds."""
        if self._num_running:
            self._end_span()
        spans, self._spans = self._spans, []
        return [{**self._names, "start_s": start, "end_s": end} for start, end in spans]

    def _end_span(self) -> None:
        start, self._since = self._since, unix_s()
        if self._spans and start - self._spans[-1][1] < _APART_S:
            start = self._spans.pop()[0]
        self._spans.append((start, self._since))


class Scorer:
    """Spreads calls of the user's code over workers, with time limits and retries.

    Args:
        reward: The user's function; None leaves the rewards to the environment.
        config: Limits, retries, concurrency and number of workers.
        environment: What answers the turns; None: every sample is one turn.
        make_worker: Makes one worker handle; for tests.
    """

    def __init__(
        self,
        reward: RewardFunction | None,
        config: RolloutConfig,
        environment: Environment | None = None,
        make_worker: Callable[[], Any] | None = None,
    ) -> None:
        self._config = config
        self._has_reward = reward is not None
        self._make_worker = make_worker or (lambda: _start_worker(reward, config, environment))
        self._workers = [Calls(self._make_worker()) for _ in range(config.reward.num_workers)]
        self._slots = asyncio.Semaphore(config.reward.concurrency)
        halvings = range(config.reward.concurrency.bit_length())
        sizes = [config.reward.concurrency >> number for number in halvings] + [1]
        self._places = [asyncio.Semaphore(size) for size in sizes]
        """Of calls whose worker has died by itself so many times, the last ones one by one."""
        rewards, turns = _Lane("rewards", "score"), _Lane("environment", "answer")
        self._lanes: dict[Call, _Lane] = {"score": rewards, "reset": turns, "step": turns}

    def take_spans(self) -> list[dict[str, Any]]:
        """Rows of the timeline since the last time: when rewards, and when answers of the
        environment were computed; times are Unix seconds."""
        return [row for what in ("score", "step") for row in self._lanes[what].take()]

    @property
    def mean_reward_s(self) -> float | None:
        """Mean seconds of a call of the reward function, without its wait for a slot; None before
        the first one has ended."""
        return self._lanes["score"].mean_s

    async def score(self, sample: Sample) -> RewardResult:
        """Return the reward of a finished sample, which the environment gives if no function does.

        Raises:
            UserCodeError: If the last try failed, too.
        """
        if self._has_reward:
            result = await self._call("score", sample)
            assert isinstance(result, RewardResult)
            return result
        step = await self.step(sample)
        if step.result is None:
            raise StepError(
                sample.sample_id, "invalid", "ended without a reward, and no function gives one"
            )
        return step.result

    async def reset(self, sample: Sample) -> Step:
        """Return what the environment says before the first turn.

        Raises:
            StepError: If the last try failed, too.
        """
        return await self._call_environment("reset", sample)

    async def step(self, sample: Sample) -> Step:
        """Return the environment's answer to the last turn.

        Raises:
            StepError: If the last try failed, too.
        """
        return await self._call_environment("step", sample)

    async def _call_environment(self, what: Call, sample: Sample) -> Step:
        step = await self._call(what, sample)
        assert isinstance(step, Step)
        return step

    async def _call(self, what: Call, sample: Sample) -> RewardResult | Step:
        """Call one of the user's functions; one that fails is tried again.

        Waits for: a slot. Unblocked by: the end of another call, each of which has a limit.
        """
        for tries_left in range(self._config.reward.retries, -1, -1):
            try:
                async with self._slots:
                    with self._lanes[what].running():
                        return await self._try(what, sample)
            except UserCodeError as error:
                logger.warning("%s", error)
                if not tries_left or error.detail == _DIED:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    async def _try(self, what: Call, sample: Sample) -> RewardResult | Step:
        """One try; calls that died with a worker that another call blocked or ended are made again.

        Waits for: a place, where a worker died. Unblocked by: the end of a call, as for a slot.
        """
        failure, limit_s = ERRORS[what], self._config.reward.timeout_s
        start_s = self._config.engine.start_timeout_s
        num_deaths = 0
        for _ in range(1 + self._config.reward.concurrency):
            if num_deaths == len(self._places):
                break
            try:
                async with self._places[num_deaths]:
                    calls = min(self._workers, key=lambda calls: calls.load)
                    await calls.ready(start_s)
                    async with asyncio.timeout(limit_s + _GRACE_S):
                        return await calls.make(what, sample, limit_s)
            except TimeoutError:
                await self._give_up(calls)
                if calls.is_stuck and num_deaths < len(self._places) - 1:
                    num_deaths = len(self._places) - 1  # those of its moment, one by one
                    continue
                detail = f"did not return within {limit_s:g} s"
                if not calls.is_ready:
                    limit = f"{start_s:g} s (rollout.engine.start_timeout_s)"
                    detail = f"its worker did not start within {limit}"
                raise failure(sample.sample_id, "timeout", detail) from None
            except RayError:  # dead, killed for its memory, or its answer is lost
                self._replace(calls)
                num_deaths += calls.is_ready and not calls.is_given_up
        raise failure(sample.sample_id, "raised", _DIED)

    async def _give_up(self, calls: Calls) -> None:
        """Replace a worker of which a call did not return; the first such call asks how it is.

        Waits for: its answer. Unblocked by: that, or a limit.
        """
        lives = not calls.is_ready or await calls.lives(_GRACE_S)
        if not calls.is_given_up:
            calls.is_given_up, calls.is_stuck = True, not lives
        self._replace(calls)

    def _replace(self, calls: Calls) -> None:
        """Kill a worker that hangs or is dead, unless another call has already done so."""
        if calls in self._workers:
            index = self._workers.index(calls)
            logger.warning("reward worker %d is replaced", index)
            ray.kill(calls.worker)
            self._workers[index] = Calls(self._make_worker())

    def close(self) -> None:
        """Kill the workers."""
        for calls in self._workers:
            ray.kill(calls.worker)


def _start_worker(
    reward: RewardFunction | None, config: RolloutConfig, environment: Environment | None
) -> Any:
    at_once = config.reward.concurrency
    actor: Any = ray.remote(
        num_cpus=config.reward.num_cpus_per_worker,
        max_concurrency=at_once + 8,
        enable_task_events=False,
    )(RewardWorker)
    return actor.remote(reward, at_once, environment)
