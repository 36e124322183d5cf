"""The run folder: every figure of a run as JSON lines, written by one actor on the driver's node.

Files: ``metrics.jsonl`` (a row a step), ``samples.jsonl`` (a row a trained sample), ``ended.jsonl``
(a row a sample that ended, trained or not), ``dropped.jsonl`` (a row a group that was dropped),
``poison.jsonl`` (a row a prompt that was set aside because it kills engines),
``timeline.jsonl`` (spans of what engines and trainer did), ``engine_steps.jsonl`` (a row a step of
an engine, while one of the trainer is profiled), and of a run with held-out prompts
``evaluations.jsonl`` (a row an evaluation) and ``evaluation_samples.jsonl``. Beside them are the
texts of trained samples (`run.trained_samples`). Times are seconds since the run began. Rows are on
disk when the call returns, so that a crash costs at most the line being written.

Ray starts this actor again if it dies, and makes the calls again that were under way. So a row that
is in its file already is not written once more: of a step and of its samples by the step, of others
by the whole line. The samples of a step of which a kill cut some off are completed as they come
again.

A row that cannot be written, on a full disk say, ends the run: no row after it is taken, so that
the next step's row, which the trainer waits for, is the last that is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import ResourceError
from ray_apr.core.profiles import ENGINE_STEPS_FILE, PROFILES
from ray_apr.data.fence import Fence
from ray_apr.data.store import opened
from ray_apr.run.failed_groups import DROPPED_FILE, POISON_FILE
from ray_apr.run.folder import (
    append,
    end_with_a_line,
    last_lines,
    last_row,
    not_written,
    open_rows,
)
from ray_apr.run.trained_samples import table_of, write_step

logger = logging.getLogger(__name__)

ROW_FILES = {
    "step": "metrics.jsonl",
    "sample": "samples.jsonl",
    "ended": "ended.jsonl",
    "dropped": DROPPED_FILE,
    "poison": POISON_FILE,
    "timeline": "timeline.jsonl",
    "engine_step": ENGINE_STEPS_FILE,
    "evaluation": "evaluations.jsonl",
    "evaluation_sample": "evaluation_samples.jsonl",
}
"""Kind of a row -> file of the run folder."""
_END = 64 << 20
"""Bytes of a file's end in which rows are looked for: those since a checkpoint are there."""
_END_OF_CALLS = 1 << 20
"""The same, for rows of calls that were under way when this actor died."""


