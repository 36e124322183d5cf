"""How long a run's checkpoints stay: a number of them, and an age.

Ray Train removes checkpoints, and knows a number alone: it reads ``num_to_keep`` each time that it
adds one to its list. `AgedCheckpoints` answers with how many of that list are young enough, so that
files, list and journal (`train.saving`) go the same way as without an age.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

import ray.train

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import one_line
from ray_apr.data.resumption import LIST_COPY_FILE, LIST_FILE, PROGRESS_FILE
from ray_apr.run.folder import CHECKPOINTS, CONFIG_FILE, absolute, object_or_empty

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0


def checkpoints_of(run_dir: Path) -> ray.train.Checkpoint:
    """The folder that has the checkpoints of a run, wherever it is, which the run folder says.

    Raises:
        OSError: If a storage does not answer.
    """
    uri = object_or_empty(run_dir / CONFIG_FILE).get(CHECKPOINTS)
    return ray.train.Checkpoint(absolute(str(run_dir)) if uri is None else uri)


def listed_checkpoints(storage: Any, folder: str) -> list[dict[str, Any]]:
    """Ray Train's list of a run's checkpoints, the oldest first; its copy where it was cut off.

    Args:
        storage: A `pyarrow.fs.FileSystem`.
        folder: Of the checkpoints, there.

    Raises:
        OSError: If there is none, or it cannot be read.
        ValueError: If it is no JSON, as one that was cut off.
        KeyError: If it is that of another version of Ray.
    """

    def read(name: str) -> list[dict[str, Any]]:
        with storage.open_input_file(f"{folder}/{name}") as file:
            listed: list[dict[str, Any]] = json.loads(file.read())["checkpoint_results"]
        # Ray Train's own order is by score, if there is one
        return sorted(listed, key=lambda result: (result.get("metrics") or {}).get("step", -1))

    try:
        return read(LIST_FILE)
    except ValueError:
        if not storage.get_file_info(f"{folder}/{LIST_COPY_FILE}").is_file:
            raise
        return read(LIST_COPY_FILE)


class AgedCheckpoints(ray.train.CheckpointConfig):
    """Ray Train's number of checkpoints to keep, lowered to those that are young enough.

    The age of a checkpoint is that of its `PROGRESS_FILE` in the storage. What the storage does not
    tell is young.

    Args:
        number: Checkpoints that stay at most, at least 1.
        hours: Greatest age of one that stays beside the newest.
        storage: Filesystem (of pyarrow) that has them.
        folder: In it, of the run: it has Ray Train's list.
    """

    def __init__(self, number: int, *, hours: float, storage: Any, folder: str) -> None:
        self._number = number
        self._hours = hours
        self._storage = storage
        self._folder = folder
        super().__init__(num_to_keep=number)

    @property
    def num_to_keep(self) -> int:
        """Checkpoints that stay, the one that is being added among them."""
        young = itertools.takewhile(lambda age_s: age_s <= self._hours * _HOUR_S, self._ages_s())
        return min(self._number, 1 + sum(1 for _ in young))

    @num_to_keep.setter
    def num_to_keep(self, number: int) -> None:
        self._number = number

    def _ages_s(self) -> list[float]:
        """Ages of the checkpoints in the list, in seconds, the newest first; of none, where the
        storage does not answer: 0 for as many as there may be."""
        try:
            listed = listed_checkpoints(self._storage, self._folder)
            names = [result["checkpoint_dir_name"] for result in reversed(listed)]
            files = [f"{self._folder}/{name}/{PROGRESS_FILE}" for name in names]
            infos = self._storage.get_file_info(files)
        except FileNotFoundError:
            return []  # the first one is being added
        except (OSError, ValueError, KeyError) as error:
            logger.warning("checkpoints do not go by age this time: %s", one_line(error))
            return [0.0] * self._number
        now = min(unix_s(), time.time())  # the storage's times go with a clock that is set
        return [0.0 if info.mtime_ns is None else now - info.mtime_ns / 1e9 for info in infos]
