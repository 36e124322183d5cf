"""Callbacks of a run: they follow its folder, each in a thread of the driver.

Invariants, kept by `Followed`:
    * Each row is told in order, and once, whatever rows the run folder loses when the run begins
      again: a row is told by its step or version, and the last one that was is in the folder. Only
      the row at which a process was killed is told again by the next one; all are where that file
      was damaged, with a warning.
    * A callback that raises is heard of in the log, once for each of its methods; neither the run
      nor the other callbacks notice it, or one that takes long.
    * A callback is told of nothing before its `on_start` has returned, which is called again where
      it raises; then it is told of all that it has missed.
    * Those of a driver that has lost the folder to another one are told nothing more, not even how
      it ended: those of the other one are.
    * The run waits for callbacks at its end alone, and there only for `_END_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import APRError, FolderTakenError, one_line
from ray_apr.core.user import RunCallback, RunInfo
from ray_apr.run.final import FINAL_FILE
from ray_apr.run.folder import put_text
from ray_apr.run.new_rows import NewRows
from ray_apr.run.resume import kept_checkpoints
from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

CALLBACKS_FILE = "callbacks.json"
"""File of the run folder: what callbacks have been told, and what each wants to know again."""
_LOOK_S = 1.0
_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 60.0
"""From an `on_start` that raised to the next call; twice as long each time."""
_END_S = 120.0
"""Longest that the end of a run waits for them."""

_TOLD = ("step", "policy_version", "checkpoint")

Checkpoints = Callable[[], Sequence[tuple[int, str]]]
"""Gives the steps that each checkpoint has trained, and its path."""


class Kept:
    """`CALLBACKS_FILE`: the last of each that every callback was told, and its notes.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / CALLBACKS_FILE
        self._known = _read(self._file)
        """By the name of a callback, of processes before this one."""
        self._written = dict(self._known)
        self._writing = threading.Lock()
        self._unsaved: set[str] = set()

    def of(self, name: str) -> dict[str, Any] | None:
        """What is kept of a callback; None of one that is new."""
        return copy.deepcopy(self._known.get(name))  # whose notes it changes

    def last(self, what: str) -> int:
        """Up to where any callback was told: a new one is told what comes after that."""
        return max((kept[what] for kept in self._known.values()), default=-1)

    def save(self, name: str, kept: Mapping[str, Any]) -> None:
        """Keep what a callback was told, and its notes as they are now.

        Waits for: another callback that does so. Unblocked by: the file system.
        """
        try:
            plain = json.loads(json.dumps(kept, default=str))
            with self._writing:
                self._written[name] = plain
                put_text(self._file, json.dumps(self._written) + "\n")
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            # a full disk, or notes that are no JSON, or that another thread changes
            if name not in self._unsaved:
                self._unsaved.add(name)
                logger.error("%s is not written for %s: %s", self._file, name, one_line(error))


