"""The weights of a sync on the trainer's side: a copy of the model's, as its checkpoint has them.

Invariants, kept by `GatheredWeights`:
    * Parameters travel as the tensors of the model's checkpoint, under their names (see `wire`);
      tied ones once, and adapters merged into what they adapt.
    * What was gathered is a copy, which stays as it is while the optimizer goes on.
    * `gather` is a collective of all train workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ray_apr.weights.adapters import merged_parameters
from ray_apr.weights.buffers import byte_buffer, named_views
from ray_apr.weights.gather import BucketGather, parts_of
from ray_apr.weights.plan import ParamSpec, plan_buckets

_MIB = 1 << 20


class GatheredWeights:
    """The weights of a (sharded) model, gathered on rank 0 or on all ranks.

    Args:
        model: The train worker's model, FSDP2 or plain; a Hugging Face model.
        bucket_mb: Size of one buffer, in MiB.
        wire_dtype: Data type of what is gathered; None leaves each parameter its own.
        device: Where the model computes, and what is gathered lies; None: where it is.
        ranks: Group of all train workers in which they wait without their devices; None: the
            default one.

    Attributes:
        params: All tensors, in the order of the buckets.
        buckets: How they lie in the buffers.
        staged: What was gathered, a buffer a bucket; empty on ranks that get nothing.

    Raises:
        WeightSyncError: If the model's checkpoint cannot be made of its parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        bucket_mb: float,
        wire_dtype: str | None = None,
        device: torch.device | None = None,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        named = dict(model.named_parameters())  # names tied parameters once
        parts = parts_of(model, merged_parameters(model, named))
        self.params = tuple(
            ParamSpec(
                name,
                part.tensor.shape,
                wire_dtype or str(part.param.base.dtype).removeprefix("torch."),
            )
            for name, part in parts.items()
        )
        self.bucket_bytes = int(bucket_mb * _MIB)
        self.buckets = plan_buckets(self.params, self.bucket_bytes)
        self._gathers = [BucketGather(bucket, parts) for bucket in self.buckets]
        self.device = device or next(model.parameters()).device
        self.ranks = ranks
        self.staged: list[torch.Tensor] = []

    @torch.no_grad()
    def gather(
        self,
        *,
        to_all: bool = False,
        new_buffer: Callable[[int, torch.device], torch.Tensor] = byte_buffer,
    ) -> None:
        """Copy the current weights to rank 0.

        Args:
            to_all: Whether all ranks get them.
            new_buffer: Makes a buffer of so many bytes on a device.
        """
        self.drop()
        has_all = to_all or not dist.is_initialized() or dist.get_rank() == 0
        staged = []
        for bucket, gather in zip(self.buckets, self._gathers, strict=True):
            buffer = new_buffer(bucket.num_bytes, self.device) if has_all else None
            gather.gather(buffer, self.device, to_all=to_all)
            if buffer is not None:
                staged.append(buffer)
        if staged and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # others have streams of their own
        self.staged = staged

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was gathered: views of the buffers, each by its name in the checkpoint."""
        for bucket, buffer in zip(self.buckets, self.staged, strict=bool(self.staged)):
            yield from named_views(bucket, buffer)

    def drop(self) -> None:
        """Free what was gathered."""
        self.staged = []
