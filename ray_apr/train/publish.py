"""Weight syncs of a train worker: which steps have one, and who waits for whom.

    optimizer step k ─► gather (all ranks) ─┬─► pause ─► deliver ─► resume       (rank 0)
                                            └─► step k + 1, if the sync overlaps

Invariants, kept by `WeightPublisher`:
    * What is sent is what the gather saw: it copies, so that the optimizer may go on at once.
    * A rollout server that comes or goes costs no more than a sync: the group is formed anew.
    * A sync that breaks off is tried again, with a new group of the servers that live, a few times
      and within its limit; any other error is the end. What was gathered stays until then.
    * One sync at a time: the one before has ended, or raised its error, before the next gather.
    * An engine that does not compute like the trainer afterwards ends the run (`WeightCheck`).
    * The thread that sends is waited for within a limit, and every wait inside of it has its own.
      It is a daemon: after an error it cannot keep the process alive.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_apr.core.exceptions import NoEngineError, RolloutError, SyncBrokenError, WeightSyncError
from ray_apr.core.threads import in_thread
from ray_apr.train.span import Span

if TYPE_CHECKING:
    from ray_apr.train.control import RunControl
    from ray_apr.train.weight_check import WeightCheck
    from ray_apr.weights.transports.base import WeightSender

logger = logging.getLogger(__name__)

NO_SYNC = {
    "weight_sync_s": 0.0,
    "weight_gather_s": 0.0,
    "generation_stopped_s": 0.0,
    "weight_wait_s": 0.0,
}
"""Times of a step without a sync."""
_TRIES = 4
"""Of one sync: a group that changes while it forms, again and again, is no chance event."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A sync whose weights are gathered and on their way."""

    policy_version: int
    times: concurrent.futures.Future[dict[str, float]]


