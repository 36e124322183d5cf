"""Going on with a run: the checkpoint that it begins with, and the folder that it appends to.

A run that was interrupted goes on with its last checkpoint. Rows of what came after that are taken
out, as those steps are trained again; samples that were under way go on with the tokens that they
had by then; the tokens that are lost are counted as ``lost``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray.train

from ray_apr.core.exceptions import ConfigError, ResourceError, one_line
from ray_apr.core.profiles import ENGINE_STEPS_FILE
from ray_apr.data.fence import LEFT_S, Fence
from ray_apr.data.resumption import (
    LIST_COPY_FILE,
    LIST_FILE,
    PROGRESS_FILE,
    ROLLOUT_FILE,
    SAMPLES_FILE,
    Begin,
    Counters,
    RolloutProgress,
    read_file,
    read_json,
    read_rollout,
)
from ray_apr.data.saved_samples import read_samples
from ray_apr.run.begun import BEGUN_FILE
from ray_apr.run.changes import Changed, changed_text
from ray_apr.run.checks import check_goes_on
from ray_apr.run.evaluations import lacks_last_evaluation
from ray_apr.run.failed_groups import DROPPED_FILE, POISON_FILE
from ray_apr.run.folder import (
    LOCK_FILE,
    RESUMES_FILE,
    add_row,
    holds_run,
    is_held,
    keep_rows,
    last_row,
    lock,
    object_or_empty,
    read_rows,
)
from ray_apr.run.journals import header_of, holds_journal, with_journal
from ray_apr.run.kept_rows import KeptRows
from ray_apr.run.reported import add_reported
from ray_apr.train.checksums import check_read

if TYPE_CHECKING:
    from ray_apr.run.spec import RunSpec
from ray_apr.run.trained_samples import drop_from

logger = logging.getLogger(__name__)

_OF_THE_END = ("final.json", "error.log", "summary.json", "report.html")
"""Files of a run's end."""


def find_begin(spec: RunSpec, *, holds: bool = True) -> Begin:
    """Where a run begins: with the last checkpoint of its name, else that of the spec, or anew.

    Args:
        spec: What runs.
        holds: Whether this process holds the run folder. One that only looks mends nothing where
            another one trains, which may be writing it.

    Raises:
        ConfigError: If there is nothing left to train, a checkpoint that is no run's, or another
            run's journal in the place of its own.
        ResourceError: If the checkpoints of a run that has begun cannot be read, or its journal.
    """
    last = _last_checkpoint(spec, mends=holds or not is_held(spec.folder))
    checkpoint = last or spec.checkpoint
    is_resumed = last is not None or holds_run(spec.folder) or holds_journal(spec)
    if checkpoint is None:
        begin = Begin(is_resumed=is_resumed)
        if not is_resumed:
            return begin
        return with_journal(spec, begin, first=0)
    begin = dataclasses.replace(begin_with(spec, checkpoint), is_resumed=is_resumed)
    assert begin.rollout is not None, "a checkpoint has it"
    is_counted = spec.train.passes is None  # else once more, when the prompts are
    is_trained = is_counted and begin.step >= spec.train.num_steps
    evaluates = last is not None and spec.evaluation is not None
    if is_trained and not (evaluates and lacks_last_evaluation(spec.folder, begin.policy_version)):
        raise ConfigError(
            "train.steps",
            spec.train.num_steps,
            f"{checkpoint.path} has trained {begin.step} steps, so that none is left; raise "
            "it (or what says it: train.total_samples, train.passes), or choose another run.name",
        )
    check_goes_on(spec, begin, begin.rollout)
    if last is None:  # of another run: what goes on is all that this one has made
        begin = dataclasses.replace(begin, before=Counters(tokens_generated=begin.num_kept))
    return with_journal(spec, begin, first=0 if last is None else begin.epoch)


def find_side_begin(spec: RunSpec, began: Begin) -> Begin:
    """Where rollout worker and buffer begin again beside a trainer that goes on where it is.

    What the journal has of attempts before is in `began`: a trainer that had gone further than this
    one wrote it.

    Args:
        spec: What runs.
        began: Where this trainer began.

    Raises:
        ResourceError: If its checkpoints cannot be read, which may be so for a moment.
    """
    checkpoint, begin = _last_checkpoint(spec, mends=False), began
    if checkpoint is not None:
        try:
            last = begin_with(spec, checkpoint)
        except (ConfigError, OSError) as error:
            raise ResourceError(  # Ray Train removes those that a newer one takes the place of
                f"{checkpoint.path} cannot be read, or was removed meanwhile: {one_line(error)}"
            ) from error
        if last.epoch > began.epoch:
            begin = last
    return with_journal(spec, begin, first=begin.epoch, trainer_lives=True)


