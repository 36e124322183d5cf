"""Engines that come and go while a run trains, as the run folder asks for it (`scale_requests`).

    up      deploy more ─► clients: they are there ─► the ingress: they are there
    down    clients: they leave ─► the ingress: they leave ─► deploy fewer

The clients are those of the rollout worker and of the evaluator. Newcomers get requests once they
have the newest weights, by the next weight sync. From those that leave, clients get what has been
generated before Serve ends them.

Invariants, kept by `EngineScaling`:
    * One request at a time; each one is answered, whatever becomes of it. What the end of an
      attempt cuts off is answered by the next one; where the run ends, who asks sees that.
    * What fails half done is undone, the last step first: there are as many engines as before.
    * Nothing is deployed once the run closes, which takes the application away.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import ConfigError, ResourceError, StarvedError
from ray_apr.run.checks import check_resources
from ray_apr.run.scale_requests import (
    ScaleAnswer,
    ScaleRequest,
    answer,
    check_replicas,
    is_ordered,
    last_number,
    lay,
    take,
)
from ray_apr.serve.builder import change_rollout_servers
from ray_apr.serve.errors import without_pages

if TYPE_CHECKING:
    from ray_apr.run.autoscaling import Autoscaler
    from ray_apr.run.spec import RunSpec
    from ray_apr.serve.spec import EngineSpec

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ASK_CLOSING_S = 1.0
_CLIENT_S = 480.0
"""Limit of a client's answer: the end of a sync, and of requests on engines that leave."""
_CLOSING = "the run ends"

Step = tuple[Callable[[], None], Callable[[], None]]
"""What is done, and what undoes it; that may be called after a step that failed."""


