"""The journal: what the rollout side has done since a checkpoint, in files that only grow.

The rollout worker and the buffer write a file each, of frames; a frame is what one of them has done
since its last one, whole or not there. A checkpoint begins a new epoch, in new files, so that those
before it can go with the checkpoints that they follow. `data.replay` makes of them what a run goes
on with.

Invariants, kept by `Journal`:
    * What `flush` has returned for is in the file, though this process is killed. Nothing is synced
      to the disk: what the system does not write, because it dies too, is lost.
    * A frame holds the figures of the moment at which its notes were taken, so that tokens and
      counts fit together.
    * A file that cannot be written ends the epoch's journal, and an empty file says so: with a
      trainer that lives nobody goes on with it, as what it had trained since is not told. The run
      ends only where not even that file can be made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import struct
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.fs

from ray_apr.core.exceptions import FolderTakenError, ResourceError, one_line
from ray_apr.core.sample import Sample, Segment
from ray_apr.data.fence import Fence
from ray_apr.data.saved_samples import SCHEMA, samples_table

logger = logging.getLogger(__name__)

Writer = Literal["worker", "buffer"]
FRAME_SCHEMA = SCHEMA.append(pa.field("base", pa.int32()))
"""Rows of samples with their tokens from number `base` on: those before it are in earlier rows."""
_HEAD = struct.Struct("<4sII")
"""Magic, length of the body in bytes, its CRC-32."""
_MAGIC = b"APRJ"
_FRAMES, _BROKEN = ".frames", ".broken"
"""Endings of the files of an epoch: its frames, and that not all of them could be written."""
_NOTES = b"notes"
WORKER_GATHER_S = 0.03
"""Groups that become whole together are written together."""


class Frame(NamedTuple):
    """What one side has done since its last frame."""

    notes: dict[str, Any]
    """``events``, in order; ``state``, figures of the moment; ``header``, of a file's first one."""
    rows: pa.Table
    """Of `FRAME_SCHEMA`."""


