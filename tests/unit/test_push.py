"""The card of a trained model, and its way to a hub (cli/push.py, tools/model_card.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint

from ray_apr.cli import launch
from ray_apr.cli.main import main
from ray_apr.cli.push import push_at_end
from ray_apr.cli.sections import RunFolderSettings
from ray_apr.config import AlgorithmConfig, PartialRolloutConfig, RolloutConfig, TrainConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.resumption import LIST_COPY_FILE, LIST_FILE
from ray_apr.run import retention
from ray_apr.tools import model_card as model_card_module
from ray_apr.tools.model_card import model_card
from ray_apr.tools.report.load import load_run
from tests.fakes import evaluation_row, step_row
from tests.hub_server import TOKEN, Model
from tests.hub_server import hub as hub_here

QUICKSTART = Path(__file__).parents[2] / "examples/arithmetic/quickstart.yaml"
SECTIONS = {
    "algorithm": AlgorithmConfig,
    "partial_rollout": PartialRolloutConfig,
    "rollout": RolloutConfig,
    "train": TrainConfig,
}


class Hub:
    """What the hub was asked for."""

    calls: ClassVar[list[tuple]] = []
    failure: Exception | None = None

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        self.calls.append((repo, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.failure is not None:
            raise self.failure
        self.calls.append((repo_id, folder_path, commit_message))
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "failure", None)
    return Hub


@pytest.fixture
def run_dir(tmp_path):
    """A run that has ended, and two checkpoints with a model in them; a third one was cut off."""
    run = tmp_path / "my-run"
    for name in ("checkpoint_1", "checkpoint_2", "checkpoint_3"):
        (run / name / "hf").mkdir(parents=True)
        (run / name / "hf" / "config.json").write_text("{}")
    listed = [{"checkpoint_dir_name": f"checkpoint_{k}"} for k in (1, 2)]
    (run / LIST_FILE).write_text(json.dumps({"checkpoint_results": listed}))
    config = {
        "model": "/home/me/secret/base_model",
        "reward": "/home/me/secret/task.py:reward",
        "algorithm": {"advantage": "grpo", "loss": "ppo"},
        "train": {"learning_rate": 1e-6, "batch_size": 8, "seed": 3},
    }
    (run / "config.json").write_text(json.dumps(config))
    rows = [step_row(step=k, reward_mean=k / 10) for k in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suites = {
        name: evaluation_row(4, num_samples=n, reward_mean=r, pass_at_k={"1": r, "2": p})
        for name, n, r, p in (("easy", 24, 1.0, 1.0), ("hard | new", 8, 0.0, 0.125))
    }
    of_all = {"num_samples": 32, "pass_at_k": {"1": 0.75, "2": 0.78125}, "suites": suites}
    evaluated = evaluation_row(4, **of_all)
    (run / "evaluations.jsonl").write_text(json.dumps(evaluated) + "\n")
    final = {"status": "ok", "wall_s": 90.0, "tokens_trained": 1234, "mode": "apr"}
    (run / "final.json").write_text(json.dumps(final))
    return run


def test_a_card_has_the_figures_and_no_path(run_dir):
    card = model_card(load_run(run_dir))
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers" and "base_model" not in front
    assert "| steps | 4 |" in card
    assert "| mean reward, first and last steps | 0.050 → 0.250 |" in card
    held_out = "0.750, pass@1 0.750, pass@2 0.781 (policy version 4)"
    assert f"| mean reward of 32 held-out samples | {held_out} |" in card
    assert "| 24 of them: easy | 1.000, pass@1 1.000, pass@2 1.000 |" in card
    assert r"| 8 of them: hard \| new | 0.000, pass@1 0.000, pass@2 0.125 |" in card
    assert "| tokens trained | 1,234 |" in card and "| time | 1.5 minutes |" in card
    assert "| `algorithm.loss` | ppo |" in card and "| `train.learning_rate` | 1e-06 |" in card
    assert "base_model, trained by" in card and "/home" not in card and "task.py" not in card


def test_a_bar_in_the_name_of_a_figure_ends_no_cell_of_a_card(run_dir):
    """known fault: of such a row a hub shows the name's second half in place of the figure."""
    run = load_run(run_dir)
    for row in run.steps:
        row["reward/right | new\nline_mean"] = row["reward_mean"]
    row = r"| `right \| new line`, first and last steps | 0.050 → 0.250 |"
    assert row in model_card(run).splitlines()


def test_a_card_names_the_correction_that_the_run_had(run_dir):
    """known fault: it said that the correction is null of a run with importance weights."""
    algorithm = {"importance": "token", "correction": None}
    run = load_run(run_dir)
    run.config["algorithm"] = algorithm
    card = model_card(run)
    assert "| `algorithm.importance` | token |" in card and "algorithm.correction" not in card
    run.config["algorithm"] = algorithm | {"correction": "/home/me/own.py:weights"}
    card = model_card(run)
    assert "| `algorithm.correction` | own.py:weights |" in card and "importance" not in card


