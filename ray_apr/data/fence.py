"""Who may write into the folders of a run: the driver that took them last.

Locks of a file system (`run.resume.hold_folder`) do not suffice: object stores have none, and that
of a node which is cut off is given to the next one. So each start of a run leaves its name in a
file, and who writes for it looks there: each `LOOK_S` before rows and frames, and before each
checkpoint goes into the list.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pyarrow.fs

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import FolderTakenError, ResourceError, one_line

OWNER_FILE = "owner.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOOK_S = 2.0
LEFT_S = LOOK_S + 1.0
"""After so long nothing comes any more of who has lost a folder: its last write began before it
looked again."""
_SHARE = 0.01
"""Of the time, that looks take."""


class Fence:
    """Of one folder, for one start of a run; goes to other processes.

    Args:
        owner: Name of the start.
        folder: Its path.
        filesystem: Of pyarrow, that has it.
    """

    def __init__(
        self, owner: str, folder: str, filesystem: pyarrow.fs.FileSystem | None = None
    ) -> None:
        self._owner = owner
        self._folder = folder
        self._filesystem = filesystem or pyarrow.fs.LocalFileSystem()
        self._file = f"{folder}/{OWNER_FILE}"
        self._next_look = -math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the moment, which is of this process's clock."""
        return Fence, (self._owner, self._folder, self._filesystem)

    def take(self) -> bool:
        """Have the folder be this start's: whoever had it writes nothing there after `LEFT_S`.

        Returns:
            Whether another machine had it, of which nobody knows what still runs there.

        Raises:
            ResourceError: If that cannot be written.
        """
        name = {"host": socket.gethostname(), "pid": os.getpid(), "time_s": unix_s()}
        name["machine"] = _machine()
        before = self._found()
        try:
            self._filesystem.create_dir(self._folder)
            with self._filesystem.open_output_stream(f"{self._file}.new") as file:
                file.write(json.dumps({"owner": self._owner, **name}).encode())
            self._filesystem.move(f"{self._file}.new", self._file)
        except OSError as error:
            reason = f"{self._file} cannot be written: {one_line(error)}; mend its storage"
            raise ResourceError(reason) from error
        return bool(before) and before.get("machine") != name["machine"]

    def check(self) -> None:
        """Look whose the folder is; what does not answer says nothing.

        Raises:
            FolderTakenError: If another start has taken it.
        """
        began = time.monotonic()
        found = self._found()
        if found and found["owner"] != self._owner:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["time_s"]))
            raise FolderTakenError(
                f"{self._folder} was taken over at {when} by process {found['pid']} on host "
                f"{found['host']}, which goes on with this run; this one was cut off or suspended "
                "meanwhile, and writes nothing there any more: leave the run to that one"
            )
        now = time.monotonic()
        self._next_look = now + min(LOOK_S, (now - began) / _SHARE)

    def check_soon(self) -> None:
        """The same, unless that would cost more than `_SHARE` of the time since the last look, and
        `LOOK_S` have not gone by."""
        if time.monotonic() >= self._next_look:
            self.check()

    def _found(self) -> dict[str, Any]:
        """Whose the folder is; nothing where that cannot be read."""
        try:
            with self._filesystem.open_input_file(self._file) as file:
                found: dict[str, Any] = json.loads(file.read())
        except (OSError, ValueError):
            return {}
        return found


def _machine() -> str:
    """This machine since its start, its containers included; without Linux the host's name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
