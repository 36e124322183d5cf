"""What a run is checked for on its cluster: where it writes, its port, room for train workers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_apr.core.exceptions import ConfigError, ResourceError

if TYPE_CHECKING:
    from ray_apr.config import RolloutConfig
    from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0
"""Limit for a node to say what it sees."""
_PLACEMENT_LIMIT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
_LOOKS = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
_LOOK_S = 0.5
"""Between Ray Train's looks at its workers, by itself 2.0; it takes one report at each."""
_NO_PLACE = "WorkerGroupStartupTimeoutError"
_LAG_S = 5.0
"""A shared file system may show a new file as late as this."""


def resources_of_worker(scaling: ray.train.ScalingConfig) -> dict[str, float]:
    """What one train worker reserves, with Ray Train's defaults."""
    default = {"GPU": 1.0} if scaling.use_gpu else {"CPU": 1.0}
    given = scaling.resources_per_worker
    return dict(
        default if given is None else {**({"GPU": 1.0} if scaling.use_gpu else {}), **given}
    )


# -- storage ---------------------------------------------------------------------------------------


def make_run_folder(spec: RunSpec) -> None:
    """Make the run folder, if it is not there; all nodes see it.

    Raises:
        ConfigError: If a train worker could not write there.
    """
    spec.folder.mkdir(parents=True, exist_ok=True)
    if spec.remote_storage is None:
        check_shared_folder(spec.folder, other_nodes(spec.worker_scaling), nodes_without)


def check_shared_folder(
    folder: Path,
    nodes: Mapping[str, str],
    who_misses: Callable[[str, Collection[str]], Collection[str]],
) -> None:
    """Check that a folder of this machine is the same one on other nodes.

    Args:
        folder: It exists here.
        nodes: Address of each other node that a train worker may be on, by id.
        who_misses: Returns those of the nodes that do not see a path; see `nodes_without`.

    Raises:
        ConfigError: If it is not.
    """
    if not nodes:
        return
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    try:
        missing = sorted(nodes[node] for node in who_misses(str(probe), nodes.keys()))
    finally:
        probe.unlink()
    if missing:
        raise ConfigError(
            "run_config.storage_path",
            str(folder.parent),
            f"is another folder, or none, on {', '.join(missing)}, where train workers may run and "
            "write their checkpoints; give a folder that all nodes share (in YAML: "
            "run.storage_path), or in Python a URI as s3://...",
        )


def other_nodes(scaling: ray.train.ScalingConfig) -> dict[str, str]:
    """Address by id of the nodes but this one that are large enough for a train worker."""
    here, wanted = ray.get_runtime_context().get_node_id(), resources_of_worker(scaling)
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] != here
        and all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items())
    }


def nodes_without(path: str, node_ids: Collection[str]) -> set[str]:
    """Which of the nodes do not see a path; one that does not answer is only warned of."""
    task = ray.remote(num_cpus=0, max_retries=0)(_is_there)
    asked: dict[Any, str] = {}
    for node_id in node_ids:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[task.options(scheduling_strategy=there).remote(path)] = node_id
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    missing: set[str] = set()
    for answer in answered:
        try:
            if not ray.get(answer, timeout=_ANSWER_S):
                missing.add(asked[answer])
        except RayError as error:
            logger.warning(
                "node %s does not say whether it sees %s: %s", asked[answer], path, error
            )
    for answer in silent:
        logger.warning("node %s did not look for %s within %g s", asked[answer], path, _ANSWER_S)
        ray.cancel(answer)
    return missing


def _is_there(path: str) -> bool:
    """Whether a path exists on this node, now or soon.

    Waits for: the path. Unblocked by: its appearance, or `_LAG_S`.
    """
    deadline = time.monotonic() + _LAG_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


# -- placement -------------------------------------------------------------------------------------


@contextlib.contextmanager
def settings_of_ray_train(placement_limit_s: float) -> Iterator[None]:
    """Have Ray Train, which reads its settings in the environment, wait so long for room for its
    workers, and look more often whether these report, end or fail.

    A variable that is set outside wins.
    """
    wanted = {_PLACEMENT_LIMIT: str(placement_limit_s), _LOOKS: str(_LOOK_S)}
    given = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ |= given
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def wait_for_cpu(limit_s: float) -> None:
    """Wait until a task finds a CPU, as the tasks of Ray Data do, which wait for one without limit.

    It is spread like those, so that no placement group of the caller's captures it.

    Args:
        limit_s: Longest wait.

    Raises:
        ResourceError: If none becomes free.
    """
    placed = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_is_there).remote(os.sep)
    if ray.wait([placed], timeout=limit_s)[0]:
        return
    ray.cancel(placed)
    free, total = ray.available_resources(), ray.cluster_resources()
    raise ResourceError(
        f"encoding the prompts found no CPU within {limit_s:g} s (rollout.engine.start_timeout_s): "
        f"it wants 1 (free: {free.get('CPU', 0.0):g} of {total.get('CPU', 0.0):g}). Add CPUs, or "
        "end what else runs there"
    )


def found_no_place(error: Exception) -> bool:
    """Whether Ray Train says that its workers found no place within their limit."""
    failure = getattr(error, "controller_failure", None)
    return type(failure).__name__ == _NO_PLACE  # which is not public


def not_placed(scaling: ray.train.ScalingConfig, limit_s: float) -> ResourceError:
    """The error of train workers that had no place for so long: what the cluster lacks."""
    free, total = ray.available_resources(), ray.cluster_resources()
    workers, wanted = scaling.num_workers, resources_of_worker(scaling)
    figures = [
        f"{workers * amount:g} {name} (free: {free.get(name, 0.0):g} of {total.get(name, 0.0):g})"
        for name, amount in wanted.items()
    ]
    lacks = [n for n, amount in wanted.items() if free.get(n, 0.0) < workers * amount]
    reason = (
        f"the cluster lacks {' and '.join(lacks)}"
        if lacks
        else "no node has as much of them as one worker wants"
    )
    given = os.environ.get(_PLACEMENT_LIMIT)  # see `settings_of_ray_train`
    limit = f"{limit_s:g} s (rollout.engine.start_timeout_s)"
    if given is not None:
        limit = f"{given} s ({_PLACEMENT_LIMIT})"
    return ResourceError(
        f"the {workers} train workers found no place within {limit}: they want "
        f"{', '.join(figures)}; {reason}. Lower "
        "scaling.num_workers or rollout.num_replicas, add nodes, or end what else runs there"
    )


# -- HTTP ------------------------------------------------------------------------------------------


def check_port(rollout: RolloutConfig) -> None:
    """Check that the HTTP ingress can open its port.

    Raises:
        ConfigError: If it cannot, or has no such address; names which.
    """
    host, port = rollout.http.host, rollout.http.port
    if port is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                remedy = f"is no address of this machine ({error}); choose one, such as 127.0.0.1"
                raise ConfigError("rollout.http.host", host, remedy) from error
            remedy = f"cannot be opened ({error}); choose another"
            raise ConfigError("rollout.http.port", port, remedy) from error
