"""Callbacks of a run: they follow its folder, in a thread of the driver.

Invariants, kept by `Followed`:
    * Each row is told in order, and once, whatever rows the run folder loses when the run begins
      again: a row is told by its step or version, and the last one that was is in the folder. Only
      the row at which a process was killed is told again by the next one; all are where that file
      was damaged, with a warning.
    * A callback that raises is heard of in the log, once for each of its methods; neither the run
      nor the other callbacks notice it.
    * The run waits for callbacks at its end alone, and there only for `_END_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import APRError, one_line
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
_END_S = 120.0
"""Longest that the end of a run waits for them."""

_TOLD = ("step", "policy_version", "checkpoint")

Checkpoints = Callable[[], Sequence[tuple[int, str]]]
"""Gives the steps that each checkpoint has trained, and its path."""


class Followed:
    """Tells callbacks what a run folder has that is new.

    Args:
        folder: Of the run.
        callbacks: Whom.
        checkpoints: Gives those that the run has now.
    """

    def __init__(
        self, folder: Path, callbacks: Sequence[RunCallback], checkpoints: Checkpoints
    ) -> None:
        self._folder = folder
        self._callbacks = callbacks
        self._checkpoints = checkpoints
        self._file = folder / CALLBACKS_FILE
        self._told, self._notes = _read(self._file)
        """The last of each that all callbacks were told."""
        self._steps = NewRows(folder / "metrics.jsonl", "step", self._told["step"])
        self._evaluations = NewRows(
            folder / "evaluations.jsonl", "policy_version", self._told["policy_version"]
        )
        self._wants_checkpoints = any(
            type(callback).on_checkpoint is not RunCallback.on_checkpoint for callback in callbacks
        )
        self._failed: set[tuple[str, str]] = set()
        self._is_unsaved = False

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        """The run begins."""
        for callback in self._callbacks:
            key = name_of(callback)
            info = RunInfo(
                name=name,
                folder=self._folder,
                config=config,
                is_resumed=key in self._notes,
                notes=self._notes.setdefault(key, {}),
            )
            self._tell(callback, "on_start", info)
        self._save()

    def look(self, *, is_end: bool = False) -> None:
        """Tell what is new; of checkpoints only with a step, or at the end."""
        steps = self._steps.new()
        for row in steps:
            self._tell_all("on_step", row)
            self._save(step=row["step"])
        for row in self._evaluations.new():  # a damaged one costs no steps
            self._tell_all("on_evaluation", row)
            self._save(policy_version=row["policy_version"])
        if self._wants_checkpoints and (steps or is_end):
            for num_steps, path in sorted(self._checkpoints()):
                if num_steps > self._told["checkpoint"]:
                    self._tell_all("on_checkpoint", num_steps, path)
                    self._save(checkpoint=num_steps)

    def end(self) -> None:
        """Tell how the run ended."""
        file = self._folder / FINAL_FILE
        final = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self._tell_all("on_end", final)
        self._save()

    def _tell_all(self, verb: str, *args: Any) -> None:
        for callback in self._callbacks:  # a copy each: they may take keys out of a row
            self._tell(callback, verb, *copy.deepcopy(args))

    def _tell(self, callback: RunCallback, verb: str, *args: Any) -> None:
        try:
            getattr(callback, verb)(*args)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            which = (name_of(callback), verb)
            if which not in self._failed:
                self._failed.add(which)
                logger.exception(
                    "%s of the callback %s raised %s: %s; the run goes on, and further errors "
                    "of it are not shown", verb, which[0], type(error).__name__, one_line(error),
                )  # fmt: skip

    def _save(self, **told: int) -> None:
        """Note what was told, and what the callbacks want to know again."""
        self._told |= told
        try:
            text = json.dumps({**self._told, "notes": self._notes}, default=str)
            put_text(self._file, text + "\n")
        except (OSError, TypeError, ValueError) as error:  # a full disk, or notes that are no JSON
            if not self._is_unsaved:
                self._is_unsaved = True
                logger.error("%s is not written: %s", self._file, one_line(error))


def _read(file: Path) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """The last of each that all callbacks were told, and their notes; nothing of a file that cannot
    be read, so that they are told all again."""
    if file.exists():
        try:
            told = json.loads(file.read_bytes())
            notes = {str(name): {**of_one} for name, of_one in told.get("notes", {}).items()}
            return {name: int(told.get(name, -1)) for name in _TOLD}, notes
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning(
                "%s cannot be read, so that callbacks are told all again: %s", file, one_line(error)
            )
    return dict.fromkeys(_TOLD, -1), {}


def name_of(callback: RunCallback) -> str:
    """Under which its notes are kept."""
    return callback.name or type(callback).__qualname__


@contextlib.contextmanager
def followed_by(callbacks: Sequence[RunCallback], spec: RunSpec) -> Iterator[None]:
    """Have callbacks follow a run that is made inside of the block; without any, nothing is done.

    Waits for: the callbacks, at the end. Unblocked by: theirs, or `_END_S`.

    Args:
        callbacks: In the order in which they are told.
        spec: What runs.
    """
    if not callbacks:
        yield
        return
    over = threading.Event()

    def follow() -> None:
        """Consumes: the run folder. Waits for: the clock. Unblocked by: the end of the block.
        Produces: calls of the callbacks."""
        followed = Followed(spec.folder, callbacks, lambda: _checkpoints(spec))
        followed.start(spec.name, spec.describe())
        is_over = False
        while not is_over:
            is_over = over.wait(_LOOK_S)
            try:
                followed.look(is_end=is_over)
            except (OSError, ValueError) as error:  # of the run folder; the next look may succeed
                logger.warning("callbacks are told later: %s", one_line(error))
        followed.end()

    thread = threading.Thread(target=follow, name="callbacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=_END_S)
        if thread.is_alive():
            logger.error("callbacks did not end within %g s; they are left alone", _END_S)


def _checkpoints(spec: RunSpec) -> Sequence[tuple[int, str]]:
    """Those of a run now; none while Ray Train writes its list, or the storage cannot be had."""
    try:
        return [(num_steps, kept.path) for num_steps, kept in kept_checkpoints(spec)]
    except (APRError, OSError, ValueError) as error:
        logger.info("checkpoints are looked at later: %s", one_line(error))
        return ()