def begin_with(spec: RunSpec, checkpoint: ray.train.Checkpoint) -> Begin:
    """Where a run begins that has this checkpoint and no journal.

    Raises:
        ConfigError: If it is no checkpoint of a run.
    """
    progress = read_json(checkpoint, PROGRESS_FILE)
    try:
        rollout = read_rollout(checkpoint)  # which says the format
        begin = Begin(**progress)
    except (TypeError, KeyError) as error:  # of values
        remedy = f"has others than this ray_apr reads: {error}; go on with the one that wrote it"
        raise ConfigError("checkpoint", checkpoint.path, remedy) from error
    check_read(checkpoint, PROGRESS_FILE, ROLLOUT_FILE)
    samples = _read_samples(checkpoint, rollout, spec)
    if samples is None:
        rollout = rollout.without_samples()
    return dataclasses.replace(
        begin,
        checkpoint=checkpoint,
        rollout=rollout,
        before=rollout.counters,
        samples=samples,
        epoch=rollout.epoch,
    )


def last_step(spec: RunSpec, *, trainer_lives: bool = False) -> int:
    """Steps that a run of this name would not train again.

    Args:
        spec: What runs.
        trainer_lives: Whether Ray Train may be writing its list of checkpoints.

    Raises:
        APRError: If its last checkpoint cannot be read.
    """
    checkpoint = _last_checkpoint(spec, mends=not trainer_lives) or spec.checkpoint
    if checkpoint is None:
        return 0
    step: int = read_json(checkpoint, PROGRESS_FILE)["step"]
    return step


def _read_samples(
    checkpoint: ray.train.Checkpoint, rollout: RolloutProgress, spec: RunSpec
) -> pa.Table | None:
    """The samples under way of a checkpoint; None if there are none that could go on.

    Raises:
        ConfigError: If their file is missing or damaged.
    """
    if rollout.samples_digest is None:
        return None
    then, now = rollout.sampled, header_of(spec)["sampled"]
    others = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    if others:
        logger.warning(
            "the checkpoint's responses under way begin anew: %s differ", " and ".join(others)
        )
        return None
    try:
        return read_samples(read_file(checkpoint, SAMPLES_FILE), rollout.samples_digest)
    except ValueError as error:
        raise ConfigError(
            "checkpoint", checkpoint.path, f"{SAMPLES_FILE} is damaged: {error}; take another one"
        ) from error


def _last_checkpoint(spec: RunSpec, *, mends: bool = True) -> ray.train.Checkpoint | None:
    """The last checkpoint that Ray Train has of a run's name.

    Args:
        spec: What runs.
        mends: Whether a list that is cut off may be replaced: not while Ray Train writes it.

    Raises:
        ResourceError: If that cannot be known of a run that has begun.
    """
    path = spec.checkpoints_folder
    try:
        if mends:
            _mend_list(ray.train.Checkpoint(path, spec.run.storage_filesystem))
        return ray.train.Result.from_path(path, spec.run.storage_filesystem).checkpoint
    except RuntimeError:  # there is no such folder, or no checkpoint in it
        return None
    except Exception as error:  # of the storage, or of a list that Ray Train cannot read
        is_known = isinstance(error, (OSError, ValueError))  # no network, no such scheme
        if holds_run(spec.folder) or not is_known:
            raise ResourceError(
                f"{path} may hold checkpoints of the run in {spec.folder}, but cannot be read: "
                f"{one_line(error)}. Mend it, or choose another run.name"
            ) from error
        logger.warning("%s cannot be looked at, which may hold a run already: %s", path, error)
        return None


def kept_checkpoints(spec: RunSpec) -> list[tuple[int, ray.train.Checkpoint]]:
    """The checkpoints that Ray Train keeps of a run's name, with the steps that each has trained.

    Raises:
        ConfigError: If one of them is none of a run.
        ResourceError: If their list cannot be read, as while Ray Train writes it.
    """
    path = spec.checkpoints_folder
    try:
        result = ray.train.Result.from_path(path, spec.run.storage_filesystem)
    except RuntimeError:  # there is no such folder, or no checkpoint in it
        return []
    except Exception as error:  # of the storage, or of a list that Ray Train cannot read
        reason = f"checkpoints in {path} cannot be read: {one_line(error)}; try again, or mend it"
        raise ResourceError(reason) from error
    kept = [checkpoint for checkpoint, _ in result.best_checkpoints or ()]
    return [(read_json(c, PROGRESS_FILE)["step"], c) for c in kept]


def _mend_list(folder: ray.train.Checkpoint) -> None:
    """Put the copy of a run's list of checkpoints in the place of one that is cut off or gone."""
    file, copy = (f"{folder.path}/{name}" for name in (LIST_FILE, LIST_COPY_FILE))
    listed, copied = folder.filesystem.get_file_info([file, copy])
    if not copied.is_file:
        return
    try:
        if listed.is_file:
            with folder.filesystem.open_input_file(file) as opened:
                json.loads(opened.read())
            return
    except ValueError:
        pass
    logger.warning("%s was cut off, or is gone; %s takes its place", file, LIST_COPY_FILE)
    folder.filesystem.copy_file(copy, file)


