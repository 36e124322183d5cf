"""Whole runs by the command line, and a cluster that lives on after them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import MARK, kill_all, processes_of

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic" / "quickstart.yaml"
TWO_OF_EACH = (
    "rollout.num_replicas=2", "scaling={num_workers: 2, use_gpu: false}", "ray.num_cpus=5",
)  # fmt: skip
"""What `command` makes of the quickstart's one engine and one train worker."""
ONE_OF_EACH = ("rollout.num_replicas=1", "scaling={num_workers: 1, use_gpu: false}")
"""Settings of a run with one engine and one train worker."""
START_LIMIT_S = 240.0
"""Of a cluster, on a machine that does much else."""
RAYS_OWN = (
    "JobSupervisor", "_StatsActor", "_AutoscalingCoordinatorActor", "_UsageCollectionActor",
    "TrainStateActor",
)  # fmt: skip
"""Classes of actors that Ray leaves on a cluster."""
ANY_PORT = (
    "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
    "--disable-usage-stats",
)  # fmt: skip
"""Options of a node beside which others of this machine start."""
_LIVING_PARTS = f"""
import sys, ray
from ray.util.state import list_actors, list_placement_groups
ray.init(address=sys.argv[1], log_to_driver=False)
actors = list_actors(filters=[("state", "!=", "DEAD")], limit=1000)
groups = list_placement_groups(filters=[("state", "!=", "REMOVED")], limit=1000)
print([a.class_name for a in actors if a.class_name not in {RAYS_OWN}]
      + [g.placement_group_id for g in groups])
"""


def command(folder: Path, *overrides: str, name: str = "run") -> list[str]:
    settings = [f"run.storage_path={folder}", f"run.name={name}", *TWO_OF_EACH, *overrides]
    pairs = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "ray_apr", "train", str(CONFIG), *pairs]


def start_run(
    folder: Path, env: dict[str, str], *overrides: str, log: Path | None = None
) -> subprocess.Popen[str]:
    """Start a run in a session of its own; all that it says comes out of its `stdout`, or goes to
    the file `log`."""
    with contextlib.ExitStack() as stack:
        stdout = subprocess.PIPE if log is None else stack.enter_context(log.open("w"))
        return subprocess.Popen(
            command(folder, *overrides), env=env, text=True, cwd=folder,
            stdout=stdout, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def free_port() -> int:
    """A port that nobody has, and that the system gives to nobody who asks for any."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.randrange(20_000, 32_000)
            probe.bind(("127.0.0.1", port))
            return port


def ray_cli(env: dict[str, str], *args: str, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *args],
        env=env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@contextmanager
def running_cluster(
    env: dict[str, str],
    *,
    num_cpus: int = 8,
    address: str = "127.0.0.1",
    options: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Start a cluster with a marked environment, on an address of this machine, and with further
    options of its node; yields its address with the port, and its dashboard's."""
    port = free_port()
    dashboard = next(other for other in iter(free_port, None) if other != port)
    env = {**env, "RAY_AUTH_MODE": "disabled"}
    # not pytest's folder, whose path is too long for Ray's sockets
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        started = ray_cli(
            env, "start", "--head", f"--port={port}", f"--num-cpus={num_cpus}",
            f"--node-ip-address={address}", "--include-dashboard=true",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder}",
            *ANY_PORT, *options, timeout=START_LIMIT_S,
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr
        try:
            yield f"{address}:{port}", f"http://127.0.0.1:{dashboard}"
        finally:
            kill_all(env[MARK])  # `ray stop` would stop every cluster of this machine


def living_parts(address: str, env: dict[str, str]) -> str:
    """Actors and placement groups of a cluster that are not Ray's own, as the text of a list."""
    left = subprocess.run(
        [sys.executable, "-c", _LIVING_PARTS, address],
        env={**env, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address},  # others may live, too
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return left.stdout.strip() or left.stderr


def fail_by_killing(
    victim: str, folder: Path, address: str, env: dict[str, str], *overrides: str,
    after_steps: int = 1, before: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Start a run on a cluster and kill one of its parts: it fails, says why in one line, and
    leaves none.

    `before` is called when all parts are there. Returns the final figures.
    """
    on_cluster = env | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address}
    run = start_run(folder, on_cluster, *overrides)
    assert run.stdout is not None
    seen: list[str] = []
    num_steps = 0
    for line in run.stdout:
        seen.append(line)
        num_steps += line.startswith("step")
        if num_steps == after_steps:
            break
    else:
        raise AssertionError("".join(seen))
    (pid,) = [p for p, name in processes_of(env[MARK]).items() if victim in name]
    before()
    os.kill(pid, signal.SIGKILL)
    rest, _ = run.communicate(timeout=240)
    assert run.returncode == 1, f"exit code {run.returncode}: " + "".join(seen) + rest
    final = json.loads((folder / "run" / "final.json").read_text())
    # its half of the ledger is gone with the rollout worker
    balance = None if victim == "RolloutWorker" else 0
    assert (final["status"], final["ledger_error"]) == ("failed", balance)
    log = folder / "run" / "error.log"
    (said,) = [line for line in rest.splitlines() if line.startswith("error: ")]
    assert said == f"error: {final['error']} (traceback: {log})"
    assert log.read_text().startswith(final["error"] + "\n")
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert final["steps"] == len(rows), rest
    assert living_parts(address, env) == "[]"
    return final
