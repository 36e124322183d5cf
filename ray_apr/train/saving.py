"""Reports of the train workers to Ray Train, with checkpoints that are written beside the training.

    end of a step ─► wait for the one before ─► ask for a copy ─► report ─► next steps
                                                     └ Ray Train's thread: write ─► its list

Invariants, kept by `CheckpointWriter`:
    * All ranks report the same in the same order: each report is made in the loop's thread, at the
      step that it is of, whichever thread writes and ends it.
    * What is written is of one moment, whatever is trained meanwhile: it is a copy, or the loop
      waits for it.
    * At most one checkpoint is under way, from the copy until Ray Train has it in its list. Until
      then the one before is the last, and what is there of the new one counts for nothing.
    * A checkpoint that cannot be written ends the run: Ray Train raises its error at once.
"""

from __future__ import annotations

import datetime
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointConsistencyMode, CheckpointUploadMode
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import APRError, StarvedError, TrainError, one_line
from ray_apr.data.fence import Fence
from ray_apr.data.resumption import LIST_COPY_FILE, LIST_FILE, read_rollout
from ray_apr.train.checkpoint import (
    HF_FOLDER,
    Progress,
    export_hf,
    save_rollout,
    take_snapshot,
)
from ray_apr.train.control import RunControl
from ray_apr.train.staging import Stager
from ray_apr.train.state_files import Scribe
from ray_apr.train.tensors import compute_device

logger = logging.getLogger(__name__)

CHECKPOINT_LIMIT_S = 3600.0
"""Longest that a checkpoint may be under way."""
_ASK_AGAIN_S = 10.0


class CheckpointWriter:
    """Reports of one train worker; all of them call the same methods in the same order.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        control: Rank 0's line to the other actors; None on other ranks.
        source: Folder or hub id of the model, for its exports.
        step: Steps that the run begins with.
        fence: Of the folder that has the checkpoints.
        exports: Whether each checkpoint gets the model in Hugging Face's format, not the last one
            alone.
        stays: Whether the state stays where it is between two steps, so that it may be copied
            beside the training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        control: RunControl | None,
        *,
        source: str,
        step: int = 0,
        fence: Fence | None = None,
        exports: bool = False,
        stays: bool = True,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._control = control
        self._source = source
        self._fence = fence
        self._exports = exports
        self._storage = ray.train.get_context().get_storage()
        # of its own: another thread has it while the loop computes in the others
        limit = datetime.timedelta(seconds=CHECKPOINT_LIMIT_S)
        self._ranks = dist.new_group(backend="gloo", timeout=limit)
        self._stager = Stager(model, optimizer)
        has_gpu = compute_device(model).type == "cuda"  # for which the loop launches work
        self._scribe = Scribe(self._stager) if has_gpu else None
        self._stays = stays
        self._listing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Any] | None = None
        self.step = step
        """Of the last checkpoint, also of one that is under way."""
        self._listed: set[str] = set()
        """Paths of the checkpoints that Ray Train had last."""

    def report(self, row: Mapping[str, Any]) -> None:
        """Report figures; they come after those of a checkpoint that is under way."""
        is_free = self._under_way is None or self._under_way.done()
        mode = CheckpointUploadMode.SYNC if is_free else CheckpointUploadMode.ASYNC
        ray.train.report(dict(row), checkpoint_upload_mode=mode)

    def save(
        self,
        row: Mapping[str, Any],
        progress: Progress,
        *,
        name: str | None = None,
        is_last: bool = False,
    ) -> None:
        """Report figures with a checkpoint of now.

        Waits for: the checkpoint before; with a name, or an export, its own writing, too.
        Unblocked by: these, or `CHECKPOINT_LIMIT_S`.

        Args:
            row: Figures of the last step.
            progress: Where the run stands.
            name: Of its folder; None: Ray Train gives it one.
            is_last: Whether it gets the model in Hugging Face's format in any case.
        """
        self.wait()
        exports = is_last or self._exports
        waits = exports or name is not None  # an export reads the model itself, not the copy
        mode = CheckpointUploadMode.SYNC if waits else CheckpointUploadMode.ASYNC
        captured = None if self._control is None else self._control.capture()
        stager, scribe = (None, None) if waits else (self._stager, self._scribe)
        snapshot = take_snapshot(self._model, self._optimizer, progress, stager)
        if not self._stays:
            self._stager.wait()
        taken_at = unix_s()

        def write(folder: Path) -> None:
            snapshot.write(folder, self._ranks, scribe)
            if captured is not None:
                save_rollout(folder, *captured())
            if exports:
                export_hf(folder / HF_FOLDER, self._model, self._source)

        fence = None if self._control is None else self._fence
        part = _Part(write, self._storage, progress.step, fence)
        self.step, self._under_way = progress.step, part.written
        ray.train.report(
            dict(row),
            checkpoint=ray.train.Checkpoint(self._storage.experiment_fs_path),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=mode,
            checkpoint_upload_fn=part.upload,
            delete_local_checkpoint_after_upload=False,
        )
        if self._control is not None:
            self._under_way = self._listing.submit(self._await_listed, part, taken_at)

    def wait(self) -> None:
        """Wait until no checkpoint is under way.

        Raises:
            StarvedError: If it takes longer than `CHECKPOINT_LIMIT_S`.
        """
        if self._under_way is None:
            return
        try:
            self._under_way.result(CHECKPOINT_LIMIT_S)
        except TimeoutError as error:
            raise StarvedError(
                f"the checkpoint of step {self.step} was not written within "
                f"{CHECKPOINT_LIMIT_S:g} s; see whether {self._storage.experiment_fs_path} answers"
            ) from error
        self._under_way = None

    def close(self) -> None:
        """Wait for the last checkpoint; nothing is reported any more.

        Waits for: that. Unblocked by: its end, or `CHECKPOINT_LIMIT_S`.
        """
        self.wait()
        self._listing.shutdown()
        if self._scribe is not None:
            self._scribe.close()
        self._stager.close()

    def _await_listed(self, part: _Part, taken_at: float) -> None:
        """Say that a checkpoint is durable, once Ray Train's list has it; in a thread of rank 0.

        Waits for: all ranks' parts, then Ray Train's controller. Unblocked by: these, the limit, or
        the end of this process, with which Ray Train ends a run whose checkpoint fails.
        """
        began = time.monotonic()
        path = part.written.result(CHECKPOINT_LIMIT_S)
        while time.monotonic() < began + CHECKPOINT_LIMIT_S:
            listed = ray.train.get_all_reported_checkpoints(
                CheckpointConsistencyMode.COMMITTED, timeout_s=_ASK_AGAIN_S
            )
            if any(reported.checkpoint.path == path for reported in listed):
                self._copy_list()
                assert self._control is not None, "only rank 0 asks"
                oldest = self._oldest_epoch([reported.checkpoint for reported in listed])
                self._control.checkpoint_written(part.step, taken_at, oldest)
                return
        raise TimeoutError

    def _oldest_epoch(self, kept: Sequence[ray.train.Checkpoint]) -> int | None:
        """The journal's first epoch that a checkpoint which Ray Train keeps goes on with; None
        where it has removed none since the last time, so that nothing of the journal may go."""
        paths = {checkpoint.path for checkpoint in kept}
        removed, self._listed = self._listed - paths, paths
        if not removed:
            return None
        try:
            return min(read_rollout(checkpoint).epoch for checkpoint in kept)
        except (APRError, OSError) as error:
            logger.warning("files of the journal are not removed: %s", one_line(error))
            return None

    def _copy_list(self) -> None:
        """Copy Ray Train's list, which it does not write until the next checkpoint is reported."""
        folder, filesystem = self._storage.experiment_fs_path, self._storage.storage_filesystem
        try:
            filesystem.copy_file(f"{folder}/{LIST_FILE}", f"{folder}/{LIST_COPY_FILE}")
        except OSError as error:
            logger.warning("the list of checkpoints cannot be copied: %s", one_line(error))


