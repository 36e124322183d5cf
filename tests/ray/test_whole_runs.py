"""Whole runs through the real parts: vLLM, Serve, Data, Train; as a job, failing, interrupted.

Most start two engines and two train workers on two cores: more than a minute each.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine_kills import kill_a_core, sync_of
from tests.processes import kill_all, marked_environment, processes_of, wait_until_none
from tests.whole_runs import (
    CONFIG,
    command,
    fail_by_killing,
    living_parts,
    ray_cli,
    running_cluster,
    start_run,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]

SUMMARY_KEYS = {
    "mode", "steps", "wall_s", "setup_s", "reward_first", "reward_last", "reward_parts",
    "samples_trained",
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


def test_a_job_on_a_running_cluster_learns_and_leaves_nothing_behind(tmp_path, marked):
    _, env = marked
    with running_cluster(env) as (address, dashboard):
        on_cluster = env | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": dashboard}
        job = submit(on_cluster, *command(tmp_path, "train.steps=4"))
        assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
        assert "step    4/4" in job.stdout
        summary = check_summary(tmp_path / "run", steps=4)
        assert summary["samples_resumed"] >= 0.8 * summary["samples_interrupted"]
        assert living_parts(address, env) == "[]"


def submit(env: dict[str, str], *entrypoint: str) -> subprocess.CompletedProcess:
    """Run a job to its end; a head that has just started may have no agent for it yet."""
    for _ in range(60):
        job = ray_cli(env, "job", "submit", "--", *entrypoint, timeout=360)
        if "No available agent" not in job.stdout + job.stderr:
            break
        time.sleep(3)
    return job


ONE_OF_EACH = ("rollout.num_replicas=1", "scaling={num_workers: 1, use_gpu: false}")


def test_rewards_that_fail_end_the_run_with_their_reason(tmp_path, marked):
    _, env = marked
    (tmp_path / "broken.py").write_text(
        "def reward(sample):\n    raise KeyError('no such answer')\n"
    )
    run = subprocess.run(
        command(tmp_path, *ONE_OF_EACH, f"reward={tmp_path}/broken.py:reward"),
        env=env, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert "no such answer" in run.stderr
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["status"] == "failed"
    assert final["ledger_error"] == 0


def test_ctrl_c_ends_a_run_at_once_and_whole(tmp_path, marked):
    _, env = marked
    process = start_run(tmp_path, env, *ONE_OF_EACH)
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 130, "".join(seen) + rest
    assert "stopped by you (Ctrl-C)" in rest
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["ledger_error"]) == ("stopped", 0)


ONE_BY_ONE = (
    "train.steps=3", "train.batch_size=16", "rollout.seed=7",
    "rollout.engine_kwargs={max_num_seqs: 1, enable_prefix_caching: false}",
)  # fmt: skip
"""Each request alone in its engine: then its log-probs do not depend on who else is there."""


def trained_weights(folder: Path, env: dict[str, str], *overrides: str) -> bytes:
    """What a whole run ends with, one request at a time."""
    run = subprocess.run(
        command(folder, *ONE_BY_ONE, *overrides),
        env=env, capture_output=True, text=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (model,) = (folder / "run").glob("checkpoint_*/hf/model.safetensors")
    return model.read_bytes()


@pytest.fixture(scope="module")
def trained_in_sync(tmp_path_factory) -> bytes:
    mark, env = marked_environment()
    try:
        one = ("mode=sync", "rollout.num_replicas=1")  # the others have two
        weights = trained_weights(tmp_path_factory.mktemp("sync"), env, *one)
    finally:
        kill_all(mark)
    assert weights != (CONFIG.parent / "base_model" / "model.safetensors").read_bytes()
    return weights


def test_apr_without_staleness_trains_the_same_bits_as_sync(tmp_path, marked, trained_in_sync):
    """verl#6780: with a bound of 0, the asynchronous trainer did not equal the synchronous one."""
    _, env = marked
    bound = ("partial_rollout.max_staleness=0", "partial_rollout.oversampling_factor=1")
    assert trained_weights(tmp_path, env, "mode=apr", *bound) == trained_in_sync


