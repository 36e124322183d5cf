"""The engine's end of a weight sync, inside vLLM's worker process.

Invariants:
    * Buckets arrive in the order of the plan that the sender computed from the same list.
    * After `receive_weights` the model computes as if it had been loaded from a checkpoint of these
      weights; on CPU that takes a new packing of the embeddings, too.
    * On CPU the model is touched only once all buckets are there: vLLM's layerwise reload, begun
      and not ended, would spoil every later one.
"""

from __future__ import annotations

import time
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

from ray_apr.exceptions import WeightSyncError
from ray_apr.weights.collective import as_tensor, byte_buffer, join
from ray_apr.weights.plan import WeightGroup


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


class WeightReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Receives buckets by collective broadcast and loads them into the model."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    _collective: Any = None

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Join the group; waits for all members."""
        self.shutdown()
        group = WeightGroup.from_dict(init_info.group)
        rank = init_info.first_rank + get_tensor_model_parallel_rank()
        self._collective = join(group, rank)
        self._buckets = group.buckets()
        self._timeout_s = group.timeout_s

    def start_weight_update(self) -> None:
        """Nothing to prepare: `receive_weights` does the whole of an update."""

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Take all buckets of one version.

        Raises:
            WeightSyncError: If the group was not joined, or the sender is gone.
        """
        if self._collective is None:
            raise WeightSyncError("this engine worker has not joined a weight group")
        options = types.BroadcastOptions()
        options.root_rank, options.root_tensor = 0, 0
        deadline = time.monotonic() + self._timeout_s  # of all buckets: a sync ends by its limit
        weights: list[tuple[str, torch.Tensor]] = []
        for bucket in self._buckets:
            options.timeout_ms = max(1, int(1000 * (deadline - time.monotonic())))
            buffer = byte_buffer(bucket.num_bytes, self.device)
            try:
                self._collective.broadcast([buffer], options)
            except RuntimeError as error:
                raise WeightSyncError(
                    f"the weights of version {update_info.policy_version} broke off: {error}"
                ) from error
            weights += [
                (s.param.name, as_tensor(buffer, s.offset, s.param.shape, s.param.dtype))
                for s in bucket.slices
            ]
            if not self._layerwise:
                self.model.load_weights(weights)
                weights = []
        if self._layerwise:
            self._reload(weights)

    def _reload(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load all weights and let the layers pack them; even on error every layer is whole."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_embeddings()

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

    @property
    def _layerwise(self) -> bool:
        """CPU kernels keep packed copies of the weights, which a plain load does not renew."""
        return self.device.type == "cpu"

    def _pack_embeddings(self) -> None:
        """Pack embeddings and heads again: with tied ones the reload leaves the old copy there."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        with torch.no_grad():
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding | ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
