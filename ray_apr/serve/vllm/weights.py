"""A vLLM engine's weights: which it has, and how it gets others.

Invariants, kept by `Weights`:
    * They are not valid from the begin of an update until it has succeeded.
    * One update at a time; a caller that gives up does not end one half done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from ray_apr.core.exceptions import SYNC_BROKEN, EngineDiedError, SyncBrokenError, WeightSyncError
from ray_apr.core.messages import WeightGroup
from ray_apr.serve.vllm.core import Core


class Weights:
    """What an engine computes with.

    Args:
        core: The line to vLLM.
        replica_id: Name in errors.

    Attributes:
        policy_version: Of the last update that succeeded.
        are_valid: Whether the engine may generate by them.
        are_away: Whether the engine sleeps, and they come back with the next update.
    """

    def __init__(self, core: Core, replica_id: str) -> None:
        self._core = core
        self._replica_id = replica_id
        self._group_timeout_s = 0.0
        self._updating = asyncio.Lock()
        self.policy_version = 0
        self.are_valid = True
        self.are_away = False

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Let the workers join the group that weights arrive by; see `Engine`."""
        from ray_apr.serve.vllm.private import WeightTransferInitRequest

        told = {**dataclasses.asdict(group), "first_rank": first_rank}  # of plain values
        request = WeightTransferInitRequest(told)
        self._group_timeout_s = group.timeout_s
        self._core.busy_until = time.monotonic() + self._group_timeout_s
        try:
            await self._core.ask(self._core.llm.init_weight_transfer_engine(request))
        except EngineDiedError:
            raise
        except Exception as error:
            raise _sync_error(f"{self._replica_id} could not join: {error}") from error
        finally:
            self._core.busy_until = 0.0

    async def receive(self, policy_version: int, notice: bytes) -> None:
        """Take one set of weights; see `Engine`."""
        self.are_valid = False
        # a caller that gives up must not leave vLLM's update half done: no later one could begin
        await asyncio.shield(asyncio.create_task(self._receive(policy_version, notice)))

    async def _receive(self, policy_version: int, notice: bytes) -> None:
        """Take the weights of a version.

        Waits for: another update, then the weights. Unblocked by: the transport, which has the
        sync's limit; the core's death.
        """
        async with self._updating:
            self.are_valid = False
            self._core.busy_until = time.monotonic() + self._group_timeout_s
            try:
                await self._core.ask(self._update(policy_version, notice))
            except EngineDiedError:
                raise
            except Exception as error:
                raise _sync_error(f"{self._replica_id}: {error}") from error
            finally:
                self._core.busy_until = 0.0
            self.policy_version = policy_version
            self.are_valid = True

    async def _update(self, policy_version: int, notice: bytes) -> None:
        """Have the core's workers load what the transport brings.

        Waits for: the core and the transport. Unblocked by: the weights, or the sync's limit in the
        receivers.
        """
        from ray_apr.serve.vllm.private import WeightTransferUpdateRequest

        llm = self._core.llm
        if self.are_away:
            await llm.wake_up(["weights"])
        await llm.start_weight_update()
        update = {"policy_version": policy_version, "notice": notice}
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        if self._core.attests:
            await llm.finish_weight_update(weight_version=str(policy_version))
        else:
            await llm.finish_weight_update()


def _sync_error(message: str) -> WeightSyncError:
    """What an error in vLLM's workers means for the sync; see `SYNC_BROKEN`."""
    return (SyncBrokenError if SYNC_BROKEN in message else WeightSyncError)(message)
