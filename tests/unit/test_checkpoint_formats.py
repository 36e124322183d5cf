"""Checkpoints of every format that there was are read, from files of that time."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest
import ray.train

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import Environment, Step
from ray_apr.data.resumption import FORMAT, PROGRESS_FILE, ROLLOUT_FILE, SAMPLES_FILE
from ray_apr.data.saved_samples import groups_of
from ray_apr.run.resume import find_begin
from ray_apr.train.checksums import checksums, write_checksums
from tests.run_specs import run_spec
from tests.saved_checkpoints import (
    COUNTERS,
    ROLLOUT,
    STORED,
    group_in_buffer,
    live_group,
    prompt_of,
    write_checkpoint,
)


class Game(Environment):
    """Speaks first."""

    async def reset(self, prompt):
        return Step()

    async def step(self, sample):
        return Step(done=True)


def begin_with(folder, tmp_path):
    return find_begin(
        run_spec(
            run=ray.train.RunConfig(name="mine", storage_path=str(tmp_path)),
            train=TrainConfig(steps=4, seed=3),
            rollout=ROLLOUT,
            environment=Game(),
            checkpoint=ray.train.Checkpoint(str(folder)),
        )
    )


def test_each_format_has_its_stored_checkpoint():
    """One who raises FORMAT stores a checkpoint of it: see tests/saved_checkpoints.py."""
    folders = sorted(int(path.name) for path in STORED.iterdir())
    assert folders == list(range(FORMAT + 1))
    for number in folders:
        stored = json.loads((STORED / str(number) / ROLLOUT_FILE).read_text())
        assert stored.get("format", 0) == number


def test_a_checkpoint_of_format_0_is_read(tmp_path):
    """It has no samples: all of its prompts come again."""
    begin = begin_with(STORED / "0", tmp_path)
    assert (begin.step, begin.policy_version) == (2, 2)
    assert begin.samples is None and begin.prompts_again == (2, 5, 6, 7)
    assert begin.rollout.counters == COUNTERS
    assert (begin.rollout.position, begin.rollout.retries) == (8, ())


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_of_a_format_with_samples_is_read(tmp_path, number):
    begin = begin_with(STORED / str(number), tmp_path)
    assert (begin.step, begin.policy_version) == (2, 2)
    live, handed_over = groups_of(begin.samples, prompt_of)
    assert live == [live_group()] and handed_over == [group_in_buffer()]
    assert begin.rollout.counters == COUNTERS
    assert begin.rollout.retries == ("e1-2~1",)
    assert (begin.rollout.num_long_retries, begin.rollout.num_owed) == (1, 2)
    assert begin.rollout.num_stops == {}, "it does not say how often a prompt was stopped"
    assert begin.prompts_again == (2,), "neither with samples, nor to be tried again"
    assert begin.num_kept == 3 + 3 + 2 + 2


def test_todays_format_is_that_of_its_stored_checkpoint(tmp_path):
    """One who changes what is written raises FORMAT."""
    write_checkpoint(tmp_path / "now")
    stored, now = STORED / str(FORMAT), tmp_path / "now"
    for name in (PROGRESS_FILE, ROLLOUT_FILE):
        values = [json.loads((folder / name).read_text()) for folder in (stored, now)]
        for found in values:  # a digest, and settings, which may become more
            if name == ROLLOUT_FILE:
                assert found.pop("samples_digest") and found.pop("sampled")
        assert values[0] == values[1]
    schemas = [pa.ipc.open_file(str(folder / SAMPLES_FILE)).schema for folder in (stored, now)]
    assert schemas[0] == schemas[1]


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path):
    newer = tmp_path / "newer"
    shutil.copytree(STORED / str(FORMAT), newer)
    values = json.loads((newer / ROLLOUT_FILE).read_text())
    values |= {"format": FORMAT + 1, "something": "new"}
    (newer / ROLLOUT_FILE).write_text(json.dumps(values))
    message = rf"checkpoint = 'format {FORMAT + 1}'.*reads formats up to {FORMAT}; go on with"
    with pytest.raises(ConfigError, match=message):
        begin_with(newer, tmp_path)


@pytest.mark.parametrize("name", [PROGRESS_FILE, ROLLOUT_FILE])
def test_a_checkpoint_with_values_of_a_newer_version_is_refused_in_words(tmp_path, name):
    """known fault: it was a TypeError, also where the format said so."""
    folder = shutil.copytree(STORED / str(FORMAT), tmp_path / "newer")
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | {"new_value": 1}))
    with pytest.raises(ConfigError, match=r"newer.*has others .*'new_value'; go on with the one"):
        begin_with(folder, tmp_path)
    values = json.loads((folder / ROLLOUT_FILE).read_text())
    (folder / ROLLOUT_FILE).write_text(json.dumps(values | {"format": FORMAT + 1}))
    with pytest.raises(ConfigError, match=f"reads formats up to {FORMAT}"):
        begin_with(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [(PROGRESS_FILE, '"step": 2', '"step": 1'), (ROLLOUT_FILE, '"position": 8', '"position": 9')],
)
def test_figures_of_which_a_digit_changed_are_refused(tmp_path, name, was, now):
    """known fault: the run went on with them, and had taken the rows of its steps out by then."""
    folder = tmp_path / "now"
    write_checkpoint(folder)
    write_checksums(folder, 0, checksums([folder / PROGRESS_FILE]))
    assert begin_with(folder, tmp_path).step == 2
    text = (folder / name).read_text()
    assert was in text
    (folder / name).write_text(text.replace(was, now))
    with pytest.raises(ConfigError, match=rf"/now/{name}': is not what was written"):
        begin_with(folder, tmp_path)


def test_damaged_checksums_of_the_rollout_side_are_refused(tmp_path):
    write_checkpoint(tmp_path / "now")
    (tmp_path / "now" / "checksums-rollout.json").write_text("{")
    with pytest.raises(ConfigError, match=r"checksums-rollout\.json': is not what was written"):
        begin_with(tmp_path / "now", tmp_path)
