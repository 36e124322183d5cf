"""``ray-apr replay``: which steps can be replayed, what is compared, what is shown."""

from __future__ import annotations

import json

import pytest

from ray_apr.cli import main as cli
from ray_apr.cli import replay as cli_replay
from ray_apr.cli.replay import replay_json, replay_text
from ray_apr.config import RolloutConfig
from ray_apr.config.journal import JournalConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.rows import PromptRows
from ray_apr.run.folder import add_row
from ray_apr.run.replaying import Replay, SampleAgain, StepAgain, _with_ranks, replay_step
from tests.run_specs import run_spec

PROMPTS = PromptRows([{"prompt": "1+1="}])
SAMPLE = SampleAgain(sample_id="e0-0-0", prompt="1+1=", response="2", reward=1.0, advantage=0.5)


def replayed(**figures):
    step = StepAgain(step=3, recorded={"loss": 0.1, "norm": float("nan")}, figures=figures)
    changed = {"train.learning_rate": (0.1, 0.2)}
    return Replay(begins_at=2, num_ranks=1, steps=(step,), samples=(SAMPLE,), changed=changed)


def test_the_smallest_difference_is_one():
    same = replayed(loss=0.1, norm=float("nan"))
    assert same.is_same
    other = replayed(loss=0.1 + 1e-16, norm=float("nan"))
    assert other.steps[0].different == ("loss",) and not other.is_same
    assert not replayed(new=1.0).is_same, "of which the run has no row"


@pytest.mark.parametrize(("loss", "code"), [(0.1, 0), (0.2, 1)])
def test_the_exit_code_says_whether_it_is_the_same(monkeypatch, capsys, tmp_path, loss, code):
    given = []
    replay = replayed(loss=loss)
    monkeypatch.setattr(cli_replay, "replay_run", lambda *args: given.append(args) or replay)
    assert cli.main(["replay", str(tmp_path), "--step", "3"]) == code
    said = capsys.readouterr().out
    assert ("DIFFERS" in said) == bool(code) and "1+1= → 2" in said
    changed = "the run changed some after step 2: train.learning_rate 0.1 → 0.2"
    assert (changed in said) == bool(code) and given[0][1] == 3
    assert cli.main(["replay", str(tmp_path), "--step", "3", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["same"] is not bool(code) and told["samples"][0]["advantage"] == 0.5
    assert told == json.loads(replay_json(replay)) and replay_text(replay) in said


def begun(tmp_path, spec, **changed):
    """A run folder with one step and the settings of a spec."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 0.1}) + "\n")
    described = json.loads(json.dumps(spec.describe(), default=str))
    described["train"] |= changed
    del described["train"]["export_checkpoints"]  # as a version before this setting wrote it
    (folder / "config.json").write_text(json.dumps(described))


def spec_in(tmp_path, **replaced):
    import ray.train

    run = ray.train.RunConfig(name="app", storage_path=str(tmp_path))
    return run_spec(run=run, **replaced)


@pytest.mark.parametrize(
    ("step", "changed", "enabled", "said"),
    [
        (4, {}, True, "metrics.jsonl has steps 0 to 0"),
        (0, {"learning_rate": 7.0}, True, "train.learning_rate; put them back"),
        (0, {}, False, "keeps no batches"),
        (0, {}, True, "no checkpoint is kept that was taken before step 0"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_refused(tmp_path, step, changed, enabled, said):
    spec = spec_in(tmp_path, rollout=RolloutConfig(journal=JournalConfig(enabled=enabled)))
    begun(tmp_path, spec, **changed)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=said):
        replay_step(spec, PROMPTS, step)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_reward_that_was_changed_since_does_not_keep_a_step_from_being_replayed(tmp_path):
    """The batch has its rewards."""
    spec = spec_in(tmp_path)
    begun(tmp_path, spec)
    file = tmp_path / "app" / "config.json"
    described = json.loads(file.read_text())
    described["digests"] = {"reward": "of another file"}
    file.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="no checkpoint is kept"):
        replay_step(spec, PROMPTS, 0)


@pytest.mark.parametrize(
    ("first", "last", "number"), [(0, 3, 2), (4, 7, 1), (8, 9, 3), (6, 8, None), (0, 9, None)]
)
def test_a_step_has_the_train_workers_that_trained_it_last(tmp_path, first, last, number):
    spec = spec_in(tmp_path)
    spec.folder.mkdir()
    for step, num_workers in ((0, 2), (4, 1), (8, 2), (8, 3)):
        add_row(spec.folder / "ranks.jsonl", {"step": step, "num_train_workers": num_workers})
    if number is None:
        with pytest.raises(ConfigError, match=r"train workers, and no checkpoint is kept"):
            _with_ranks(spec, first, last)
    else:
        assert _with_ranks(spec, first, last).scaling.num_workers == number


def test_a_folder_that_does_not_tell_the_train_workers_of_a_step_is_refused(tmp_path):
    spec = spec_in(tmp_path)
    spec.folder.mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"ranks\.jsonl': does not say how many train work"):
            _with_ranks(spec, 2, 3)
        add_row(spec.folder / "ranks.jsonl", {"step": 3, "num_train_workers": 1})
