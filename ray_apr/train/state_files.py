"""The files of a rank's state, written by this process, or by one of its own.

    dcp.save ─► FilesWriter ─► threads of this process
                    └ Scribe ─► its process ─► threads of that, which read the copy of `Stager`

Python's threads take turns: those that write a state hold up the one that launches a step, for
half a second a checkpoint of 0.6B parameters on a GPU. Another process does not.

Invariants:
    * Whoever writes files says their checksums, and returns once all of them are there.
    * What a scribe's process does not write, for whatever reason, this process does.
    * That process ends with the one that has begun it, however that ends.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import multiprocessing.connection
import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ray_apr.core.exceptions import StarvedError, one_line
from ray_apr.core.threads import in_thread
from ray_apr.train.checksums import NUM_THREADS, Checksums, checksums
from ray_apr.train.host_memory import HostMemory

if TYPE_CHECKING:
    from ray_apr.train.staging import Stager

logger = logging.getLogger(__name__)

WRITE_LIMIT_S = 3000.0
"""Longest that a process may take to write a state: less than the ranks wait for each other."""
_END_LIMIT_S = 10.0
_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_MAIN = """
import sys
sys.path += [path for path in sys.argv[3:] if path not in sys.path]
from ray_apr.train.state_files import serve
serve(*map(int, sys.argv[1:3]))
"""
"""Python's own modules come before the user's, some of which may have their names."""


class StatePlanner(dcp.DefaultSavePlanner):
    """Keeps its plan for the next checkpoint, by the name of its class, as long as names and shapes
    are the same: to make one takes 0.1 to 0.2 s of Python, beside which a step launches nothing.
    Where tensors are those of the plan, as a stager's are, it is not even made for a comparison.

    After a checkpoint that failed this process writes none (`CheckpointWriter`): PyTorch 2.11 keeps
    a plan that not all ranks have agreed to.
    """

    _planned: ClassVar[dict[str, weakref.ref[torch.Tensor] | None]] = {}
    """Tensors that the plan is of, and the names of what is none."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)

    def create_local_plan(self) -> SavePlan:
        """What this rank would write; nothing where that has not changed."""
        planned, type(self)._planned = type(self)._planned, {}
        if planned.keys() == self.state_dict.keys() and all(
            _is_same(value, planned[name]) for name, value in self.state_dict.items()
        ):
            return SavePlan([], usable=False)
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes, as all ranks have agreed."""
        plan = super().finish_plan(new_plan)
        type(self)._planned = {
            name: weakref.ref(value) if isinstance(value, torch.Tensor) else None
            for name, value in self.state_dict.items()
        }
        return plan


def _is_same(value: Any, reference: weakref.ref[torch.Tensor] | None) -> bool:
    """Whether it is the tensor that is referred to; no tensor, where none is."""
    return not isinstance(value, torch.Tensor) if reference is None else reference() is value


class FilesWriter(dcp.FileSystemWriter):
    """Writes a rank's state into several files side by side.

    torch's own threads keep their errors to themselves: a full disk would leave a checkpoint that
    lacks files.

    Args:
        folder: Where they are written.
        scribe: Has a process for it; None: this one writes.
    """

    def __init__(self, folder: Path, scribe: Scribe | None = None) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # a copy ahead is for one thread alone
        self._folder = folder
        self._scribe = scribe
        self.checksums: Checksums = {}
        """Of the files that were written."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write what torch asks for; as `write_here`, where `Scribe.write` does not."""
        written = None
        if self._scribe is not None:
            written = self._scribe.write(self._folder, plan, planner)
        results, self.checksums = written or self.write_here(plan, planner)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def write_here(
        self, plan: SavePlan, planner: SavePlanner
    ) -> tuple[list[WriteResult], Checksums]:
        """Write it in threads of this process.

        Waits for: all files. Unblocked by: their ends.

        Raises:
            OSError: The first one that a file has failed with, once all have ended.
        """
        write, names = super().write_data, plan.storage_data
        parts = [
            replace(plan, items=items, storage_data=replace(names, prefix=f"{names.prefix}{i}_"))
            for i, items in enumerate(_alike(plan.items))
        ]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            written = list(pool.map(lambda part: write(part, planner).value(), parts))
        results = [result for of_file in written for result in of_file]
        files = {self._folder / result.storage_data.relative_path for result in results}
        return results, checksums(files)


