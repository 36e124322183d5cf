"""A whole run with an engine that ray_apr does not have: tests/scripted_backend.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.whole_runs import ONE_OF_EACH, command

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

BACKEND = Path(__file__).parents[1] / "scripted_backend.py"
PARTS = Path(__file__).parents[1] / "own_parts.py"
SMALL = (
    f"rollout.engine.factory={BACKEND}:ScriptedBackend", f"reward={BACKEND}:reward",
    "rollout.engine.kwargs={num_ids: 17, longest: 48}", "train.steps=3", "train.batch_size=16",
    "rollout.group_size=4", "rollout.max_response_tokens=64",
    *ONE_OF_EACH,
)  # fmt: skip


def run(folder: Path, env: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *SMALL, *overrides),
        env=env, capture_output=True, text=True, timeout=280, check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.long
def test_engine_rules_and_objective_of_a_run_are_the_users(tmp_path, marked):
    """Engine, resume order, admission, advantage, loss and correction, named in YAML."""
    _, env = marked
    ended = run(
        tmp_path, env, "train.weight_check_every=0",
        f"partial_rollout.resume_order={PARTS}:FewestTokensLeft",
        f"partial_rollout.admission={PARTS}:two_groups_at_a_time",
        f"algorithm.advantage={PARTS}:advantage", "algorithm.advantage_kwargs={scale: 0.5}",
        f"algorithm.loss={PARTS}:loss", "algorithm.loss_kwargs={floor: 0.1}",
        f"algorithm.correction={PARTS}:correction", "algorithm.correction_kwargs={cap: 1.5}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["ledger_error"], final["steps"]) == ("ok", 0, 3)
    assert [engine["policy_version"] for engine in final["engines"]] == [2], "it got both syncs"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 3
    assert all(0.1 <= row["loss/age"] <= 2.0 for row in rows), rows
    assert all(row["importance_weight_mean"] <= 1.5 for row in rows), rows
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["rollout"]["engine"]["factory"].endswith(":ScriptedBackend")
    assert config["algorithm"]["loss"].endswith(":loss")
    assert config["algorithm"]["loss_kwargs"] == {"floor": 0.1}
    assert config["partial_rollout"]["resume_order"].endswith(":FewestTokensLeft")


@pytest.mark.long
def test_an_engine_that_cannot_score_is_refused_while_weights_are_checked(tmp_path, marked):
    _, env = marked
    ended = run(tmp_path, env)
    assert ended.returncode == 1
    assert "train.weight_check_every = 'auto': must be 0" in ended.stderr, ended.stderr[-3000:]
