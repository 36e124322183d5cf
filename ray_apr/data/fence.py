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
from typing import Any

import pyarrow.fs

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import FolderTakenError, ResourceError, one_line

OWNER_FILE = "owner.json"
LOOK_S = 2.0


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
        self._looked_at = -math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the moment, which is of this process's clock."""
        return Fence, (self._owner, self._folder, self._filesystem)

    def take(self) -> None:
        """Have the folder be this start's: whoever had it writes nothing there any more.

        Raises:
            ResourceError: If that cannot be written.
        """
        name = {"host": socket.gethostname(), "pid": os.getpid(), "time_s": unix_s()}
        try:
            self._filesystem.create_dir(self._folder)
            with self._filesystem.open_output_stream(f"{self._file}.new") as file:
                file.write(json.dumps({"owner": self._owner, **name}).encode())
            self._filesystem.move(f"{self._file}.new", self._file)
        except OSError as error:
            reason = f"{self._file} cannot be written: {one_line(error)}; mend its storage"
            raise ResourceError(reason) from error

    def check(self) -> None:
        """Look whose the folder is; what does not answer says nothing.

        Raises:
            FolderTakenError: If another start has taken it.
        """
        try:
            with self._filesystem.open_input_file(self._file) as file:
                found = json.loads(file.read())
        except (OSError, ValueError):
            found = {"owner": self._owner}
        if found["owner"] != self._owner:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["time_s"]))
            raise FolderTakenError(
                f"{self._folder} was taken over at {when} by process {found['pid']} on host "
                f"{found['host']}, which goes on with this run; this one was cut off or suspended "
                "meanwhile, and writes nothing there any more: leave the run to that one"
            )
        self._looked_at = time.monotonic()

    def check_soon(self) -> None:
        """The same, unless that was less than `LOOK_S` ago."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self.check()
