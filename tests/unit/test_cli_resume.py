"""``ray-apr resume RUN_DIR``: what the run folder keeps of its command, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.train

from ray_apr.cli import launch
from ray_apr.cli import main as cli
from ray_apr.cli.launch import trainer_arguments
from ray_apr.cli.resume import is_anything_left, settings_to_resume
from ray_apr.cli.said import tell
from ray_apr.cli.settings import load_settings
from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import ConfigError, Stopped
from ray_apr.data.resumption import LIST_FILE, PROGRESS_FILE
from ray_apr.run import controller
from ray_apr.run.command import COMMAND_FILE, Command, read_command
from ray_apr.run.resume import hold_folder
from tests.run_specs import run_spec

YAML = """\
model: base_model
prompts: prompts.jsonl
reward: task.py:reward
rollout: {group_size: 4, max_response_tokens: 32}
train: {steps: 3, batch_size: 8}
ray: {num_cpus: 4}
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings in a folder of their own; the command was given in ``there``."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    files, there = tmp_path / "files", tmp_path / "there"
    files.mkdir()
    there.mkdir()
    (files / "base_model").symlink_to(EXAMPLE / "base_model")
    (files / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (files / "task.py").write_text("def reward(sample):\n    return 1.0\n")
    (files / "tiny.yaml").write_text(YAML)
    monkeypatch.chdir(there)
    return files / "tiny.yaml"


def begin_run(config: Path, *overrides: str) -> Path:
    """A run that a command began and that did not end; returns its folder."""
    settings = load_settings(config, ["run.name=mine", *overrides])
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    settings.command.write(settings.run_dir)
    (settings.run_dir / "metrics.jsonl").write_text("")
    return settings.run_dir


def test_a_run_goes_on_from_anywhere_with_the_settings_of_its_command(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = begin_run(config, "train.steps=7", "rollout.group_size=2")
    begun = []
    monkeypatch.setattr(launch, "run_training", lambda settings, **_: begun.append(settings))
    monkeypatch.setattr(cli, "make_report", lambda run_dir, out: None)
    monkeypatch.chdir(tmp_path)
    paths = list(sys.path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *paths])
    assert cli.main(["resume", "there/runs/mine"]) == 0
    (settings,) = begun
    assert settings.run_dir == run_dir and settings.run.resume
    assert (settings.train.steps, settings.rollout.group_size) == (7, 2)
    assert settings.prompts.path == str(config.parent / "prompts.jsonl")
    assert (os.getcwd(), sys.path) == (str(tmp_path / "there"), [os.getcwd(), *paths])
    prompts = launch.read_prompts(settings.prompts)
    spec = launch.make_trainer(settings, prompts, None).spec
    assert spec.folder == run_dir and spec.command == settings.command


def test_further_settings_hold_for_the_next_time_too(config: Path) -> None:
    run_dir = begin_run(config, "train.steps=7")
    for new in ("train.steps=9", "train.steps=11", "train.steps=9"):
        settings = settings_to_resume(run_dir, [new])
        settings.command.write(run_dir)
    assert settings_to_resume(run_dir).train.steps == 9
    overrides = read_command(run_dir).overrides
    assert len(set(overrides)) == len(overrides)


def test_a_folder_that_was_moved_goes_on_where_it_is(config: Path, tmp_path: Path) -> None:
    run_dir = begin_run(config)
    moved = tmp_path / "kept" / "007"  # a name that YAML would read as a number
    moved.parent.mkdir()
    run_dir.rename(moved)
    assert settings_to_resume(moved).run_dir == moved


@pytest.mark.parametrize("overrides", [(), ("train.steps=9",)])
def test_a_run_whose_checkpoints_are_remote_goes_on_with_them(
    config: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    bucket = f"file://{tmp_path}/bucket"
    run_dir = begin_run(config, f"run.storage_path={bucket}")
    assert run_dir == Path.cwd() / "runs" / "mine"
    settings = settings_to_resume(run_dir, overrides)
    assert (settings.run_dir, settings.run.storage_path) == (run_dir, bucket)
    run = trainer_arguments(settings)["run_config"]
    assert (run.name, run.storage_path) == ("mine", bucket)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_run_that_has_trained_all_its_steps_has_nothing_left(
    tmp_path: Path, is_remote: bool
) -> None:
    run_dir = tmp_path / "run"
    kept = tmp_path / "bucket" if is_remote else run_dir
    (kept / "checkpoint_1").mkdir(parents=True)
    run_dir.mkdir(exist_ok=True)
    listed = {"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_1"}]}
    (kept / LIST_FILE).write_text(json.dumps(listed))
    config = {"train": {"steps": 9}} | ({"checkpoints": f"file://{kept}"} if is_remote else {})
    (run_dir / "config.json").write_text(json.dumps(config))
    for step in (8, 9):
        progress = {"step": step, "policy_version": step}
        (kept / "checkpoint_1" / PROGRESS_FILE).write_text(json.dumps(progress))
        assert is_anything_left(run_dir) == (step < 9)


