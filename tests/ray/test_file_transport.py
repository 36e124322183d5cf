"""A whole run whose weights travel as files: examples/transports/folder.py, which the package does
not know."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.whole_runs import CONFIG, command

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

FOLDER = CONFIG.parents[1] / "transports" / "folder.py"


def test_weights_travel_as_files(tmp_path, marked):
    _, env = marked
    files = tmp_path / "files"
    files.mkdir()
    overrides = (
        f"train.weight_transport={FOLDER}:FolderSender", "train.steps=4", "train.batch_size=32",
        "train.weight_check_every=1", "rollout.num_replicas=2", "mode=apr",
    )  # fmt: skip
    ended = subprocess.run(
        command(tmp_path, *overrides), env={**env, "APR_WEIGHT_FOLDER": str(files)},
        capture_output=True, text=True, timeout=550, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["ledger_error"], final["steps"]) == ("ok", 0, 4)
    assert [engine["policy_version"] for engine in final["engines"]] == [3, 3], "each got all"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    checked = [row["weight_check_gap"] for row in rows if row.get("weight_check_gap") is not None]
    assert len(checked) == 3 and all(gap < 1e-3 for gap in checked), checked
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["weight_transport"].endswith(":FolderSender")
    assert not list(files.glob("apr-weights-*")), "nothing is left"
