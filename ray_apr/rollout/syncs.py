"""Weight syncs, as train workers ask the rollout worker for them.

Invariants, kept by `WeightSyncs`:
    * Nothing is asked of the engines before they run.
    * Where the settings say so, requests in flight end before engines are paused or sleep, in calls
      of a limited time: the caller calls again.
    * `_on_weights` follows each sync that succeeds, before its `finish_sync` returns.
    * Engines come and go between two syncs: what a sync has found at its begin is there until its
      end.
    * A sync that finds no engine waits for those that are started again, in calls of a limited
      time; one whose engines are all gone breaks off, to be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import NoEngineError, RolloutError, SyncBrokenError
from ray_apr.core.messages import WeightGroup, WeightGroupState, WeightScores
from ray_apr.core.protocols import RolloutClient
from ray_apr.rollout.engines import EngineWatch
from ray_apr.weights.sync import SyncTimes, WeightSync

_DRAIN_CALL_S = 20.0
_BETWEEN_SYNCS_S = 300.0
"""Longest that engines which come or go wait for the end of a sync."""
_CHANGE_S = 60.0
"""Longest that they hold the next sync back: the trainer waits a little longer."""
_LOOK_S = 2.0
"""An answer whether the engines run comes within this time."""
_NOTHING = SyncTimes(pause_s=0, receive_s=0, resume_s=0, stopped_s=0)


class WeightSyncs:
    """What an actor that keeps engines fed does for their weights; the base of `RolloutWorker`.

    Args:
        partial_rollout: What becomes of requests in flight.
        timeout_s: Limit of one sync, without the responses that it lets end first.
    """

    def __init__(self, partial_rollout: PartialRolloutConfig, timeout_s: float) -> None:
        self._pause_mode = partial_rollout.pause_mode
        self._drains = partial_rollout.drain
        self._timeout_s = timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._engines_run = asyncio.Event()
        self._is_syncing = False
        """From the question who is there until the last engine goes on; a sync that is tried again
        is one sync."""
        self._has_weights = asyncio.Event()
        """Set from the first sync on that brings the version of the newest token; before it engines
        may have none, or those of another version."""
        self._is_asked = False
        """Whether the trainer was told to send its weights, and has not yet."""
        self._turns = asyncio.Condition()
        """Held while engines come and go."""
        self._client: RolloutClient
        self._engines: EngineWatch
        """Made by the class that has this one as its base."""

    async def _on_weights(self, policy_version: int) -> None:
        """Called once the engines have the weights of a version, and run."""
        raise NotImplementedError

    def _open_syncs(self, client: RolloutClient) -> None:
        """Take syncs from now on: the engines run."""
        self._client = client
        self._sync = WeightSync(client, pause_mode=self._pause_mode, timeout_s=self._timeout_s)
        self._engines_run.set()

    async def _running(self) -> RolloutClient:
        """The client of the engines, once they run: a worker that follows another one may be asked
        before that.

        Waits for: the engines' start. Unblocked by: that; the train worker that asks has a limit.
        """
        await self._engines_run.wait()
        return self._client

    async def engines_run(self) -> bool:
        """Whether the engines run.

        Waits for: their start. Unblocked by: that, or `_LOOK_S`.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engines_run.wait(), _LOOK_S)
        return self._engines_run.is_set()

    def _close_syncs(self) -> None:
        """Wait for no request any more."""
        if self._draining is not None:
            self._draining.cancel()

    async def weight_group_state(self) -> WeightGroupState | None:
        """Which replicas run, and whether just these are in the weight group; a sync begins.

        Returns:
            None if none runs yet, or this worker has not taken them over: the caller calls again.

        Raises:
            NoEngineError: If none has come for too long.
        """
        if not await self.engines_run():
            return None
        async with self._turns:
            self._is_syncing = True
        try:
            return await self._client.weight_group_state()
        except NoEngineError as error:
            self._engines.check_any(error)
            await self._engines.wait_for_any()
            return None

    async def _see_to_weights(self, buffer: Any, policy_version: int) -> None:
        """Have the trainer send its weights, once, where no engine has them any more; and where it
        waits for engines that have not had the version of the newest token yet, which is none that
        it sends by itself (`sync_every`).

        Waits for: the buffer. Unblocked by: its answer or its death.
        """
        if self._is_syncing or self._is_asked:
            return
        if not self._has_weights.is_set() or self._engines.lack(policy_version):
            self._is_asked = await buffer.send_again.remote(policy_version)

    async def scale(self, num_engines: int) -> None:
        """Have so many engines from now on; see `RolloutClient.scale`.

        Waits for: the engines' start, the end of the sync under way, and requests of engines that
        leave. Unblocked by: these; who asks has a limit, `_BETWEEN_SYNCS_S`, `_CHANGE_S`.

        Raises:
            RolloutError: If these do not end in time, or no engine would be left to take requests;
                there are as many engines as before then.
        """
        client = await self._running()
        async with self._turns:
            try:
                async with asyncio.timeout(_BETWEEN_SYNCS_S):
                    await self._turns.wait_for(lambda: not self._is_syncing)
            except TimeoutError as error:
                raise RolloutError(
                    f"the weight sync under way did not end within {_BETWEEN_SYNCS_S:g} s"
                ) from error
            try:
                async with asyncio.timeout(_CHANGE_S):
                    left = await client.scale(num_engines)
            except TimeoutError as error:
                raise RolloutError(f"the engines did not answer within {_CHANGE_S:g} s") from error
            await self._engines.let_go(left)

    async def join_weight_group(self, group: WeightGroup, first_ranks: Mapping[str, int]) -> None:
        """Let these replicas join the group that weights arrive by."""
        await (await self._running()).join_weight_group(group, first_ranks)

    async def sleep(self) -> bool:
        """Have the engines leave their devices to the train workers, until the next sync.

        Waits for: the engines' start. Unblocked by: that; the train worker that asks has a limit.

        Returns:
            False if requests have to end first: the caller calls again.
        """
        await self._running()
        if not await self._has_drained():
            return False
        await self._client.sleep("wait" if self._drains else "abort")
        return True

    async def begin_sync(
        self, policy_version: int, notice: bytes = b"", *, holds_device: bool = False
    ) -> bool:
        """Pause the engines and let them receive the weights of `policy_version`; see
        `WeightSync.begin`.

        Returns:
            False if requests have to end first: the caller calls again.
        """
        await self._running()
        if not await self._has_drained():
            return False
        await self._sync.begin(policy_version, notice, holds_device=holds_device)
        return True

    async def _has_drained(self) -> bool:
        """Let requests in flight end where the settings say so, in calls of a limited time.

        Waits for: the engines. Unblocked by: the end of all requests; `_DRAIN_CALL_S`. A request
        whose engine makes no progress is ended there.
        """
        if not self._drains:
            return True
        if self._draining is None:
            self._draining = asyncio.create_task(self._client.pause("wait"), name="drain")
        draining = self._draining
        await asyncio.wait({draining}, timeout=_DRAIN_CALL_S)
        if draining.done():
            self._draining = None
            try:
                draining.result()
            except RolloutError as error:
                raise SyncBrokenError(f"engines could not be paused: {error}") from error
        return draining.done()

    async def wait_until_received(self) -> None:
        """Wait until the engines have the weights of the sync that has begun."""
        await self._sync.wait_until_received()

    async def finish_sync(self, policy_version: int) -> dict[str, float]:
        """Let the engines run again, and go on under the new version; also where the worker died
        with which the sync began: the engines have the weights by now.

        Returns:
            Seconds of the parts of the sync.
        """
        times = _NOTHING
        if self._engines_run.is_set() and self._sync.has_begun:
            times = await self._sync.finish()
        await self._on_weights(policy_version)
        async with self._turns:
            self._is_syncing = False
            self._turns.notify_all()
        self._is_asked = False
        return dataclasses.asdict(times)

    async def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Have the engines score sequences once they have the weights of a version."""
        try:
            await (await self._running()).expect_scores(policy_version, sequences)
        except NoEngineError as error:
            raise SyncBrokenError(str(error)) from error

    async def weight_scores(self) -> list[WeightScores]:
        """What the engines have scored since `expect_scores`."""
        return await (await self._running()).weight_scores()

    async def probe_weights(
        self, replica_id: str, token_ids: Sequence[int]
    ) -> Mapping[str, list[list[float]]]:
        """What each module of one engine's model computes."""
        return await (await self._running()).probe_weights(replica_id, token_ids)
