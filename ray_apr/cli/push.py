"""``ray-apr push``: the trained model of a run, with its card, to the Hugging Face Hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ray_apr.core.checks import require
from ray_apr.core.exceptions import APRError, ResourceError, one_line
from ray_apr.run.model import HUB_ID

if TYPE_CHECKING:
    from ray.train import Checkpoint

_MODEL, _CONFIG = "hf", "config.json"
"""Folder in a checkpoint, and a file there: of a model in Hugging Face's format, which the last
checkpoint of a run has, and with `train.export_checkpoints` each one."""


def check_repo(name: str, repo: str) -> None:
    """Check the id of a repository.

    Raises:
        ConfigError: If it is none; `name` is that of the setting or argument.
    """
    require(HUB_ID.fullmatch(repo) is not None, name, repo, "must be a hub id: owner/name")


def check_token(name: str, repo: str) -> None:
    """Check that there is a token; the hub is not asked whether it may write.

    Raises:
        ConfigError: If there is none; `name` is that of the setting or argument.
    """
    import huggingface_hub

    remedy = "needs a token that may write: set HF_TOKEN, or log in with `hf auth login`"
    require(huggingface_hub.get_token() is not None, name, repo, remedy)


def write_card(run_dir: Path) -> Checkpoint:
    """Write the card of a run's trained model beside its weights.

    Args:
        run_dir: Of the run.

    Returns:
        The folder of the model.

    Raises:
        ConfigError: If it is no run folder, or holds no exported model.
        ResourceError: If its list of checkpoints cannot be read.
    """
    from ray_apr.tools.model_card import CARD_FILE, model_card
    from ray_apr.tools.report.load import load_run

    run = load_run(run_dir)
    exported = _exported(run_dir)
    remedy = "holds no exported model, which a run writes with its last step; let it end"
    require(bool(exported), "RUN_DIR", str(run_dir), remedy)
    model = exported[-1]
    with model.filesystem.open_output_stream(f"{model.path}/{CARD_FILE}") as card:
        card.write(model_card(run).encode())
    return model


def _exported(run_dir: Path) -> list[Checkpoint]:
    """Models in checkpoints of a run, the oldest first, without one that is being written, or was
    cut off.

    Raises:
        ResourceError: If Ray Train's list of them cannot be read, as while it is written.
    """
    from ray.train import Checkpoint

    from ray_apr.run.retention import checkpoints_of, listed_checkpoints

    try:
        kept = checkpoints_of(run_dir)
        files = kept.filesystem
        listed = listed_checkpoints(files, kept.path)
        models = [f"{kept.path}/{result['checkpoint_dir_name']}/{_MODEL}" for result in listed]
        exported = [m for m in models if files.get_file_info(f"{m}/{_CONFIG}").is_file]
        return [Checkpoint(model, files) for model in exported]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError) as error:
        reason = f"checkpoints in {run_dir} cannot be read: {one_line(error)}; try again"
        raise ResourceError(reason) from error


def push(run_dir: Path, repo: str, *, private: bool = True) -> str:
    """Upload a run's trained model and its card; a repository that is not there is made.

    Waits for: the hub. Unblocked by: its answers, or the time limits of huggingface_hub.

    Args:
        run_dir: Of the run.
        repo: Id of the model's repository, owner/name.
        private: Whether a repository that is made is private.

    Returns:
        Address of the commit.

    Raises:
        ConfigError: If there is nothing to push, or no token.
        ResourceError: If the card cannot be written, or the hub does not take the model; it says
            how to try again.
    """
    import huggingface_hub

    check_repo("OWNER/NAME", repo)
    check_token("OWNER/NAME", repo)
    try:
        model = write_card(run_dir)
        hub = huggingface_hub.HfApi()
        hub.create_repo(repo, private=private, exist_ok=True)
        with model.as_directory() as folder:  # a copy of it, where it is in remote storage
            message = f"Model of run {run_dir.name}"
            done = hub.upload_folder(repo_id=repo, folder_path=Path(folder), commit_message=message)
    except APRError:  # which says what to do
        raise
    except Exception as error:  # its versions have other libraries for the network
        public = "" if private else " --public"
        again = f"python -m ray_apr push {shlex.quote(str(run_dir))} {repo}{public}"
        raise ResourceError(
            f"the model of {run_dir} was not pushed: {one_line(error)}; try again with `{again}`"
        ) from error
    return str(done.commit_url)


def push_at_end(run_dir: Path, repo: str, *, private: bool) -> str:
    """What becomes of a run's model in one line; that it is not taken ends nothing."""
    try:
        return f"model:   {push(run_dir, repo, private=private)}"
    except APRError as error:
        return f"model:   not pushed: {error}"