class WeightPublisher:
    """Moves the trainer's weights to the servers, on every rank of the train workers.

    Args:
        sender: This rank's end.
        control: Rank 0's line to the other actors; None on the other ranks, which only gather.
        sync_every: Optimizer steps of one sync.
        overlaps: Whether the trainer goes on while the weights travel.
        timeout_s: Limit for the engine workers to join the group, and of one collective call.
        wait_limit_s: Longest that the other ranks wait for rank 0.
        after_gather: Called on every rank before the weights leave it.
        meet: Lets the ranks wait for rank 0 where that may wait for engines longer than a
            collective may take; None where it does not.
        check: Compares the engines with the trainer after a sync; None never does.
    """

    def __init__(
        self,
        sender: WeightSender,
        control: RunControl | None,
        *,
        sync_every: int,
        overlaps: bool,
        timeout_s: float,
        wait_limit_s: float,
        after_gather: Callable[[], None] = lambda: None,
        meet: Callable[[], None] | None = None,
        check: WeightCheck | None = None,
    ) -> None:
        self._sender = sender
        self._control = control
        self._sync_every = sync_every
        self._overlaps = overlaps
        self._timeout_s = timeout_s
        self._wait_limit_s = wait_limit_s
        self._after_gather = after_gather
        self._meet = meet or (lambda: None)
        self._check = check
        self._is_connected = False
        self._pending: _Pending | None = None
        self._sent_version = -1
        """The newest version that was gathered for a sync, on every rank."""

    def publish(self, policy_version: int, *, timeout_s: float) -> None:
        """Sync now, and wait until the servers have the weights.

        Waits for: the sync under way. Unblocked by: its end, or the limit of all of its tries.

        Args:
            policy_version: Version of the weights.
            timeout_s: Limit for the servers to be there.

        Raises:
            WeightSyncError: If they did not get them.
        """
        self._join(must_end=True)
        self._send(policy_version, self._gather(policy_version), timeout_s)

    def send_again(self, lost_version: int, policy_version: int) -> None:
        """Sync now, as no engine has the weights any more; on every rank alike.

        Args:
            lost_version: What they had; nothing is done where a newer one was sent since.
            policy_version: Version of the weights.

        Raises:
            WeightSyncError: If the servers did not get them.
        """
        if self._sent_version <= lost_version:
            self._join(must_end=True)
            self._meet()
            self.publish(policy_version, timeout_s=self._timeout_s)

    def after_step(
        self, num_steps: int, policy_version: int, *, is_last: bool
    ) -> Mapping[str, float]:
        """Sync if the step that has just ended is due for it; the last one never is.

        Args:
            num_steps: Optimizer steps done.
            policy_version: Version that they made.
            is_last: Whether no step follows.

        Returns:
            Seconds: ``weight_wait_s``, which the trainer spent here; and of the sync that ended
            since the last call, zeros without one: ``weight_sync_s`` from the gather until the
            engines ran again, ``weight_gather_s``, and ``generation_stopped_s``. With a check, what
            `WeightCheck.verify` says, too.

        Raises:
            WeightSyncError: If this sync or the one before failed.
            WeightMismatchError: If an engine does not compute like the trainer after it.
            StarvedError: If another actor did not answer in time.
        """
        is_due = not is_last and num_steps % self._sync_every == 0
        with Span() as waited:
            ended = self._join(must_end=is_due or is_last)
            if is_due or is_last:
                self._meet()
            if is_due:
                ended = self._begin(policy_version) or ended
                if not self._overlaps:
                    self._meet()
        if self._control is not None and (is_due or ended is not None):
            self._control.record_span("sync", waited.start_s, waited.end_s)
        return {**NO_SYNC, **(ended or {}), "weight_wait_s": waited.duration_s}

    def close(self) -> None:
        """Wait for a sync that is still under way, and leave the group.

        Raises:
            WeightSyncError: If that sync failed.
        """
        self._join(must_end=True)
        self._sender.close()

    def _gather(self, policy_version: int) -> Span:
        self._sent_version = policy_version
        with Span() as gathered:
            self._sender.gather()
            if self._check is not None:
                self._check.record(policy_version)
            self._after_gather()
        return gathered

    def _begin(self, policy_version: int) -> dict[str, float] | None:
        """Gather, and send; returns the times of a sync that does not overlap."""
        gathered = self._gather(policy_version)
        send = functools.partial(self._send, policy_version, gathered, self._timeout_s)
        if not self._overlaps:
            return send()
        times = in_thread(send, f"weight-sync-{policy_version}")
        self._pending = _Pending(policy_version, times)
        return None

    def _send(self, policy_version: int, gathered: Span, timeout_s: float) -> dict[str, float]:
        """Send what was gathered, on rank 0; returns the times of the sync.

        Consumes: the gathered weights. Waits for: the rollout worker and the engines; on other
        ranks, whose memory engines read, for rank 0. Unblocked by: their limits.
        """
        stopped_s = 0.0
        with Span() as sent:
            if self._control is None:
                self._sender.release()
            else:  # which releases once all engines have the weights
                stopped_s = self._broadcast(self._control, policy_version, timeout_s)
        checked: Mapping[str, float] = {}
        if self._control is not None and self._check is not None:
            checked = self._check.verify(self._control)
        if self._control is not None and self._overlaps:
            self._control.record_span("sync", gathered.start_s, sent.end_s, actor="weights")
        return {
            "weight_sync_s": gathered.duration_s + sent.duration_s,
            "weight_gather_s": gathered.duration_s,
            "generation_stopped_s": stopped_s,
            **checked,
        }

    def _broadcast(self, control: RunControl, policy_version: int, timeout_s: float) -> float:
        """Send, to a new group if servers have come or gone; returns how long generation stopped.

        Raises:
            SyncBrokenError: If it broke off each time.
        """
        deadline = time.monotonic() + control.retry_limit_s
        for number in range(1, _TRIES):
            try:
                return self._broadcast_once(control, policy_version, timeout_s)
            except SyncBrokenError as error:
                if time.monotonic() > deadline or not self._sender.has_weights:
                    raise  # the engines had it, and it was freed
                logger.warning("try %d of %d: %s; once more", number, _TRIES, error)
                self._is_connected = False  # this group may be broken, though all of it lives
        return self._broadcast_once(control, policy_version, timeout_s)

    def _broadcast_once(self, control: RunControl, policy_version: int, timeout_s: float) -> float:
        try:
            if not self._is_connected or not control.is_group_whole():
                control.connect(self._sender, timeout_s=timeout_s)
                self._is_connected = True
            if self._check is not None:
                self._check.announce(control)
        except NoEngineError:
            raise
        except RolloutError as error:  # a server does not answer
            raise SyncBrokenError(str(error)) from error
        return control.broadcast(self._sender, policy_version)["stopped_s"]

    def _join(self, *, must_end: bool) -> dict[str, float] | None:
        """Take the times of the sync under way if it has ended, or must end now.

        Waits for: the sync under way. Unblocked by: its end, or the limit of all of its tries.
        """
        pending, control = self._pending, self._control
        if pending is None:
            return None
        limit_s = self._wait_limit_s if control is None else control.sync_limit_s
        limit_s *= must_end
        done, _ = concurrent.futures.wait([pending.times], timeout=limit_s)
        while not done and must_end and control and control.is_draining:  # engines make tokens
            done, _ = concurrent.futures.wait([pending.times], timeout=limit_s)
        if not done and not must_end:
            return None
        self._pending = None
        if not done:
            raise WeightSyncError(
                f"the weights of version {pending.policy_version} were not with the servers within "
                f"{limit_s:g} s; raise train.weight_sync_timeout_s, or see what the servers log"
            )
        return pending.times.result(timeout=0)
