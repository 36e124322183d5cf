"""Asks for more or fewer engines as the steps of a run say (`rollout.engine.autoscaling`).

    recorder: rows of steps ─► Autoscaler ─► scheduling.autoscaling: how many, and why
                                   │
                                   └─► run.scaling: does it, as for a request by command

Once a number of engines was had by command, the autoscaler asks for no other one; nor does the one
of a run that begins again by itself (`scaling.as_scaled`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ray_apr.compat.ray import free_by_node
from ray_apr.core.exceptions import one_line
from ray_apr.run.room import count_places, resources_of_engine
from ray_apr.run.scale_requests import ScaleAnswer, ScaleRequest
from ray_apr.scheduling.autoscaling import Autoscaling, Mark

if TYPE_CHECKING:
    from ray_apr.data.resumption import Begin
    from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
_ANSWER_S = 10.0


class Autoscaler:
    """Asks for engines.

    Args:
        scaling: Decides.
        rows: Gives the rows of steps from a number of steps on.
        num_places: Gives the engines that the cluster has a place for beside those that run.
        num_steps: Steps of the whole run.
        num_seen: Steps that are of no interest any more.
    """

    def __init__(
        self,
        scaling: Autoscaling,
        *,
        rows: Callable[[int], list[dict[str, Any]]],
        num_places: Callable[[], int],
        num_steps: int,
        num_seen: int,
    ) -> None:
        self._scaling = scaling
        self._rows = rows
        self._num_places = num_places
        self._num_steps = num_steps
        self._num_seen = num_seen
        self._rests = False
        self._waited_s = 0.0
        self._looked_at = -math.inf
        self._num_asked = 0
        self._held_by = ""

    def ask(self, replicas: int) -> ScaleRequest | None:
        """Ask for another number of engines, if the last steps call for it.

        Args:
            replicas: Engines that there are.
        """
        if self._rests or time.monotonic() - self._looked_at < _LOOK_S:
            return None
        self._looked_at = time.monotonic()
        try:
            rows = self._rows(self._num_seen)
            room = replicas + self._num_places() if rows else 0
        except (RayError, TimeoutError) as error:
            logger.info("no decision about engines this time: %s", one_line(error))
            return None
        if not rows:
            return None
        for row in rows:
            self._observe(row)
        left = self._num_steps - self._num_seen
        decision = self._scaling.decide(replicas, room=room, steps_left=left)
        held_by = "" if decision is None else decision.held_by
        if decision is not None and held_by and held_by != self._held_by:
            logger.info("no more engines than %d: %s", replicas, decision.reason)
        self._held_by = held_by
        if decision is None or decision.replicas == replicas:
            return None
        self._num_asked += 1
        logger.info("%d engines become %d: %s", replicas, decision.replicas, decision.reason)
        return ScaleRequest(
            request_id=f"{time.time_ns()}-autoscaling{self._num_asked}",
            replicas=decision.replicas,
            by="autoscaling",
            why=decision.reason,
        )

    def heard(self, given: ScaleAnswer) -> None:
        """A request was answered, whoever asked."""
        is_done = given.outcome == "done"
        if given.by == "command" and is_done and not self._rests:
            self._rests = True
            logger.warning("%d engines were ordered: autoscaling ends for this run", given.after)
        elif is_done and given.after != given.before:
            self._scaling.changed(start_s=given.seconds if given.after > given.before else None)
        elif given.by == "autoscaling":
            self._scaling.failed()

    def _observe(self, row: Mapping[str, Any]) -> None:
        self._num_seen = row["step"] + 1
        self._waited_s += row["trainer_wait_s"]
        if "engines_busy_s" not in row:  # no engine has told anything yet
            return
        self._scaling.observe(
            Mark(
                time_s=row["time_s"],
                waited_s=self._waited_s,
                busy_s=row["engines_busy_s"],
                idle_s=row["engines_idle_s"],
                request_s=row["engines_request_s"],
            )
        )


def make_autoscaler(
    spec: RunSpec, recorder: Any, begin: Begin, start_s: float
) -> Autoscaler | None:
    """What asks for the engines of a run; None where its settings do not say so.

    Args:
        spec: Of the run, on its devices.
        recorder: Handle of the recorder.
        begin: Where the run begins.
        start_s: Seconds that the engines took to start.
    """
    config = spec.rollout.engine.autoscaling
    if config is None:
        return None
    wanted = resources_of_engine(spec.rollout)
    of_another = begin.step - begin.num_rows  # steps, whose rows the folder does not have

    def rows(num_seen: int) -> list[dict[str, Any]]:
        asked = recorder.follow.remote(num_seen - of_another, 0.01)
        steps, _ = ray.get(asked, timeout=_ANSWER_S)
        return [row for row in steps if row["step"] >= num_seen]

    return Autoscaler(
        Autoscaling(config, start_s=start_s),
        rows=rows,
        num_places=lambda: count_places(free_by_node(), wanted),
        num_steps=spec.train.num_steps,
        num_seen=begin.step,
    )
