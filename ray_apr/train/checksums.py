"""Checksums of the files of a checkpoint, so that other bytes are not read as weights or figures.

PyTorch reads a shard whose bytes have changed on the disk without a word, and a number in which one
digit has is JSON.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from ray_apr.core.exceptions import ConfigError

NUM_THREADS = 4
"""Of a rank that writes a checkpoint, or reads one: as many files at a time."""
_FILE = "checksums-{}.json"
OF_ROLLOUT = "rollout"
"""In the place of a rank: of the file with which the rollout side goes on."""
_CHUNK_BYTES = 1 << 22
Checksums: TypeAlias = dict[str, list[int] | None]
"""Size and CRC-32 of each file by its name; None of one that is not there."""
_ELSE = "or begin a new run with the checkpoint before it (run.checkpoint; in Python checkpoint)"
_REMEDY = (
    "is not what was written: its size or checksum differs; mend the disk or the copy, " + _ELSE
)
_UNKNOWN = (
    "has no checksum, although others have: a checksums-RANK.json is gone; put it back, " + _ELSE
)


def write_checksums(folder: Path, part: int | str, found: Checksums) -> None:
    """Write those of files of the folder into a file of this rank, or `OF_ROLLOUT`."""
    (folder / _FILE.format(part)).write_text(json.dumps(found), encoding="utf-8")


def check_read(checkpoint: Any, *names: str) -> None:
    """Check files that the driver reads, wherever the checkpoint is; as `check_files`.

    Args:
        checkpoint: A `ray.train.Checkpoint`.
        names: Of files that are there, of rank 0 or the rollout side.

    Raises:
        ConfigError: Of the first file that is not what was written.
        OSError: If one cannot be read.
    """
    written: dict[str, list[int]] = {}

    def read(name: str) -> bytes:
        with checkpoint.filesystem.open_input_file(f"{checkpoint.path}/{name}") as file:
            return bytes(file.read())

    for part in (0, OF_ROLLOUT):
        name = _FILE.format(part)
        try:
            written |= json.loads(read(name))
        except FileNotFoundError:  # of an older version
            continue
        except ValueError as error:
            raise ConfigError("checkpoint", f"{checkpoint.path}/{name}", _REMEDY) from error
    for name in names:
        content = read(name)
        if written.get(name) not in (None, [len(content), zlib.crc32(content)]):
            raise ConfigError("checkpoint", f"{checkpoint.path}/{name}", _REMEDY)


def check_files(folder: Path, part: int = 0, num_parts: int = 1) -> None:
    """Check that files are what was written; of a checkpoint without checksums none is looked at.

    Args:
        folder: Of the checkpoint.
        part: Which of the files, where several processes share them.
        num_parts: Number of these processes.

    Raises:
        ConfigError: Of the first file that is not.
    """
    written: dict[str, list[int]] = {}
    for file in folder.glob(_FILE.format("*")):
        try:
            written |= json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # no JSON, or no text
            raise ConfigError("checkpoint", str(file), _REMEDY) from error
    if written and (others := sorted({f.name for f in folder.glob("__*")} - written.keys())):
        raise ConfigError("checkpoint", str(folder / others[0]), _UNKNOWN)
    names = sorted(written)[part::num_parts]
    found = checksums(folder / name for name in names)
    for name in names:
        if found[name] != written[name]:
            raise ConfigError("checkpoint", str(folder / name), _REMEDY)


def checksums(files: Iterable[Path]) -> Checksums:
    """Read files for theirs."""
    files = list(files)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return dict(zip((file.name for file in files), pool.map(_checksum, files), strict=True))


def _checksum(file: Path) -> list[int] | None:
    """Size in bytes, and CRC-32."""
    if not file.is_file():
        return None
    size = value = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return [size, value]
