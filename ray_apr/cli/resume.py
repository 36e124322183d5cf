"""``ray-apr resume RUN_DIR``: what ``train CONFIG --resume`` does, from the run folder alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_apr.cli.settings import RunSettings, load_settings
from ray_apr.core.exceptions import APRError, ConfigError
from ray_apr.data.resumption import PROGRESS_FILE, read_json
from ray_apr.run.command import read_command
from ray_apr.run.folder import CONFIG_FILE, is_remote, read_object


def settings_to_resume(run_dir: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """Read the settings with which the run of a folder goes on, and go to the working directory of
    its command.

    Args:
        run_dir: The run folder; it may have been moved.
        overrides: Settings that are others from now on, ``"train.steps=20"``.

    Raises:
        ConfigError: If there is no run that a command began, another process trains it, or a
            setting is wrong.
    """
    from ray_apr.run.resume import hold_folder

    folder = run_dir.expanduser().resolve()
    read_command(folder)
    with hold_folder(folder):  # the run holds it later; refused here, nothing is started
        pass
    return settings_of_run(folder, overrides)


def settings_of_run(folder: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """Read the settings of the run of a folder, and go to the working directory of its command.

    Args:
        folder: The run folder, absolute; it may have been moved. Nothing is written into it.
        overrides: Settings that are others.

    Raises:
        ConfigError: If there is no run that a command began, or a setting is wrong.
    """
    command = read_command(folder)
    for key in command.withheld:
        if not any(text.partition("=")[0].strip() == key for text in overrides):
            raise ConfigError(
                "--set", None, f"the run folder does not keep {key}; give it again: --set {key}=..."
            )
    _go_to(Path(command.working_directory))
    if not Path(command.config).is_file():
        raise ConfigError(
            "RUN_DIR",
            str(folder),
            f"its settings {command.config} are no longer there; put them back, or go on with "
            f"`train CONFIG --resume --set run.name={folder.name}`",
        )
    own = [f"run.name={json.dumps(folder.name)}", "run.resume=true"]
    begun = load_settings(command.config, [*command.overrides, *overrides])
    if not is_remote(begun.run.storage_path):
        own.append(f"run.storage_path={json.dumps(str(folder.parent))}")  # it may have been moved
    kept = [text for text in command.overrides if text not in (*own, *overrides)]
    settings = load_settings(command.config, [*kept, *own, *overrides])
    if settings.run_dir != folder or not settings.run.resume:
        raise ConfigError(
            "--set", list(overrides), "a run that goes on keeps run.name, run.storage_path"
        )
    return settings


def is_anything_left(folder: Path) -> bool:
    """Whether a run that was stopped can be gone on with, by its folder alone: its last checkpoint
    lacks a step or its evaluation, or does not say so."""
    from ray_apr.run.evaluations import lacks_last_evaluation  # which imports Ray
    from ray_apr.run.retention import checkpoints_of, listed_checkpoints

    try:
        kept = checkpoints_of(folder)
        last = listed_checkpoints(kept.filesystem, kept.path)[-1]["checkpoint_dir_name"]
        trained = read_json(kept, f"{last}/{PROGRESS_FILE}")
        config = read_object(folder / CONFIG_FILE)
        if trained["step"] < config["train"]["steps"]:
            return True
        evaluates = "evaluation" in config
        return evaluates and lacks_last_evaluation(folder, trained["policy_version"])
    except (APRError, OSError, ValueError, LookupError):
        return True


def _go_to(directory: Path) -> None:
    """Change the working directory, and where Python looks for modules if it looks there.

    Raises:
        ConfigError: If it is no longer there.
    """
    here = os.getcwd()
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            "RUN_DIR",
            str(directory),
            f"the run's command was given there, which cannot be entered: {error}; make it, or go "
            "on with `train CONFIG --resume`",
        ) from error
    sys.path[:] = [str(directory) if entry == here else entry for entry in sys.path]
