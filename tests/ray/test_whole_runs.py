"""Whole runs through the real parts: vLLM, Serve, Data, Train; as a job, failing, interrupted.

Most start two engines and two train workers on two cores: more than a minute each.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ray_apr.run.folder import read_rows
from tests.whole_runs import (
    CONFIG,
    ONE_OF_EACH,
    command,
    living_parts,
    ray_cli,
    running_cluster,
    start_run,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(700)]

FOLDER = CONFIG.parents[1] / "transports" / "folder.py"
LOUD = """
def reward(sample):
    print(f"scores {sample.sample_id}\\n", end="")
    return float(sample.response_text.rpartition(",")[2] == str(sample.row["answer"]))
"""
SUMMARY_KEYS = {
    "mode", "steps", "parts", "wall_s", "setup_s", "reward_first", "reward_last", "reward_parts",
    "held_out", "samples_trained",
    "samples_interrupted", "samples_resumed", "tokens_generated", "tokens_trained",
    "tokens_buffered", "tokens_interrupted", "tokens_discarded", "ledger_error", "staleness_max",
    "staleness_mean", "max_staleness", "policy_version", "num_replicas", "num_train_workers",
    "generation_idle_ratio", "trainer_idle_ratio", "weight_sync_s", "rollout_tokens_per_s",
    "read_ahead_max",
}  # fmt: skip


def check_summary(folder: Path, *, steps: int) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["steps"] == summary["policy_version"] == steps
    assert summary["samples_trained"] == 128 * steps
    assert summary["ledger_error"] == 0
    assert summary["staleness_max"] <= summary["max_staleness"]
    assert (summary["num_replicas"], summary["num_train_workers"]) == (2, 2)
    assert summary["read_ahead_max"] <= 2 * 128
    assert 'class="plot"' in (folder / "report.html").read_text()
    return summary


def test_a_job_on_a_running_cluster_learns_and_leaves_nothing_behind(tmp_path, marked):
    _, env = marked
    with running_cluster(env) as (address, dashboard):
        on_cluster = env | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": dashboard}
        (tmp_path / "loud.py").write_text(LOUD)
        reward = f"reward={tmp_path}/loud.py:reward"
        settings = ("train.steps=3", "train.profile_steps=[1]", reward)
        job = submit(on_cluster, *command(tmp_path, *settings))
        assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
        assert "step    3/3" in job.stdout
        assert "reward worker: scores e0-" in job.stdout
        scored = (tmp_path / "run" / "ray.log").read_text().count(" scores e")
        assert scored >= 3 * 128 > job.stdout.count(" scores e")
        summary = check_summary(tmp_path / "run", steps=3)
        assert summary["samples_resumed"] >= 0.8 * summary["samples_interrupted"]
        assert living_parts(address, env) == "[]"
        check_profile(tmp_path / "run")


def check_profile(folder: Path) -> None:
    """Both sides are there of the step that was profiled."""
    assert {file.name[:11] for file in (folder / "profiles").iterdir()} == {"step-000001"}
    steps = read_rows(folder / "engine_steps.jsonl")
    assert {row["what"] for row in steps} == {"prefill", "decode"}
    assert all(row["end_s"] >= row["start_s"] > 0 for row in steps)
    last = read_rows(folder / "metrics.jsonl")[-1]
    assert 0 < sum(row["tokens"] for row in steps) < last["engines_tokens"]
    assert last["reward_s"] > 0


def submit(env: dict[str, str], *entrypoint: str) -> subprocess.CompletedProcess:
    """Run a job to its end; a head that has just started may have no agent for it yet."""
    for _ in range(60):
        job = ray_cli(env, "job", "submit", "--", *entrypoint, timeout=360)
        if "No available agent" not in job.stdout + job.stderr:
            break
        time.sleep(3)
    return job


@pytest.mark.long
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


@pytest.mark.long
def test_ctrl_c_ends_a_run_with_its_own_cluster_at_once_and_whole(tmp_path, marked):
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


@pytest.mark.long
def test_weights_travel_as_files_by_a_transport_of_the_users(tmp_path, marked):
    """examples/transports/folder.py, which the package does not know."""
    _, env = marked
    files = tmp_path / "files"
    files.mkdir()
    overrides = (
        f"train.weight_transport={FOLDER}:FolderSender", "train.steps=4", "train.batch_size=32",
        "train.weight_check_every=1",
    )  # fmt: skip
    ended = subprocess.run(
        command(tmp_path, *overrides), env={**env, "APR_WEIGHT_FOLDER": str(files)},
        capture_output=True, text=True, timeout=400, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["ledger_error"], final["steps"]) == ("ok", 0, 4)
    versions = [engine["policy_version"] for engine in final["engines"]]
    assert versions == [3, 3], "both engines got all three syncs"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    checked = [json.loads(line).get("weight_check_gap") for line in lines]
    gaps = [gap for gap in checked if gap is not None]
    assert len(gaps) == 3 and max(gaps) < 1e-3, gaps
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["weight_transport"].endswith(":FolderSender")
    assert not list(files.iterdir()), "nothing is left"
