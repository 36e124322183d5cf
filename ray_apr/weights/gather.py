"""Collecting a sharded model's parameters on rank 0 or on all ranks, bucket by bucket.

    rank r: its rows of each parameter ──pack──► one flat piece ──gather──► rank 0: whole tensors

Invariants:
    * One collective a bucket, whatever the number of its tensors; none where nothing is spread.
    * A tensor may be a part of a parameter (see `wire`), and some ranks have none of it. Every rank
      computes what each one gives, and where in its piece that lies; pieces are as long as the
      longest.
    * A parameter that is not sharded by rows, or has adapters, is gathered by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ray_apr.weights.adapters import MergedParameter
from ray_apr.weights.buffers import Place, as_tensor, byte_buffer, flat_views
from ray_apr.weights.plan import ITEM_BYTES, Bucket, Slice, aligned
from ray_apr.weights.wire import WireTensor, wire_tensors


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a checkpoint, and the parameter that it is a range of."""

    tensor: WireTensor
    param: MergedParameter

    def value(self) -> torch.Tensor:
        """The whole tensor; where the parameter is sharded, a collective of all ranks."""
        base = self.param.base
        if not _is_whole(self.param):
            base = self.param.full()
        elif isinstance(base, DTensor):
            base = base.to_local()
        return self.tensor.of(base)


def parts_of(model: torch.nn.Module, params: Mapping[str, MergedParameter]) -> dict[str, Part]:
    """The tensors of a model's checkpoint, by name, in an order that asks all ranks alike.

    Neighbouring experts of one parameter are on one rank: in their own order a bucket would come
    from that rank alone.

    Raises:
        WeightSyncError: If the checkpoint cannot be made of the parameters.
    """
    found = wire_tensors(model, {name: tuple(p.base.shape) for name, p in params.items()})
    parts: list[Part] = []
    for source, tensors in itertools.groupby(found, key=lambda tensor: tensor.source):
        param = params[source]
        own = [Part(tensor, param) for tensor in tensors]
        group = _rows_group(param)
        if group is not None:
            share = _share_of(param.base, len(dist.get_process_group_ranks(group)))
            own.sort(key=lambda part: (part.tensor.begin % share, part.tensor.begin))
        parts += own
    return {part.tensor.name: part for part in parts}


class BucketGather:
    """How the tensors of a bucket get together: found once, as shards stay where they are.

    Args:
        bucket: Which tensors, and where they lie.
        parts: What they are ranges of, by their names; this rank's shards.
    """

    def __init__(self, bucket: Bucket, parts: Mapping[str, Part]) -> None:
        self._alone: list[tuple[Slice, Part]] = []
        spread: dict[dist.ProcessGroup, list[_Spread]] = {}
        for piece in bucket.slices:
            part = parts[piece.param.name]
            group = _rows_group(part.param)
            if group is None:
                self._alone.append((piece, part))
            else:
                spread.setdefault(group, []).append(_Spread(piece, part))
        self._rows = [_Rows(group, members) for group, members in spread.items()]

    def gather(
        self, buffer: torch.Tensor | None, device: torch.device, *, to_all: bool = False
    ) -> None:
        """Copy the tensors into `buffer`; a collective of all ranks.

        Args:
            buffer: The bucket's bytes, on `device`; None on ranks that get none.
            device: Where this rank computes; its shards may be kept on the host.
            to_all: Whether every rank gets all of them.
        """
        to: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        for piece, part in self._alone:
            value = part.value()
            if buffer is not None:
                to.append(as_tensor(buffer, piece.offset, piece.param.shape, piece.param.dtype))
                whole.append(value)
        if to:
            torch._foreach_copy_(to, whole)
        for rows in self._rows:
            rows.gather(buffer, device, to_all=to_all)


@dataclass(frozen=True, slots=True)
class _Spread:
    """A tensor whose parameter's rows are spread over the ranks of a group."""

    piece: Slice
    part: Part

    def range_of(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """What a rank has of the tensor: elements of the parameter from ... up to ..."""
        share = _share_of(self.part.param.base, num_ranks)
        begin = max(rank * share, self.part.tensor.begin)
        return begin, max(begin, min((rank + 1) * share, self.part.tensor.end))


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a rank gives of one tensor, and where in its piece."""

    spread: _Spread
    begin: int
    end: int
    """Elements of the parameter."""
    offset: int
    """Bytes of the piece before it."""

    def local(self, rank: int, num_ranks: int) -> torch.Tensor:
        """What this rank, which is `rank`, has of it."""
        base: Any = self.spread.part.param.base  # its rows are spread: a DTensor
        before = rank * _share_of(base, num_ranks)
        own: torch.Tensor = base.to_local().reshape(-1)[self.begin - before : self.end - before]
        return own

    @property
    def place(self) -> Place:
        """In a piece."""
        return self.offset, self.end - self.begin, self.spread.piece.param.dtype

    @property
    def place_in_bucket(self) -> Place:
        """In the bucket's buffer."""
        piece = self.spread.piece
        before = (self.begin - self.spread.part.tensor.begin) * ITEM_BYTES[piece.param.dtype]
        return piece.offset + before, self.end - self.begin, piece.param.dtype


def _cuts(spread: list[_Spread], rank: int, num_ranks: int) -> tuple[list[_Cut], int]:
    """What a rank gives, and the length of its piece in bytes."""
    cuts, size = [], 0
    for one in spread:
        begin, end = one.range_of(rank, num_ranks)
        if begin < end:
            cuts.append(_Cut(one, begin, end, size))
            size += aligned((end - begin) * ITEM_BYTES[one.piece.param.dtype])
    return cuts, size


class _Rows:
    """Tensors of a bucket whose parameters' rows are spread over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, members: list[_Spread]) -> None:
        self._group = group
        ranks = dist.get_process_group_ranks(group)
        self._has_rank_0 = ranks[0] == 0
        self._own, self._num_ranks = dist.get_rank(group), len(ranks)
        given = [_cuts(members, rank, len(ranks)) for rank in range(len(ranks))]
        self._num_bytes = max(size for _, size in given)
        self._mine = given[self._own][0]
        self._places = [[cut.place for cut in cuts] for cuts, _ in given]
        self._places_in_bucket = [[cut.place_in_bucket for cut in cuts] for cuts, _ in given]

    def gather(self, buffer: torch.Tensor | None, device: torch.device, *, to_all: bool) -> None:
        """A collective of the group's ranks."""
        if not self._has_rank_0 and not to_all:
            return  # these ranks have a copy of the model of their own
        piece = byte_buffer(self._num_bytes, device)
        if self._mine:
            torch._foreach_copy_(
                flat_views(piece, self._places[self._own]),
                [cut.local(self._own, self._num_ranks) for cut in self._mine],
            )
        if buffer is None:
            dist.gather(piece, None, dst=0, group=self._group)
            return
        pieces = [torch.empty_like(piece) for _ in range(self._num_ranks)]
        if to_all:
            dist.all_gather(pieces, piece, group=self._group)
        else:
            dist.gather(piece, pieces, dst=0, group=self._group)
        to: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for rank, gathered in enumerate(pieces):
            to += flat_views(buffer, self._places_in_bucket[rank])
            values += flat_views(gathered, self._places[rank])
        torch._foreach_copy_(to, values)


def _share_of(base: torch.Tensor, num_ranks: int) -> int:
    """Elements of a parameter that the first ranks have, when its rows are spread."""
    return -(-base.shape[0] // num_ranks) * (base.numel() // base.shape[0])


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
