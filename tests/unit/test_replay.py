"""Recorded copies (serve/vllm/replay.py) on loaders like those of vLLM."""

from __future__ import annotations

import pytest
import torch

from ray_apr.serve.vllm.replay import CopyRecorder, replay


class Layer(torch.nn.Module):
    """q, k and v stacked in one parameter, a padded embedding, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(12, 4))
        self.embed = torch.nn.Parameter(torch.full((8, 4), 9.0))
        self.norm = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.zeros(2))

    def load_weights(self, weights) -> None:
        for name, loaded in weights:
            if name in "qkv":
                begin = 4 * "qkv".index(name)
                self.qkv.data.narrow(0, begin, 4).copy_(loaded.view(4, 4))
            elif name == "embed":
                self.embed[: len(loaded)].data.copy_(loaded)
                self.embed[len(loaded) :].data.fill_(0)
            elif name == "norm":
                self.norm.data.copy_(loaded)


def cut(buffer):
    """Named views of a flat buffer of 58 numbers."""
    sizes = {"q": (4, 4), "k": (4, 4), "v": (4, 4), "embed": (6, 1), "norm": (4,)}
    sizes["embed"] = (1, 4)
    begin, views = 0, []
    for name, shape in sizes.items():
        end = begin + torch.Size(shape).numel()
        views.append((name, buffer[begin:end].view(shape)))
        begin = end
    return views


@torch.no_grad()
def test_a_replay_loads_what_a_loader_would():
    ours, theirs = Layer(), Layer()
    buffer = torch.randn(64)
    with CopyRecorder(buffer, ours.parameters()) as recorder:
        ours.load_weights(cut(buffer))
    assert recorder.copies is not None and len(recorder.copies[0]) == 5
    for _ in range(2):
        buffer.copy_(torch.randn(64))
        replay(recorder.copies)
        theirs.load_weights(cut(buffer))
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter, dict(ours.named_parameters())[name]), name
    assert ours.embed[1:].abs().sum() == 0, "what the loader did besides holds"


def computes(model, buffer):
    model.qkv.data[:4].copy_(buffer[:16].view(4, 4) * 2)


def casts(model, buffer):
    model.norm.data.copy_(buffer[:4].to(torch.bfloat16))


def goes_through_a_copy(model, buffer):
    between = torch.empty(4, 4)
    between.copy_(buffer[:16].view(4, 4))
    model.qkv.data[:4].copy_(between)


def broadcasts(model, buffer):
    model.qkv.data.copy_(buffer[:4])


def reads(model, buffer):
    model.scale.fill_(buffer[0].item())


@pytest.mark.parametrize("load", [computes, casts, goes_through_a_copy, broadcasts, reads])
@torch.no_grad()
def test_a_loader_that_does_more_than_to_copy_is_not_replayed(load):
    model, buffer = Layer(), torch.randn(64)
    with CopyRecorder(buffer, (*model.parameters(), *model.buffers())) as recorder:
        load(model, buffer)
    assert recorder.copies is None