def test_a_card_tells_of_groups_that_failed_and_not_their_errors(run_dir):
    assert "failed" not in model_card(load_run(run_dir))
    rows = [
        {"group_id": str(k), "reason": reason, "num_generated": 30, "error": "no /home/me/answers"}
        for k, reason in enumerate(("failed", "stale", "failed"))
    ]
    (run_dir / "dropped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    final = json.loads((run_dir / "final.json").read_text()) | {"tokens_generated": 2000}
    (run_dir / "final.json").write_text(json.dumps(final))
    card = model_card(load_run(run_dir))
    said = "2 groups (3% of the generated tokens)"
    assert f"| dropped as a generation, step or reward failed | {said} |" in card
    assert "/home" not in card


def test_the_settings_of_a_card_are_those_of_a_run():
    for section, names in model_card_module._SETTINGS.items():
        assert set(names) <= {field.name for field in dataclasses.fields(SECTIONS[section])}


def test_a_base_model_of_the_hub_is_named_to_it(run_dir):
    (run_dir / "config.json").write_text('{"model": "org/base"}')
    front = yaml.safe_load(model_card(load_run(run_dir)).split("---")[1])
    assert front["base_model"] == "org/base"


def test_a_card_of_a_run_that_recorded_little(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "| steps | 0 |" in model_card(load_run(tmp_path))


def test_the_last_model_is_pushed_with_its_card(run_dir, hub, capsys):
    assert main(["push", str(run_dir), "org/name"]) == 0
    folder = run_dir / "checkpoint_2" / "hf"
    assert hub.calls == [("org/name", True), ("org/name", folder, "Model of run my-run")]
    assert (folder / "README.md").read_text() == model_card(load_run(run_dir))
    assert "model: https://hub/org/name/commit/1" in capsys.readouterr().out
    assert main(["push", str(run_dir), "org/name", "--public"]) == 0
    assert hub.calls[2] == ("org/name", False)


def test_a_checkpoint_that_is_cut_off_is_not_pushed(run_dir, hub, capsys):
    """known fault: it was the newest one, and its model without weights went to the hub."""
    (run_dir / LIST_FILE).write_text(json.dumps({"checkpoint_results": []}))
    assert main(["push", str(run_dir), "org/name"]) == 2
    assert "holds no exported model" in capsys.readouterr().err
    (run_dir / LIST_FILE).write_text('{"checkpoint_res')
    assert main(["push", str(run_dir), "org/name"]) == 1
    assert f"checkpoints in {run_dir} cannot be read" in capsys.readouterr().err
    (run_dir / LIST_FILE).unlink()
    assert main(["push", str(run_dir), "org/name"]) == 2
    assert not hub.calls


def test_the_last_model_is_pushed_where_the_best_checkpoints_stay(run_dir, hub):
    """known fault: with a `checkpoint_score_attribute` Ray Train's list ends with the best one."""
    listed = [
        {"checkpoint_dir_name": f"checkpoint_{k}", "metrics": {"step": k, "reward_mean": 1 / k}}
        for k in (2, 1)
    ]
    (run_dir / LIST_FILE).write_text(json.dumps({"checkpoint_results": listed}))
    assert main(["push", str(run_dir), "org/name"]) == 0
    assert hub.calls[1][1] == run_dir / "checkpoint_2" / "hf"


def test_a_list_of_checkpoints_that_is_cut_off_has_a_copy(run_dir, hub):
    """known fault: after a kill that cut it off, `push` said to try again, for good."""
    (run_dir / LIST_FILE).rename(run_dir / LIST_COPY_FILE)
    (run_dir / LIST_FILE).write_text('{"checkpoint_res')
    assert main(["push", str(run_dir), "org/name"]) == 0
    assert hub.calls[1][1] == run_dir / "checkpoint_2" / "hf"


def test_the_hubs_own_client_sends_the_model_and_its_card(run_dir, tmp_path, monkeypatch, capsys):
    weights, model = b"weights" * 1000, Model()
    (run_dir / "checkpoint_2" / "hf" / "model.safetensors").write_bytes(weights)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # the hub here has no other storage than LFS
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with hub_here(model) as (url, _):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert main(["push", str(run_dir), "org/name"]) == 0
    assert f"model: {url}/org/name/commit/" in capsys.readouterr().out
    assert "private" in str(model.made) and model.message == "Model of run my-run"
    assert model.files.pop("README.md").decode() == model_card(load_run(run_dir))
    assert model.files == {"config.json": b"{}", "model.safetensors": weights}


@pytest.mark.parametrize("private", [True, False])
def test_a_run_that_has_ended_pushes_its_model(run_dir, hub, monkeypatch, capsys, private):
    monkeypatch.setattr(launch, "run_training", lambda settings, **_: None)
    name = f"run={{name: my-run, storage_path: '{run_dir.parent}', push_to_hub: org/name"
    overrides = [f"{name}, resume: true, hub_private: {str(private).lower()}}}"]
    assert main(["train", str(QUICKSTART), "--set", overrides[0]]) == 0
    assert hub.calls[0] == ("org/name", private)
    assert "model:   https://hub/org/name/commit/1" in capsys.readouterr().out


def test_the_card_alone(run_dir, hub, capsys):
    assert main(["push", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"card: {run_dir}/checkpoint_2/hf/README.md\n"
    assert not hub.calls


@pytest.fixture
def bucket(run_dir, tmp_path):
    """Has the checkpoints of the run, which are not in its folder then."""
    bucket = tmp_path / "bucket" / "my-run"
    bucket.mkdir(parents=True)
    for file in run_dir.glob("checkpoint_*"):  # Ray Train's list, too
        file.rename(bucket / file.name)
    config = json.loads((run_dir / "config.json").read_text())
    config["checkpoints"] = f"file://{bucket}"
    (run_dir / "config.json").write_text(json.dumps(config))
    return bucket


def test_a_model_in_remote_storage_is_pushed(run_dir, bucket, hub, capsys):
    """known fault: `push` said that the run holds no model, and run.push_to_hub was refused."""
    RunFolderSettings(storage_path="s3://bucket/runs", push_to_hub="org/name")
    assert main(["push", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"card: {bucket}/checkpoint_2/hf/README.md\n"
    assert main(["push", str(run_dir), "org/name"]) == 0
    assert hub.calls[1][1] == bucket / "checkpoint_2" / "hf"


def test_a_model_that_is_on_no_file_system_is_pushed_from_a_copy(
    run_dir, bucket, hub, monkeypatch, capsys
):
    storage = SubTreeFileSystem(str(bucket.parent), LocalFileSystem())
    monkeypatch.setattr(retention, "checkpoints_of", lambda _: Checkpoint("my-run", storage))
    upload, seen = Hub.upload_folder, []

    def look(self, *, folder_path, **rest):
        seen.extend(sorted(file.name for file in folder_path.iterdir()))
        return upload(self, folder_path=folder_path, **rest)

    monkeypatch.setattr(Hub, "upload_folder", look)
    assert main(["push", str(run_dir), "org/name"]) == 0
    assert seen == ["README.md", "config.json"]
    assert (bucket / "checkpoint_2" / "hf" / "README.md").is_file()
    assert not hub.calls[1][1].exists()
    (bucket / LIST_FILE).write_text("{")
    (bucket / LIST_COPY_FILE).write_text("{")
    assert main(["push", str(run_dir), "org/name"]) == 1
    assert f"checkpoints in {run_dir} cannot be read" in capsys.readouterr().err


def test_a_hub_that_does_not_take_it_ends_nothing_and_is_tried_again(run_dir, hub, capsys):
    hub.failure = OSError("no network")
    said = push_at_end(run_dir, "org/name", private=True)
    assert "not pushed" in said and f"push {run_dir} org/name`" in said
    said = push_at_end(run_dir, "org/name", private=False)
    assert f"push {run_dir} org/name --public`" in said
    assert main(["push", str(run_dir), "org/name", "--public"]) == 1
    assert "no network; try again with" in capsys.readouterr().err


def test_a_card_that_cannot_be_written_ends_nothing(run_dir, hub):
    """known fault: it ended the command of a run that had trained."""
    (run_dir / "checkpoint_2" / "hf" / "README.md").mkdir()
    said = push_at_end(run_dir, "org/name", private=True)
    assert "not pushed" in said and f"push {run_dir} org/name`" in said
    (run_dir / "metrics.jsonl").write_text("no row\n{}\n")
    assert "metrics.jsonl" in push_at_end(run_dir, "org/name", private=True)
    assert not hub.calls


def test_what_cannot_be_pushed_is_refused(run_dir, hub, capsys, monkeypatch):
    with pytest.raises(ConfigError, match="must be a hub id: owner/name"):
        RunFolderSettings(push_to_hub="name")
    with pytest.raises(ConfigError, match=r"run\.hub_private = False: has no use without"):
        RunFolderSettings(hub_private=False)
    for model in run_dir.glob("*/hf/config.json"):
        model.unlink()
    assert main(["push", str(run_dir), "org/name"]) == 2
    assert "holds no exported model" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(run_dir), "org/name"]) == 2
    assert "set HF_TOKEN" in capsys.readouterr().err
    config = ["train", str(QUICKSTART), "--set", "run.push_to_hub=org/name"]
    assert main(config) == main([*config, "--dry-run"]) == 2, "before anything is started"
    assert capsys.readouterr().err.count("run.push_to_hub = 'org/name': needs a token") == 2
    assert not hub.calls
