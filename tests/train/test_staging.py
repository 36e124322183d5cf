"""Copies of the trainer's state beside the steps that follow (train/staging.py)."""

from __future__ import annotations

import threading
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ray_apr.core.exceptions import StarvedError, TrainError
from ray_apr.train import staging
from ray_apr.train.staging import Stager, trainer_state

LIMIT_S = 30.0


class Tied(nn.Module):
    """A head that is the embedding, and a layer; `unused` has nothing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.empty(0))

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))) + self.unused.sum()


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    return model, optimizer


def take_step(model, optimizer):
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(state):
    found = []
    staging._mapped(state, found.append)
    return found


def values(state):
    return [tensor.clone() for tensor in tensors(state)]


def check_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_step_of_the_optimizer_waits_for_the_copy(trained, monkeypatch):
    """Forward and backward do not."""
    model, optimizer = trained
    stager, may_copy = Stager(model, optimizer), threading.Event()
    parts = staging._parts
    monkeypatch.setattr(staging, "_parts", lambda pairs: may_copy.wait(LIMIT_S) and parts(pairs))
    before = values(trainer_state(model, optimizer))
    stager.stage()
    model(torch.arange(7)).square().sum().backward()
    step = threading.Thread(target=optimizer.step)
    step.start()
    step.join(0.3)
    assert step.is_alive() and not stager._copy.done()
    check_same(values(trainer_state(model, optimizer)), before)
    may_copy.set()
    step.join(LIMIT_S)
    check_same(tensors(stager.wait()), before)
    after = values(trainer_state(model, optimizer))
    changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert changed == [bool(tensor.numel()) or tensor.ndim == 0 for tensor in before]
    stager.close()


def test_a_copy_is_made_in_the_memory_of_the_one_before(trained):
    model, optimizer = trained
    stager = Stager(model, optimizer)
    places = []
    for _ in range(3):
        stager.stage()
        copy = stager.wait()
        check_same(tensors(copy), values(trainer_state(model, optimizer)))
        places.append([tensor.data_ptr() for tensor in tensors(copy)])
        take_step(model, optimizer)
    assert places[0] == places[1] == places[2]
    for tensor in tensors(copy):  # torch writes a view's whole storage, or copies it first
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    stager.close()


def test_tied_weights_are_copied_once(trained):
    stager = Stager(*trained)
    stager.stage()
    of_model = stager.wait()["model"]
    assert of_model["head.weight"] is of_model["embedding.weight"]
    stager.close()


def test_the_state_is_put_together_once(trained, monkeypatch):
    """For a model of 0.6B parameters that takes 40 ms; tensors that are new are noticed."""
    model, optimizer = trained
    stager, asked = Stager(model, optimizer), []
    whole = staging.trainer_state
    monkeypatch.setattr(staging, "trainer_state", lambda *a: asked.append(1) or whole(*a))
    for _ in range(2):
        stager.stage()
        take_step(model, optimizer)
    assert len(asked) == 1
    state = optimizer.state[model.layer.bias]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)
    stager.stage()
    copy = stager.wait()
    assert copy["optimizer"]["state"]["layer.bias"]["exp_avg"].tolist() == [5.0] * 3
    model.layer.weight.data = torch.full((3, 3), 6.0)
    stager.stage()
    copy = stager.wait()
    assert copy["model"]["layer.weight"].tolist() == [[6.0] * 3] * 3
    assert len(asked) == 3
    stager.close()


class Cuda:
    """CUDA's runtime with several devices, of which each thread has a current one, at first 0."""

    def __init__(self, monkeypatch) -> None:
        self._thread = threading.local()
        self.used: list[int] = []
        """Devices that memory was pinned for, each of which gets a context of this process."""
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)

    def set_device(self, device):
        self._thread.device = torch.device(device).index

    def cudaHostRegister(self, *_):
        self.used.append(getattr(self._thread, "device", 0))
        return 0

    def cudaHostUnregister(self, *_):
        return 0


def test_the_thread_that_copies_is_at_the_device_of_its_rank(trained, monkeypatch):
    """known fault: each rank took some hundred megabytes of the first GPU of its node."""
    cuda, stager = Cuda(monkeypatch), Stager(*trained)
    cuda.set_device("cuda:1")
    device = torch.device("cuda", 1)
    stager._stream = types.SimpleNamespace(device=device, wait_stream=id, synchronize=list)
    stager.stage()
    stager.wait()
    stager.close()
    assert cuda.used == [1]


def test_a_copy_that_fails_ends_the_step_after_it(trained, monkeypatch):
    model, optimizer = trained
    stager = Stager(model, optimizer)

    def refuse(*_):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(Stager, "_take_memory", refuse)
    stager.stage()
    for waits in (optimizer.step, stager.wait):
        with pytest.raises(TrainError, match=r"copied to the host's memory .*no room for a copy"):
            waits()


def test_a_copy_that_takes_too_long_says_so(trained, monkeypatch):
    """known fault: a TimeoutError without a word."""
    stager, may_copy = Stager(*trained), threading.Event()
    monkeypatch.setattr(staging, "COPY_LIMIT_S", 0.1)
    monkeypatch.setattr(staging, "_parts", lambda _: may_copy.wait(LIMIT_S) and [])
    stager.stage()
    with pytest.raises(StarvedError, match=r"not copied to the host's memory within 0\.1 s"):
        stager.wait()
    may_copy.set()
    stager.close()


def test_a_stager_that_is_closed_holds_no_step_up(trained):
    model, optimizer = trained
    stager = Stager(model, optimizer)
    stager.stage()
    stager.close()
    assert not optimizer._optimizer_step_pre_hooks
    take_step(model, optimizer)
