"""Prompts that kill engines: the calls of suspects, and what becomes of those that are convicted.

Invariants, kept by `Poison`:
    * The death of an engine is laid to the calls that ran there (`EngineDiedError`), and to no
      others: an engine that cannot be had, a pause or an abort counts for nothing.
    * Samples that an engine died under soon after they had begun, or twice, leave the last engine
      to others: all would wait for its start. They take it when nothing else runs for a while.
    * Where a prompt begins anew, two deaths of those before are laid to each of its samples.
    * A prompt that is set aside is handed out no more, in whatever epoch, also where the run is
      gone on with. Its group is dropped whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    RolloutError,
    one_line,
)
from ray_apr.core.messages import GenerateRequest, Generation
from ray_apr.core.protocols import RolloutClient
from ray_apr.core.sample import Prompt
from ray_apr.data.prompts import PromptSource
from ray_apr.scheduling.live import LiveSample
from ray_apr.scheduling.scheduler import Scheduler
from ray_apr.scheduling.suspects import ON_TRIAL, TRIAL_S, came_back, died

logger = logging.getLogger(__name__)

_SPARE_S = 10.0
"""The last engine is left alone until it has had nothing else to do for so long."""
_SOON_S = 5.0
"""What kills an engine as it begins does so within this time."""
_ASK_S = 0.5
"""How old the answer to how many engines there are may be."""
_SHOWN = 200
"""Characters of a prompt that its row shows."""


class Poison:
    """What is known of prompts that kill engines.

    Args:
        scheduler: Has the samples.
        prompts: Of the run.
        config: Number of engines, and how many prompts may be set aside.
        known: Rows of the dataset that were set aside before.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prompts: PromptSource,
        config: RolloutConfig,
        known: Collection[int] = (),
    ) -> None:
        self._scheduler = scheduler
        self._prompts = prompts
        self._config = config
        self._set_aside = set(known)
        self._suspected: dict[int, tuple[int, float]] = {}
        """Deaths that a prompt begins with, and `LiveSample.trial_s`."""
        scheduler.suspicion = self._suspicion
        self.convicted: list[dict[str, Any]] = []
        """Rows of ``poison.jsonl``, until the worker has them recorded."""
        self._skipped: list[dict[str, Any]] = []
        """Rows of ``dropped.jsonl`` for prompts that were not handed out, until they are taken."""
        self._asking = asyncio.Lock()
        self._num_ready = 0
        self._asked_at = self._idle_at = -1.0

    async def generate(
        self, client: RolloutClient, live: LiveSample, request: GenerateRequest
    ) -> Generation:
        """Make a sample's call; a suspect's is made when it may, and cut short on trial.

        Raises:
            RolloutError: What the client raises.
            EngineUnavailableError: Also if the sample has to wait.
        """
        if live.sample.num_deaths:
            await self._spare_the_last(client, live)
        began = time.monotonic()
        try:
            if live.sample.num_deaths >= ON_TRIAL and self._scheduler.keeps_tokens:
                generation = await _cut(client, request, live.cut_s or TRIAL_S)
            else:
                generation = await client.generate(request)
        except EngineDiedError:
            self._asked_at = -1.0
            died(live, time.monotonic() - began)
            self._note(live)
            raise
        if live.sample.num_deaths:
            came_back(live, generation, time.monotonic() - began)
            self._note(live)
        return generation

    def _note(self, live: LiveSample) -> None:
        """Remember what is laid to a sample, whose group may be dropped meanwhile."""
        index, num_deaths = self._index_of(live.group.prompt), live.sample.num_deaths
        self._suspected.pop(index, None)
        if num_deaths:
            self._suspected[index] = (min(num_deaths, ON_TRIAL), live.trial_s)

    def _suspicion(self, prompt: Prompt) -> tuple[int, float]:
        if not self._suspected:
            return 0, 0.0
        return self._suspected.get(self._index_of(prompt), (0, 0.0))

    def _index_of(self, prompt: Prompt) -> int:
        return self._prompts.index_of(prompt.prompt_id)

    async def _spare_the_last(self, client: RolloutClient, live: LiveSample) -> None:
        """Keep a suspect from the only engine that is left; for a time, as no other may come.

        Waits for: who asks how many there are. Unblocked by: its answer, which has a limit.
        """
        is_likely = live.sample.num_deaths >= ON_TRIAL or live.trial_s <= 2 * _SOON_S + TRIAL_S
        if self._config.num_replicas < 2 or not is_likely:
            return
        async with self._asking:
            if time.monotonic() - self._asked_at > _ASK_S:
                self._num_ready = await self._count_ready(client)
                self._asked_at = time.monotonic()
        inflight = self._scheduler.live.inflight.values()
        if self._num_ready > 1 or not all(other.sample.num_deaths for other in inflight):
            self._idle_at = -1.0
        elif self._idle_at < 0:
            self._idle_at = time.monotonic()
        is_idle = self._idle_at >= 0 and time.monotonic() - self._idle_at >= _SPARE_S
        if self._num_ready < 2 and not is_idle:
            raise EngineUnavailableError("an engine died under them, and only one is left")

    async def _count_ready(self, client: RolloutClient) -> int:
        """Engines that take requests."""
        try:
            statuses = await client.status(drain=False)
        except RolloutError as error:
            raise EngineUnavailableError(str(error)) from error
        version = self._scheduler.policy_version
        return sum(status.takes_requests(version) for status in statuses)

    def convict(self, live: LiveSample, error: Exception) -> RolloutError | None:
        """Set the prompt of a sample aside, and drop its groups.

        Args:
            live: Convicted (`scheduling.suspects`).
            error: What it met with last.

        Returns:
            Why the run cannot go on, if there are too many such prompts.
        """
        sample, index = live.sample, self._index_of(live.group.prompt)
        text = str(sample.row.get(self._config.prompt_column, ""))
        row = {
            "row": index,
            "prompt": text[:_SHOWN] + ("…" if len(text) > _SHOWN else ""),
            "sample_id": sample.sample_id,
            "group_id": sample.group_id,
            "deaths": sample.num_deaths,
            "policy_version": self._scheduler.policy_version,
            "num_prompt_tokens": len(sample.prompt.token_ids),
            "num_generated": sample.num_generated,
            "error": one_line(error),
        }
        logger.error("prompt %d of the dataset is set aside, as it kills engines: %s", index, row)
        self.convicted.append(row)
        self._set_aside.add(index)
        self.drop_known()
        num, limit = len(self._set_aside), self._config.max_poison_prompts
        if num <= limit and num < len(self._prompts):
            return None
        return RolloutError(
            f"{num} prompts kill their engines, rows {sorted(self._set_aside)} of the dataset "
            f"(rollout.max_poison_prompts = {limit}); poison.jsonl has them, the servers' logs say "
            f"what they do. Leave them out; the last: {row['error']}"
        )

    def take_skipped(self) -> list[dict[str, Any]]:
        """Rows of ``dropped.jsonl`` for prompts that were not handed out since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def drop_known(self) -> None:
        """Drop all live groups of prompts that are set aside, and try none of these again."""
        if not self._set_aside:
            return
        for prompt in self._scheduler.forget(self._is_set_aside):
            self._skip(prompt)
        for group in tuple(self._scheduler.live.groups):
            if self._is_set_aside(group.prompt):
                self._scheduler.fail(group.members[0], "poison")

    def _is_set_aside(self, prompt: Prompt) -> bool:
        return self._index_of(prompt) in self._set_aside

    def next_prompt(self) -> Prompt | None:
        """The next prompt that is not set aside; None if all are."""
        if len(self._set_aside) >= len(self._prompts):
            return None
        prompt = self._prompts.next()
        while self._set_aside and self._is_set_aside(prompt):
            self._skip(prompt)
            prompt = self._prompts.next()
        return prompt

    def _skip(self, prompt: Prompt) -> None:
        """Note that a prompt is not handed out, or not tried again."""
        self._skipped.append(
            {
                "group_id": prompt.prompt_id,
                "reason": "poison",
                "policy_version": self._scheduler.policy_version,
                "num_generated": 0,
            }
        )


async def _cut(client: RolloutClient, request: GenerateRequest, limit_s: float) -> Generation:
    """Make a call, and end it after a time with the tokens that it has.

    Waits for: the call. Unblocked by: its end, as of any call.
    """
    call = asyncio.ensure_future(client.generate(request))
    try:
        await asyncio.wait({call}, timeout=limit_s)
        if not call.done():
            try:
                await client.abort([request.request_id])
            except RolloutError as error:
                logger.warning("request %s is not cut: %s", request.request_id, one_line(error))
        return await call
    finally:
        call.cancel()
