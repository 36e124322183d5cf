"""What an engine does with weights that arrive, inside vLLM's worker process.

Invariants:
    * After `receive_weights` the model computes as if it had been loaded from a checkpoint of these
      weights: where kernels keep what they made of them, it is reloaded layer by layer (`reload`).
    * On CPU the model is touched only once all weights are there.
    * On GPUs each parcel is loaded while the next ones arrive. Storages stay where they are, as
      CUDA graphs demand.
    * How they arrive is known to the `WeightInbox` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from ray_apr.core.exceptions import SYNC_BROKEN, SyncBrokenError, WeightSyncError, raised_at
from ray_apr.core.messages import WeightGroup
from ray_apr.serve.vllm.reload import (
    check_kernels,
    check_loaded,
    needs_reload,
    parameters_to_load,
    reloading,
)
from ray_apr.serve.vllm.replay import Copies, CopyRecorder, replay
from ray_apr.weights.inbox import WeightInbox
from ray_apr.weights.transports.base import Parcel
from ray_apr.weights.transports.nccl import register_nccl

logger = init_logger("vllm.ray_apr")
"""Under vLLM's, whose settings it has."""


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Which group to join (a `WeightGroup`), and as whom."""

    endpoint: bytes
    timeout_s: float
    first_rank: int
    """Rank of the replica's first worker."""


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    """One whole set of weights."""

    policy_version: int
    notice: bytes = b""
    """What the sender says of them; nothing if it is empty."""


class WeightReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Loads what arrives into the model."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    _inbox: WeightInbox | None = None
    _reloads: bool
    """Whether the layers process their weights, and have to do so again."""
    _wanted: set[str]
    """Parameters that have to be loaded, where no reload looks after them."""
    _copies: dict[int, tuple[Copies | None, set[str]]]
    """Of each parcel that was loaded once, with the names of what was loaded; None where a replay
    would not do."""
    _stream: torch.cuda.Stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.device.type == "cuda":
            register_nccl()  # here: the engine stops for what forming a group takes

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Join the group; waits for all members."""
        self.shutdown()
        check_kernels(self.model, self.device)  # first: nobody meets for a model that is refused
        self._reloads = needs_reload(self.model, self.device)
        self._copies, self._wanted = {}, parameters_to_load(self.model)
        self._inbox = WeightInbox(self.device, loads_wait=self._reloads)
        group = WeightGroup(timeout_s=init_info.timeout_s, endpoint=init_info.endpoint)
        self._inbox.join(group, init_info.first_rank + get_tensor_model_parallel_rank())
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)

    def start_weight_update(self) -> None:
        """Nothing to prepare: `receive_weights` does the whole of an update."""

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Take all weights of one version.

        Raises:
            SyncBrokenError: If the group was not joined, or the sender is gone.
            WeightSyncError: If a parameter got no weights, or a transport or a loader failed of
                something that another try does not mend.
        """
        if self._inbox is None:
            raise SyncBrokenError(f"{SYNC_BROKEN}: this engine worker is in no weight group")
        parcels = self._inbox.parcels(update_info.notice)
        try:
            with contextlib.closing(parcels):  # also if loading fails: a transport may hold memory
                if self.device.type == "cpu":
                    self._load_on_cpu(parcels)
                else:
                    self._load_on_gpu(parcels)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            if self.device.type != "cpu":
                self.shutdown()  # an NCCL group that broke off would only hang
            raise SyncBrokenError(
                f"{SYNC_BROKEN} at version {update_info.policy_version}: {error}"
            ) from error
        except Exception as error:  # the asserts of vLLM's loaders say nothing
            where, code = raised_at(error)
            raise WeightSyncError(
                f"weights of version {update_info.policy_version} were not received or loaded, by "
                f"{where} ({code}): {type(error).__name__}: {error}"
            ) from error

    def _load_on_cpu(self, parcels: Iterator[Parcel]) -> None:
        """Take all parcels, then load: kernels keep packed copies, which a plain load would not
        renew; even on error every layer is whole."""
        weights = [named for parcel in list(parcels) for named in parcel.tensors]
        with reloading(self.model, self.model_config, self.device) as loaded:
            loaded.update(self.model.load_weights(weights) or ())

    def _load_on_gpu(self, parcels: Iterator[Parcel]) -> None:
        """Load each parcel while the next ones arrive."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begin: torch.cuda.Event | None = None
        num_parcels = num_bytes = 0
        with self._loading() as load:
            for parcel in parcels:
                if begin is None:
                    begin = stream.record_event(torch.cuda.Event(enable_timing=True))
                load(num_parcels, parcel)
                num_parcels += 1
                num_bytes += parcel.num_bytes
        end = stream.record_event(torch.cuda.Event(enable_timing=True))
        end.synchronize()
        if begin is not None:
            logger.info(
                "%d bytes of weights: loaded %.2f ms after the first of %d buckets was there",
                num_bytes,
                begin.elapsed_time(end),
                num_parcels,
            )

    @contextlib.contextmanager
    def _loading(self) -> Iterator[Callable[[int, Parcel], None]]:
        """How to load the parcel of a number; all of it on the stream of the copies."""
        with torch.cuda.stream(self._stream):
            if not self._reloads:
                names: set[str] = set()
                yield lambda number, parcel: names.update(self._load(number, parcel))
                check_loaded(self.model, self._wanted, names)
                return
            with reloading(self.model, self.model_config, self.device) as loaded:

                def load(number: int, parcel: Parcel) -> None:
                    del number
                    # a layer takes its weights once all are there; by then others are staged
                    loaded.update(self.model.load_weights(parcel.kept().tensors) or ())

                yield load

    def _load(self, number: int, parcel: Parcel) -> set[str]:
        """Load a parcel: by the copies that loading it took the first time, where that is all.

        Returns:
            Names of the parameters that it has loaded.
        """
        known = parcel.staged is not None and self._copies.get(number)
        if known and known[0] is not None:
            replay(known[0])
            return known[1]
        if known or parcel.staged is None:  # a loader that computes, or other memory each time
            return set(self.model.load_weights(parcel.tensors) or ())
        owned = (*self.model.parameters(), *self.model.buffers())
        with CopyRecorder(parcel.staged, owned) as recorder:
            names = set(self.model.load_weights(parcel.tensors) or ())
        self._copies[number] = recorder.copies, names
        return names

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the group."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used: `weights.transports` send. vLLM before 0.32 demands that the method exists."""
        raise NotImplementedError("weights are sent by a ray_apr.weights.transports sender")
