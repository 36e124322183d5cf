"""Checksums of the files that train workers write, so that other bytes are not read as weights.

PyTorch reads a shard whose bytes have changed on the disk without a word.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from ray_apr.core.exceptions import ConfigError

_FILE = "checksums-{}.json"
_CHUNK_BYTES = 1 << 22
_REMEDY = (
    "is not what was written: its size or checksum differs; mend the disk or the copy, or begin a "
    "new run with the checkpoint before it (checkpoint=PATH in Python)"
)


def write_checksums(folder: Path, rank: int, files: Iterable[Path]) -> None:
    """Write size and CRC-32 of files of the folder into a file of this rank."""
    found = {file.name: _checksum(file) for file in files}
    (folder / _FILE.format(rank)).write_text(json.dumps(found), encoding="utf-8")


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
    for name in sorted(written)[part::num_parts]:
        file = folder / name
        if not file.is_file() or _checksum(file) != written[name]:
            raise ConfigError("checkpoint", str(file), _REMEDY)


def _checksum(file: Path) -> list[int]:
    """Size in bytes, and CRC-32."""
    size = value = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return [size, value]
