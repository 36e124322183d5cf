"""Weights that another process on the device reads (weights/shared.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ray_apr.exceptions import WeightSyncError
from ray_apr.weights.collective import as_tensor
from ray_apr.weights.plan import WeightGroup
from ray_apr.weights.shared import SHARED, SharedWeightSender, device_key, opened

CPU = torch.device("cpu")

READ = """
import sys, torch
from ray_apr.weights.shared import opened
with opened([int(value) for value in sys.argv[1:]], torch.device("cpu")) as buffer:
    print(bytes(buffer.tolist()).hex())
"""


def test_another_process_reads_what_was_gathered_until_it_is_released():
    model = torch.nn.Linear(3, 2)
    sender = SharedWeightSender(model, bucket_mb=0.00001)
    group = sender.open_group(1, host="127.0.0.1", timeout_s=1.0)
    assert (group.backend, group.port, group.world_size) == (SHARED, 0, 2)
    assert WeightGroup.from_dict(group.to_dict()) == group
    sender.connect(group)
    with pytest.raises(WeightSyncError, match="comes before"):
        sender.send()
    num_open = len(os.listdir("/proc/self/fd"))
    sender.gather()
    sender.send()
    (key,) = sender.handles
    assert key == device_key(CPU) and len(sender.handles[key]) == len(group.buckets()) == 2
    for bucket, handle in zip(group.buckets(), sender.handles[key], strict=True):
        read = subprocess.run(
            [sys.executable, "-c", READ, *map(str, handle)],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found = torch.frombuffer(bytearray.fromhex(read.stdout.strip()), dtype=torch.uint8)
        for piece in bucket.slices:
            spec = piece.param
            weights = as_tensor(found, piece.offset, spec.shape, spec.dtype)
            assert torch.equal(weights, model.get_parameter(spec.name))
    handle = sender.handles[key][0]
    sender.release()
    assert len(os.listdir("/proc/self/fd")) == num_open
    with pytest.raises((OSError, RuntimeError)), opened(handle, CPU):
        pass


def test_each_gather_takes_the_place_of_the_one_before():
    model = torch.nn.Linear(3, 2)
    sender = SharedWeightSender(model, bucket_mb=1)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sender.gather()
        with torch.no_grad():
            model.weight.add_(1)
    assert len(os.listdir("/proc/self/fd")) == num_open + 1
    sender.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
