"""An engine as a user could bring one: it draws its tokens by chance, and drops its weights.

A run takes it with ``rollout.engine.factory=scripted_backend.py:ScriptedBackend``; ray_apr
knows nothing of this file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections import Counter

from ray_apr.core.exceptions import EngineUnavailableError
from ray_apr.core.messages import Generation, Origin, ServerStatus
from ray_apr.core.sample import FinishReason, Segment
from ray_apr.weights.inbox import WeightInbox

TICK_S = 0.005
FIRST_ID = 2
"""Those before have a meaning: padding and the end of a sequence."""


def reward(sample) -> float:
    """Half of the samples get one."""
    return float(len(sample.response_ids) % 2)


@dataclasses.dataclass(eq=False)
class _Call:
    length: int
    made: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(policy version, token id)"""
    is_inside: bool = False
    is_aborted: bool = False


class ScriptedBackend:
    """Makes one token of each call in a tick; ``engine_kwargs`` say how many ids there are, and how
    long a response is at most."""

    attests_versions = True

    def __init__(self, spec, replica_id: str) -> None:
        self.replica_id = replica_id
        self._num_ids = spec.engine_kwargs["num_ids"]
        self._longest = spec.engine_kwargs["longest"]
        self._inbox = WeightInbox()
        self._random = random.Random(replica_id)
        self._calls: dict[str, _Call] = {}
        self._version = 0
        self._is_paused = self._is_frozen = self._is_broken = False
        self._num_aborted = self._num_ended = 0
        self._tokens: Counter[Origin] = Counter()
        """By who asked for them: the ledger is of the rollouts alone."""
        self._began_at = time.monotonic()

    async def start(self) -> None:
        pass

    async def generate(self, request) -> Generation:
        length = min(request.max_tokens, self._random.randint(1, self._longest))
        call = self._calls[request.request_id] = _Call(length)
        try:
            await self._until_resumed(call)
            if self._is_broken or self._version < request.min_policy_version:
                raise EngineUnavailableError(f"{self.replica_id} has no weights")
            call.is_inside = True
            await self._make(call)
        finally:
            del self._calls[request.request_id]
        self._tokens[request.sampling.origin] += len(call.made)
        self._num_aborted += call.is_aborted
        self._num_ended += not call.is_aborted
        logprob = -math.log(self._num_ids - FIRST_ID)
        segments = []
        for version in sorted({version for version, _ in call.made}):
            ids = tuple(token for of, token in call.made if of == version)
            logprobs = (logprob,) * len(ids)
            segments.append(Segment(policy_version=version, token_ids=ids, logprobs=logprobs))
        return Generation(
            request_id=request.request_id,
            segments=tuple(segments),
            finish_reason=FinishReason.ABORT if call.is_aborted else FinishReason.STOP,
            replica_id=self.replica_id,
        )

    async def _until_resumed(self, call: _Call) -> None:
        while self._is_paused and not call.is_aborted:  # noqa: ASYNC110  (it lives by ticks)
            await asyncio.sleep(TICK_S)

    async def _make(self, call: _Call) -> None:
        """Make the tokens of a call, until it is whole or aborted."""
        while len(call.made) < call.length and not call.is_aborted:
            await asyncio.sleep(TICK_S)
            if not self._is_frozen and not call.is_aborted:
                call.made.append((self._version, self._draw()))

    def _draw(self) -> int:
        return self._random.randrange(FIRST_ID, self._num_ids)

    async def abort(self, request_ids=None) -> int:
        ids = list(self._calls) if request_ids is None else request_ids
        calls = [self._calls[i] for i in ids if i in self._calls]
        for call in calls:
            call.is_aborted = True
        return len(calls)

    async def pause(self, mode) -> None:
        self._is_paused = True
        while mode == "wait" and self._inside():  # noqa: ASYNC110  (it lives by ticks)
            await asyncio.sleep(TICK_S)
        self._is_frozen = True
        for call in self._inside() if mode == "abort" else ():
            call.is_aborted = True

    def _inside(self) -> list[_Call]:
        return [call for call in self._calls.values() if call.is_inside]

    sleep = pause

    async def resume(self) -> None:
        self._is_paused = self._is_frozen = False

    async def join_weight_group(self, group, first_rank: int) -> None:
        await asyncio.to_thread(self._inbox.join, group, first_rank)

    async def receive_weights(self, policy_version: int, notice: bytes = b"") -> None:
        self._is_broken = True
        await asyncio.to_thread(self._drop, notice)
        self._version, self._is_broken = policy_version, False

    def _drop(self, notice: bytes) -> None:
        assert {name for name, _ in self._inbox.receive(notice)} >= {"model.norm.weight"}

    def status(self, *, drain: bool = True) -> ServerStatus:
        made = self._tokens.total() + sum(len(call.made) for call in self._calls.values())
        return ServerStatus(
            replica_id=self.replica_id,
            policy_version=self._version,
            is_paused=self._is_paused,
            weights_valid=not self._is_broken,
            num_running=len(self._calls),
            tokens_generated=self._tokens[Origin.ROLLOUT],
            tokens_evaluated=self._tokens[Origin.EVALUATION],
            tokens_outside=self._tokens[Origin.OUTSIDE],
            tokens_made=made,
            num_aborted=self._num_aborted,
            num_ended=self._num_ended,
            uptime_s=time.monotonic() - self._began_at,
            busy_s=0.0,
            paused_s=0.0,
        )

    async def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._inbox.close()
