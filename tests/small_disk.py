"""A small disk of its own, which is filled to the brim."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoDiskError(Exception):
    """This machine cannot have such a disk; the reason."""


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount a disk of so many bytes, which is in memory, on a folder.

    Raises:
        NoDiskError: If that cannot be done here.
    """
    if os.geteuid() != 0:
        raise NoDiskError("only root mounts a file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise NoDiskError("no tmpfs can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path, left_bytes: int) -> None:
    """Take all room of a file's disk but for so many bytes, which are whole pages."""
    with file.open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError as full:
            assert full.errno == errno.ENOSPC, full
        ballast.truncate(ballast.tell() - left_bytes)
