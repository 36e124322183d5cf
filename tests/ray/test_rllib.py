"""A run by RLlib's API: trained, saved, stopped, and gone on with in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(420)]


def train(folder: Path, env: dict[str, str], *arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.rllib_run", str(folder), *arguments],
        env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


def test_an_algorithm_goes_on_in_another_process(tmp_path, marked):
    _, env = marked
    first = train(tmp_path, env, "2")
    assert [row["iteration"] for row in first["iterations"]] == [1, 2]
    assert [row["version"] for row in first["iterations"]] == [2, 4]
    assert [row["env_steps"] for row in first["iterations"]] == [64, 128]
    assert first["left"] == []
    (run,) = (tmp_path / "runs").iterdir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 4
    assert json.loads((run / "final.json").read_text())["ledger_error"] == 0
    second = train(tmp_path, env, "1", first["path"])
    (row,) = second["iterations"]
    assert (row["iteration"], row["steps"], row["version"], row["env_steps"]) == (3, 6, 6, 192)
    assert row["done"]
    assert row["evaluated"] == 6, "the last version is evaluated before the run ends"
    assert second["left"] == []
    (other,) = set((tmp_path / "runs").iterdir()) - {run}
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 5]
