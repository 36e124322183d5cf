"""A run that came to nothing does not use up its name (run/folder.py, run/tidying.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray.train

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.resumption import Begin
from ray_apr.run.folder import came_to_nothing, check_new_folder
from ray_apr.run.recorder import ROW_FILES
from ray_apr.run.resume import find_begin, hold_folder
from ray_apr.run.tidying import tidy_folder
from ray_apr.tools.verify import verify
from tests.run_specs import run_spec

ERROR = "ConfigError: prompts[30].question = '1202 tokens': at most 64 leave room"
TRACES = {
    "metrics.jsonl": {"step": 0},
    "ended.jsonl": {"sample_id": "e0-0-0"},
    "timeline.jsonl": {"actor": "engine-0", "what": "generate", "start_s": 1.0, "end_s": 2.0},
    "journal/000000-worker.frames": {},
    "checkpoint_2026/rollout.json": {},
}
"""What a run leaves that made a token."""


def spec_in(folder: Path) -> Any:
    run = ray.train.RunConfig(name="long", storage_path=str(folder))
    return run_spec(run=run, train=TrainConfig(steps=4))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a run leaves it that found a prompt too long, and was tried again."""
    made = tmp_path / "long"
    made.mkdir()
    for name in ROW_FILES.values():
        (made / name).touch()
    load = {"actor": "trainer", "what": "load", "start_s": 1.0, "end_s": 2.0}
    (made / "timeline.jsonl").write_text(json.dumps(load) + "\n")
    for name in ("resumes.jsonl", "ranks.jsonl"):
        (made / name).write_text('{"time_s": 1.0, "step": 0}\n')
    (made / "final.json").write_text(json.dumps({"status": "failed", "error": ERROR}))
    for name in ("error.log", "summary.json", "report.html", "prompts.jsonl", "callbacks.json"):
        (made / name).write_text("{}\n")
    return made


def test_a_name_whose_run_came_to_nothing_is_free(folder):
    """known fault: after a prompt that was too long, the corrected run was refused its name."""
    assert came_to_nothing(folder)
    check_new_folder(folder)
    with hold_folder(folder), pytest.raises(ConfigError, match="holds a run already"):
        check_new_folder(folder)  # it has only just begun


@pytest.mark.parametrize("name", TRACES)
def test_a_run_that_made_a_token_keeps_its_folder(folder, name):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(TRACES[name]) + "\n")
    with pytest.raises(ConfigError, match="holds a run already"):
        check_new_folder(folder)
    tidy_folder(spec_in(folder.parent))
    assert file.read_text() and (folder / "resumes.jsonl").exists()


def test_its_rows_are_replaced_and_all_else_stays(folder):
    tidy_folder(spec_in(folder.parent))
    assert sorted(path.name for path in folder.iterdir()) == [
        "callbacks.json", "prompts.jsonl",
    ]  # fmt: skip
    assert find_begin(spec_in(folder.parent)) == Begin()
    assert not came_to_nothing(folder)


def test_a_folder_of_no_run_is_left_alone(tmp_path):
    spec = spec_in(tmp_path)
    spec.folder.mkdir()
    (spec.folder / "ranks.jsonl").write_text("{}\n")
    tidy_folder(spec)
    assert (spec.folder / "ranks.jsonl").exists()


def test_verify_says_that_nothing_was_trained(folder):
    """known fault: BROKEN lines for prompts and ledger."""
    with pytest.raises(ConfigError, match=r"nothing was trained, .* to prove: ConfigError: prompt"):
        verify(folder)
