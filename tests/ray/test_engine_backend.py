"""A whole run with an engine that ray_apr does not have: tests/scripted_backend.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.whole_runs import command

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

BACKEND = Path(__file__).parents[1] / "scripted_backend.py"
SMALL = (
    f"rollout.engine.factory={BACKEND}:ScriptedBackend", f"reward={BACKEND}:reward",
    "rollout.engine.kwargs={num_ids: 17, longest: 48}", "train.steps=3", "train.batch_size=16",
    "rollout.group_size=4", "rollout.max_response_tokens=64",
    "scaling={num_workers: 1, use_gpu: false}",
)  # fmt: skip


def run(folder: Path, env: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *SMALL, *overrides),
        env=env, capture_output=True, text=True, timeout=280, check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["apr", "in_flight"])
def test_a_run_is_served_by_an_engine_of_the_users(tmp_path, marked, mode):
    _, env = marked
    ended = run(tmp_path, env, "train.weight_check_every=0", f"mode={mode}")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["ledger_error"], final["steps"]) == ("ok", 0, 3)
    assert len(final["engines"]) == 2
    assert {engine["policy_version"] for engine in final["engines"]} == {2}, "each got both syncs"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["rollout"]["engine"]["factory"].endswith(":ScriptedBackend")


def test_an_engine_that_cannot_score_is_refused_while_weights_are_checked(tmp_path, marked):
    _, env = marked
    ended = run(tmp_path, env, "rollout.num_replicas=1")
    assert ended.returncode == 1
    assert "train.weight_check_every = 'auto': must be 0" in ended.stderr, ended.stderr[-3000:]
