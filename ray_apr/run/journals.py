"""The journal of a run: where it is, and what a run goes on with."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ray_apr.core.exceptions import ConfigError, ResourceError, RolloutError, one_line
from ray_apr.data.journal import JournalFolder
from ray_apr.data.replay import Epoch, replay
from ray_apr.data.resumption import Begin, sampled_with
from ray_apr.rollout.turns import turn_rules
from ray_apr.run.folder import absolute

if TYPE_CHECKING:
    from ray_apr.run.spec import RunSpec

_FOLDER = "journal"
_OF_OTHERS = 1000
"""More epochs than an earlier part of the run can have noted beyond those of its last checkpoint:
a part without a journal, or with one elsewhere, passes them over, so that the one after it takes
none of them for those that follow its own checkpoints."""


def journal_of(spec: RunSpec) -> JournalFolder | None:
    """Where the journal of a run is; None if it has none.

    Raises:
        ConfigError: If there is no such place.
    """
    config = spec.rollout.journal
    if not config.enabled:
        return None
    if config.path is None:
        root, filesystem = f"{spec.checkpoint_path}/{spec.name}", spec.run.storage_filesystem
    else:
        root, filesystem = f"{config.path.rstrip('/')}/{spec.name}", None
    if filesystem is None:
        root = absolute(root)
    try:
        folder = JournalFolder.of(f"{root}/{_FOLDER}", filesystem)
        return dataclasses.replace(folder, fence=spec.fences[1])
    except (OSError, ValueError) as error:
        raise ConfigError(
            "rollout.journal.path", root, f"cannot be reached: {one_line(error)}"
        ) from error


def header_of(spec: RunSpec) -> dict[str, Any]:
    """Settings without which a journal cannot be gone on with."""
    rules = turn_rules(spec.environment, spec.rollout.max_turns)
    return {
        "seed": spec.train.seed,
        "step_size": spec.step_size,
        "sampled": sampled_with(
            spec.rollout,
            resets=None if rules is None else rules.resets,
            weights=spec.prompts.weights,
        ),
    }


def holds_journal(spec: RunSpec) -> bool:
    """Whether a run without checkpoints, whose folder is gone, has left its journal in its remote
    storage: it goes on with that.

    Raises:
        ConfigError: If a run has left one elsewhere, which may be another one of this name.
        ResourceError: If it cannot be looked at.
    """
    folder = journal_of(spec)
    if folder is None:
        return False
    try:
        is_there = bool(folder.epochs())
    except OSError as error:
        raise _unreadable(folder, error) from error
    if is_there and (spec.rollout.journal.path is not None or spec.remote_storage is None):
        remedy = f"{folder.path} has the journal of a run of this name that is not in {spec.folder}"
        raise ConfigError("run.name", spec.name, f"{remedy}; remove it, or choose another name")
    return is_there


def with_journal(spec: RunSpec, begin: Begin, *, first: int, trainer_lives: bool = False) -> Begin:
    """Add what the journal has to where a run begins.

    Args:
        spec: What runs.
        begin: Of its last checkpoint.
        first: Epoch that follows that.
        trainer_lives: See `replay`.

    Returns:
        That, with the number of the epoch that is next.

    Raises:
        ResourceError: If the journal cannot be read.
        RolloutError: If the trainer lives, and what it did is not all in the journal.
    """
    folder = journal_of(spec)
    if folder is None:
        begin = replay(begin, (), {}, trainer_lives=False)
        return dataclasses.replace(begin, epoch=begin.epoch + _OF_OTHERS)
    try:
        numbers = folder.epochs()
        if trainer_lives and any(epoch >= first for epoch in folder.broken_epochs()):
            raise RolloutError(
                f"the journal in {folder.path} could not be written to its end, so that rollout "
                "worker and buffer cannot begin again beside the trainer; make room there, then go "
                "on with the run (--resume)"
            )
        epochs = (
            Epoch(tuple(folder.frames(n, "worker")), tuple(folder.frames(n, "buffer")))
            for n in itertools.dropwhile(lambda n: n < first, numbers)
        )
        begin = replay(begin, epochs, header_of(spec), trainer_lives=trainer_lives)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(folder, error) from error
    is_elsewhere = begin.is_resumed and not trainer_lives and first not in numbers
    first += _OF_OTHERS if is_elsewhere else 0
    return dataclasses.replace(begin, epoch=max([first, *(n + 1 for n in numbers)]))


def _unreadable(folder: JournalFolder, error: Exception) -> ResourceError:
    return ResourceError(
        f"the journal in {folder.path} cannot be read: {one_line(error)}; mend it, or remove it, "
        "and go on without what was done since the last checkpoint"
    )