class Followed:
    """Tells a callback what a run folder has that is new.

    Args:
        folder: Of the run.
        callback: Whom.
        kept: What it was told before; noted after each of its methods.
        checkpoints: Gives those that the run has now.
    """

    def __init__(
        self, folder: Path, callback: RunCallback, kept: Kept, checkpoints: Checkpoints
    ) -> None:
        self._folder = folder
        self._callback = callback
        self._checkpoints = checkpoints
        self._kept = kept
        self.name = name_of(callback)
        known = kept.of(self.name)
        self._is_resumed = known is not None and known["has_begun"]
        self._has_begun = False
        self._again_at, self._pause = 0.0, _AGAIN_S
        self._told = {what: kept.last(what) if known is None else known[what] for what in _TOLD}
        self._notes: dict[str, Any] = {} if known is None else known["notes"]
        self._steps = NewRows(folder / "metrics.jsonl", "step", self._told["step"])
        self._evaluations = NewRows(
            folder / "evaluations.jsonl", "policy_version", self._told["policy_version"]
        )
        self._wants_checkpoints = type(callback).on_checkpoint is not RunCallback.on_checkpoint
        self._failed: set[str] = set()

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        """The run begins."""
        self._info = RunInfo(
            name=name,
            folder=self._folder,
            config=config,
            is_resumed=self._is_resumed,
            notes=self._notes,
        )
        self._begin()

    def _begin(self) -> None:
        """Call `on_start`, for the first time or again."""
        self._tell("on_start", self._info)
        if self._has_begun and "on_start" in self._failed:
            logger.warning("the callback %s has begun, and is told all so far", self.name)
        self._again_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_AGAIN_S)

    def look(self, *, is_end: bool = False) -> None:
        """Tell what is new; of checkpoints only with a step, or at the end."""
        if not self._has_begun and (is_end or time.monotonic() >= self._again_at):
            self._begin()
        if not self._has_begun:
            return
        steps = self._steps.new()
        for row in steps:
            self._tell("on_step", row, step=row["step"])
        for row in self._evaluations.new():  # a damaged one costs no steps
            self._tell("on_evaluation", row, policy_version=row["policy_version"])
        if self._wants_checkpoints and (steps or is_end):
            for num_steps, path in sorted(self._checkpoints()):
                if num_steps > self._told["checkpoint"]:
                    self._tell("on_checkpoint", num_steps, path, checkpoint=num_steps)

    def end(self) -> None:
        """Tell how the run ended."""
        if not self._has_begun:
            logger.error("the callback %s was told nothing: its on_start raised", self.name)
            return
        file = self._folder / FINAL_FILE
        final = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self._tell("on_end", final)

    def _tell(self, verb: str, *args: Any, **told: int) -> None:
        """Call a method, and note what it was told with what the callback wants to know again."""
        try:
            getattr(self._callback, verb)(*args)
            self._has_begun = True  # nothing is told before `on_start` has returned
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if verb not in self._failed:
                self._failed.add(verb)
                logger.exception(
                    "%s of the callback %s raised %s: %s; the run goes on, and further errors "
                    "of it are not shown", verb, self.name, type(error).__name__, one_line(error),
                )  # fmt: skip
        self._told |= told
        has_begun = self._is_resumed or self._has_begun
        kept = {**self._told, "has_begun": has_begun, "notes": self._notes}
        self._kept.save(self.name, kept)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """What is kept of each callback; nothing of a file that cannot be read, so that they are told
    all again."""
    if file.exists():
        try:
            kept = json.loads(file.read_bytes())
            if isinstance(kept.get("step"), int):  # of an older version: all were told the same
                told = {what: kept.get(what, -1) for what in _TOLD}
                kept = {name: {**told, "notes": notes} for name, notes in kept["notes"].items()}
            return {
                str(name): {what: int(of_one[what]) for what in _TOLD}
                | {"has_begun": of_one.get("has_begun", True), "notes": {**of_one["notes"]}}
                for name, of_one in kept.items()
            }
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            logger.warning(
                "%s cannot be read, so that callbacks are told all again: %s", file, one_line(error)
            )
    return {}


def name_of(callback: RunCallback) -> str:
    """Under which its notes are kept."""
    return callback.name or type(callback).__qualname__


@contextlib.contextmanager
def followed_by(callbacks: Sequence[RunCallback], spec: RunSpec) -> Iterator[None]:
    """Have callbacks follow a run that is made inside of the block; without any, nothing is done.

    Waits for: the callbacks, at the end. Unblocked by: theirs, or `_END_S`.

    Args:
        callbacks: Each has a thread, and a name of its own.
        spec: What runs.
    """
    if not callbacks:
        yield
        return
    over, kept = threading.Event(), Kept(spec.folder)

    def follow(followed: Followed) -> None:
        """Consumes: the run folder. Waits for: the clock. Unblocked by: the end of the block.
        Produces: calls of a callback."""
        followed.start(spec.name, spec.describe())
        fence, is_over = spec.fences[0], False
        while not is_over:
            is_over = over.wait(_LOOK_S)
            try:
                (fence.check if is_over else fence.check_soon)()
                followed.look(is_end=is_over)
            except FolderTakenError as error:
                logger.warning("the callback %s is told no more: %s", followed.name, error)
                return
            except (OSError, ValueError) as error:  # of the run folder; the next look may succeed
                logger.warning("%s is told later: %s", followed.name, one_line(error))
        followed.end()

    threads: dict[str, threading.Thread] = {}
    for callback in callbacks:
        followed = Followed(spec.folder, callback, kept, lambda: _checkpoints(spec))
        name = f"callback {followed.name}"
        threads[followed.name] = threading.Thread(
            target=follow, args=(followed,), name=name, daemon=True
        )
    for thread in threads.values():
        thread.start()
    try:
        yield
    finally:
        over.set()
        deadline = time.monotonic() + _END_S
        for thread in threads.values():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        late = [name for name, thread in threads.items() if thread.is_alive()]
        if late:
            logger.error(
                "callbacks did not end within %g s, and are left alone: %s; they may lack the last "
                "steps, and how the run ended", _END_S, ", ".join(late),
            )  # fmt: skip


def _checkpoints(spec: RunSpec) -> Sequence[tuple[int, str]]:
    """Those of a run now; none while Ray Train writes its list, or the storage cannot be had."""
    try:
        return [(num_steps, kept.path) for num_steps, kept in kept_checkpoints(spec)]
    except (APRError, OSError, ValueError) as error:
        logger.info("checkpoints are looked at later: %s", one_line(error))
        return ()
