"""Where a run began that got another run's checkpoint, for those who read its folder alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_apr.data.resumption import read_rollout
from ray_apr.run.final import write_json

if TYPE_CHECKING:
    from ray_apr.data.resumption import Begin
    from ray_apr.run.spec import RunSpec

BEGUN_FILE = "begun.json"
"""File of the run folder; there is none where a run began with the model."""


def note_begin(spec: RunSpec, begin: Begin) -> None:
    """Write where a run begins that has no checkpoint of its own yet.

    Args:
        spec: What runs.
        begin: As `find_begin` has found it for this spec.

    Raises:
        APRError: If the checkpoint is none of a run any more, or the file cannot be written.
        OSError: If the checkpoint cannot be read any more.
    """
    file = spec.folder / BEGUN_FILE
    if begin.checkpoint is None:
        file.unlink(missing_ok=True)
    elif begin.checkpoint is spec.checkpoint:
        rollout = read_rollout(begin.checkpoint)  # that of `begin` is as the journal says
        values = {
            "step": begin.step,
            "policy_version": begin.policy_version,
            "prompts_position": rollout.position,
            "prompts_pending": rollout.pending,
        }
        write_json(file, values)
