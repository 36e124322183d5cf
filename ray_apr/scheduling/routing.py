"""Placement: which replicas take requests, which of them gets one, and how many each may have.

Invariants, kept by `Placement`:
    * No replica gets more requests than its limit while another one has room.
    * A sample goes on where its KV entries are, and a group meets on one replica, unless that one
      is markedly fuller than the emptiest.

Pure: the Serve client and the simulator run this same code. Choosing costs O(log n) in the number
of replicas, whatever is in flight.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_apr.core.exceptions import EngineUnavailableError, NoEngineError
from ray_apr.core.messages import ServerStatus

_SLACK = 0.125
"""How much fuller, as a share of its limit, the usual replica may be than the emptiest one."""
_HOMES_A_REQUEST, _LEAST_HOMES = 8, 1024
"""Samples and groups whose replica is remembered, for each request that all replicas may have, and
at least; the least recently used is forgotten first. One takes some 190 bytes."""


def that_stay(running: Sequence[ServerStatus]) -> list[ServerStatus]:
    """The engines whose nodes are not drained.

    Raises:
        NoEngineError: If there is none, though some live.
    """
    staying = [status for status in running if not status.is_leaving]
    if running and not staying:
        raise NoEngineError("the nodes of all rollout servers are drained")
    return staying


def that_take(
    running: Mapping[str, ServerStatus], policy_version: int, leaving: Collection[str] = ()
) -> dict[str, str]:
    """The replica of each engine that takes requests.

    One that was started (again) has the base model until the next sync, and one that is paused may
    be in the midst of it.

    Args:
        running: Status of each engine that lives, by its name.
        policy_version: Newest version that is known to be with engines.
        leaving: Engines that get no more requests.

    Raises:
        EngineUnavailableError: If there is none.
    """
    newest = newest_version(running, policy_version)
    staying = {engine: status for engine, status in running.items() if engine not in leaving}
    ready = {
        engine: status.replica_id
        for engine, status in staying.items()
        if status.takes_requests(newest)
    }
    if not ready:
        is_any = any(not status.is_lost for status in staying.values())
        lacks = f"has the weights of version {newest}" if is_any else "makes any token"
        raise EngineUnavailableError(f"no rollout server {lacks}")
    return ready


def newest_version(running: Mapping[str, ServerStatus], policy_version: int) -> int:
    """Newest policy version that is known to be with engines.

    Args:
        running: Status of each engine that lives, by its name.
        policy_version: The newest one that was known before.
    """
    return max([policy_version, *(status.policy_version for status in running.values())])


class Placement:
    """Spreads requests over replicas.

    Args:
        replicas: Their ids.
        limit: Most requests of each one.

    Example:
        >>> placement = Placement(["a", "b"], limit=2)
        >>> placement.enter("g0-0", "g0"), placement.enter("g1-0", "g1")
        ('a', 'b')
        >>> placement.leave("b")
        >>> placement.enter("g1-0", "g1"), placement.enter("g2-0", "g2")
        ('b', 'a')
    """

    def __init__(self, replicas: Iterable[str], *, limit: int) -> None:
        self._limits: dict[str, int] = {}
        self._load: Counter[str] = Counter()
        """Also of those that get no more requests."""
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Replica that a sample or group was on last."""
        self._heap: list[tuple[float, str]] = []
        self._capacity = 0
        self.change(replicas, limit=limit)

    def change(self, replicas: Iterable[str], *, limit: int) -> None:
        """Place on these replicas from now on: those that were there before keep their limits and
        loads.

        Args:
            replicas: Their ids.
            limit: Most requests of each one that comes.
        """
        self._limits = {replica: self._limits.get(replica, limit) for replica in replicas}
        self._capacity = sum(self._limits.values())
        self._sort()

    @property
    def capacity(self) -> int:
        """Sum of all limits."""
        return self._capacity

    def load(self, replica: str) -> int:
        """Requests that a replica has."""
        return self._load[replica]

    def limit(self, replica: str) -> int:
        """Most requests that a replica is given."""
        return self._limits[replica]

    def set_limit(self, replica: str, limit: int) -> None:
        """Change a replica's limit; at least 1."""
        limit = max(1, limit)
        self._capacity += limit - self._limits[replica]
        self._limits[replica] = limit
        self._note(replica)

    def enter(self, sample_id: str, group_id: str) -> str:
        """Choose the replica of a sample's next call; the emptiest one when all are full."""
        emptiest = self._emptiest()
        bound = self._fill(emptiest) + _SLACK
        known = (self._homes.get(sample_id), self._homes.get(group_id))
        replica = next((r for r in known if r and self._has_room(r, bound)), emptiest)
        for name in (sample_id, group_id):
            self._homes[name] = replica
            self._homes.move_to_end(name)
        while len(self._homes) > max(_LEAST_HOMES, _HOMES_A_REQUEST * self._capacity):
            self._homes.popitem(last=False)
        self._load[replica] += 1
        self._note(replica)
        return replica

    def leave(self, replica: str) -> None:
        """A request of a replica has ended."""
        self._load[replica] -= 1
        if replica in self._limits:
            self._note(replica)

    def _has_room(self, replica: str, bound: float) -> bool:
        if replica not in self._limits:
            return False
        return self._load[replica] < self._limits[replica] and self._fill(replica) <= bound

    def _fill(self, replica: str) -> float:
        return self._load[replica] / self._limits[replica]

    def _note(self, replica: str) -> None:
        heapq.heappush(self._heap, (self._fill(replica), replica))
        if len(self._heap) > 8 * len(self._limits) + 64:  # entries that no longer hold pile up
            self._sort()

    def _sort(self) -> None:
        self._heap = [(self._fill(name), name) for name in self._limits]
        heapq.heapify(self._heap)

    def _emptiest(self) -> str:
        while self._heap[0][0] != self._fill(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]


