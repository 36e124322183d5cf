"""Nodes that are drained while a run has parts there, as by a spot notice.

Engines see to themselves (`serve.server`). This watch tells people, and has train workers write a
checkpoint; where the run may have another number of them, it leaves the node with it.

Invariants, kept by `NodeWatch`:
    * A run folder has one row for a node, however often the run begins again.
    * Train workers leave with a checkpoint that is durable, for nodes that have room; where none
      has, they train on, until Ray Train ends them at the node's deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from ray_apr.compat.ray import drained_nodes, free_by_node, living_actors
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import RanksChange, ResourceError, one_line
from ray_apr.run.folder import add_row, read_rows
from ray_apr.run.preflight import resources_of_worker
from ray_apr.run.resume import last_step
from ray_apr.run.room import num_elsewhere, num_that_fit
from ray_apr.run.watch import CALL_TIMEOUT_S, Watch
from ray_apr.serve.builder import engines_of

if TYPE_CHECKING:
    from ray_apr.run.side import RolloutSide
    from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

NOTICES_FILE = "notices.jsonl"
"""File of the run folder with a row for each drained node that had parts of the run."""


@dataclass(frozen=True, slots=True)
class PartsOfNode:
    """What of a run is on a node."""

    engines: tuple[str, ...] = ()
    num_train_workers: int = 0
    others: tuple[str, ...] = ()
    """Classes of its other actors."""


def parts_on(
    node: str, actors: Iterable[Mapping[str, Any]], *, app: str, recorder: str
) -> PartsOfNode | None:
    """What of a run is on a node; None while Ray's table does not have the recorder, by which it is
    known whose actors are the run's.

    Args:
        node: Its id.
        actors: Rows of Ray's table of those that live.
        app: Name of the Serve application.
        recorder: Name of the recorder, which the run's driver has made.
    """
    actors = list(actors)
    makers = [_place(a["OwnerAddress"]) for a in actors if a["Name"] == recorder]
    if not makers:
        return None
    driver = makers[0]
    trainers = {
        _place(a["Address"])
        for a in actors
        if a["ActorClassName"] == "TrainController" and _place(a["OwnerAddress"]) == driver
    }
    here = [a for a in actors if a["Address"]["NodeID"] == node]
    return PartsOfNode(
        engines=engines_of(app, here),
        num_train_workers=sum(
            a["ActorClassName"] == "RayTrainWorker" and _place(a["OwnerAddress"]) in trainers
            for a in here
        ),
        others=tuple(
            sorted(a["ActorClassName"] for a in here if _place(a["OwnerAddress"]) == driver)
        ),
    )


def _place(address: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a process."""
    return address["NodeID"], address["IPAddress"], address["Port"]


class NodeWatch(Watch):
    """Sees which nodes are drained.

    Args:
        spec: Of the run, with the number of train workers that there is.
        side: Has the buffer, which tells the train workers.
        recorder: Name of the recorder.
        started_at: Unix time of the run's begin.
        show: Takes a line for a person.
    """

    def __init__(
        self,
        spec: RunSpec,
        side: RolloutSide,
        recorder: str,
        started_at: float,
        show: Callable[[str], None],
    ) -> None:
        super().__init__("drained nodes", side.fail)
        self._spec = spec
        self._side = side
        self._recorder = recorder
        self._started_at = started_at
        self._show = show
        self._told = {row["node"] for row in read_rows(spec.folder / NOTICES_FILE)}
        """Nodes that have a row."""
        self._seen: set[str] = set()
        self._num_leaving = 0
        """Train workers on nodes that are drained."""
        self._step: int | None = None
        """Steps that the checkpoint which was ordered has trained."""

    def look(self) -> bool:
        """Look once; whether the train workers leave, so that all parts of the run end."""
        for node, deadline in drained_nodes().items():
            if node not in self._seen:
                self._take(node, deadline)
        return self._num_leaving > 0 and self._leave()

    def _take(self, node: str, deadline: float) -> None:
        """Take notice of a node."""
        parts = parts_on(node, living_actors(), app=self._spec.name, recorder=self._recorder)
        if parts is None:
            return
        if parts != PartsOfNode() and node not in self._told:
            self._tell(node, deadline, parts)
        self._seen.add(node)
        if parts.num_train_workers and not self._spec.rollout.is_colocated:
            self._num_leaving += parts.num_train_workers
            self._step = None

    def _tell(self, node: str, deadline: float, parts: PartsOfNode) -> None:
        now = unix_s()
        left_s = round(deadline - now, 1) if deadline else None
        row = {
            "time_s": round(now - self._started_at, 4),
            "node": node,
            "left_s": left_s,
            "engines": list(parts.engines),
            "num_train_workers": parts.num_train_workers,
            "others": list(parts.others),
        }
        self._spec.check_owner()
        add_row(self._spec.folder / NOTICES_FILE, row)
        self._told.add(node)
        when = "" if left_s is None else f", gone in {left_s:g} s"
        has = [*parts.engines, *parts.others]
        if parts.num_train_workers:
            has.append(f"train workers: {parts.num_train_workers}")
        self._show(f"node {node[:8]} is drained{when}; it has {', '.join(has)}")

    def _leave(self) -> bool:
        """Have a checkpoint written; once it is durable, leave. Whether the train workers do.

        Waits for: the buffer. Unblocked by: its answer or death, or the limit of a call.
        """
        if self._step is None:
            ordered = self._side.buffer.order_checkpoint.remote()
            self._step = ray.get(ordered, timeout=CALL_TIMEOUT_S)
        ranks = self._spec.ranks
        if self._step is None or not ranks.is_elastic:
            return False
        try:
            saved = last_step(self._spec, trainer_lives=True)
        except ResourceError as error:
            logger.warning("once more: %s", one_line(error))
            return False
        if not self._step <= saved < self._spec.train.num_steps:  # the last one ends the run
            return False
        number, counts = self._spec.scaling.num_workers, ranks.counts(self._spec.train)
        room = num_that_fit(free_by_node(), resources_of_worker(self._spec.scaling), ranks.most)
        after = num_elsewhere(number, self._num_leaving, room, counts)
        if after is None:
            return False
        why = f"{self._num_leaving} of {number} train workers are on nodes that are drained"
        self._fail(RanksChange(f"{why}; others have room for {after}"))
        return True
