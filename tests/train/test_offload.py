"""A train worker's memory that goes to the host and comes back (train/offload.py)."""

from __future__ import annotations

import pytest
import torch

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.train.checkpoint import full_parameters
from ray_apr.train.fsdp import build_model, build_optimizer
from ray_apr.train.offload import Offload
from ray_apr.train.step import train_step
from ray_apr.train.tensors import local_tensor
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")


def num_bytes(model, optimizer):
    """Of the weights and of the optimizer's states."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [local_tensor(t) for t in (*model.parameters(), *states)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_steps_between_which_all_is_on_the_host_are_those_without(tmp_path, reduce_dtype):
    """With one data type the model is a plain one, with two it is FSDP's."""
    folder = str(make_tiny_model(tmp_path / "model", hidden_size=32, tie=True))
    train = TrainConfig(learning_rate=1e-2, reduce_dtype=reduce_dtype)
    with process_group(tmp_path):
        (row,) = make_batches(make_samples())
        ends = []
        for goes in (False, True):
            model = build_model(folder, train, CPU)
            if reduce_dtype == "float32":
                for parameter in model.parameters():  # out of the file, as on a GPU
                    parameter.data = parameter.data.clone()
            optimizer = build_optimizer(model, train)
            offload = Offload([model], optimizer)
            for _ in range(3):
                if goes:
                    offload.to_device()
                train_step(model, optimizer, row, AlgorithmConfig(), train)
                if goes:
                    before = num_bytes(model, optimizer)
                    offload.to_host()
                    offload.to_host()  # it is there
                    assert num_bytes(model, optimizer) == 0 < before
            offload.to_device()
            ends.append(dict(full_parameters(model)))
    for name, weights in ends[0].items():
        torch.testing.assert_close(ends[1][name], weights, rtol=0, atol=0)
