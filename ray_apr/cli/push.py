"""``ray-apr push``: the trained model of a run, with its card, to the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_apr.core.checks import require
from ray_apr.core.exceptions import APRError, ResourceError, one_line
from ray_apr.run.folder import checkpoints_of
from ray_apr.run.model import HUB_ID

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


def write_card(run_dir: Path) -> tuple[Any, str]:
    """Write the card of a run's trained model beside its weights.

    Args:
        run_dir: Of the run.

    Returns:
        The `pyarrow.fs.FileSystem` that has the model, and the path of its folder there.

    Raises:
        ConfigError: If it is no run folder, or holds no exported model.
        ResourceError: If its list of checkpoints cannot be read.
    """
    from ray_apr.tools.model_card import CARD_FILE, model_card
    from ray_apr.tools.report.load import load_run

    run = load_run(run_dir)
    files, exported = _exported(run_dir)
    remedy = "holds no exported model, which a run writes with its last step; let it end"
    require(bool(exported), "RUN_DIR", str(run_dir), remedy)
    with files.open_output_stream(f"{exported[-1]}/{CARD_FILE}") as card:
        card.write(model_card(run).encode())
    return files, exported[-1]


def _exported(run_dir: Path) -> tuple[Any, list[str]]:
    """Models in checkpoints of a run, the oldest first, without one that is being written, or was
    cut off; with the file system that has them.

    Raises:
        ResourceError: If Ray Train's list of them cannot be read, as while it is written.
    """
    from ray_apr.run.retention import listed_checkpoints

    try:
        files, folder = checkpoints_of(run_dir)
        try:
            listed = listed_checkpoints(files, folder)
        except FileNotFoundError:
            return files, []
        models = [f"{folder}/{result['checkpoint_dir_name']}/{_MODEL}" for result in listed]
        return files, [m for m in models if files.get_file_info(f"{m}/{_CONFIG}").is_file]
    except (OSError, ValueError, KeyError) as error:
        reason = f"checkpoints in {run_dir} cannot be read: {one_line(error)}; try again"
        raise ResourceError(reason) from error


@contextlib.contextmanager
def _on_this_host(files: Any, folder: str) -> Iterator[Path]:
    """A folder; a copy of it, until the block ends, where it is in remote storage."""
    from pyarrow.fs import LocalFileSystem, copy_files

    if isinstance(files, LocalFileSystem):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as copy:
        copy_files(folder, copy, source_filesystem=files)
        yield Path(copy)


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
        files, model = write_card(run_dir)
        hub = huggingface_hub.HfApi()
        hub.create_repo(repo, private=private, exist_ok=True)
        with _on_this_host(files, model) as folder:
            done = hub.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=f"Model of run {run_dir.name}"
            )
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
