"""The row of a step that a checkpoint has, and the run folder has not.

Where engines and train workers take turns, the checkpoint of a step is taken before its weight
sync, and its row is written after that: a process that is killed between both leaves a checkpoint
without the row of its last step. Ray Train's list of checkpoints has what was reported with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.run.folder import add_row, last_row
from ray_apr.run.retention import listed_checkpoints

if TYPE_CHECKING:
    from ray_apr.data.resumption import Begin


def add_reported(file: Path, begin: Begin, first: int) -> None:
    """Write the row of the last step of a checkpoint, if it alone is missing. Figures that were not
    reported with it are those of the row before.

    Args:
        file: Rows of the steps.
        begin: With the checkpoint.
        first: Step that the run of the folder began with, after those of another one.

    Raises:
        ConfigError: If the last row is no JSON.
        ResourceError: If it cannot be written.
    """
    last = last_row(file)
    if begin.checkpoint is None or last.get("step", first - 1) + 2 != begin.step:
        return
    row = _reported(begin.checkpoint)
    if row.get("step") == begin.step - 1:
        add_row(file, {**last, **row})


def _reported(checkpoint: Any) -> dict[str, Any]:
    """What was reported with a checkpoint; nothing if Ray Train's list beside it does not say."""
    folder, _, name = checkpoint.path.rpartition("/")
    try:
        results = listed_checkpoints(checkpoint.filesystem, folder)
        found = (result["metrics"] for result in results if result["checkpoint_dir_name"] == name)
        return {**next(found, {})}
    except (OSError, ValueError, KeyError, TypeError):  # of another version of Ray
        return {}