def _alike(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Items in up to `NUM_THREADS` lists of about the same size."""
    lists: list[list[WriteItem]] = [[] for _ in range(NUM_THREADS)]
    sizes = [0] * NUM_THREADS
    for item in sorted(items, key=_num_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        lists[smallest].append(item)
        sizes[smallest] += _num_bytes(item)
    return [found for found in lists if found]


def _num_bytes(item: WriteItem) -> int:
    """Of a tensor, or of this rank's part of it; what is none is small."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is in the memory of a `Stager`."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a scribe's process is to write."""

    folder: Path
    plan: SavePlan
    values: list[_Place | bytes]
    """Of each item of the plan."""
    memory: str
    """Path of the memory that the places are in."""
    size: int
    """Of that, in bytes."""


class _FailedError(Exception):
    """A scribe's process has not written what it was to write."""


class _Process:
    """Writes what it is asked for; see `serve`."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        with there:
            numbers = [str(there.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *numbers, *filter(None, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=os.environ | _WITHOUT_GPU,
                start_new_session=True,  # not for Ctrl-C
            )
        self._line = multiprocessing.connection.Connection(os.dup(self._socket.fileno()))

    def ask(self, order: _Order) -> tuple[list[WriteResult], Checksums]:
        """Have it write.

        Waits for: its answer. Unblocked by: that, its end, or `WRITE_LIMIT_S`.

        Raises:
            _FailedError: If it has died, or cannot write.
            TimeoutError: If it takes longer.
        """
        answer = in_thread(partial(self._answer, order), "apr-scribe").result(WRITE_LIMIT_S)
        if isinstance(answer, str):
            raise _FailedError(answer)
        results, found = answer
        return results, found

    def _answer(self, order: _Order) -> Any:
        """Waits for: its answer. Unblocked by: that, or its end."""
        try:
            self._line.send(order)
            return self._line.recv()
        except (EOFError, OSError):
            raise _FailedError(f"it has died, with exit code {self.end()}") from None

    def end(self) -> int | None:
        """Have it end; returns its exit code, if it has one by then.

        Waits for: it. Unblocked by: its end, or SIGKILL after a limit, and that limit again.
        """
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            return self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # of a disk that does not answer
            return self._process.wait(_END_LIMIT_S)
        return None


class Scribe:
    """Writes the state that a stager has copied, in a process that begins with the first one.

    Args:
        stager: Has the copy.
    """

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._process: _Process | None = None

    def write(
        self, folder: Path, plan: SavePlan, planner: SavePlanner
    ) -> tuple[list[WriteResult], Checksums] | None:
        """Have the files of a plan written; None: its process has not, and has ended.

        Raises:
            StarvedError: If its process takes longer than `WRITE_LIMIT_S`.
        """
        try:
            self._process = self._process or _Process()
            return self._process.ask(self._order(folder, plan, planner))
        except TimeoutError as error:
            self.close()
            raise StarvedError(
                f"{folder} was not written within {WRITE_LIMIT_S:g} s; see whether its storage "
                "answers"
            ) from error
        except (_FailedError, OSError) as error:
            logger.warning(
                "the process that writes checkpoints has failed: %s; the train worker writes this "
                "one itself, which slows its steps",
                one_line(error),
            )
            self.close()
            return None

    def close(self) -> None:
        """Have its process end."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def _order(self, folder: Path, plan: SavePlan, planner: SavePlanner) -> _Order:
        memory = self._stager.memory
        values: list[_Place | bytes] = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, io.BytesIO):
                values.append(value.getvalue())
                continue
            begin = value.data_ptr() - memory.address if value.numel() else 0
            if not (0 <= begin <= memory.size - value.nbytes and value.is_contiguous()):
                raise _FailedError(f"{item.index.fqn} is not where the stager copies to")
            values.append(_Place(begin, value.shape, value.dtype))
        plan = replace(plan, planner_data=None)
        return _Order(folder=folder, plan=plan, values=values, memory=memory.path, size=memory.size)


def serve(file: int, parent: int) -> None:
    """Be the process of a scribe.

    Waits for: orders. Unblocked by: these, or the end of the other process.

    Args:
        file: Number of the line to that.
        parent: Its pid.
    """
    line = multiprocessing.connection.Connection(file)
    in_thread(lambda: _end_with(file, parent), "apr-end")
    memory = HostMemory(0)
    with contextlib.suppress(EOFError, ConnectionError):  # the other process has ended
        while True:
            order = line.recv()
            answer: Any
            try:
                if not memory.is_at(order.memory):  # else its pages are known here
                    memory.close()
                    memory = HostMemory(order.size, order.memory)
                answer = _written(order, memory)
            except Exception as error:  # noqa: BLE001  (the other process says it)
                answer = f"{type(error).__name__}: {one_line(error)}"
            line.send(answer)


def _end_with(file: int, parent: int) -> None:
    """End this process as soon as the other one has ended, or wants no more.

    Waits for: that. Unblocked by: that.
    """
    gone = select.poll()
    gone.register(file, select.POLLRDHUP)
    try:
        gone.register(os.pidfd_open(parent), select.POLLIN)  # a fork of it may keep the line
    except ProcessLookupError:  # it has ended
        os._exit(0)
    except OSError as error:  # of a system that has no such call
        logger.info("only the line says when the train worker ends: %s", error)
    gone.poll()
    os._exit(0)


def _written(order: _Order, memory: HostMemory) -> tuple[list[WriteResult], Checksums]:
    values = {
        item.index: io.BytesIO(value)
        if isinstance(value, bytes)
        else memory.tensor(value.begin, value.shape, value.dtype)
        for item, value in zip(order.plan.items, order.values, strict=True)
    }
    return FilesWriter(order.folder).write_here(order.plan, _Given(values))


class _Given(dcp.DefaultSavePlanner):
    """Has the value of each item."""

    def __init__(self, values: dict[Any, Any]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Value of an item."""
        return self._values[write_item.index]
