"""What a train worker asks of tensors that may be shards."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter or gradient; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compute_device(model: torch.nn.Module) -> torch.device:
    """Where a model computes, also where its shards are kept on the host."""
    param = next(model.parameters())
    if isinstance(param, DTensor) and param.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return param.device