class EngineScaling:
    """Answers the requests of a run.

    Args:
        spec: Of the run, with the number of engines that it has.
        deploy: Has Serve run the first number of engines, with the second told to the ingress.
        tell: Tells a client how many engines there are, one function for each.
        check_room: Raises where the cluster has no room for so many.
        started_at: Unix time of the run's begin.
        closing: Set when the run closes.
        autoscaler: Asks for engines by itself; None: nobody but the command does.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        deploy: Callable[[int, int], None],
        tell: Sequence[Callable[[int], None]],
        check_room: Callable[[int], None],
        started_at: float,
        closing: threading.Event,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._spec = spec
        self._autoscaler = autoscaler
        self._deploy = deploy
        self._tell = tell
        self._check_room = check_room
        self._started_at = started_at
        self._closing = closing
        self.num_engines = spec.rollout.num_replicas

    def follow(self) -> None:
        """Answer requests until the run closes.

        Consumes: requests of the run folder, then those of the autoscaler. Waits for: the clock.
        Unblocked by: `closing`. Produces: answers.
        """
        while not self._closing.wait(_LOOK_S):
            try:
                request = take(self._spec.folder)
                if request is None and self._autoscaler is not None:
                    request = self._autoscaler.ask(self.num_engines)
                if request is None:
                    continue
                given = self.serve(request)
                if given.outcome != "done" and self._closing.is_set():
                    if request.by == "command":
                        lay(self._spec.folder, request)
                    return
                if self._autoscaler is not None:
                    self._autoscaler.heard(given)
                self._spec.check_owner()
                answer(self._spec.folder, given)
            except (OSError, ResourceError) as error:  # the command has a limit of its own
                logger.warning("requests for engines cannot be read or answered: %s", error)

    def serve(self, request: ScaleRequest) -> ScaleAnswer:
        """Do what is asked, or say why not."""
        before, begin = self.num_engines, time.monotonic()
        undone: list[str] = []
        try:
            after = self._checked(request.replicas)
            if after != before:
                self._change(before, after, undone)
                self.num_engines = after
            reason = ""
        except Exception as error:  # noqa: BLE001  (a thread: who has asked gets it)
            reason = _reason(error)
            logger.warning("%s engines are not made %s: %s", before, request.replicas, reason)
        now = unix_s()
        given = ScaleAnswer(
            request_id=request.request_id,
            outcome="undone" if undone else "refused" if reason else "done",
            at=now,
            time_s=round(now - self._started_at, 3),
            before=before,
            after=self.num_engines,
            seconds=round(time.monotonic() - begin, 3),
            reason="; ".join([reason, *undone[1:]]),
            by=request.by,
            why=request.why,
        )
        logger.info("engines: %s", given)
        return given

    def _checked(self, replicas: Any) -> int:
        """The number that is asked for.

        Raises:
            ConfigError: If the run cannot have it.
        """
        after = check_replicas(replicas)
        if after != self.num_engines and self._spec.rollout.is_colocated:
            raise ConfigError(
                "rollout.engine.placement",
                "colocated",
                "engines that share GPUs with train workers neither come nor go",
            )
        dataclasses.replace(self._spec.rollout, num_replicas=after)  # within the settings' bounds
        if after > self.num_engines:
            self._check_room(after)
        return after

    def _change(self, before: int, after: int, undone: list[str]) -> None:
        """Do all steps, or undo those that were done.

        Args:
            before: Engines that there are.
            after: Engines that there will be.
            undone: Gets a line if anything was undone, and one for each error of that.
        """
        begun: list[Callable[[], None]] = []
        try:
            for do, undo in self._steps(before, after):
                begun.append(undo)
                do()
        except Exception:
            if self._closing.is_set():  # all of it is taken away
                raise
            undone.append("undone")
            for undo in reversed(begun):
                try:
                    undo()
                except Exception as error:
                    logger.exception("%d engines could not be had back", before)
                    undone.append(f"not undone: {_reason(error)}")
            raise

    def _steps(self, before: int, after: int) -> list[Step]:
        def deploy(number: int, behind_http: int, back: tuple[int, int]) -> Step:
            return lambda: self._deploy(number, behind_http), lambda: self._deploy(*back)

        def tell_client(tell: Callable[[int], None]) -> Step:
            return lambda: tell(after), lambda: tell(before)

        has_http = self._spec.rollout.http.port is not None
        clients = [tell_client(tell) for tell in self._tell]
        if after > before:
            told = [deploy(after, after, (after, before))] if has_http else []
            return [deploy(after, before, (before, before)), *clients, *told]
        told = [deploy(before, after, (before, before))] if has_http else []
        return [*clients, *told, deploy(after, after, (before, after))]


def start_scaling(
    spec: RunSpec,
    engine: EngineSpec,
    actors: Callable[[], Sequence[Any]],
    *,
    started_at: float,
    closing: threading.Event,
    autoscaler: Autoscaler | None,
) -> threading.Thread:
    """Answer the requests of a run whose engines run, in a thread that ends once it closes.

    Args:
        spec: Of the run.
        engine: What each engine is built from.
        actors: Gives the handles of actors that have a client, the rollout worker first.
        started_at: Unix time of the run's begin.
        closing: Set when the run closes.
        autoscaler: Asks for engines by itself; None: nobody but the command does.
    """

    def config_of(number: int) -> Any:
        return dataclasses.replace(spec.rollout, num_replicas=number)

    def deploy(number: int, behind_http: int) -> None:
        if closing.is_set():
            raise ResourceError(_CLOSING)
        change_rollout_servers(
            spec.name,
            engine,
            config_of(number),
            num_behind_http=behind_http,
            timeout_s=spec.rollout.engine.start_timeout_s,
            cancelled=closing,
        )

    def teller(index: int) -> Callable[[int], None]:
        return lambda number: _wait_for(actors()[index].scale.remote(number), closing)

    def check_room(number: int) -> None:
        scaled = dataclasses.replace(spec, rollout=config_of(number))
        check_resources(scaled, ray.cluster_resources())

    scaling = EngineScaling(
        spec,
        deploy=deploy,
        tell=[teller(index) for index in range(len(actors()))],
        check_room=check_room,
        started_at=started_at,
        closing=closing,
        autoscaler=autoscaler,
    )
    thread = threading.Thread(target=scaling.follow, name="scale-engines", daemon=True)
    thread.start()
    return thread


def _reason(error: Exception) -> str:
    """What was raised, in one line, without what Ray puts around it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return without_pages(cause)


def _wait_for(ref: Any, closing: threading.Event) -> None:
    """Wait for a client's answer.

    Waits for: that. Unblocked by: it, `closing`, or `_CLIENT_S`.

    Raises:
        ResourceError: If the run closes.
        StarvedError: If it does not come in time.
    """
    deadline = time.monotonic() + _CLIENT_S
    while not ray.wait([ref], timeout=_ASK_CLOSING_S)[0]:
        if closing.is_set():
            raise ResourceError(_CLOSING)
        if time.monotonic() > deadline:
            raise StarvedError(f"a client of the engines did not answer within {_CLIENT_S:g} s")
    ray.get(ref, timeout=_ASK_CLOSING_S)


def as_scaled(spec: RunSpec, since: float) -> RunSpec:
    """The spec with the engines that a run had last, if their number was changed; without
    autoscaling, if that was by command.

    Args:
        spec: As the run was started.
        since: Unix time of that.
    """
    number = last_number(spec.folder, since)
    if number is None:
        return spec
    if is_ordered(spec.folder, since):
        engine = dataclasses.replace(spec.rollout.engine, autoscaling=None)
        spec = dataclasses.replace(spec, rollout=dataclasses.replace(spec.rollout, engine=engine))
    return spec.with_replicas(number)
