"""What is used of Ray that Ray does not promise to keep (see `lookup`)."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ray_apr.compat.lookup import PrivateNames, replaced
from ray_apr.core.threads import in_thread

_COLLECTIVE = "ray.util.collective"
_STORAGE = "ray.train.v2._internal.execution.storage"
_NCCL = f"{_COLLECTIVE}.collective_group.nccl_util"
_METADATA = "ray.data._internal.execution.metadata_fetcher"
_COORDINATOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
_REACH_LIMIT_S = 10.0
_NO_PROXY = ("Disabled", "NoServer")
_TOKEN = Path("~/.ray/auth_token")
"""`ray start` asks for it where it is there, and `ray.init` sends it only if it is told to."""
_NONE_TO_JOIN = ("Could not find any running Ray", "Found multiple active Ray")
"""How errors of Ray begin that come before it connects."""
STATE_TRACKING = "RAY_TRAIN_ENABLE_STATE_TRACKING"
"""Whether Ray Train keeps what its runs do for ``/api/train/v2/runs/v1`` of the dashboard."""

NONE_AHEAD = {"prestart_worker_first_driver": False}
"""Ray's `_system_config` of a cluster whose workers begin when somebody asks for them; else one per
CPU begins at once, for tasks without a runtime environment."""

RAY = PrivateNames(
    distributions=("ray",),
    tested="2.58 to 2.60",
    names={
        "Deployment": "ray.serve.deployment",
        "_get_global_client": "ray.serve.context",
        "ServeControllerClient": "ray.serve._private.client",
        "DeploymentHandle": "ray.serve.handle",
        "DeploymentBroadcastResponse": "ray.serve.handle",
        "read_datasource": "ray.data.read_api",
        "DataContext": "ray.data.context",
        "MaterializedDataset": "ray.data.dataset",
        "_PREFETCH_ON_THREAD": _METADATA,
        "get_or_create_autoscaling_coordinator": _COORDINATOR,
        "get_or_create_state_actor": "ray.train.v2._internal.state.state_actor",
        "GlobalState": "ray._private.state",
        "state": "ray._private.state",
        "StorageContext": _STORAGE,
        "_global_registry": f"{_COLLECTIVE}.backend_registry",
        "BackendRegistry": f"{_COLLECTIVE}.backend_registry",
        "register_collective_backend": f"{_COLLECTIVE}.backend_registry",
        "is_backend_available": f"{_COLLECTIVE}.collective",
        "BaseGroup": f"{_COLLECTIVE}.collective_group.base_collective_group",
        "NCCLGroup": f"{_COLLECTIVE}.collective_group.nccl_collective_group",
        "get_stream_pool": f"{_COLLECTIVE}.collective_group.cuda_stream",
        "get_nccl_unique_id": _NCCL,
        "create_nccl_communicator": _NCCL,
        "SETUP_WORKER_FILENAME": "ray._private.ray_constants",
        "Node": "ray._private.node",
        "ConsolePopen": "ray._private.services",
        "print_to_stdstream": "ray._private.worker",
        "find_bootstrap_address": "ray._private.services",
        "get_ray_address_from_environment": "ray._private.services",
    },
    members={
        "find_bootstrap_address": "(temp_dir)",
        "get_ray_address_from_environment": "(addr,temp_dir)",
        "print_to_stdstream": "(data,ignore_prefix)",
        "Deployment": "options(name,version,_internal)",
        "ServeControllerClient": "http_config",
        "DeploymentHandle": "broadcast(method_name) options remote",
        "DeploymentBroadcastResponse": "results_async(timeout_s)",
        "read_datasource": "(datasource,override_num_blocks,num_cpus)",
        "DataContext": "target_max_block_size",
        "GlobalState": "get_draining_nodes available_resources_per_node node_table "
        "actor_table(actor_id,actor_state_name)",
        "StorageContext": "storage_filesystem experiment_fs_path "
        "build_checkpoint_path_from_name(checkpoint_name) "
        "persist_current_checkpoint(checkpoint,checkpoint_dir_name)",
        "BackendRegistry": "get(name)",
        "BaseGroup": "__init__(world_size,rank,group_name) broadcast allreduce barrier "
        "destroy_group backend check_backend_availability",
        "NCCLGroup": "_get_nccl_collective_communicator(comm_key,device_list) _used_gpu_indices "
        "_dev_comm_map _dev_streams_map _dev_event_map broadcast destroy_group",
        "create_nccl_communicator": "(world_size,nccl_unique_id,rank)",
        "Node": "start_api_server(include_dashboard,raise_on_failure) webui_url all_processes",
    },
)


def __getattr__(name: str) -> Any:
    return RAY.get(name)


def hand_on_blocks_at_once() -> None:
    """Have each dataset that this process reads from now on give a block as soon as it is there.

    Otherwise Ray Data fetches what is known of the block on a thread, and asks for that when its
    next wait ends: 0.1 s later, if nothing else happens. What this sets has an environment
    variable for processes that are yet to begin, which is obeyed where it is set.
    """
    RAY.get("_PREFETCH_ON_THREAD")
    if "RAY_DATA_METADATA_PREFETCH_ON_THREAD" not in os.environ:
        vars(sys.modules[_METADATA])["_PREFETCH_ON_THREAD"] = False


def workers_set_up_by(script: str) -> AbstractContextManager[None]:
    """Have a cluster that starts in this block set its workers up by a script, in place of Ray's
    `setup_worker.py`, with the arguments of that one."""
    name = "SETUP_WORKER_FILENAME"
    RAY.get(name)
    # Ray joins it to its folder, which an absolute path leaves out
    return replaced(RAY.names[name], name, script)


def workers_lines_go_to(take: Callable[[Mapping[str, Any]], None]) -> AbstractContextManager[None]:
    """Have a driver that connects in this block, with `log_to_driver`, hand on what the processes
    of its job print, in place of printing it.

    Args:
        take: Gets lines of one process, in a thread of Ray, until the driver leaves.
    """
    name = "print_to_stdstream"
    RAY.get(name)
    return replaced(RAY.names[name], name, lambda data, ignore_prefix: take(data))


def init_beside_dashboard(**options: Any) -> Future[str | None]:
    """`ray.init`; where that starts a node, it does not wait for the dashboard, as Ray does first.

    Processes of the node have process groups of their own: a signal to all of this process's group,
    as `timeout` sends it, would end them before it is obeyed here. They die with this process.

    Args:
        options: Of `ray.init`.

    Returns:
        The future of the dashboard's address, None where there is none; its error is Ray's, of a
        dashboard that has not started. `ray.shutdown` ends one that has.

    Raises:
        Exception: What `ray.init` raises of all the rest.
    """
    import ray

    starts: list[Future[str | None]] = []
    node_class: Any = RAY.get("Node")

    class NodeBesideDashboard(node_class):  # type: ignore[misc]
        def start_api_server(self, **options: Any) -> None:
            address: Future[str | None] = Future()
            starts.append(address)

            def hold() -> None:
                """Waits for: the dashboard, which dies with the thread that has started it.
                Unblocked by: its end, or that of this process."""
                try:
                    node_class.start_api_server(self, **options)
                except BaseException as error:  # noqa: BLE001  (it goes to who asks)
                    address.set_exception(error)
                    return
                address.set_result(self.webui_url or None)
                for started in self.all_processes.get("dashboard", ()):
                    started.process.wait()

            in_thread(hold, "hold-dashboard")

    try:
        with replaced(RAY.names["Node"], "Node", NodeBesideDashboard), _groups_of_their_own():
            context = ray.init(**options)
    except ConnectionError as error:
        is_told = "RAY_AUTH_MODE" in os.environ or str(error).startswith(_NONE_TO_JOIN)
        if is_told or not _TOKEN.expanduser().is_file():
            raise
        remedy = "clusters that began since ask for it; set RAY_AUTH_MODE=token for this process"
        raise ConnectionError(f"{error}; there is a token of Ray in {_TOKEN}: {remedy}") from error
    if not starts:  # it has joined a cluster
        starts.append(Future())
        starts[0].set_result(context.dashboard_url or None)
    return starts[0]


def _groups_of_their_own() -> AbstractContextManager[None]:
    name = "ConsolePopen"
    popen: Any = functools.partial(RAY.get(name), process_group=0)
    return replaced(RAY.names[name], name, popen)


def cluster_of_this_machine() -> str | None:
    """Address of the cluster that `ray start` has last begun or joined here; None: of none."""
    address: str | None = RAY.get("find_bootstrap_address")(None)
    return address


def reach(address: str | None) -> None:
    """Knock at a cluster's door; `ray.init` would wait for minutes where nobody is.

    Args:
        address: As of `ray.init`; what is no host and port is left to Ray.

    Raises:
        ConnectionError: If nothing answers.
    """
    if address == "auto":
        with contextlib.suppress(ConnectionError):  # there is none, as Ray will say
            address = RAY.get("get_ray_address_from_environment")(address, None)
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_LIMIT_S).close()
        except OSError as error:
            raise ConnectionError(
                f"{address} does not answer ({error}); `ray stop` ends what is left of a cluster "
                "of this machine that has died"
            ) from error


def begin_actors_of_train() -> None:
    """Have the processes start that Ray Train waits for before it starts a train worker: actors of
    the cluster, which outlive a run. Ray Train itself starts one after the other, late."""
    RAY.get("get_or_create_autoscaling_coordinator")()
    if os.environ.get(STATE_TRACKING, "").lower() in ("1", "true"):
        RAY.get("get_or_create_state_actor")()


def collective_backend(name: str) -> Any:
    """The class that is registered as a backend of `ray.util.collective`."""
    return RAY.get("_global_registry").get(name)


def drained_nodes() -> dict[str, float]:
    """Nodes that Ray was told are drained, as by a spot notice, and the Unix time in seconds at
    which each one will be gone; 0 where nobody has said."""
    drained: dict[str, int] = RAY.get("state").get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in drained.items()}


def size_by_node() -> list[dict[str, float]]:
    """What each living node has, reserved or not, those with most CPUs first; without nodes that
    are drained, where Ray starts nothing."""
    nodes = [node for node in RAY.get("state").node_table() if node["Alive"]]
    drained = drained_nodes()
    return _largest_first(node["Resources"] for node in nodes if node["NodeID"] not in drained)


def free_by_node() -> list[dict[str, float]]:
    """The same of what nobody has reserved."""
    state, drained = RAY.get("state"), drained_nodes()
    alive = {node["NodeID"] for node in state.node_table() if node["Alive"]}
    free: dict[str, dict[str, float]] = state.available_resources_per_node()
    return _largest_first(
        has for node, has in free.items() if node in alive and node not in drained
    )


def _largest_first(nodes: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    return sorted((dict(node) for node in nodes), key=lambda node: -node.get("CPU", 0.0))


def living_actors() -> list[dict[str, Any]]:
    """Rows of Ray's table of actors, of those that live."""
    rows: dict[str, dict[str, Any]] = RAY.get("state").actor_table(None, actor_state_name="ALIVE")
    return list(rows.values())


def kept_deployment(deployment: Any, version: str) -> Any:
    """A deployment whose replicas go on where it is deployed again with the same version and
    options; Serve draws a version by chance otherwise, and starts other replicas.

    Args:
        deployment: A Serve deployment.
        version: Of what it is made of.
    """
    return deployment.options(version=version, _internal=True)


def http_of_serve() -> tuple[str, int] | None:
    """Host and port of Serve's HTTP, as who started Serve has set them; None where it has none."""
    http = RAY.get("_get_global_client")().http_config
    location = getattr(http.location, "value", http.location)
    return None if http.host is None or location in _NO_PROXY else (http.host, http.port)