@pytest.mark.parametrize(
    ("token", "key"),
    [
        ("rollout.http.control_token=hush", "rollout.http.control_token"),
        ("rollout.http={control_token: hush, port: 8000}", "rollout.http"),
    ],
)
def test_a_control_token_is_not_kept_and_is_asked_for(config: Path, token: str, key: str) -> None:
    run_dir = begin_run(config, "rollout.http.port=8000", token, "train.steps=7")
    assert "hush" not in (run_dir / COMMAND_FILE).read_text()
    with pytest.raises(ConfigError, match=f"give it again: --set {key}="):
        settings_to_resume(run_dir)
    settings = settings_to_resume(run_dir, [token])
    assert (settings.rollout.http.control_token, settings.train.steps) == ("hush", 7)
    assert settings.command.withheld == (key,)
    assert not any("hush" in text for text in settings.command.overrides)


@pytest.mark.parametrize(
    ("spoil", "overrides", "message"),
    [
        (
            lambda run, config: (run / COMMAND_FILE).unlink(),
            [],
            r"`replay` take those of the command line; APRTrainer\.restore goes on",
        ),
        (lambda run, config: [f.unlink() for f in run.iterdir()], [], "holds no run; give the"),
        (lambda run, config: (run / COMMAND_FILE).write_text("{"), [], "cannot be read"),
        (lambda run, config: (run / COMMAND_FILE).write_text("{}"), [], "no command of this"),
        (lambda run, config: config.unlink(), [], "are no longer there; put them back"),
        (lambda run, config: None, ["run.name=other"], "keeps run.name, run.storage_path"),
        (lambda run, config: None, ["run.resume=false"], "keeps run.name"),
        (lambda run, config: None, ["train.step=1"], r"train\.step = 1: unknown key"),
    ],
)
def test_what_cannot_go_on_is_refused(
    config: Path, spoil: Any, overrides: list[str], message: str
) -> None:
    run_dir = begin_run(config)
    spoil(run_dir, config)
    with pytest.raises(ConfigError, match=message):
        settings_to_resume(run_dir, overrides)


def test_a_working_directory_that_is_gone_is_refused(config: Path, tmp_path: Path) -> None:
    run_dir = begin_run(config).rename(tmp_path / "mine")
    (tmp_path / "there" / "runs").rmdir()
    os.chdir(tmp_path)
    (tmp_path / "there").rmdir()
    with pytest.raises(ConfigError, match="which cannot be entered"):
        settings_to_resume(run_dir)


