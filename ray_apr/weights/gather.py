"""Collecting a sharded model's parameters on rank 0 or on all ranks, bucket by bucket.

    rank r: its rows of each parameter ──pack──► one flat piece ──gather──► rank 0: whole parameters

Invariants:
    * One collective a bucket, whatever the number of its parameters; none where nothing is spread.
    * All ranks lay out their piece alike, by the largest share of rows that one of them has:
      rank 0 knows where everything lies.
    * A parameter that is not sharded by rows, or has adapters, is gathered by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ray_apr.weights.adapters import MergedParameter
from ray_apr.weights.collective import as_tensor, byte_buffer
from ray_apr.weights.plan import ITEM_BYTES, Bucket, Slice, aligned


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter or gradient; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compute_device(model: torch.nn.Module) -> torch.device:
    """Where a model computes, also where its shards are kept on the host."""
    param = next(model.parameters())
    if isinstance(param, DTensor) and param.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return param.device


def gather_bucket(
    bucket: Bucket,
    params: Mapping[str, MergedParameter],
    buffer: torch.Tensor | None,
    device: torch.device,
    *,
    to_all: bool = False,
) -> None:
    """Copy the parameters of a bucket into `buffer`; a collective of all ranks.

    Args:
        bucket: Which parameters, and where they lie.
        params: This rank's shards of all parameters, by name.
        buffer: The bucket's bytes, on `device`; None on ranks that get none.
        device: Where this rank computes; its shards may be kept on the host.
        to_all: Whether every rank gets all of them.
    """
    to: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    shares: dict[dist.ProcessGroup, list[_Share]] = {}
    for piece in bucket.slices:
        param = params[piece.param.name]
        group = _rows_group(param)
        if group is not None:
            shares.setdefault(group, []).append(_Share(piece, param.base))
            continue
        value = local_tensor(param.base) if _is_whole(param) else param.full()
        if buffer is not None:
            to.append(as_tensor(buffer, piece.offset, piece.param.shape, piece.param.dtype))
            whole.append(value)
    if to:
        torch._foreach_copy_(to, whole)
    for group, members in shares.items():
        _gather_rows(group, members, buffer, device, to_all=to_all)


@dataclass(frozen=True, slots=True)
class _Share:
    """A parameter whose rows are spread over the ranks of a group."""

    piece: Slice
    tensor: Any
    """A DTensor."""

    def rows(self, num_ranks: int) -> int:
        """Rows of the ranks that have most."""
        return -(-self.piece.param.shape[0] // num_ranks)

    @property
    def row_bytes(self) -> int:
        """Size of one row on the wire."""
        return self.piece.param.num_bytes // max(1, self.piece.param.shape[0])


def _gather_rows(
    group: dist.ProcessGroup,
    shares: list[_Share],
    buffer: torch.Tensor | None,
    device: torch.device,
    *,
    to_all: bool,
) -> None:
    ranks = dist.get_process_group_ranks(group)
    if ranks[0] != 0 and not to_all:
        return  # these ranks have a copy of the model of their own
    offsets, size = [], 0
    for share in shares:
        offsets.append(size)
        size += aligned(share.rows(len(ranks)) * share.row_bytes)
    local = [local_tensor(share.tensor) for share in shares]
    piece = byte_buffer(size, device)
    mine = [
        as_tensor(piece, offset, tuple(rows.shape), share.piece.param.dtype)
        for share, offset, rows in zip(shares, offsets, local, strict=True)
    ]
    torch._foreach_copy_(mine, local)
    if buffer is None:
        dist.gather(piece, None, dst=0, group=group)
        return
    pieces = [torch.empty_like(piece) for _ in ranks]
    if to_all:
        dist.all_gather(pieces, piece, group=group)
    else:
        dist.gather(piece, pieces, dst=0, group=group)
    to: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    for share, offset in zip(shares, offsets, strict=True):
        param, begin = share.piece.param, share.piece.offset
        item = ITEM_BYTES[param.dtype]
        for rank, theirs in enumerate(pieces):
            first = min(rank * share.rows(len(ranks)), param.shape[0])
            last = min(first + share.rows(len(ranks)), param.shape[0])
            shape = ((last - first) * share.row_bytes // item,)
            to.append(as_tensor(buffer, begin + first * share.row_bytes, shape, param.dtype))
            given.append(as_tensor(theirs, offset, shape, param.dtype))
    torch._foreach_copy_(to, given)


def _rows_group(param: MergedParameter) -> dist.ProcessGroup | None:
    """The ranks that a parameter's rows are spread over; None if they are not, or it is no plain
    parameter."""
    base: Any = param.base
    if param.adapters or not isinstance(base, DTensor) or _is_whole(param):
        return None
    spread = [i for i, placed in enumerate(base.placements) if not placed.is_replicate()]
    if len(spread) != 1 or base.placements[spread[0]] != Shard(0):
        return None
    return base.device_mesh.get_group(spread[0])


def _is_whole(param: MergedParameter) -> bool:
    """Whether every rank has all of it."""
    if param.adapters or not isinstance(param.base, DTensor):
        return not param.adapters
    spread = zip(param.base.placements, param.base.device_mesh.shape, strict=True)
    return all(placed.is_replicate() or ranks == 1 for placed, ranks in spread)