@contextlib.contextmanager
def hold_folder(folder: Path, fences: Sequence[Fence] = ()) -> Iterator[None]:
    """Hold a run folder, so that no other process writes to it; the system lets it go at the end of
    this one, whatever ends it.

    Waits for: what the machine that had it may still write. Unblocked by: the clock.

    Args:
        folder: To be held.
        fences: Of the run that begins, if one does; for those whom the lock does not keep out.

    Raises:
        ConfigError: If another process holds it.
        ResourceError: If a fence cannot be written.
    """
    with (folder / LOCK_FILE).open("w") as file:
        try:
            lock(file)
        except BlockingIOError as error:
            raise ConfigError(
                "run.name", folder.name, f"another process trains it in {folder}; wait for its end"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be held, so that no other run may use it: %s", folder, error)
        if any([fence.take() for fence in fences]):  # all of them
            time.sleep(LEFT_S)
        yield


def resume_folder(folder: Path, begin: Begin, now: float) -> tuple[Begin, float]:
    """Take what came after a checkpoint out of a run folder, and note what is lost.

    Args:
        folder: Of a run that another process began.
        begin: Where it goes on.
        now: Unix time.

    Returns:
        `begin`, with what the folder counts; and the Unix time at which the run would have begun if
        it had not paused: its rows' times go on from the last one.
    """
    began = object_or_empty(folder / BEGUN_FILE)
    add_reported(folder / "metrics.jsonl", begin, first=began.get("step", 0))
    final = object_or_empty(folder / "final.json")
    steps = last_row(folder / "metrics.jsonl")
    time_s = max(final.get("wall_s") or 0.0, steps.get("time_s", 0.0))
    time_s = max(time_s, last_row(folder / "timeline.jsonl").get("end_s", 0.0))
    resumed = last_row(folder / RESUMES_FILE)  # whose attempt may have come to no step
    generated = max(row.get("tokens_generated") or 0 for row in (final, steps, resumed))
    before, lost = begin.before.lose(generated, begin.num_kept)
    keep_rows(folder / "samples.jsonl", lambda row: row["step"] < begin.step)
    drop_from(folder, begin.step)
    for name in ("timeline.jsonl", ENGINE_STEPS_FILE, POISON_FILE):
        keep_rows(folder / name, lambda row: True)
    kept = KeptRows(begin)
    keep_rows(folder / "ended.jsonl", kept.of_ended)
    keep_rows(folder / DROPPED_FILE, kept.of_dropped)
    evaluated: set[int] = set()

    def was_evaluated(row: Mapping[str, Any]) -> bool:
        version: int = row["policy_version"]
        if begin.checkpoint is None or version > begin.policy_version:
            return False
        evaluated.add(version)
        return True

    keep_rows(folder / "evaluations.jsonl", was_evaluated)
    keep_rows(folder / "evaluation_samples.jsonl", lambda row: row["policy_version"] in evaluated)

    def note(num_dropped: int) -> None:
        row = {
            "time_s": round(time_s, 4),
            "step": begin.step,
            "policy_version": begin.policy_version,
            "steps_repeated": num_dropped,
            "samples_kept": begin.num_samples,
            "tokens_kept": begin.num_kept,
            "prompts_pending": len(begin.prompts_again),
            "tokens_generated": before.tokens_generated,
            "tokens_lost": lost,
            "ended": final.get("error") or final.get("status") or "killed",
        }
        if not num_dropped or row != resumed:  # else a kill came before these steps were taken out
            add_row(folder / RESUMES_FILE, row)

    num_rows, _ = keep_rows(
        folder / "metrics.jsonl", lambda row: row["step"] < begin.step, before_drop=note
    )
    # one that was under way since, and is lost, is due again; the first one of the run, too
    first = None if begin.checkpoint is None else _before_first(folder)
    last = max(evaluated, default=first)
    begin = dataclasses.replace(begin, num_rows=num_rows, before=before, last_version=last)
    return begin, now - time_s


def _before_first(folder: Path) -> int:
    """Policy version before the first one that the run of a folder can have evaluated; 0 of a run
    that began with the model."""
    began = object_or_empty(folder / BEGUN_FILE).get("policy_version", 0)
    return max(0, began - 1)


def poison_rows(folder: Path) -> tuple[int, ...]:
    """Rows of the dataset that a run has set aside, as they kill engines."""
    return tuple(row["row"] for row in read_rows(folder / POISON_FILE))


def remove_end(folder: Path) -> None:
    """Remove what says how an earlier attempt ended, which the next one has not reached."""
    for name in _OF_THE_END:
        (folder / name).unlink(missing_ok=True)


def resume_line(begin: Begin, num_steps: int, changed: Changed) -> str:
    """What a person is told of a run that does not begin anew."""
    lost = begin.before.tokens_discarded.get("lost", 0)
    which = f"step {begin.step + 1} of" if begin.step < num_steps else "the evaluation after step"
    return (
        f"goes on with {which} {num_steps}, policy version "
        f"{begin.policy_version}; {begin.num_samples} samples go on with {begin.num_kept:,} "
        f"tokens, {len(begin.prompts_again)} prompts come again; tokens lost so far: {lost:,}"
        + (f"; other settings: {changed_text(changed)}" if changed else "")
    )