class _Part:
    """This rank's part of a checkpoint.

    Args:
        write: Writes it into a folder, together with all ranks.
        storage: Ray Train's.
        step: Of the checkpoint.
        fence: Of the folder; None on other ranks than the first.
    """

    def __init__(
        self, write: Callable[[Path], None], storage: Any, step: int, fence: Fence | None
    ) -> None:
        self._write = write
        self._storage = storage
        self.step = step
        self._fence = fence
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self.written: Future[str] = Future()
        """Path of the whole checkpoint in the storage."""

    def upload(self, _: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        """Write it where Ray Train keeps checkpoints; Ray Train calls this.

        Where a remote storage refuses for a moment, Ray Train calls this again, on this rank alone:
        the files are written once.

        Raises:
            APRError: If that fails.
        """
        try:
            kept = self._to_storage(name)
            if self._fence is not None:
                self._fence.check()  # before Ray Train has it in its list
        except APRError:  # of the rollout side or the fence, and says so
            raise
        except (Exception, CheckpointException) as error:  # torch's is none
            raise TrainError(
                f"the checkpoint of step {self.step} could not be written to "
                f"{self._storage.experiment_fs_path}/{name}: {_reason(error)}; make room or mend "
                "the storage, then go on with the run (--resume): the checkpoint before is whole"
            ) from error
        self.written.set_result(kept.path)
        return kept

    def _to_storage(self, name: str) -> ray.train.Checkpoint:
        filesystem = self._storage.storage_filesystem
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            path = self._storage.build_checkpoint_path_from_name(name)
            self._write_whole(path)
            return ray.train.Checkpoint(path, filesystem)
        if self._copy is None:
            self._copy = tempfile.TemporaryDirectory()
            self._write_whole(self._copy.name)
        local = ray.train.Checkpoint.from_directory(self._copy.name)
        kept: ray.train.Checkpoint = self._storage.persist_current_checkpoint(local, name)
        self._copy.cleanup()
        return kept

    def _write_whole(self, folder: str) -> None:
        """Write into a folder; if that fails, leave nothing there that takes room."""
        try:
            self._write(Path(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _reason(error: BaseException) -> str:
    """What was raised first, on the first rank of those that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        first = error.failures[min(error.failures)][0]
        return f"{type(first).__name__}: {one_line(first)}"
    return f"{type(error).__name__}: {one_line(error)}"
