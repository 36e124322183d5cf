"""The engine's end of a weight sync, inside vLLM's worker process.

Invariants:
    * Buckets arrive in the order of the plan that the sender computed from the same list.
    * After `receive_weights` the model computes as if it had been loaded from a checkpoint of these
      weights: where kernels keep what they made of them, it is reloaded layer by layer (`reload`).
    * On CPU the model is touched only once all buckets are there.
    * On GPUs buckets go through three staging buffers, and from there into the parameters while the
      next ones arrive. Storages stay where they are, as CUDA graphs demand.
    * Where a train worker shares the device, they are read from it, in the same way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ray.util.collective import types
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from ray_apr.exceptions import SYNC_BROKEN, SyncBrokenError, WeightSyncError
from ray_apr.serve.reload import check_kernels, needs_reload, reloading
from ray_apr.serve.replay import Copies, CopyRecorder, replay
from ray_apr.weights.collective import as_tensor, byte_buffer, join, register_backends
from ray_apr.weights.plan import Bucket, WeightGroup
from ray_apr.weights.shared import SHARED, Handle, device_key, opened

logger = init_logger("vllm.ray_apr")
"""Under vLLM's, whose settings it has."""

_NUM_STAGES = 3
"""Staging buffers on a GPU: while one is loaded, two arrive."""


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Which group to join, and as whom."""

    group: dict[str, Any]
    first_rank: int
    """Rank of the replica's first worker."""


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    """One whole set of weights."""

    policy_version: int
    handles: dict[str, list[Handle]] | None = None
    """Where they are to be read, by device; None receives them."""


class WeightReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Receives buckets by collective broadcast and loads them into the model."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    _collective: Any = None
    _reloads: bool
    """Whether the layers process their weights, and have to do so again."""
    _copies: dict[int, Copies | None]
    """Of each bucket that was loaded once; None where a replay would not do."""
    _stages: list[torch.Tensor]
    _stream: torch.cuda.Stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register_backends()  # here: the engine stops for what forming a group takes

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Join the group; waits for all members."""
        self.shutdown()
        group = WeightGroup.from_dict(init_info.group)
        check_kernels(self.model, self.device)  # first: nobody meets for a model that is refused
        if group.backend != SHARED:
            self._collective = join(group, init_info.first_rank + get_tensor_model_parallel_rank())
        self._reloads = needs_reload(self.model, self.device)
        self._buckets = group.buckets()
        self._timeout_s = group.timeout_s
        self._copies = {}
        if self.device.type == "cuda":
            sizes = [b.num_bytes for b in self._buckets]
            stages = [sizes[stage::_NUM_STAGES] for stage in range(_NUM_STAGES)]
            self._stages = [byte_buffer(max(s, default=0), self.device) for s in stages]
            self._stream = torch.cuda.Stream(self.device)

    def start_weight_update(self) -> None:
        """Nothing to prepare: `receive_weights` does the whole of an update."""

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Take all buckets of one version.

        Raises:
            SyncBrokenError: If the group was not joined, or the sender is gone.
            WeightSyncError: If a parameter got no weights.
        """
        if update_info.handles is not None:
            self._read_shared(update_info.handles)
            return
        if self._collective is None:
            raise SyncBrokenError(f"{SYNC_BROKEN}: this engine worker is in no weight group")
        options = types.BroadcastOptions()
        options.root_rank, options.root_tensor = 0, 0
        deadline = time.monotonic() + self._timeout_s  # of all buckets: a sync ends by its limit
        try:
            if self.device.type == "cpu":
                self._receive_on_cpu(options, deadline)
            else:
                self._receive_on_gpu(options, deadline)
        except WeightSyncError:  # they all came
            raise
        except RuntimeError as error:
            if self.device.type != "cpu":
                self.shutdown()  # an NCCL group that broke off would only hang
            raise SyncBrokenError(
                f"{SYNC_BROKEN} at version {update_info.policy_version}: {error}"
            ) from error

    def _read_shared(self, handles: Mapping[str, list[Handle]]) -> None:
        """Load what the train worker on this device has gathered.

        Raises:
            WeightSyncError: If there is none.
        """
        key = device_key(self.device)
        if key not in handles:
            raise WeightSyncError(
                f"no train worker shares {key} with this engine worker; they are on "
                f"{', '.join(handles)}. Placement colocated needs a cluster with just as many free "
                "GPUs as train workers"
            )
        with contextlib.ExitStack() as stack:
            buffers = [stack.enter_context(opened(h, self.device)) for h in handles[key]]
            if self.device.type == "cpu":
                pairs = zip(self._buckets, buffers, strict=True)
                self._reload([view for pair in pairs for view in _named_views(*pair)])
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with self._loading() as load:
                for number, buffer in enumerate(buffers):
                    self._buffer_of(number).copy_(buffer)
                    load(number)

    def _receive_on_cpu(self, options: types.BroadcastOptions, deadline: float) -> None:
        """Take all buckets, then load: kernels keep packed copies, which a plain load would not
        renew."""
        weights: list[tuple[str, torch.Tensor]] = []
        for bucket in self._buckets:
            options.timeout_ms = max(1, int(1000 * (deadline - time.monotonic())))
            buffer = byte_buffer(bucket.num_bytes, self.device)
            self._collective.broadcast([buffer], options)
            weights += _named_views(bucket, buffer)
        self._reload(weights)

    def _receive_on_gpu(self, options: types.BroadcastOptions, deadline: float) -> None:
        """Load each bucket while the next two arrive."""
        import cupy

        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        arrived: list[torch.cuda.Event] = []

        def ask_for(number: int) -> None:
            # Ray's stream waits for CuPy's current one: here, until the staging buffer is free
            with cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index):
                self._collective.broadcast([self._buffer_of(number)], options)
            event = torch.cuda.Event(enable_timing=True)
            arrived.append(self._collective.stream.record_event(event))

        for number in range(min(_NUM_STAGES, len(self._buckets))):
            ask_for(number)
        with self._loading() as load:
            for number in range(len(self._buckets)):
                if self._reloads:
                    # loading waits for the device, which would wait for a broadcast without end
                    self._collective.wait(deadline)
                stream.wait_event(arrived[number])
                load(number)
                if number + _NUM_STAGES < len(self._buckets):
                    ask_for(number + _NUM_STAGES)
        self._collective.wait(deadline)
        begin, end = arrived[0], stream.record_event(torch.cuda.Event(enable_timing=True))
        end.synchronize()
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        logger.info(
            "%d bytes of weights: loaded %.2f ms after the first of %d buckets was there",
            num_bytes,
            begin.elapsed_time(end),
            len(self._buckets),
        )

    def _buffer_of(self, number: int) -> torch.Tensor:
        """Where a bucket is staged."""
        stage = self._stages[number % _NUM_STAGES]
        return stage[: self._buckets[number].num_bytes]

    @contextlib.contextmanager
    def _loading(self) -> Iterator[Callable[[int], None]]:
        """How to load the staged bucket of a number; all of it on the stream of the copies."""
        with torch.cuda.stream(self._stream):
            if not self._reloads:
                yield self._load
                return
            with reloading(self.model, self.model_config, self.device) as loaded:

                def load(number: int) -> None:
                    # a layer takes its weights once all are there; by then others are staged
                    views = _named_views(self._buckets[number], self._buffer_of(number).clone())
                    loaded.update(self.model.load_weights(views) or ())

                yield load

    def _load(self, number: int) -> None:
        """Load a bucket: by the copies that loading it took the first time, where that is all."""
        copies = self._copies.get(number)
        if copies is not None:
            replay(copies)
            return
        buffer = self._buffer_of(number)
        views = _named_views(self._buckets[number], buffer)
        if number in self._copies:  # a loader that computes
            self.model.load_weights(views)
            return
        owned = (*self.model.parameters(), *self.model.buffers())
        with CopyRecorder(buffer, owned) as recorder:
            self.model.load_weights(views)
        self._copies[number] = recorder.copies

    def _reload(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load all weights and let the layers pack them; even on error every layer is whole."""
        with reloading(self.model, self.model_config, self.device) as loaded:
            loaded.update(self.model.load_weights(weights) or ())

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the group."""
        if self._collective is not None:
            self._collective.destroy_group()
            self._collective = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used: `weights.sender` sends. vLLM before 0.32 demands that the method exists."""
        raise NotImplementedError("weights are sent by ray_apr.weights.sender.WeightSender")


def _named_views(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A bucket's parameters, by name."""
    return [
        (s.param.name, as_tensor(buffer, s.offset, s.param.shape, s.param.dtype))
        for s in bucket.slices
    ]