def test_a_run_that_another_process_trains_is_refused_at_once(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = begin_run(config)
    with hold_folder(run_dir):
        assert cli.main(["resume", str(run_dir)]) == 2
    said = capsys.readouterr()
    assert "another process trains it" in said.err and said.out == ""


def test_refused_commands_leave_the_folder_as_it_is(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = begin_run(config, "train.steps=7")
    (run_dir / "config.json").write_text("{}")
    (run_dir / "metrics.jsonl").write_text("{}\n")
    before = {file: file.read_bytes() for file in run_dir.iterdir()}
    mine = ["--set", "run.name=mine"]
    assert cli.main(["train", str(config), *mine]) == 2, "the name is taken"
    assert cli.main(["train", str(config), *mine, "--resume", "--dry-run"]) == 0
    assert cli.main(["resume", str(run_dir), "--json"]) == 2, "only with --dry-run"

    def refuse(settings: Any, **_: Any) -> None:
        raise ConfigError("train.steps", 7, "none is left")

    monkeypatch.setattr(launch, "run_training", refuse)
    assert cli.main(["resume", str(run_dir)]) == 2
    (run_dir / ".lock").unlink()
    assert {file: file.read_bytes() for file in run_dir.iterdir()} == before


def test_a_dry_run_shows_what_a_run_would_go_on_with(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = begin_run(config, "train.steps=7")
    told = ["resume", str(run_dir), "--set", "train.batch_size=16", "--dry-run"]
    assert cli.main([*told, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert cli.main(told) == 0
    said = capsys.readouterr().out
    assert plan["each step"]["samples (batch)"] == 16 and plan["run"]["run folder"] == str(run_dir)
    assert f" {run_dir}\n" in said and said.endswith("dry run: nothing was started\n")
    wrong = ["--set", "train.batch_size=9"]
    assert cli.main(["resume", str(run_dir), "--dry-run", *wrong]) == 2
    assert "train.batch_size" in capsys.readouterr().err


def test_where_nothing_is_trained_ray_does_not_advise_to_delete_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """known fault: `replay` and a dry run showed it, where people look at a run to go on with."""
    run_dir = begin_run(config)
    found = logging.getLogger("ray.train.v2.checkpoint_manager")
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    caplog.set_level(logging.INFO)

    def look(*_: Any, **__: Any) -> None:
        found.info("If you meant to start a brand new training job, delete the existing folder.")
        raise ConfigError("train.steps", 3, "none is left")

    monkeypatch.setattr(launch, "make_trainer", look)
    assert cli.main(["resume", str(run_dir), "--dry-run"]) == 2
    monkeypatch.setattr("ray_apr.run.replaying.replay_step", look)
    assert cli.main(["replay", str(run_dir), "--step", "0"]) == 2
    assert "delete" not in caplog.text
    found.info("delete, where it is trained")
    assert "delete, where it is trained" in caplog.text


def test_a_run_keeps_its_command_once_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    command = Command(config="/a.yaml", overrides=("mode=sync",), working_directory="/")
    spec = run_spec(run=run, train=TrainConfig(steps=4), command=command)
    monkeypatch.setattr(controller, "check_hub_model", lambda model: None)
    monkeypatch.setattr(controller, "check_engine", lambda *_: None)
    monkeypatch.setattr(controller, "make_run_folder", lambda spec: spec.folder.mkdir())
    monkeypatch.setattr(controller, "_run_parts", lambda *_: None)
    monkeypatch.setattr(controller.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(controller.ray, "cluster_resources", dict)
    controller.run(spec, None)
    assert read_command(spec.folder) == command
    assert json.loads((spec.folder / COMMAND_FILE).read_text())["overrides"] == ["mode=sync"]
    assert not (spec.folder / f"{COMMAND_FILE}.new").exists()


@pytest.mark.parametrize(
    ("trained", "evaluated", "is_left"),
    [(2, None, True), (3, None, False), (3, 3, False), (3, 2, True)],
)
def test_a_run_that_was_stopped_says_to_go_on_with_it_where_anything_is_left(
    config, monkeypatch, capsys, trained, evaluated, is_left
):
    """known fault: one that was stopped after its last step did, which `resume` refused."""
    run_dir = Path.cwd() / "runs" / "mine"

    def stop(settings, **_):
        assert settings.run_dir == run_dir
        checkpoint = run_dir / "checkpoint_1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "progress.json").write_text(
            json.dumps({"step": trained, "policy_version": trained})
        )
        listed = {"checkpoint_results": [{"checkpoint_dir_name": checkpoint.name}]}
        (run_dir / "checkpoint_manager_snapshot.json").write_text(json.dumps(listed))
        settings_of_it = {"train": {"steps": 3}}
        if evaluated is not None:
            settings_of_it["evaluation"] = {"every": 1}
            (run_dir / "evaluations.jsonl").write_text(f'{{"policy_version": {evaluated}}}\n')
        (run_dir / "config.json").write_text(json.dumps(settings_of_it))
        (run_dir / "final.json").write_text('{"status": "stopped"}')
        raise Stopped

    monkeypatch.setattr(launch, "run_training", stop)
    monkeypatch.setattr(cli, "make_report", lambda *_: None)
    assert cli.main(["train", str(config), "--set", "run.name=mine"]) == 130
    out = capsys.readouterr().out
    assert (f"go on:   ray-apr resume {run_dir}" in out) == is_left
    assert ("next:    ray-apr samples" in out) != is_left


def test_a_run_ends_as_ever_where_what_reads_its_lines_has_ended(config, monkeypatch):
    """known fault: `train | tee` that got Ctrl-C ended with exit code 0, and without its report."""
    reports, told = [], []

    def stop(settings, *, progress, **_):
        settings.run_dir.mkdir(parents=True)
        (settings.run_dir / "config.json").write_text("{}")
        progress("step 1/3")
        told.append("step 1/3")
        raise Stopped

    monkeypatch.setattr(launch, "run_training", stop)
    monkeypatch.setattr(cli, "make_report", lambda run_dir, out: reports.append(run_dir.name))
    for name in ("stdout", "stderr"):
        read, write = os.pipe()
        os.close(read)
        monkeypatch.setattr(sys, name, os.fdopen(write, "w"))
    assert cli.main(["train", str(config), "--set", "run.name=mine"]) == 130
    assert (told, reports) == (["step 1/3"], ["mine"])


def test_lines_that_a_full_disk_does_not_take_are_told_of(capsys):
    """known fault: `train > log` went on without a word of what its log lacks."""
    with pytest.MonkeyPatch.context() as patch:
        full = open("/dev/full", "w")  # noqa: SIM115 (it is closed by hand: what it holds is lost)
        patch.setattr(sys, "stdout", full)
        tell("step 1/3")
        tell("step 2/3")
        full.close()
    assert capsys.readouterr().err.count("are not shown any more: [Errno 28] No space left") == 1