def test_colocated_engines_train_the_same_bits_as_others(tmp_path, marked, trained_in_sync):
    _, env = marked
    turns = ("mode=sync", "rollout.placement=colocated", "train.checkpoint_every=2")
    assert trained_weights(tmp_path, env, *turns) == trained_in_sync


def test_servers_that_die_inside_of_a_sync_and_later_are_replaced_and_the_run_goes_on(
    tmp_path, marked
):
    """known fault: an engine core killed during a sync ended the run though another one lived."""
    mark, env = marked
    overrides = (
        "train.steps=1000", "train.weight_sync_timeout_s=30",
        "scaling={num_workers: 1, use_gpu: false}",
    )  # fmt: skip
    process = start_run(tmp_path, env, *overrides)
    kill = kill_a_core(mark, tmp_path / "run", after_step=3, delay_s=0.0)
    timeline = tmp_path / "run" / "timeline.jsonl"
    left = 3
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if not line.startswith("step"):
            continue
        spans = [json.loads(span) for span in timeline.read_text().splitlines()]
        if ("engine-2", "generate") not in {(span["actor"], span["what"]) for span in spans}:
            continue
        if left == 3:
            victim = next(p for p, name in processes_of(mark).items() if "ServeReplica" in name)
            os.kill(victim, signal.SIGKILL)
        left -= 1
        if left == 0:
            break
    process.send_signal(signal.SIGTERM)  # as Ctrl-C, of which there is a test above
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 143, "".join(seen)[-6000:] + rest
    assert (tmp_path / "run" / "report.html").is_file()
    spans = [json.loads(span) for span in timeline.read_text().splitlines()]
    started = {(span["actor"], span["what"]) for span in spans}
    assert {("trainer", "load"), *((f"engine-{i}", "start") for i in range(3))} <= started
    hit = sync_of(kill, tmp_path / "run")
    assert hit is not None
    assert hit["end_s"] - hit["start_s"] < 25.0, "the others did not wait for a limit"
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["error"]) == ("stopped", "stopped by SIGTERM")
    assert final["ledger_error"] == 0


def test_a_run_without_one_of_its_parts_fails_with_the_reason_and_leaves_nothing(tmp_path, marked):
    _, env = marked
    victims = ("RayTrainWorker", "ServeReplica", "EngineCore", "RolloutWorker")
    with running_cluster(env) as (address, _):
        for number, victim in enumerate(victims):
            folder = tmp_path / str(number)  # not the victim's name, which its command would have
            folder.mkdir()
            final = fail_by_killing(
                victim, folder, address, env, "rollout.num_replicas=1", "train.steps=1000",
                "scaling={num_workers: 1, use_gpu: false}", "train.weight_sync_timeout_s=30",
            )  # fmt: skip
    assert final["error"].startswith("RolloutError: the rollout worker died")


def test_a_killed_driver_leaves_nothing_on_a_cluster_that_lives_on(tmp_path, marked):
    """known fault: it left the Serve application and its GPUs behind."""
    mark, env = marked
    ours = ("EngineCore", "ServeReplica", "ServeController", "ProxyActor", "RunLease")
    with running_cluster(env) as (address, _):
        on_cluster = env | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address}
        run = start_run(tmp_path, on_cluster, *ONE_OF_EACH, "train.steps=1000")
        assert run.stdout is not None
        seen = list(itertools.takewhile(lambda line: not line.startswith("step"), run.stdout))
        running = processes_of(mark)
        assert "EngineCore" in str(running), "".join(seen)
        (lease,) = [pid for pid, name in running.items() if "RunLease" in name]
        os.kill(lease, signal.SIGKILL)  # Ray starts it again
        run.kill()
        run.wait()
        deadline = time.monotonic() + 60
        while (left := living_parts(address, env)) != "[]" and time.monotonic() < deadline:
            time.sleep(1)
        assert left == "[]"
        names = processes_of(mark).values()
        assert not [name for name in names if any(part in name for part in ours)]
