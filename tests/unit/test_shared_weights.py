"""Weights that another process on the device reads (weights/transports/shared.py)."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch

from ray_apr.core.exceptions import SYNC_BROKEN, SyncBrokenError, WeightSyncError
from ray_apr.core.messages import WeightGroup
from ray_apr.weights.buffers import as_tensor
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.inbox import WeightInbox
from ray_apr.weights.transports.shared import SharedSender, device_key, opened

CPU = torch.device("cpu")

READ = """
import sys, torch
from ray_apr.weights.transports.shared import opened
with opened([int(value) for value in sys.argv[1:]], torch.device("cpu")) as buffer:
    print(bytes(buffer.tolist()).hex())
"""


def test_another_process_reads_what_was_gathered_until_it_is_released():
    model = torch.nn.Linear(3, 2)
    sender = SharedSender(GatheredWeights(model, bucket_mb=0.00001))
    sender.connect(sender.open(1, host="127.0.0.1", timeout_s=1.0))
    for phase in (sender.prepare, sender.deliver):
        with pytest.raises(WeightSyncError, match="comes before"):
            phase()
    gc.collect()  # what tests before have left
    num_open = len(os.listdir("/proc/self/fd"))
    sender.gather()
    ((key, handles),) = sender.prepare().items()
    sender.deliver()
    assert key == device_key(CPU) and len(handles) == 2
    for bucket, handle in zip(sender.weights.buckets, handles, strict=True):
        read = subprocess.run(
            [sys.executable, "-c", READ, *map(str, handle)],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found = torch.frombuffer(bytearray.fromhex(read.stdout.strip()), dtype=torch.uint8)
        for piece in bucket.slices:
            spec = piece.param
            weights = as_tensor(found, piece.offset, spec.shape, spec.dtype)
            assert torch.equal(weights, model.get_parameter(spec.name))
    sender.release()
    assert len(os.listdir("/proc/self/fd")) == num_open
    with pytest.raises((OSError, RuntimeError)), opened(handles[0], CPU):
        pass


def test_each_gather_takes_the_place_of_the_one_before():
    model = torch.nn.Linear(3, 2)
    sender = SharedSender(GatheredWeights(model, bucket_mb=1))
    gc.collect()  # what tests before have left
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sender.gather()
        with torch.no_grad():
            model.weight.add_(1)
    assert len(os.listdir("/proc/self/fd")) == num_open + 1
    sender.close()
    assert len(os.listdir("/proc/self/fd")) == num_open


DIES = """
import pickle, time, ray.cloudpickle, torch
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.transports.shared import SharedSender
torch.manual_seed(0)
sender = SharedSender(GatheredWeights(torch.nn.Linear(3, 2), bucket_mb=1))
sender.gather()
endpoint = sender.open(1, host="", timeout_s=1.0)
print(pickle.dumps((ray.cloudpickle.dumps(endpoint), sender.prepare())).hex(), flush=True)
time.sleep(600)
"""


def test_a_sender_that_is_killed_before_the_release_leaves_nothing_behind():
    """And an engine that reads then says that another try may do."""
    command = [sys.executable, "-c", DIES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        try:
            endpoint, handles = pickle.loads(bytes.fromhex(sender.stdout.readline()))
            inbox = WeightInbox()
            inbox.join(WeightGroup(timeout_s=1.0, endpoint=endpoint), 1)
            weights = dict(inbox.receive(pickle.dumps(handles)))
        finally:
            sender.kill()
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 2).weight
    assert torch.equal(weights["weight"], expected), "what is mapped outlives the sender"
    with pytest.raises(SyncBrokenError, match=SYNC_BROKEN):
        dict(inbox.receive(pickle.dumps(handles)))
    with pytest.raises(SyncBrokenError, match="in no weight group"):
        dict(inbox.receive(pickle.dumps(handles)))
