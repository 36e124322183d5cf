"""A second node of a cluster on this machine, which is drained, or killed and started anew."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.processes import MARK, processes_below, processes_of
from tests.whole_runs import ANY_PORT, START_LIMIT_S, ray_cli

_ADDRESS = "127.0.0.2"
"""Not that of the first node, so that a driver finds its own one."""
_RAYLET = "/raylet/raylet "
_HOLD = """
import sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)
(node,) = (n for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == sys.argv[2])
class Holder:
    def is_there(self):
        return True
there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
holder = ray.remote(Holder).options(
    num_cpus=node["Resources"]["CPU"], scheduling_strategy=there).remote()
ray.get(holder.is_there.remote(), timeout=60)
print("held", flush=True)
sys.stdin.read()
"""
_NODE_ID = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(*(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == sys.argv[2]))
"""
_RAYS_OWN = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")


class SecondNode:
    """A node that joins a cluster of one node.

    Args:
        address: Of the cluster, whose first node runs.
        env: With the mark of the cluster's processes.
        num_cpus: Of the node.
        own_address: Of the node.
        inside: Command that runs another one where the node is to be, such as in a namespace.
    """

    def __init__(
        self,
        address: str,
        env: dict[str, str],
        *,
        num_cpus: int,
        own_address: str = _ADDRESS,
        inside: Sequence[str] = (),
    ) -> None:
        self._address, self._own_address = address, own_address
        self._command = [
            *inside, sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}",
            f"--node-ip-address={own_address}", f"--num-cpus={num_cpus}", *ANY_PORT,
        ]  # fmt: skip
        self._env = env
        self._of_first = self._all_raylets()
        self._starting: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have it start, which takes some seconds."""
        self._starting = subprocess.Popen(
            self._command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait_until_started(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait for the end of its start.

        Raises:
            AssertionError: If it did not start.
        """
        assert self._starting is not None
        assert self._starting.wait(limit_s) == 0, "the second node does not start"

    def drain(self, limit_s: int) -> None:
        """Tell Ray that it will be gone in so many seconds, as a cloud does with a spot node; who
        calls this has to end it."""
        found = subprocess.run(
            [sys.executable, "-c", _NODE_ID, self._address, self._own_address],
            env=self._env, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        drained = ray_cli(
            self._env, "drain-node", f"--address={self._address}",
            f"--node-id={found.stdout.strip()}", "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=spot", f"--deadline-remaining-seconds={limit_s}",
        )  # fmt: skip
        assert drained.returncode == 0, drained.stdout + drained.stderr

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside of it all of its CPUs are taken."""
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLD, self._address, self._own_address],
            env=self._env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdin is not None and holder.stdout is not None
        try:
            assert any("held" in line for line in holder.stdout), "it has no CPUs"
            yield
        finally:
            holder.stdin.close()
            holder.wait(60)

    def raylets(self) -> list[int]:
        """Its raylet, while it has one."""
        is_starting = self._starting is not None and self._starting.poll() is None
        return [] if is_starting else sorted(self._all_raylets() - self._of_first)

    def carries(self) -> list[str]:
        """The parts of a run that it has: names of its actors and tasks that are not Ray's."""
        names = [name for pid in self.raylets() for name in processes_below(pid).values()]
        parts = [name.partition("::")[2].partition(" ")[0] for name in names if "::" in name]
        return sorted(part for part in parts if part and part not in _RAYS_OWN)

    def _all_raylets(self) -> set[int]:
        found = processes_of(self._env[MARK])
        return {pid for pid, name in found.items() if _RAYLET in name}
