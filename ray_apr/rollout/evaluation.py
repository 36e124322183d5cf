"""Evaluation on held-out prompts, beside the run and on its servers.

Invariants, kept by `Evaluator`:
    * It never holds up a rollout or a sync: it has requests of its own, few at once, and those that
      a sync interrupts go on afterwards. Each row says which versions took part.
    * Its tokens are counted apart; the run's ledger knows nothing of them.
    * One evaluation at a time. A version that comes due meanwhile is left out, and counted in the
      next row; the last one waits for its turn.
    * A response that could not be made or scored is counted as failed, and is in no mean. One whose
      engine is gone waits for another, for ``rollout.engine.stall_timeout_s`` at most; where no
      engine has answered any of them for so long, the evaluation ends with an error. A prompt
      whose call meets with the death of its engine ``rollout.max_request_failures`` times in a row
      is failed in this and in all later evaluations.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_apr.config import EvaluationConfig, RolloutConfig
from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
    UserCodeError,
    one_line,
)
from ray_apr.core.messages import GenerateRequest, Origin, SamplingParams
from ray_apr.core.metrics import Metrics
from ray_apr.core.protocols import RolloutClient
from ray_apr.core.sample import Prompt, Sample
from ray_apr.core.user import RewardResult
from ray_apr.rollout.evaluated import by_suite, sample_row, summarize
from ray_apr.rollout.failures import told
from ray_apr.rollout.scoring import Scorer
from ray_apr.rollout.turns import decode, encode_step, with_texts
from ray_apr.scheduling.live import TurnRules

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.05
_ENGINE_PAUSE_S = 1.0


class Evaluator:
    """Async actor that evaluates a version when it is told to.

    Args:
        rollout: Limits and stop tokens of the run.
        config: When and how to evaluate.
        tokenizer: Of the model.
        make_prompts: Gives the held-out prompts inside this process.
        make_client: Makes a client of the servers inside this process, once they run.
        make_scorer: Makes the scorer inside this process.
        recorder: Handle of the recorder.
        turns: Rules of a run with an environment; None: every sample is one turn.
        run: Name of the run, which its metrics carry.
    """

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        config: EvaluationConfig,
        tokenizer: Any,
        make_prompts: Callable[[], Sequence[Prompt]],
        make_client: Callable[[], RolloutClient],
        make_scorer: Callable[[], Scorer],
        recorder: Any,
        turns: TurnRules | None = None,
        run: str = "",
    ) -> None:
        self._rollout = rollout
        self._turns = turns
        self._config = config
        self._asked = [
            (prompt, index)
            for prompt in make_prompts()
            for index in range(config.of_row(prompt.row).samples)
        ]
        """Of each sample of an evaluation its prompt, and its number among those of it."""
        column = config.suite_column
        self._suites = [] if column is None else [str(p.row[column]) for p, _ in self._asked]
        """Of each sample of an evaluation."""
        self._tokenizer = tokenizer
        self._make_client = make_client
        self._client: RolloutClient | None = None
        self._scorer = make_scorer()
        self._recorder = recorder
        self._metrics = Metrics(run)
        self._running = asyncio.Lock()
        self._stopping = False
        self._poison: set[str] = set()
        """Ids of prompts that engines died under."""
        self._version = 0
        """That is evaluated; an engine that Serve has just started again has the base model."""
        self._num_calls = 0
        self._answered_at = -math.inf
        """When an engine ended a call last."""
        self._no_engine: EngineUnavailableError | None = None
        """What a call met with last, where none has answered for too long."""
        self._num_ended = 0
        """Calls and responses that have ended."""
        self._error = ""
        """Why a response failed last, in the evaluation that goes on."""
        self._left_out: set[int] = set()
        """Versions that came due and were left out, until a row has told how many."""

    async def connect(self) -> None:
        """Connect to the servers, which run."""
        self._client = self._client or self._make_client()

    async def start(self, policy_version: int) -> None:
        """Evaluate the base model, if that is asked for and the run begins with it.

        Waits for: that evaluation. Unblocked by: its end; the run does not wait for it.
        """
        if policy_version == 0 and self._config.is_due(0):
            await self.evaluate(0)

    async def evaluate(self, policy_version: int, *, is_last: bool = False) -> dict[str, Any]:
        """Evaluate the version that the servers have now.

        Waits for: an evaluation under way. Unblocked by: its end; who asks has a limit.

        Args:
            policy_version: That version.
            is_last: Wait for an evaluation that is under way, instead of leaving this one out.

        Returns:
            The row that is written to ``evaluations.jsonl``; empty if it was left out or stopped.
        """
        self._client = self._client or self._make_client()  # Ray may have started it again
        if self._running.locked() and not is_last:
            logger.warning("version %d is not evaluated: one is under way", policy_version)
            self._left_out.add(policy_version)
            return {}
        async with self._running:
            last: dict[str, Any] = await self._recorder.last_evaluation.remote()
            if last.get("policy_version") == policy_version:
                return last  # it was due, and is the last one, too; or an evaluator died since
            try:
                return await self._evaluate(policy_version)
            except Exception:
                logger.exception("the evaluation of version %d broke off", policy_version)
                raise  # to whom waits for it: for the last one only

    async def scale(self, num_engines: int) -> None:
        """Have so many engines from now on; see `RolloutClient.scale`. Requests that come back from
        those that leave go on elsewhere."""
        self._client = self._client or self._make_client()  # Ray may have started it again
        await self._client.scale(num_engines)

    async def wait_until_idle(self) -> None:
        """Return once no evaluation is under way.

        Waits for: an evaluation under way. Unblocked by: its end; who asks has a limit.
        """
        async with self._running:
            return

    async def _evaluate(self, policy_version: int) -> dict[str, Any]:
        """Evaluate one version, and record it.

        Waits for: all responses, then the recorder. Unblocked by: their ends, each of which has a
        limit, or `stop`; its answer or its death.

        Raises:
            NoEngineError: If no engine has answered for ``rollout.engine.stall_timeout_s``.
        """
        begin, self._no_engine, self._error = time.monotonic(), None, ""
        self._version = policy_version
        self._left_out.discard(policy_version)  # the last one may have come due before
        left_out = frozenset(self._left_out)  # others that come due are of the next row
        slots = asyncio.Semaphore(self._config.max_inflight)
        samples = await asyncio.gather(
            *(
                self._evaluate_one(self._new_sample(policy_version, prompt, index), slots)
                for prompt, index in self._asked
            )
        )
        self._scorer.take_spans()  # which nobody shows, and which would grow for ever
        if self._stopping:
            return {}
        if self._no_engine is not None:
            raise NoEngineError(
                f"version {policy_version} is not evaluated: no engine has answered for "
                f"{self._rollout.engine.stall_timeout_s:g} s (rollout.engine.stall_timeout_s); "
                f"{one_line(self._no_engine)}"
            )
        row = summarize(samples, self._config)
        if self._config.suite_column is not None:
            row["suites"] = by_suite(samples, self._suites, self._config)
        row |= {"policy_version": policy_version, "seconds": time.monotonic() - begin}
        if self._error:
            row["error"] = self._error
        if left_out:
            row["num_left_out"] = len(left_out)
            self._left_out -= left_out
        suites = [{"suite": name} for name in self._suites] or [{}] * len(samples)
        rows = [
            sample_row(policy_version, sample) | suite
            for sample, suite in zip(samples, suites, strict=True)
            if sample is not None
        ]
        await self._recorder.record_evaluation.remote(row, rows)
        self._show(row)
        logger.info("version %d: mean reward %s", policy_version, row["reward_mean"])
        return row

    def _show(self, row: Mapping[str, Any]) -> None:
        """Set the metrics of an evaluation that has ended."""
        self._metrics.set("apr_evaluation_policy_version", row["policy_version"])
        if row["reward_mean"] is not None:
            self._metrics.set("apr_evaluation_reward_mean", row["reward_mean"])
        for outcome, count in (("scored", "num_samples"), ("failed", "num_failed")):
            self._metrics.add("apr_evaluation_samples", row[count], outcome=outcome)

    async def progress(self) -> tuple[int, int]:
        """What changes as long as an evaluation goes on: calls that ended, tokens that engines
        made.

        Raises:
            EngineUnavailableError: If there is no engine.
        """
        statuses = [] if self._client is None else await self._client.status(drain=False)
        return self._num_ended, sum(status.tokens_made for status in statuses)

    async def stop(self) -> None:
        """Give up what is under way; the calls end when they are aborted."""
        self._stopping = True
        self._scorer.close()

    def _new_sample(self, policy_version: int, prompt: Prompt, index: int) -> Sample:
        group_id = f"evaluation-{policy_version}-{prompt.prompt_id}"
        return Sample(
            sample_id=f"{group_id}-{index}",
            group_id=group_id,
            prompt=prompt,
            max_response_tokens=self._budget_of(prompt),
        )

    def _budget_of(self, prompt: Prompt) -> int:
        most = self._config.of_row(prompt.row).max_response_tokens
        return most or self._rollout.max_response_tokens

    def _sampling_of(self, sample: Sample) -> SamplingParams:
        """How a response is drawn."""
        config, of_run = self._config.of_row(sample.row), self._rollout.sampling
        greedy = config.temperature == 0
        return SamplingParams(
            temperature=1.0 if greedy else config.temperature,
            top_p=config.top_p,
            top_k=1 if greedy else 0,
            stop_token_ids=of_run.stop_token_ids,
            stop_strings=of_run.stop_strings,
            min_tokens=min(of_run.min_tokens, sample.max_response_tokens),
            origin=Origin.EVALUATION,
        )

    async def _evaluate_one(self, sample: Sample, slots: asyncio.Semaphore) -> Sample | None:
        """Generate and score a response; None if that failed, or the run ends.

        Waits for: a slot. Unblocked by: the end of another response.
        """
        if sample.prompt.prompt_id in self._poison:
            return None
        try:
            async with slots:
                sample, result = await self._respond(sample)
            if self._is_ending:
                return None
            sample = with_texts(self._tokenizer, sample)
            result = result or await self._scorer.score(sample)
            self._num_ended += 1
        except (RolloutError, UserCodeError) as error:
            self._error = told(error, sample.sample_id)
            logger.warning("evaluation of %s failed: %s", sample.sample_id, error)
            return None
        return replace(sample, reward=result.reward)

    async def _respond(self, sample: Sample) -> tuple[Sample, RewardResult | None]:
        """Generate to the end, turn by turn; returns what the last step gave, too, if it did."""
        if self._turns is None:
            return await self._generate(sample), None
        if self._turns.resets:
            step = await self._scorer.reset(sample)
            sample = sample.observe(encode_step(self._tokenizer, sample, step), state=step.state)
        while True:
            sample = await self._generate(sample)
            if not sample.awaits_step or self._is_ending:
                return sample, None
            asked = replace(sample, turn_text=decode(self._tokenizer, sample.turn_ids))
            step = await self._scorer.step(asked)
            reason = self._turns.finish_reason(asked, step)
            if reason is not None:
                return asked.finish(reason, state=step.state), step.result
            sample = asked.observe(encode_step(self._tokenizer, asked, step), state=step.state)

    @property
    def _is_ending(self) -> bool:
        """Whether what is under way is given up."""
        return self._stopping or self._no_engine is not None

    async def _generate(self, sample: Sample) -> Sample:
        """Generate to the end of a turn, over interruptions and a bounded number of failures.

        Waits for: an engine. Unblocked by: its answer, `rollout.engine.stall_timeout_s` without any
        engine, or `stop`.
        """
        failures, deaths, waits_since = 0, 0, None
        sampling = self._sampling_of(sample)
        assert self._client is not None
        while sample.finish_reason is None and not sample.awaits_step and not self._is_ending:
            self._num_calls += 1
            seed = None if sampling.top_k == 1 else self._rollout.sampling.seed_of(sample)
            request = GenerateRequest.of_sample(sample, sampling, number=self._num_calls, seed=seed)
            try:
                generation = await self._client.generate(
                    replace(request, min_policy_version=self._version)
                )
            except EngineUnavailableError as error:  # no fault of the sample, unless it kills them
                deaths += isinstance(error, EngineDiedError)
                if deaths >= self._rollout.max_request_failures:
                    self._poison.add(sample.prompt.prompt_id)
                    raise
                waits_since = waits_since or time.monotonic()
                if time.monotonic() - waits_since >= self._rollout.engine.stall_timeout_s:
                    if self._answered_at < waits_since:
                        self._no_engine = error
                    raise
                await asyncio.sleep(_ENGINE_PAUSE_S)
                continue
            except RolloutError:
                failures += 1
                if failures >= self._rollout.max_request_failures:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            deaths, waits_since, self._answered_at = 0, None, time.monotonic()
            self._num_ended += 1
            sample = sample.append(generation, ends_turn=self._turns is not None)
            if generation.num_tokens == 0:
                await asyncio.sleep(_RETRY_PAUSE_S)  # aborted before it began
        return sample
