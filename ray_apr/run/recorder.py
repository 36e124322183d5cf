"""The run folder: every figure of a run as JSON lines, written by one actor on the driver's node.

Files: ``metrics.jsonl`` (a row a step), ``samples.jsonl`` (a row a trained sample), ``ended.jsonl``
(a row a sample that ended, trained or not), ``dropped.jsonl`` (a row a group that was dropped),
``timeline.jsonl`` (spans of what engines and trainer did), and of a run with held-out prompts
``evaluations.jsonl`` (a row an evaluation) and ``evaluation_samples.jsonl``. Times are seconds
since the run began. Rows are on disk when the call returns, so that a crash costs at most the line
being written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FILES = {
    "step": "metrics.jsonl",
    "sample": "samples.jsonl",
    "ended": "ended.jsonl",
    "dropped": "dropped.jsonl",
    "timeline": "timeline.jsonl",
    "evaluation": "evaluations.jsonl",
    "evaluation_sample": "evaluation_samples.jsonl",
}


class RunRecorder:
    """Async actor that takes rows from all processes of a run.

    Args:
        folder: The run folder; it exists.
        started_at: Unix time at which the run began.
        num_steps: Rows of steps that the folder holds already.
        before: What those count; the status counts on from there.
    """

    def __init__(
        self,
        folder: str,
        started_at: float,
        num_steps: int = 0,
        before: Mapping[str, int] | None = None,
    ) -> None:
        self._files = {
            kind: (Path(folder) / name).open("a", encoding="utf-8") for kind, name in _FILES.items()
        }
        self._started_at = started_at
        self._first_step = num_steps
        self._before = dict(before or {})
        self._steps: list[dict[str, Any]] = []
        self._status: dict[str, Any] = {}
        self._new_step = asyncio.Condition()

    async def record(self, kind: str, row: Mapping[str, Any]) -> None:
        """Take one row; kind "status" is kept as the latest state and joins the next step's row."""
        await self.record_many(kind, [row])

    async def record_many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows of one kind: "step", "sample", "timeline" or "status".

        Spans of the timeline come in Unix seconds and are written relative to the run's begin.
        """
        if kind == "status":
            status = dict(rows[-1])
            self._status = status | {
                name: status[name] + count for name, count in self._before.items() if name in status
            }
            return
        if kind == "step":
            rows = [{**row, **self._status} for row in rows]
        elif kind == "timeline":
            rows = [self._relative(row) for row in rows]
        file = self._files[kind]
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        if kind == "step":
            async with self._new_step:
                self._steps.extend(map(dict, rows))
                self._new_step.notify_all()

    def _relative(self, row: Mapping[str, Any]) -> dict[str, Any]:
        start, end = row["start_s"] - self._started_at, row["end_s"] - self._started_at
        return {**row, "start_s": round(start, 4), "end_s": round(end, 4)}

    async def follow(
        self, num_seen: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Wait for steps beyond the first `num_seen` of this recorder, at most `timeout_s`.

        Returns:
            The new rows (none at the limit), and the latest status.
        """
        async with self._new_step:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._new_step.wait_for(lambda: len(self._steps) > num_seen)
            except TimeoutError:
                return [], self._status
        return self._steps[num_seen:], self._status

    async def num_steps(self) -> int:
        """Steps that the folder holds."""
        return self._first_step + len(self._steps)

    async def hold(self, timeout_s: float) -> None:
        """Return after a while: as long as this actor lives, so does the driver (`serve.lease`)."""
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