class RunRecorder:
    """Async actor that takes rows from all processes of a run.

    Args:
        folder: The run folder; it exists.
        started_at: Unix time at which the run began.
        prompt_column: Of the run's dataset.
        fence: Of the folder; None: nobody else takes it.
    """

    def __init__(
        self,
        folder: str,
        started_at: float,
        prompt_column: str = "prompt",
        fence: Fence | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._prompt_column = prompt_column
        self._fence = fence
        paths = {kind: Path(folder) / name for kind, name in ROW_FILES.items()}
        for path in paths.values():
            end_with_a_line(path)
        self._files = {kind: open_rows(path) for kind, path in paths.items()}
        self._paths = paths
        self._started_at = started_at
        self._last_step = {kind: _last_step(paths[kind]) for kind in ("step", "sample")}
        """Of each file's rows; -1 without any."""
        self._known = {
            kind: set(last_lines(path, _END_OF_CALLS))
            for kind, path in paths.items()
            if kind not in self._last_step
        }
        """Lines that calls which Ray makes again bring once more."""
        self._found_step = self._last_step["sample"]
        """Step of which a kill may have cut the samples off; -1: of none."""
        self._num_shown = _num_lines(paths["step"])
        """Steps of the folder that need not be kept for `follow`."""
        self._steps: list[dict[str, Any]] = []
        """Those that were not shown yet."""
        self._failure: ResourceError | None = None
        self._status: dict[str, Any] = {}
        self._doing: dict[str, str] = {}
        """Parts of the run that start or end -> what they do."""
        self._new_step = asyncio.Condition()
        self._saving = asyncio.Lock()
        self._is_closed = False

    async def record(self, kind: str, row: Mapping[str, Any]) -> None:
        """Take one row; kind "status" is kept as the latest state and joins the next step's row."""
        await self.record_many(kind, [row])

    async def record_many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows of one kind: one of `ROW_FILES`, "status", or "doing", which is shown alone.

        Spans of the timeline come in Unix seconds and are written relative to the run's begin.

        Raises:
            ResourceError: If they, or rows before them, cannot be written.
        """
        if kind == "status":
            self._status = dict(rows[-1])
            return
        if kind == "doing":
            self._doing |= {row["part"]: row["doing"] for row in rows}
            return
        if kind in self._last_step and rows:
            step = rows[-1]["step"]
            if kind == "sample" and step == self._found_step:
                rows, self._found_step = self._without_known(rows), -1
            elif step <= self._last_step[kind]:
                return
            self._last_step[kind] = step
        if kind == "step":
            rows = [{**row, **self._status} for row in rows]
        elif kind in ("timeline", "engine_step"):
            rows = [self._relative(row) for row in rows]
        elif kind == "poison":
            time_s = round(unix_s() - self._started_at, 4)
            rows = [{"time_s": time_s, **row} for row in rows]
        known = self._known.get(kind, set())
        lines = [json.dumps(row) + "\n" for row in rows]
        self._write(kind, [line for line in lines if line not in known])
        if kind == "step":
            async with self._new_step:
                self._steps.extend(map(dict, rows))
                self._new_step.notify_all()

    async def record_evaluation(
        self, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take an evaluation and its samples, in one call: an evaluator that dies meanwhile has
        both of them taken, or none."""
        last = await self.last_evaluation()
        if last.get("policy_version") == row["policy_version"]:
            return
        await self.record_many("evaluation_sample", samples)
        await self.record("evaluation", row)

    async def last_evaluation(self) -> dict[str, Any]:
        """Row of the last evaluation; an empty one without any."""
        return last_row(self._paths["evaluation"])

    async def record_missing(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take those of some rows that the end of their file does not have."""
        lines = [json.dumps(row) + "\n" for row in rows]
        known = set(last_lines(self._paths[kind], _END))
        self._write(kind, [line for line in lines if line not in known])

    def _without_known(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Samples of a step that the file of samples does not have."""
        lines = map(json.loads, last_lines(self._paths["sample"], _END))
        known = {row["sample_id"] for row in lines if row["step"] == rows[-1]["step"]}
        return [row for row in rows if row["sample_id"] not in known]

    async def save_samples(self, rows: Sequence[Mapping[str, Any]], *groups: bytes) -> None:
        """Keep samples of a step that was trained, with their texts.

        Waits for: the file system. Unblocked by: its answer.

        Args:
            rows: Of all samples of the step.
            groups: Those that are kept, as `data.store.carry` gives them.

        Raises:
            ResourceError: If they cannot be written.
        """

        def write() -> None:
            samples = list(itertools.chain.from_iterable(opened(groups)))
            table = table_of(rows, samples, self._prompt_column)
            write_step(self._folder, rows[0]["step"], table)

        async with self._saving:  # a buffer that has died may have asked for the same step
            with self._failing():
                await asyncio.to_thread(write)

    async def save_profile(self, name: str, data: bytes) -> None:
        """Keep a profile of a step; one that cannot be written is missing, and ends nothing.

        Waits for: the file system. Unblocked by: its answer.

        Args:
            name: Of the file.
            data: What it holds.
        """
        file = self._folder / PROFILES / name

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            logger.warning("no profile: %s", not_written(file, error))

    def _write(self, kind: str, lines: Sequence[str]) -> None:
        with self._failing():
            append(self._files[kind], "".join(lines))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What cannot be written is the last that is tried."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._fence is not None:
                self._fence.check_soon()
            yield
        except ResourceError as error:
            self._failure = error
            raise

    def _relative(self, row: Mapping[str, Any]) -> dict[str, Any]:
        start, end = row["start_s"] - self._started_at, row["end_s"] - self._started_at
        return {**row, "start_s": round(start, 4), "end_s": round(end, 4)}

    async def follow(
        self, num_seen: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Wait for steps beyond the first `num_seen` of the folder, or its end, for `timeout_s`;
        those before are not kept any longer.

        Returns:
            The new rows, none at the limit, and the latest status with what the parts do that start
            or end.
        """
        rows = await self._follow(num_seen, timeout_s)
        doing = {part: what for part, what in self._doing.items() if what}
        return rows, {**self._status, "doing": doing}

    async def _follow(self, num_seen: int, timeout_s: float) -> list[dict[str, Any]]:
        async with self._new_step:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._new_step.wait_for(
                        lambda: self._num_steps > num_seen or self._is_closed
                    )
            except TimeoutError:
                return []
        if num_seen > self._num_shown:
            del self._steps[: num_seen - self._num_shown]
            self._num_shown = num_seen
        if num_seen < self._num_shown:  # written by the one before this, which died
            lines = last_lines(self._paths["step"], _END)[num_seen - self._num_steps :]
            return [json.loads(line) for line in lines]
        return list(self._steps)

    @property
    def _num_steps(self) -> int:
        return self._num_shown + len(self._steps)

    async def num_steps(self) -> int:
        """Steps that the folder holds."""
        return self._num_steps

    async def hold(self, timeout_s: float) -> None:
        """Return after a while: as long as this actor lives, so does the driver (`serve.lease`)."""
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        """Close the files, and end the calls of those who follow: Ray says of each call of an actor
        which it starts again that it will be retried, once that is killed."""
        for file in self._files.values():
            file.close()
        async with self._new_step:
            self._is_closed = True
            self._new_step.notify_all()


def _last_step(file: Path) -> int:
    step: int = last_row(file).get("step", -1)
    return step


def _num_lines(file: Path) -> int:
    if not file.exists():
        return 0
    with file.open("rb") as rows:
        return sum(1 for _ in rows)
