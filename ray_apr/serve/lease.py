"""The lease of the rollout servers: they end by themselves when their run has ended without them.

Serve and its applications belong to the cluster. What a driver takes away at its end stays when it
is killed: engines, with their GPUs, for nobody. The lease is an actor that outlives the driver, and
waits for the death of one that does not: Ray ends that with the driver, whatever ended it.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from ray_apr.core.exceptions import ResourceError

logger = logging.getLogger(__name__)

_HOLD_S = 30.0
"""One call waits so long for the holder's death, which it tells of at once."""
_ANSWER_S = 30.0
_PAUSE_S = 1.0
_GONE_S = 2 * (_HOLD_S + _ANSWER_S)
_NAMESPACE = "ray_apr"
_LEASE = re.compile("(.+)-lease(-[0-9a-f]{8})?")
"""Name of the lease of an application; that of an older version, which a cluster may still have,
ends in digits of its own."""


class RunLease:
    """Actor that takes a run's Serve application away once the lease's holder is dead.

    Args:
        app_name: Name of the Serve application.
        holder: Name of an actor that ends with the driver; it has `RunRecorder.hold`. Ray could not
            restart a lease that was made with a handle.
        namespace: Of the holder.
    """

    def __init__(self, app_name: str, holder: str, namespace: str) -> None:
        self._app_name = app_name
        self._holder = holder
        self._namespace = namespace
        threading.Thread(target=self._watch, name="watch-holder", daemon=True).start()

    def _watch(self) -> None:
        """Waits for: the holder's death. Unblocked by: that, or the end of this process. Produces:
        a cluster without the application, and without this actor."""
        while self.is_held():
            continue
        logger.warning(
            "the driver of %s or the run's recorder is gone; its servers are taken away",
            self._app_name,
        )
        from ray_apr.serve import builder  # rarely needed: it imports Serve

        try:
            builder.stop_rollout_servers(self._app_name)
            builder.end_serve(self._app_name)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def is_held(self) -> bool:
        """Wait a while for the holder's death; whether it lives."""
        try:
            holder = ray.get_actor(self._holder, namespace=self._namespace)
            ray.get(holder.hold.remote(_HOLD_S), timeout=_HOLD_S + _ANSWER_S)
        except ValueError:  # there is none of this name
            return False
        except GetTimeoutError:
            logger.info("the driver of %s is slow to answer", self._app_name)
        except ActorUnavailableError:  # the network; Ray says so if it is dead
            time.sleep(_PAUSE_S)
        except RayActorError:
            return False
        except RayError as error:  # it says nothing of the holder
            logger.warning("the driver of %s cannot be asked: %s", self._app_name, error)
            time.sleep(_PAUSE_S)
        return True


def wait_for_lease(app_name: str) -> None:
    """Wait until the servers of an earlier run of this name are gone, whose driver was killed.

    Waits for: the end of their lease. Unblocked by: that, or `_GONE_S`.

    Raises:
        ResourceError: If they are not within `_GONE_S`.
    """
    deadline = time.monotonic() + _GONE_S
    while app_name in _leased():
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the servers of another run named {app_name} are on this cluster, and have not "
                f"gone within {_GONE_S:g} s; choose another run.name, or end that run"
            )
        time.sleep(_PAUSE_S)


def start_lease(app_name: str, holder: str) -> Any:
    """Start the lease of an application; its handle, to be killed once the application is gone.

    Args:
        app_name: Name of the Serve application.
        holder: See `RunLease`; in this process's namespace.

    Raises:
        ResourceError: If a run of the same name has begun since `wait_for_lease`: the two would
            have the same servers.
    """
    actor = ray.remote(RunLease).options(
        num_cpus=0,
        name=f"{app_name}-lease",
        namespace=_NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        enable_task_events=False,
    )
    try:
        return actor.remote(app_name, holder, ray.get_runtime_context().namespace)
    except ValueError as error:  # Ray has an actor of this name
        raise ResourceError(
            f"another run named {app_name} begins on this cluster just now; choose another "
            "run.name, or end that run"
        ) from error


def is_leased_to_others(app_name: str | None) -> bool:
    """Whether there is a lease of another application, or with None of any, which runs on Serve or
    is about to."""
    return bool(_leased() - {app_name})


def _leased() -> set[str | None]:
    """Names of the applications that have a lease."""
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = (_LEASE.fullmatch(a["name"]) for a in named if a["namespace"] == _NAMESPACE)
    return {lease[1] for lease in ours if lease is not None}
