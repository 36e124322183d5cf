"""What is taken out of a run folder before a run begins in it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ray_apr.run.begun import BEGUN_FILE
from ray_apr.run.draining import NOTICES_FILE
from ray_apr.run.folder import RESUMES_FILE, came_to_nothing
from ray_apr.run.journals import journal_of
from ray_apr.run.ranks import RANKS_FILE
from ray_apr.run.recorder import ROW_FILES
from ray_apr.run.resume import last_step, remove_end
from ray_apr.run.scale_requests import ENGINES_FILE, forget
from ray_apr.run.side import RESTARTS_FILE

if TYPE_CHECKING:
    from ray_apr.run.spec import RunSpec

_ROWS = (
    *ROW_FILES.values(), RESUMES_FILE, RANKS_FILE, RESTARTS_FILE, NOTICES_FILE, ENGINES_FILE,
    BEGUN_FILE,
)  # fmt: skip
"""Of a run. A folder may have other files, which are the user's."""


def tidy_folder(spec: RunSpec) -> None:
    """Remove what nobody waits for from a folder that this process holds, before its run begins:
    requests of commands that were killed, and the rows of an earlier run that came to nothing.

    Raises:
        APRError: If its checkpoints or its journal, which may be elsewhere, cannot be looked at.
    """
    forget(spec.folder)
    if not came_to_nothing(spec.folder) or last_step(dataclasses.replace(spec, checkpoint=None)):
        return
    journal = journal_of(spec)
    if journal is None or not journal.epochs():
        for name in _ROWS:
            (spec.folder / name).unlink(missing_ok=True)
        remove_end(spec.folder)