@dataclass(slots=True)
class AdaptiveLimit:
    """How many requests one replica should have: it grows while the engine has room for more.

    A request fills its KV entries slowly, so that one too many shows only a response later. The
    limit therefore grows with what ends, by one for each `ends_per_growth` responses, while nothing
    queues and KV entries are left; above the target it follows what runs, so that nothing refills
    the engine. Requests that queue twice in a row (those that have just come queue once) cut it to
    what runs, and a preemption to nine tenths of it: a preempted request loses its KV entries.
    """

    limit: int
    """Most requests of the replica."""
    kv_target: float = 0.75
    """Share of the KV cache up to which the limit grows: more in flight makes each one slower,
    and older when it ends."""
    kv_target_starved: float = 0.92
    """The same while the trainer has no batch in store."""
    ends_per_growth: int = 8
    had_queue: bool = False
    num_ended: int = 0
    """Responses that have ended since the limit grew last."""

    def observe(
        self,
        *,
        num_running: int,
        num_queued: int,
        kv_usage: float,
        num_preempted: int,
        num_ended: int,
        is_starved: bool,
    ) -> int:
        """Adjust the limit to what the engine reports, and return it.

        Args:
            num_running: Requests that decode or prefill.
            num_queued: Requests that wait inside of the engine.
            kv_usage: Share of the KV cache in use.
            num_preempted: Requests that were preempted since the last observation.
            num_ended: Responses that have ended since the last observation.
            is_starved: Whether the trainer has no batch in store.
        """
        kv_target = self.kv_target_starved if is_starved else self.kv_target
        self.num_ended += num_ended
        if num_running + num_queued > self.limit:
            pass  # the last decrease still has to take effect
        elif num_preempted:
            self.limit = max(1, num_running * 9 // 10)
            self.num_ended = 0
        elif kv_usage >= kv_target or (num_queued and self.had_queue):
            self.limit = max(1, num_running)
            self.num_ended = 0
        elif not num_queued and num_running >= self.limit * 0.9 - 1:
            growth, self.num_ended = divmod(self.num_ended, self.ends_per_growth)
            self.limit += growth
        self.had_queue = num_queued > 0
        return self.limit
