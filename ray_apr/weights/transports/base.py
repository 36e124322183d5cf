"""What a way for weights to travel consists of: an endpoint, a sender and a receiver.

    train worker, every rank        rank 0                        each engine worker
    gather ────────────────────► open ─────── Endpoint ────────► Endpoint.join ─► Receiver
                                 connect
                                 prepare ──── notice ──────────► Receiver.receive
                                 deliver ════ weights ═════════►  └ Parcel by Parcel
                                 release ◄────────────────────── all have them

Invariants, which every transport keeps:
    * What is delivered is what `gather` saw, also the second time: a sync that breaks off is tried
      again from `prepare` on, as a rule with a new endpoint, until `release`.
    * No wait is longer than the endpoint's limit. What another try may mend is a `SyncBrokenError`,
      or in an engine worker an `OSError` or a `RuntimeError`; any other error ends the run.
    * After `release` nothing of the weights is left; the transports of this package leave nothing
      behind when a process dies, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.weights.buffers import named_views
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.plan import Bucket

NEEDS_CUPY = "install ray_apr[gpu], or CuPy 14 or later for your CUDA"
"""Remedy where weights cannot travel between GPUs or be shared on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An engine worker that is to receive weights."""

    rank: int
    """From 1 on, over the workers of all engines; the sender has 0."""
    device: torch.device
    """Where it receives: the CPU where the trainer is on CPU, else the GPU of its model."""
    loads_wait: bool = False
    """Whether loading waits for the device: on a GPU a parcel has to be there when it is given."""


class Parcel:
    """Some of the weights.

    Args:
        tensors: Whole tensors, each by its name in the checkpoint, on any device; they are to stay
            as they are until the next `receive` or `close`: engines may load after the last parcel.
    """

    staged: torch.Tensor | None = None
    """The buffer that this parcel lies in at each sync, the same parcel in the same place; None if
    it lies elsewhere each time."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = list(tensors)

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors by name."""
        return self._tensors

    @property
    def num_bytes(self) -> int:
        """Size of all."""
        return sum(tensor.nbytes for _, tensor in self._tensors)

    def kept(self) -> Parcel:
        """The same in memory that stays as it is until the last parcel has been given."""
        return self


class BucketParcel(Parcel):
    """The tensors of a bucket.

    Args:
        bucket: How they lie in the buffer.
        buffer: Theirs.
        is_staged: Whether the next parcels take the buffer's place.
    """

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, *, is_staged: bool = False) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self.staged = buffer if is_staged else None

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Views of the buffer; made when asked for, as thousands take their time."""
        return named_views(self._bucket, self._buffer)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._bucket.num_bytes

    def kept(self) -> Parcel:
        """With a copy of a staging buffer."""
        return self if self.staged is None else BucketParcel(self._bucket, self._buffer.clone())


class Receiver(Protocol):
    """The end of one engine worker. Its calls block."""

    def receive(self, notice: Any) -> Iterator[Parcel]:
        """Give all weights of one version, parcel by parcel; on a GPU for the current stream.

        Args:
            notice: What the sender's `prepare` returned.

        Raises:
            WeightSyncError: If they cannot be had.
        """
        ...

    def close(self) -> None:
        """Leave; called before the next endpoint is joined, after an error, or not at all."""
        ...


class Endpoint(Protocol):
    """What engines need to know to take part; a frozen value, which is pickled."""

    def join(self, member: Member) -> Receiver:
        """Take part, in an engine worker; may wait for the others.

        Raises:
            SyncBrokenError: If they do not come in time.
        """
        ...


def _never() -> bool:
    return False


class WeightSender:
    """The end of a train worker; every rank has one. A transport is a subclass of this.

    One method runs at a time, but `connect`, `prepare`, `deliver` and `release` are called by
    another thread than the rest where syncs overlap with training.

    Args:
        weights: Those of the model.
    """

    holds_device = False
    """Whether what was gathered takes memory that engines want back: they go on after `release`
    then, and otherwise each one as soon as it has its weights."""

    def __init__(self, weights: GatheredWeights) -> None:
        self.weights = weights

    @property
    def has_weights(self) -> bool:
        """Whether rank 0 could deliver (again)."""
        return bool(self.weights.staged)

    def gather(self) -> None:
        """Copy the current weights; a collective of all train workers."""
        self.weights.gather()

    def open(self, num_engine_workers: int, *, host: str, timeout_s: float) -> Endpoint:
        """Describe where the engine workers of the next syncs get their weights, on rank 0.

        Args:
            num_engine_workers: Replicas x tensor-parallel size.
            host: Address of this node.
            timeout_s: Limit for all to come, and later for one sync.
        """
        raise NotImplementedError

    def connect(self, endpoint: Any, is_hopeless: Callable[[], bool] = _never) -> None:
        """Meet the engine workers, on rank 0, while they `join`; nothing if nobody has to meet.

        Args:
            endpoint: What `open` returned.
            is_hopeless: Says that one of them will not come; asked while this waits.

        Raises:
            SyncBrokenError: If they do not come in time.
        """

    def prepare(self) -> Any:
        """Make ready what engines read by themselves, on rank 0, before they are paused.

        Returns:
            What the receivers are told, a value that can be pickled.
        """
        return None

    def deliver(self) -> None:
        """Send what was gathered, on rank 0, while the engines receive; it stays until `release`.

        Raises:
            SyncBrokenError: If that broke off.
            WeightSyncError: If nothing was gathered.
        """
        self.check_gathered()

    def release(self) -> None:
        """Free what was gathered, as all engines have it; may be called again.

        Other ranks than 0 call it at once: where engines read from them, it waits for rank 0.
        """
        self.weights.drop()

    def close(self) -> None:
        """Leave the engine workers, on every rank."""
        self.release()

    def check_gathered(self) -> None:
        """Raise `WeightSyncError` unless there is something to deliver."""
        if not self.has_weights:
            raise WeightSyncError("gather() comes before deliver()")
