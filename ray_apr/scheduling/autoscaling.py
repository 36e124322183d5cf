"""How many engines a run is to have: more if the trainer starves, fewer if engines do little.

    the trainer waits    engines generate    requests of an engine       what follows
    20 % or more         20 % or more        enough for one more         as many as end the wait
    at most 5 %          with time to spare  any                         as many as have work
    at most 5 %          any                 few, with one fewer, too    one fewer
    between              any                 any                         nothing

Samples in flight are bounded, by the staleness bound at the latest. Where that bound is reached,
other engines get their requests from those that run: `target_ongoing_requests` says down to which
number that is worth an engine.

Invariants, kept by `Autoscaling`:
    * A decision is between the settings' numbers, and never of more engines than there is a place
      for.
    * It is drawn from steps that ended after the last change of the number of engines but for the
      first one, over `upscale_delay_s` or `downscale_delay_s`.
    * Engines that come have work for at least twice the time that their start takes: the run does
      not end before, and those that go have been too many for so long.
    * After a request that failed nothing is asked for, for a while.

Pure: no clock, no ray, no torch.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from ray_apr.config.autoscaling import AutoscalingConfig

_STARVED = 0.2
"""Share of its time that a trainer waits for batches, from which on engines come."""
_FED = 0.05
"""The same, up to which engines go."""
_LEAST_BUSY = 0.2
"""Share of their time in which engines generate, below which they are not what is waited for."""
_MOST_BUSY = 0.8
"""The same, which engines that stay may be expected to have."""
_FEW = 0.5
"""Share of `target_ongoing_requests` which is few."""
_LEAST_STEPS = 3
_STARTS_PAID = 2.0
"""How many times as long as its start an engine has to be of use."""
FAILURE_PAUSE_S = 600.0
"""From a request that failed to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a run has done by the end of a step; all but the time are sums that only grow."""

    time_s: float
    waited_s: float
    """Seconds in which the trainer has waited for batches."""
    busy_s: float
    """Seconds in which engines have generated, of all engines together."""
    idle_s: float
    """The same, in which they had nothing to do; pauses are in neither."""
    request_s: float
    """Seconds of all requests in engines, those that queue there included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What trainer and engines did over some steps."""

    seconds: float
    step_s: float
    """Mean length of a step."""
    waited: float
    """Share of the time in which the trainer waited for batches."""
    busy: float
    """Share of the engines' time in which they generated."""
    requests: float
    """Mean requests of an engine while it generated."""

    @classmethod
    def between(cls, first: Mark, last: Mark, num_steps: int) -> Load:
        """What was done from one mark to a later one."""
        seconds = max(1e-9, last.time_s - first.time_s)
        busy_s = last.busy_s - first.busy_s
        engine_s = busy_s + last.idle_s - first.idle_s
        return cls(
            seconds=seconds,
            step_s=seconds / max(1, num_steps),
            waited=min(1.0, (last.waited_s - first.waited_s) / seconds),
            busy=busy_s / engine_s if engine_s > 0 else 0.0,
            requests=(last.request_s - first.request_s) / busy_s if busy_s > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many engines there are to be, and why."""

    replicas: int
    reason: str
    held_by: str = ""
    """What keeps engines from coming although the trainer starves; empty for other decisions."""


def more_engines(
    config: AutoscalingConfig,
    load: Load,
    replicas: int,
    *,
    room: int,
    start_s: float,
    left_s: float,
) -> Decision | None:
    """Decide whether engines come.

    Args:
        config: The settings.
        load: Of the last `upscale_delay_s`.
        replicas: Engines that there are.
        room: Engines that the cluster has a place for, those that there are included.
        start_s: Seconds that the start of an engine takes.
        left_s: Seconds that the run will take yet.

    Returns:
        None where the trainer does not starve.
    """
    if load.waited < _STARVED:
        return None
    starves = f"the trainer waited for batches {load.waited:.0%} of {load.seconds:.0f} s"

    def held(by: str, reason: str) -> Decision:
        return Decision(replicas=replicas, reason=f"{starves}; {reason}", held_by=by)

    if load.busy < _LEAST_BUSY:
        return held("engines", f"engines generated {load.busy:.0%} of it: others would not help")
    wanted = 2 * replicas
    if load.waited < load.busy:  # else even engines that take no time would not end the wait
        wanted = min(wanted, math.ceil(replicas / (1 - load.waited / load.busy)))
    flying = replicas * load.requests
    limits = {
        "max_replicas": config.max_replicas,
        "the cluster": room,
        "target_ongoing_requests": math.floor(flying / config.target_ongoing_requests),
    }
    by = min(limits, key=lambda name: limits[name])
    after = min(wanted, limits[by])
    if after <= replicas:
        reasons = {
            "max_replicas": f"max_replicas = {config.max_replicas} is reached",
            "the cluster": "the cluster has no place for another engine",
            "target_ongoing_requests": (
                f"{flying:.0f} requests at once leave {replicas + 1} engines fewer than "
                f"target_ongoing_requests = {config.target_ongoing_requests:g} each"
            ),
        }
        return held(by, reasons[by])
    if left_s < _STARTS_PAID * start_s:
        return held("the end", f"it ends in {left_s:.0f} s, and a start takes {start_s:.0f} s")
    made = f"engines generated {load.busy:.0%} of it, {load.requests:.0f} requests each"
    return Decision(replicas=after, reason=f"{starves}; {made}")


def fewer_engines(config: AutoscalingConfig, load: Load, replicas: int) -> Decision | None:
    """Decide whether engines go.

    Args:
        config: The settings.
        load: Of the last `downscale_delay_s`.
        replicas: Engines that there are.

    Returns:
        None where all of them are needed.
    """
    if load.waited > _FED or replicas <= config.min_replicas:
        return None
    needed = max(math.ceil(replicas / 2), math.ceil(replicas * load.busy / _MOST_BUSY))
    flying = replicas * load.requests
    if flying <= _FEW * config.target_ongoing_requests * (replicas - 1):
        needed = min(needed, replicas - 1)
    after = max(config.min_replicas, needed)
    if after >= replicas:
        return None
    return Decision(
        replicas=after,
        reason=(
            f"the trainer waited for batches {load.waited:.0%} of {load.seconds:.0f} s; engines "
            f"generated {load.busy:.0%} of it, {load.requests:.0f} requests each"
        ),
    )


class Autoscaling:
    """Follows the steps of a run, and decides how many engines it is to have.

    Args:
        config: The settings.
        start_s: Seconds that engines took to start when the run began.

    Example:
        >>> scaling = Autoscaling(AutoscalingConfig(max_replicas=4), start_s=10.0)
        >>> for i in range(5):  # steps of 30 s, of which the trainer waits 15
        ...     scaling.observe(Mark(
        ...         time_s=30.0 * i, waited_s=15.0 * i, busy_s=30.0 * i, idle_s=0.0,
        ...         request_s=30.0 * 100 * i,
        ...     ))
        >>> scaling.decide(1, room=8, steps_left=100).replicas
        2
    """

    def __init__(self, config: AutoscalingConfig, *, start_s: float) -> None:
        self._config = config
        self._start_s = start_s
        self._marks: list[Mark] = []
        """Since the last change, in order of time; no older ones than are looked at."""
        self._not_before_s = -math.inf

    @property
    def _down_s(self) -> float:
        return max(self._config.downscale_delay_s, _STARTS_PAID * self._start_s)

    def observe(self, mark: Mark) -> None:
        """A step has ended."""
        marks = self._marks
        if marks and mark.busy_s + mark.idle_s < marks[-1].busy_s + marks[-1].idle_s:
            marks.clear()  # who counts has begun anew
        marks.append(mark)
        longest_s = max(self._config.upscale_delay_s, self._down_s)
        excess = self._first_of(longest_s)
        if excess > 0:
            del marks[:excess]

    def decide(self, replicas: int, *, room: int, steps_left: int) -> Decision | None:
        """How many engines there are to be, by what was observed.

        Args:
            replicas: Engines that there are.
            room: Engines that the cluster has a place for, those that there are included.
            steps_left: Steps that the run will take yet.

        Returns:
            None where nothing is to be said.
        """
        if self._marks and self._marks[-1].time_s < self._not_before_s:
            return None
        load = self._load(self._config.upscale_delay_s)
        if load is not None:
            decision = more_engines(
                self._config,
                load,
                replicas,
                room=room,
                start_s=self._start_s,
                left_s=steps_left * load.step_s,
            )
            if decision is not None:
                return decision
        load = self._load(self._down_s)
        return None if load is None else fewer_engines(self._config, load, replicas)

    def changed(self, *, start_s: float | None = None) -> None:
        """The number of engines was changed: what was observed before says nothing any more.

        Args:
            start_s: Seconds that engines took to start; None where none came.
        """
        self._marks.clear()
        if start_s is not None:
            self._start_s = start_s

    def failed(self) -> None:
        """What was decided could not be done."""
        if self._marks:
            self._not_before_s = self._marks[-1].time_s + FAILURE_PAUSE_S

    def _load(self, seconds: float) -> Load | None:
        """What was done over so long; None where too little was observed."""
        first = self._first_of(seconds)
        if first < 0:
            return None
        num_steps = len(self._marks) - 1 - first
        return Load.between(self._marks[first], self._marks[-1], num_steps)

    def _first_of(self, seconds: float) -> int:
        """The last mark from which on so much time and enough steps have passed; -1 without one."""
        if not self._marks:
            return -1
        until = self._marks[-1].time_s - seconds
        at = bisect.bisect_right(self._marks, until, key=lambda mark: mark.time_s) - 1
        return min(at, len(self._marks) - 1 - _LEAST_STEPS)
