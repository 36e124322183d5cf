"""Whole runs through the real parts: vLLM, Serve, Data, Train; as a job, failing, interrupted.

Each of them starts two engines and two train workers on two cores: about a minute and a half.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import kill_all, marked_environment, wait_until_none

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "arithmetic" / "quickstart.yaml"
SUMMARY_KEYS = {
    "mode", "steps", "wall_s", "setup_s", "reward_first", "reward_last", "samples_trained",
    "samples_interrupted", "samples_resumed", "tokens_generated", "tokens_trained",
    "tokens_buffered", "tokens_interrupted", "tokens_discarded", "ledger_error", "staleness_max",
    "staleness_mean", "max_staleness", "policy_version", "num_replicas", "num_train_workers",
    "generation_idle_ratio", "trainer_idle_ratio", "weight_sync_s", "rollout_tokens_per_s",
    "read_ahead_max",
}  # fmt: skip


@pytest.fixture
def marked():
    """(mark, environment); fails the test if a process with the mark outlives it."""
    mark, env = marked_environment()
    try:
        yield mark, env
        left = wait_until_none(mark, 30)
        assert not left, f"processes left behind: {left}"
    finally:
        kill_all(mark)


def command(folder: Path, *overrides: str, name: str = "run") -> list[str]:
    settings = [f"run.storage_path={folder}", f"run.name={name}", *overrides]
    pairs = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "ray_apr", "train", str(CONFIG), *pairs]


def check_summary(folder: Path, *, steps: int) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["steps"] == summary["policy_version"] == steps
    assert summary["samples_trained"] == 128 * steps
    assert summary["ledger_error"] == 0
    assert summary["staleness_max"] <= summary["max_staleness"]
    assert (summary["num_replicas"], summary["num_train_workers"]) == (2, 2)
    assert summary["read_ahead_max"] <= 2 * 128
    assert "<svg" in (folder / "report.html").read_text()
    return summary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ray_cli(env: dict[str, str], *args: str, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(Path(sys.executable).with_name("ray")), *args],
        env=env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def test_a_job_on_a_running_cluster_learns_and_leaves_nothing_behind(tmp_path, marked):
    mark, env = marked
    port, dashboard = free_port(), free_port()
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    head = {key: value for key, value in env.items() if key != "RAY_ADDRESS"}
    started = ray_cli(
        head, "start", "--head", f"--port={port}", "--num-cpus=8", "--node-ip-address=127.0.0.1",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--temp-dir=/tmp/ray-apr-{port}", "--disable-usage-stats",
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        job = submit(env, *command(tmp_path, "train.steps=4"))
        assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
        assert "step    4/4" in job.stdout
        summary = check_summary(tmp_path / "run", steps=4)
        assert summary["samples_resumed"] >= 0.8 * summary["samples_interrupted"]
        left = subprocess.run(
            [sys.executable, "-c", LIVING_PARTS, f"127.0.0.1:{port}"],
            env=head, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert left.stdout.strip() == "[]", left.stdout + left.stderr
    finally:
        kill_all(mark)  # `ray stop` would stop every cluster of this machine


def submit(env: dict[str, str], *entrypoint: str) -> subprocess.CompletedProcess:
    """Run a job to its end; a head that has just started may have no agent for it yet."""
    for _ in range(20):
        job = ray_cli(env, "job", "submit", "--", *entrypoint, timeout=360)
        if "No available agent" not in job.stdout + job.stderr:
            break
        time.sleep(3)
    return job


LIVING_PARTS = """
import sys, ray
from ray.util.state import list_actors, list_placement_groups
ray.init(address=sys.argv[1], log_to_driver=False)
actors = list_actors(filters=[("state", "!=", "DEAD")], limit=1000)
groups = list_placement_groups(filters=[("state", "!=", "REMOVED")], limit=1000)
rays_own = ("JobSupervisor", "_StatsActor", "_AutoscalingCoordinatorActor")  # of jobs and Ray Data
print([a.class_name for a in actors if a.class_name not in rays_own]
      + [g.placement_group_id for g in groups])
"""


def test_rewards_that_fail_end_the_run_with_their_reason(tmp_path, marked):
    _, env = marked
    (tmp_path / "broken.py").write_text(
        "def reward(sample):\n    raise KeyError('no such answer')\n"
    )
    run = subprocess.run(
        command(tmp_path, f"reward={tmp_path}/broken.py:reward"),
        env=env, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert "no such answer" in run.stderr
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["status"] == "failed"
    assert final["ledger_error"] == 0


def test_ctrl_c_ends_a_run_at_once_and_whole(tmp_path, marked):
    _, env = marked
    process = subprocess.Popen(
        command(tmp_path), env=env, text=True, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 130, "".join(seen) + rest


ONE_BY_ONE = (
    "train.steps=5", "train.batch_size=16", "rollout.seed=7",
    "rollout.engine_kwargs={max_num_seqs: 1, enable_prefix_caching: false}",
)  # fmt: skip
"""Each request alone in its engine: then its log-probs do not depend on who else is there."""


def test_apr_without_staleness_trains_the_same_bits_as_sync(tmp_path, marked):
    """verl#6780: with a bound of 0, the asynchronous trainer did not equal the synchronous one."""
    _, env = marked
    bound = ("partial_rollout.max_staleness=0", "partial_rollout.oversampling_factor=1")
    weights = []
    for name, overrides in {"sync": ("mode=sync",), "apr": ("mode=apr", *bound)}.items():
        run = subprocess.run(
            command(tmp_path, *ONE_BY_ONE, *overrides, name=name),
            env=env, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        (model,) = (tmp_path / name).glob("checkpoint_*/hf/model.safetensors")
        weights.append(model.read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != (CONFIG.parent / "base_model" / "model.safetensors").read_bytes()
