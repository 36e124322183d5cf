"""What all trackers make of a run's rows and samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ray_apr.config.trackers import TrackersConfig
from ray_apr.core.exceptions import one_line
from ray_apr.core.user import RunInfo
from ray_apr.run.trained_samples import read_step, saved_steps

logger = logging.getLogger(__name__)

TEXT_COLUMNS = ("prompt", "response_text")
COLUMNS = (
    "step", "sample_id", "reward", "staleness", "num_generated", "num_interruptions",
    "finish_reason", *TEXT_COLUMNS,
)  # fmt: skip
"""Of a table of samples."""
_LAST_TABLE = "last_table_step"


def numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a row by name; those of a mapping or a list in it as ``name/key``, with places
    from 0; truths as 0 and 1."""
    for name, value in _flat(row, prefix):
        if isinstance(value, int | float):
            yield name, float(value)


def texts(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What is no number in a row, as text; what is null is left out."""
    for name, value in _flat(row, prefix):
        if value is not None and not isinstance(value, int | float):
            yield name, str(value)


def _flat(row: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from _flat(dict(enumerate(value)), f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


class SampleTables:
    """Tables of samples of a run, each of them once.

    Args:
        run: That is followed; the last step with a table is kept in its notes.
        config: How often, and how many samples.
    """

    def __init__(self, run: RunInfo, config: TrackersConfig) -> None:
        self._run = run
        self._config = config

    def due(self, step: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The table that is due once a step is told, if one is: of the step before, which is saved
        by then. That of the last step is due at the end.

        Args:
            step: That was told.

        Yields:
            The step that the samples are of, and rows of `COLUMNS`: the worst and the best samples,
            as many of each.
        """
        every, number, of_step = self._config.samples_every, self._config.samples_each, step - 1
        folder, notes = self._run.folder, self._run.notes
        if not every or of_step % every or of_step not in saved_steps(folder):
            return
        if of_step <= notes.get(_LAST_TABLE, -1):
            return
        try:
            rows = sorted(read_step(folder, of_step), key=lambda row: row["reward"])
        except (OSError, ValueError) as error:
            logger.warning("no table of the samples of step %d: %s", of_step, one_line(error))
            return
        best = number // 2
        if len(rows) > number:
            rows = rows[: number - best] + rows[len(rows) - best :]
        yield of_step, [{name: row[name] for name in COLUMNS} for row in rows]
        notes[_LAST_TABLE] = of_step
