"""Event files for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ray_apr.config.trackers import TensorBoardConfig, TrackersConfig
from ray_apr.core.user import RunCallback, RunInfo
from ray_apr.trackers.rows import TEXT_COLUMNS, SampleTables, numbers, texts


class TensorBoardTracker(RunCallback):
    """Writes a run's figures as scalars, and the rest as texts.

    Args:
        config: Where to.
        shared: Of all trackers.
    """

    name = "tensorboard"

    def __init__(self, config: TensorBoardConfig, shared: TrackersConfig) -> None:
        self._config = config
        self._shared = shared
        self._step = -1

    def on_start(self, run: RunInfo) -> None:
        """Open the event file; a run that is gone on with has another one in the same folder."""
        from tensorboardX import SummaryWriter  # here, as it loads torch
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        self._summary, self._scalar = Summary, scalar
        self._tables = SampleTables(run, self._shared)
        self._writer = SummaryWriter(self._config.folder or str(run.folder / "tensorboard"))
        if not run.is_resumed:
            config = json.dumps(run.config, indent=2, default=str)  # as in config.json
            self._writer.add_text("config", f"```json\n{config}\n```", 0)

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Scalars of a step, and now and then a table of samples."""
        self._step = row["step"]
        self._add(row, "", self._step)
        self._add_samples(self._step)
        self._writer.flush()

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Scalars of an evaluation, at its policy version."""
        self._add(row, "evaluation/", row["policy_version"])
        self._writer.flush()

    def on_end(self, final: Mapping[str, Any]) -> None:
        """Close the file."""
        self._add_samples(self._step + 1)
        self._writer.add_text("final", f"```json\n{json.dumps(final, indent=2)}\n```", 0)
        self._writer.close()

    def _add_samples(self, step: int) -> None:
        for of_step, rows in self._tables.due(step):
            self._writer.add_text("samples", _table(rows), of_step)

    def _add(self, row: Mapping[str, Any], prefix: str, step: int) -> None:
        all_numbers = self._summary()
        for name, value in numbers(row, prefix):
            all_numbers.MergeFrom(self._scalar(name, value))
        self._writer.file_writer.add_summary(all_numbers, step)  # one of each takes thrice as long
        for name, text in texts(row, prefix):
            self._writer.add_text(name, text, step)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table in Markdown, texts as code."""
    head = list(rows[0])
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(_cell(name, row[name]) for name in head) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(name: str, value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("`", "'").replace("\n", " ")
    return f"`{text}`" if name in TEXT_COLUMNS else text