@dataclass(frozen=True, slots=True)
class JournalFolder:
    """Where the journal of a run is.

    Args:
        filesystem: Of pyarrow.
        path: In it.
        fence: Of the run; None: whoever wants may write.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str
    fence: Fence | None = field(default=None, compare=False)

    @classmethod
    def of(cls, where: str, filesystem: pyarrow.fs.FileSystem | None = None) -> JournalFolder:
        """The folder of a path or URI.

        Raises:
            OSError: If there is no such place.
            ValueError: If the scheme of the URI is unknown.
        """
        if filesystem is None:
            filesystem, where = pyarrow.fs.FileSystem.from_uri(where)
        return cls(filesystem, where.rstrip("/"))

    def epochs(self) -> list[int]:
        """Numbers of the epochs that it has files of, in order."""
        files = (*self._files(_FRAMES), *self._files(_BROKEN))
        return sorted({epoch for epoch, _, _ in files})

    def broken_epochs(self) -> list[int]:
        """Those of which one side could not write all that it noted, in order."""
        return sorted({epoch for epoch, _, _ in self._files(_BROKEN)})

    def frames(self, epoch: int, writer: Writer) -> Iterator[Frame]:
        """What one side wrote in an epoch, up to where it was cut off, or a piece is missing."""
        paths = [path for *of, path in self._files(_FRAMES) if of == [epoch, writer]]
        for part, path in enumerate(paths):
            if not path.endswith((f"-{writer}{_FRAMES}", f"-{part:08d}{_FRAMES}")):
                logger.warning("the piece before %s is missing", path)
                return
            with self.filesystem.open_input_file(path) as file:
                data = file.read()
            is_whole = yield from _frames(data, path)
            if not is_whole:
                return

    def drop_before(self, epoch: int) -> None:
        """Remove the files of earlier epochs."""
        for number, _, path in (*self._files(_FRAMES), *self._files(_BROKEN)):
            if number < epoch:
                self.filesystem.delete_file(path)

    def append(self, epoch: int, writer: Writer, part: int, data: bytes) -> None:
        """Write at the end of a file, or, where files cannot grow, a file of its own.

        Args:
            epoch: Its number.
            writer: Whose file it is.
            part: Number of this piece in the epoch.
            data: A frame.

        Raises:
            OSError: If that cannot be done.
            FolderTakenError: If the run is another driver's now.
        """
        if self.fence is not None:
            self.fence.check_soon()
        self.filesystem.create_dir(self.path)
        name = f"{self.path}/{epoch:06d}-{writer}"
        try:
            with self.filesystem.open_append_stream(f"{name}{_FRAMES}") as file:
                file.write(data)
        except NotImplementedError:  # of an object store
            with self.filesystem.open_output_stream(f"{name}-{part:08d}{_FRAMES}") as file:
                file.write(data)

    def mark_broken(self, epoch: int, writer: Writer) -> None:
        """Say that an epoch's file lacks what was to come, by an empty file, which takes no room.

        Raises:
            OSError: If that cannot be done.
        """
        self.filesystem.create_dir(self.path)
        self.filesystem.open_output_stream(f"{self.path}/{epoch:06d}-{writer}{_BROKEN}").close()

    def _files(self, ending: str) -> list[tuple[int, str, str]]:
        """Epoch, writer and path of each file, in the order in which they were written."""
        selector = pyarrow.fs.FileSelector(self.path, allow_not_found=True)
        found = []
        for info in self.filesystem.get_file_info(selector):
            if info.base_name.endswith(ending):
                epoch, writer = info.base_name.removesuffix(ending).split("-")[:2]
                found.append((int(epoch), writer, info.path))
        return sorted(found)


def _frames(data: bytes, path: str) -> Generator[Frame, None, bool]:
    """Frames of a file; returns whether it ends with a whole one."""
    at = 0
    while at < len(data):
        head = data[at : at + _HEAD.size]
        if len(head) == _HEAD.size:
            magic, length, crc = _HEAD.unpack(head)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(head) < _HEAD.size or magic != _MAGIC or zlib.crc32(body) != crc:
            logger.warning("%s is cut off after %d of %d bytes", path, at, len(data))
            return False
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            rows = reader.read_all()
        yield Frame(json.loads(rows.schema.metadata[_NOTES]), rows)
        at += _HEAD.size + length
    return True


def _encoded(notes: Mapping[str, Any], samples: Sequence[tuple[Sample, int]]) -> bytes:
    """A frame, of samples and how many of their tokens are known already."""
    rows = samples_table([[_from(sample, base)] for sample, base in samples])
    bases = pa.array([base for _, base in samples], pa.int32())
    rows = rows.append_column(FRAME_SCHEMA.field("base"), bases)
    rows = rows.replace_schema_metadata({_NOTES: json.dumps(notes)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    body = sink.getvalue()
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def _from(sample: Sample, num_tokens: int) -> Sample:
    """The sample with its tokens from a number on alone."""
    if not num_tokens:
        return sample
    segments: list[Segment] = []
    for segment in sample.segments:
        skipped = min(num_tokens, len(segment.token_ids))
        num_tokens -= skipped
        if skipped < len(segment.token_ids):
            segments.append(segment.beyond(skipped) if skipped else segment)
    return dataclasses.replace(sample, segments=tuple(segments))


@dataclass(slots=True)
class _Pending:
    """Notes that are not in a frame yet."""

    events: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, tuple[Sample, int]] = field(default_factory=dict)


class _Taken(NamedTuple):
    """A frame that is to be written."""

    epoch: int
    notes: dict[str, Any]
    samples: list[tuple[Sample, int]]


class Journal:
    """One side's end of the journal.

    Args:
        folder: Where it is; None: nothing is written.
        writer: The side.
        epoch: Number of the first epoch.
        header: What the run's samples are made with: a journal of others is not used.
        state: Figures of the moment, as JSON has them.
        gather_s: How long a write waits for more to come.
        known: Tokens of the samples that the run goes on with.
    """

    def __init__(
        self,
        folder: JournalFolder | None,
        writer: Writer,
        epoch: int = 0,
        *,
        header: Mapping[str, Any] | None = None,
        state: Callable[[], Mapping[str, Any]] = dict,
        gather_s: float = 0.0,
        known: Mapping[str, int] | None = None,
    ) -> None:
        self._folder = folder
        self._writer: Writer = writer
        self._header = dict(header or {})
        self._state = state
        self._gather_s = gather_s
        self._known = dict(known or {})
        """Tokens of each sample that are noted."""
        self._pending = _Pending()
        self._taken: list[_Taken] = []
        """Of epochs that have ended, and not yet written."""
        self.epoch = self._file_epoch = epoch
        self._part = 0
        self._is_broken = False
        self._failure: ResourceError | None = None
        self._writing: asyncio.Task[None] | None = None
        self._in_file = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._folder is not None

    def note(self, **event: Any) -> None:
        """Note what happened, as JSON has it."""
        if self.is_on:
            self._pending.events.append(event)

    def note_samples(self, group: Sequence[Sample], changed: Sample) -> None:
        """Note a sample as it is now, and at the first time the others of its group."""
        if not self.is_on:
            return
        is_new = changed.sample_id not in self._known
        for sample in group if is_new else ():
            self._note(sample)
        self._note(changed)

    def _note(self, sample: Sample) -> None:
        name, num_tokens = sample.sample_id, sample.num_tokens
        known = self._known.get(name, 0)
        base = known if num_tokens >= known else 0
        _, first = self._pending.samples.get(name, (sample, base))
        self._pending.samples[name] = (sample, min(first, base))
        # what an environment said before the first token gets the version of that
        self._known[name] = num_tokens if sample.num_generated else 0

    def num_noted(self, sample_id: str) -> int:
        """Tokens of a sample that are noted."""
        return self._known.get(sample_id, 0)

    def forget(self, group: Sequence[Sample]) -> None:
        """No more will be noted of these."""
        for sample in group:
            self._known.pop(sample.sample_id, None)

    def begin_epoch(self, epoch: int) -> None:
        """What is noted from now on follows the checkpoint that is taken at this moment."""
        if not self.is_on:
            return
        self._taken.append(self._take())
        self.epoch = epoch

    def soon(self) -> None:
        """Have what is noted written, without a wait."""
        if self.is_on and self._writing is None:
            self._writing = asyncio.create_task(self._write_soon(), name="journal")

    async def flush(self) -> None:
        """Wait until what is noted by now is written.

        Waits for: the file system. Unblocked by: its answer.

        Raises:
            ResourceError: If it is not, and who reads the journal cannot be told; if the run is
                another driver's now.
        """
        self.soon()
        if self._writing is not None:
            await asyncio.shield(self._writing)
        if self._failure is not None:
            raise self._failure

    async def _write_soon(self) -> None:
        """Write what was noted, a moment later.

        Waits for: who writes, then the file system. Unblocked by: its end; the file system's
        answer.
        """
        await asyncio.sleep(self._gather_s)
        async with self._in_file:
            self._writing = None
            taken, self._taken = self._taken, []
            await asyncio.to_thread(self._write, [*taken, self._take()])

    def _take(self) -> _Taken:
        state = dict(self._state())  # which may have more to note
        pending, self._pending = self._pending, _Pending()
        notes = {"events": pending.events, "state": state}
        return _Taken(self.epoch, notes, list(pending.samples.values()))

    def _write(self, taken: Sequence[_Taken]) -> None:
        assert self._folder is not None
        for epoch, notes, samples in taken:
            if epoch != self._file_epoch:
                self._file_epoch, self._part, self._is_broken = epoch, 0, False
            if self._is_broken:
                continue
            header = {} if self._part else {"header": self._header}
            try:
                data = _encoded(header | notes, samples)
                self._folder.append(epoch, self._writer, self._part, data)
            except FolderTakenError as error:
                self._failure = error
                return
            except Exception as error:  # noqa: BLE001  (a storage of fsspec has its own)
                self._break(epoch, error)
            self._part += 1

    def _break(self, epoch: int, error: Exception) -> None:
        """Write no more of an epoch, and say so to those who read it; where that cannot be said
        either, they would take it for whole, and `flush` raises from now on."""
        assert self._folder is not None
        self._is_broken = True
        path = self._folder.path
        try:
            self._folder.mark_broken(epoch, self._writer)
        except Exception as last:  # noqa: BLE001  (as above)
            self._failure = ResourceError(
                f"the journal in {path} cannot be written: {one_line(last)}; make room there or "
                "mend its file system, then go on with the run (--resume)"
            )
        logger.error(
            "the journal in %s stops until the next checkpoint; if rollout worker or buffer dies "
            "before that, the run ends; make room there, or mend what cannot be written: %s: %s",
            path,
            type(error).__name__,
            one_line(error),
            exc_info=None if isinstance(error, OSError) else error,
        )
