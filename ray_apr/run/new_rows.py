"""Rows of a run folder as they come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.run.folder import object_of


class NewRows:
    """New rows of a file, of which the begin may be written anew.

    Args:
        file: JSON lines.
        key: Name of a number that grows from row to row; None: rows have none, and those of a file
            that is written anew come again.
        last: Of the last row that is known.
    """

    def __init__(self, file: Path, key: str | None, last: int = -1) -> None:
        self._file = file
        self._key = key
        self._inode = self._offset = self._num_lines = 0
        self.last = last

    def new(self) -> list[dict[str, Any]]:
        """Whole rows beyond the last one.

        Raises:
            ConfigError: If a line is no JSON; the rows before it were returned, and the next call
                goes on after it.
        """
        if not self._file.is_file():
            return []
        found: list[dict[str, Any]] = []
        with self._file.open("rb") as lines:
            inode = os.fstat(lines.fileno()).st_ino
            if inode != self._inode or lines.seek(0, os.SEEK_END) < self._offset:
                self._inode, self._offset, self._num_lines = inode, 0, 0
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    row = object_of(line, self._file, self._num_lines + 1)
                except ConfigError:
                    if found:
                        break
                    self._pass(line)
                    raise
                self._pass(line)
                if self._key is None:
                    found.append(row)
                elif row[self._key] > self.last:
                    found.append(row)
                    self.last = row[self._key]
        return found

    def _pass(self, line: bytes) -> None:
        self._offset += len(line)
        self._num_lines += 1
