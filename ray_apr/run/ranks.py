"""Train workers of a run with ``scaling.num_workers: [least, most]`` come and go.

Ray Train gets a fixed number, as many as there is room for when the parts of the run are made. Its
own elastic policy reserves all of a node's resources for train workers, those of the engines
included, and ends its workers without a checkpoint. So the driver looks itself. Where there is room
for more, it waits for a checkpoint and ends the parts, and the next ones begin with it. Where a
node is gone and the run has failed, they begin with the last checkpoint.

Invariants:
    * A change of the number is no failure: `run.restarts` does not count it.
    * The number changes between two attempts only; all that has to do with it is made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ray_apr.compat.ray import drained_nodes, free_by_node, size_by_node
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import APRError, RanksChange, one_line
from ray_apr.run.changes import Changed, changed_settings
from ray_apr.run.folder import add_row
from ray_apr.run.preflight import resources_of_worker
from ray_apr.run.resume import last_step
from ray_apr.run.room import (
    cpus_of_this_machine,
    engines_that_fit,
    num_beside_prompts,
    resources_of_engine,
    without,
)
from ray_apr.run.watch import Watch

if TYPE_CHECKING:
    from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

RANKS_FILE = "ranks.jsonl"
"""File of the run folder with a row each time that train workers were started."""
_SETTLE_S = 10.0
"""How long what the last parts held takes to become free, and a dead node to be known as dead."""
_LOOK_S = 1.0
_HEAD = "node:__internal_head__"
"""What the head node has beside the resource of each node, which is called after its address."""


def choose_ranks(spec: RunSpec) -> RunSpec:
    """The spec with the number of train workers that there is room for beside its engines; the
    least one where there is none, for which Ray Train then waits. It has fewer engines where nodes
    are gone, so that the others are too small for all of them and for the least number.

    Waits for: what the last parts held. Unblocked by: room for the most, or `_SETTLE_S`.
    """
    ranks, worker = spec.ranks, resources_of_worker(spec.scaling)
    if not ranks.is_elastic:
        return spec
    spec = _with_engines_that_fit(spec)
    deadline, room = time.monotonic() + _SETTLE_S, 0
    while room < ranks.most and time.monotonic() < deadline:
        left = without(free_by_node(), resources_of_engine(spec.rollout), spec.rollout.num_replicas)
        room = num_beside_prompts(left, worker, ranks.most)
        if room < ranks.most:
            time.sleep(_LOOK_S)
    counts = ranks.counts(spec.train)
    number = max((n for n in counts if n <= room), default=ranks.least)
    scaling = dataclasses.replace(spec.scaling, num_workers=number)
    return dataclasses.replace(spec, scaling=scaling)


def _with_engines_that_fit(spec: RunSpec) -> RunSpec:
    rollout, bounds = spec.rollout, spec.rollout.engine.autoscaling
    number = engines_that_fit(
        size_by_node(),
        resources_of_engine(rollout),
        rollout.num_replicas,
        resources_of_worker(spec.scaling),
        spec.ranks.least,
        least=1 if bounds is None else bounds.min_replicas,
    )
    if number < rollout.num_replicas:
        logger.warning("only %d of %d engines have room", number, rollout.num_replicas)
    return spec.with_replicas(number)


def note_ranks(spec: RunSpec, step: int, started_at: float) -> Changed:
    """Have the run folder say how many train workers go on from a step, with how many engines, by
    which batch size and bound of staleness, what their machines have, and which settings are others
    than before.

    Args:
        spec: With their number.
        step: The next one.
        started_at: Unix time of the run's begin.

    Returns:
        These settings.
    """
    changed = changed_settings(spec)
    row = {
        "time_s": round(unix_s() - started_at, 4),
        "step": step,
        "num_train_workers": spec.scaling.num_workers,
        "num_engines": spec.rollout.num_replicas,
        "batch_size": spec.step_size,
        "max_staleness": spec.partial_rollout.max_staleness,
        **_machines(),
        **({"changed": changed} if changed else {}),
    }
    add_row(spec.folder / RANKS_FILE, row)
    return changed


def _machines() -> dict[str, float]:
    """CPU cores and GPUs of the cluster. The CPUs of one that a run starts are what its settings
    say, which may be more than this machine has."""
    has = ray.cluster_resources()
    cpus = has.get("CPU", 0.0)
    num_nodes = sum(n for name, n in has.items() if name.startswith("node:") and name != _HEAD)
    if num_nodes <= 1:
        cpus = min(cpus, cpus_of_this_machine())
    return {"num_cpus": cpus, "num_gpus": has.get("GPU", 0.0)}


@contextlib.contextmanager
def lost_nodes_excused(spec: RunSpec) -> Iterator[None]:
    """Where a run may have fewer train workers, let an error that comes with the death of a node,
    or after it was drained, be a change of their number.

    Raises:
        RanksChange: In the place of that error.
    """
    if not spec.ranks.is_elastic:
        yield
        return
    before = _living_nodes()
    try:
        yield
    except RanksChange:
        raise
    except (APRError, RayError) as error:
        lost = _lost_node(before)
        if lost is None:
            raise
        raise RanksChange(f"node {lost[:8]} is gone: {one_line(error)}") from error


def _living_nodes() -> frozenset[str]:
    """Those that stay: at the deadline of one that is drained, Ray Train ends its workers."""
    return frozenset(n["NodeID"] for n in ray.nodes() if n["Alive"]) - drained_nodes().keys()


def _lost_node(before: frozenset[str]) -> str | None:
    """A node that is gone, or is drained; None if all stay.

    Waits for: its death to be known. Unblocked by: that, or `_SETTLE_S`.
    """
    deadline = time.monotonic() + _SETTLE_S
    while not (lost := before - _living_nodes()):
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_S)
    return min(lost)


def watched_ranks(
    spec: RunSpec, fail: Callable[[APRError], None]
) -> contextlib.AbstractContextManager[object]:
    """Have more train workers come where there is room for them.

    Args:
        spec: Of the run, with the number that there is.
        fail: Has the run end with a reason.
    """
    if not spec.ranks.is_elastic:
        return contextlib.nullcontext()
    return RankWatch(spec, last_step=lambda: last_step(spec, trainer_lives=True), fail=fail)


class RankWatch(Watch):
    """Ends the parts of a run once there is room for more train workers, after a checkpoint.

    Args:
        spec: Of the run, with the number of train workers that there is.
        last_step: Steps that the last checkpoint has trained.
        fail: Has the parts end with a reason.
        room: Gives how many further ones have room now, up to a number.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        last_step: Callable[[], int],
        fail: Callable[[APRError], None],
        room: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__("room", fail)
        self._spec = spec
        self._number: int = spec.scaling.num_workers
        self._last_step = last_step
        self._room = room or self._room_now
        self._since: int | None = None
        """Step of the last checkpoint when there was room first."""

    @property
    def pause_s(self) -> float:
        """The user's, until there is room."""
        interval_s = self._spec.scaling.elastic_resize_monitor_interval_s
        return super().pause_s if self._since is not None or not interval_s else float(interval_s)

    def _room_now(self, most: int) -> int:
        return num_beside_prompts(free_by_node(), resources_of_worker(self._spec.scaling), most)

    def wanted(self) -> int:
        """Train workers that the run could have now; never fewer than it has."""
        ranks = self._spec.ranks
        room = self._number + self._room(ranks.most - self._number)
        return max(n for n in (self._number, *ranks.counts(self._spec.train)) if n <= room)

    def look(self) -> bool:
        """Look once; whether the parts end, as there was room before the last checkpoint, too."""
        number = self.wanted()
        if number == self._number:
            self._since = None
            return False
        try:
            step = self._last_step()
        except APRError as error:  # Ray Train may be writing its list
            logger.warning("once more: %s", one_line(error))
            return False
        self._since = step if self._since is None else self._since
        if step == self._since:
            return False
        reason = f"there is room for {number} train workers instead of {self._number}"
        self._fail(RanksChange(reason))
        return True
