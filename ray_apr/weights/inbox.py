"""An engine worker's end of weight syncs, whatever they travel by.

vLLM's workers load what comes out of it (`serve/vllm/receiver.py`); an engine of another kind takes
the tensors from `WeightInbox.receive`.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterator

import torch

from ray_apr.core.exceptions import SYNC_BROKEN, APRError, SyncBrokenError, WeightSyncError
from ray_apr.core.messages import WeightGroup
from ray_apr.weights.transports.base import Member, Parcel, Receiver


class WeightInbox:
    """One member of the weight group. Its calls block: run them in a thread.

    Args:
        device: Where the weights are received: "cpu" where the trainer is on CPU, else this
            member's GPU.
        loads_wait: Whether loading waits for the device; see `Member`.
    """

    def __init__(self, device: torch.device | str = "cpu", *, loads_wait: bool = True) -> None:
        self._device = torch.device(device)
        self._loads_wait = loads_wait
        self._receiver: Receiver | None = None

    def join(self, group: WeightGroup, rank: int) -> None:
        """Join a group, and leave the one before; may wait for all members.

        Args:
            group: What `Engine.join_weight_group` was given.
            rank: Of this member.

        Raises:
            SyncBrokenError: If they do not meet in time.
            WeightSyncError: If this process does not know the transport.
        """
        self.close()
        member = Member(rank=rank, device=self._device, loads_wait=self._loads_wait)
        try:
            endpoint = pickle.loads(group.endpoint)
        except (ImportError, AttributeError) as error:
            raise WeightSyncError(
                f"an engine worker cannot import the weight transport: {error}; install its module "
                "on every node, or name it as file.py:Class (train.weight_transport)"
            ) from error
        try:
            self._receiver = endpoint.join(member)
        except APRError:
            raise
        except (RuntimeError, OSError) as error:
            raise SyncBrokenError(f"{SYNC_BROKEN}: rank {rank} could not join: {error}") from error

    def receive(self, notice: bytes = b"") -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of one sync, each by its name in a checkpoint; all have to be taken.

        A tensor may lie in a buffer that is free again with the last one of its parcel.

        Args:
            notice: What `Engine.receive_weights` was given.

        Raises:
            SyncBrokenError: If no group was joined, or the sender is gone.
        """
        for parcel in self.parcels(notice):
            yield from parcel.tensors

    def parcels(self, notice: bytes = b"") -> Generator[Parcel, None, None]:
        """The same, as the transport gives them. After an error the group is left."""
        if self._receiver is None:
            raise SyncBrokenError(f"{SYNC_BROKEN}: this engine worker is in no weight group")
        try:
            yield from self._receiver.receive(pickle.loads(notice) if notice else None)
        except WeightSyncError:
            raise
        except (RuntimeError, OSError) as error:
            self.close()
            raise SyncBrokenError(f"{SYNC_BROKEN}: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
