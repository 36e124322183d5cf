"""Weights that travel as files: each sync writes one in a folder that all nodes see.

    python -m ray_apr train examples/arithmetic/quickstart.yaml \
        --set train.weight_transport=../transports/folder.py:FolderSender

The folder is that of the environment variable APR_WEIGHT_FOLDER, which train workers on several
nodes have to share with the engines, or in Python
``TrainConfig(weight_transport=functools.partial(FolderSender, folder="/shared"))``. What runs where
is in docs/transports.md.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from ray_apr.weights.transports.base import Parcel, WeightSender


class FolderReceiver:
    """In an engine worker: reads the file that the sender names."""

    def receive(self, notice: str):
        """All tensors of the file, in one parcel."""
        yield Parcel(load_file(notice).items())

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class FolderEndpoint:
    """What engine workers are sent; there is nobody to meet."""

    def join(self, member) -> FolderReceiver:
        """Make ready to read."""
        return FolderReceiver()


class FolderSender(WeightSender):
    """In a train worker.

    Args:
        weights: Those of its model.
        folder: Where the files are written; None: see above, or that of temporary files.
    """

    def __init__(self, weights, folder: str | None = None) -> None:
        super().__init__(weights)
        self._folder = folder or os.environ.get("APR_WEIGHT_FOLDER")
        self._file: Path | None = None

    def open(self, num_engine_workers: int, *, host: str, timeout_s: float) -> FolderEndpoint:
        """Rank 0, once for each set of engines."""
        return FolderEndpoint()

    def prepare(self) -> str:
        """Rank 0, before the engines are paused: write what was gathered."""
        self.check_gathered()
        if self._file is None:
            folder = tempfile.mkdtemp(prefix="apr-weights-", dir=self._folder)
            self._file = Path(folder, "model.safetensors")
        save_file(dict(self.weights.named()), self._file)
        return str(self._file)

    def release(self) -> None:
        """Every rank, once all engines have read it."""
        super().release()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Every rank, at the end of the run."""
        super().close()
        if self._file is not None:
            self._file.parent.rmdir()
            self._file = None
