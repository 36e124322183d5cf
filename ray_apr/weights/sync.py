"""One weight sync: pause -> receive -> resume, which no error leaves half done.

Invariants, kept by `WeightSync`:
    * Each engine goes on once it has its weights, and all are resumed after any error; a sync whose
      `finish` never comes ends by its limit.
    * Where the sender holds memory that engines want back, they go on once it has freed the
      weights, also after an error: those that have theirs would take the memory for their KV cache.
      If the trainer tries again instead, they stay paused; if it does neither, they go on after the
      limit.
    * One sync at a time.
    * A replica that did not get all of its weights refuses to generate until the next sync, rather
      than answer under a version that it does not have (the server keeps that).
    * A replica that dies takes no further part: who lives and has the weights makes the sync a
      success. What another try may mend is a `SyncBrokenError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.core.exceptions import RolloutError, SyncBrokenError, WeightSyncError
from ray_apr.core.protocols import PauseMode, RolloutClient

logger = logging.getLogger(__name__)

_TRANSIENT = (SyncBrokenError, RolloutError, OSError)
"""What another try may mend. Who does not answer is a `RolloutError` of the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimes:
    """Where a sync spent its time, in seconds."""

    pause_s: float
    receive_s: float
    resume_s: float
    """After the last one has its weights; 0 where each engine goes on by itself."""
    stopped_s: float
    """From the first pause to the last resume."""


class WeightSync:
    """The control side of weight syncs, beside the rollout client.

    Args:
        client: All rollout servers.
        pause_mode: What happens to requests in flight: "abort" or "keep".
        timeout_s: Limit of one sync, from `begin` to the resume.
    """

    def __init__(self, client: RolloutClient, *, pause_mode: PauseMode, timeout_s: float) -> None:
        self._client = client
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self._task: asyncio.Task[SyncTimes] | None = None
        self._of: tuple[int, bytes] | None = None
        """Version and notice of the sync that has begun last."""
        self._listening: asyncio.Future[None]
        self._received: asyncio.Future[None]
        self._released = asyncio.Event()

    async def begin(
        self, policy_version: int, notice: bytes = b"", *, holds_device: bool = False
    ) -> None:
        """Pause all engines and let them receive; the sender may deliver once this returns. It may
        be told twice of a sync.

        Waits for: the end of a failed sync, then the engines' pause. Unblocked by: its
        cancellation; their answers, or the limit of a sync.

        Args:
            policy_version: Version of the weights.
            notice: What the receivers are told (`weights.transports`); nothing if it is empty.
            holds_device: Whether the engines have to wait for `finish`, as the sender holds memory
                that they want back; without it each one goes on as soon as it has its weights.

        Raises:
            SyncBrokenError: If the engines cannot be paused.
            WeightSyncError: If a sync is under way.
        """
        if self._task is not None and self._awaits_release:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._task is not None and not self._task.done():
            if self._of == (policy_version, notice):  # who told it has not heard the answer
                await self._until(self._task, self._listening)
                return
            raise WeightSyncError(f"a sync is under way; version {policy_version} cannot begin")
        loop = asyncio.get_running_loop()
        self._of = (policy_version, notice)
        self._listening, self._received = loop.create_future(), loop.create_future()
        self._released.clear()
        self._task = asyncio.create_task(
            self._run(policy_version, notice, self._listening, holds_device=holds_device),
            name=f"weight-sync-{policy_version}",
        )
        # its error is logged; nobody may be left for `finish`
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._until(self._task, self._listening)

    @property
    def has_begun(self) -> bool:
        """Whether there was a sync."""
        return self._task is not None

    @property
    def _awaits_release(self) -> bool:
        """Whether the last sync has failed, and leaves the engines paused for another one."""
        if self._task is None or self._task.done() or not self._received.done():
            return False
        return self._received.exception() is not None

    async def wait_until_received(self) -> None:
        """Wait until the engines have the weights; the sender may release them then.

        Raises:
            WeightSyncError: If a replica did not get them, or the time limit passed.
        """
        if self._task is None:
            raise WeightSyncError("no sync is under way")
        await self._until(self._task, self._received)

    async def finish(self) -> SyncTimes:
        """Say that the sender has released the weights, and wait until the engines run again.

        Waits for: the engines. Unblocked by: their resume, or the limit of a sync.

        Raises:
            WeightSyncError: If a replica failed to receive, or the time limit passed.
        """
        if self._task is None:
            raise WeightSyncError("no sync is under way")
        self._released.set()
        return await self._task

    async def _until(self, task: asyncio.Task[SyncTimes], reached: asyncio.Future[None]) -> None:
        """Wait for a part of the sync under way; raises the error of one that ends before.

        Waits for: that part. Unblocked by: that, or the end of the sync, which has a limit.
        """
        ends: set[asyncio.Future[Any]] = {task, reached}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            await self.finish()
        else:
            reached.result()

    async def _run(
        self,
        policy_version: int,
        notice: bytes,
        listening: asyncio.Future[None],
        *,
        holds_device: bool,
    ) -> SyncTimes:
        begin = time.monotonic()
        paused = received = begin
        errors: list[Exception] = []
        must_resume = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.pause(self._pause_mode)
                paused = time.monotonic()
                listening.set_result(None)
                await self._client.receive_weights(policy_version, notice, resume=not holds_device)
                received = time.monotonic()
                must_resume = holds_device
                self._received.set_result(None)
                if holds_device:
                    await self._released.wait()
        except TimeoutError:
            errors.append(SyncBrokenError(f"no weights within {self._timeout_s:g} s"))
        except Exception as error:  # noqa: BLE001  (raised below, once the engines run again)
            errors.append(error)
        finally:
            if errors and holds_device and listening.done() and not self._received.done():
                self._received.set_exception(_error(policy_version, errors))
                self._received.exception()  # nobody may be left to ask for it
                await self._until_released()
            if must_resume:
                errors += await self._resume()
        if errors:
            logger.error("%s", _error(policy_version, errors))
            raise _error(policy_version, errors) from errors[0]
        end = time.monotonic()
        return SyncTimes(
            pause_s=paused - begin,
            receive_s=received - paused,
            resume_s=end - received,
            stopped_s=end - begin,
        )

    async def _until_released(self) -> None:
        """Waits for: `finish`. Unblocked by: the limit, or the next `begin`, which cancels this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._released.wait()

    async def _resume(self) -> list[Exception]:
        """Resume all engines; returns what went wrong, so that it hides no earlier error."""
        try:
            await self._client.resume()
        except Exception as error:  # noqa: BLE001  (returned, and raised by the caller)
            kind = SyncBrokenError if isinstance(error, _TRANSIENT) else WeightSyncError
            return [kind(f"engines could not be resumed: {error}")]
        return []


def _error(policy_version: int, errors: Sequence[Exception]) -> WeightSyncError:
    """What ended a sync, as one error."""
    reasons = "; ".join(str(error) or type(error).__name__ for error in errors)
    is_transient = all(isinstance(error, _TRANSIENT) for error in errors)
    kind = SyncBrokenError if is_transient else WeightSyncError
    return kind(f"weight sync to version {policy_version}: {reasons}")
