"""Event files for TensorBoard."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ray_apr.config.trackers import TensorBoardConfig, TrackersConfig
from ray_apr.core.clock import unix_s
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
        """Open an event file; a run that is gone on with has another one in the same folder."""
        from tensorboardX import summary  # here, as it loads torch
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import directory_check

        self._tables, self._parts = SampleTables(run, self._shared), summary
        self._summary, self._event = Summary, Event
        folder = self._config.folder or str(run.folder / "tensorboard")
        directory_check(folder)
        # without SummaryWriter's thread, for which its flush does not wait
        self._writer = EventsWriter(os.path.join(folder, "events"), f".{secrets.token_hex(4)}")
        if not run.is_resumed:
            config = json.dumps(run.config, indent=2, default=str)  # as in config.json
            self._write(0, [summary.text("config", f"```json\n{config}\n```")])

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Scalars of a step, and now and then a table of samples."""
        self._step = row["step"]
        self._add(row, "", self._step)
        self._add_samples(self._step)

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Scalars of an evaluation, at its policy version."""
        self._add(row, "evaluation/", row["policy_version"])

    def on_end(self, final: Mapping[str, Any]) -> None:
        """Close the file."""
        self._add_samples(self._step + 1)
        text = f"```json\n{json.dumps(final, indent=2)}\n```"
        self._write(0, [self._parts.text("final", text)])
        self._writer.close()

    def _add_samples(self, step: int) -> None:
        for of_step, rows in self._tables.due(step):
            self._write(of_step, [self._parts.text("samples", _table(rows))])

    def _add(self, row: Mapping[str, Any], prefix: str, step: int) -> None:
        scalars = [self._parts.scalar(name, value) for name, value in numbers(row, prefix)]
        self._write(step, scalars + [self._parts.text(*text) for text in texts(row, prefix)])

    def _write(self, step: int, parts: Sequence[Any]) -> None:
        """Write one event, onto the disk."""
        event = self._event(step=step, wall_time=unix_s(), summary=self._summary())
        for part in parts:
            event.summary.MergeFrom(part)
        self._writer.write_event(event)
        self._writer.flush()


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table in Markdown, texts as code."""
    head = list(rows[0])
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(_cell(name, row[name]) for name in head) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(name: str, value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("`", "'").replace("\n", " ")
    return f"`{text}`" if name in TEXT_COLUMNS else text
