"""The trainer's end of a weight sync (weights/sender.py)."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from ray.util.collective import types as collective_types

from ray_apr.exceptions import WeightSyncError
from ray_apr.weights.collective import address, as_tensor, join
from ray_apr.weights.sender import WeightSender


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(5)


def test_the_weights_arrive_whole_at_every_member_and_tied_ones_once():
    model = Tied()
    sender = WeightSender(model, bucket_mb=0.0001)
    assert [p.name for p in sender.params] == ["embed.weight", "norm.weight", "norm.bias"]
    group = sender.open_group(2, host="127.0.0.1", timeout_s=20)
    received: dict[int, dict[str, torch.Tensor]] = {1: {}, 2: {}}
    options = collective_types.BroadcastOptions()
    options.root_rank, options.root_tensor = 0, 0

    def receive(rank: int) -> None:
        member = join(group, rank)
        for bucket in group.buckets():
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            member.broadcast([buffer], options)
            for piece in bucket.slices:
                spec = piece.param
                received[rank][spec.name] = as_tensor(
                    buffer, piece.offset, spec.shape, spec.dtype
                ).clone()
        member.destroy_group()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in received]
    for thread in threads:
        thread.start()
    sender.gather()
    member = join(group, 0)
    for bucket in sender.staged:
        member.broadcast([bucket], options)
    for thread in threads:
        thread.join(timeout=20)
    for weights in received.values():
        assert set(weights) == {p.name for p in sender.params}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter, rtol=0, atol=0)


def test_what_was_gathered_survives_a_group_that_breaks_and_a_second_sending(monkeypatch):
    sent: list[tuple[str, int]] = []
    left: list[str] = []

    def broadcast(buffer, *, src_rank, group_name):
        if group_name.startswith("broken"):
            raise RuntimeError("connection closed by peer")
        sent.append((group_name.partition("|")[0], buffer.numel()))

    monkeypatch.setattr("ray.util.collective.init_collective_group", lambda *_, **__: None)
    monkeypatch.setattr("ray.util.collective.destroy_collective_group", left.append)
    monkeypatch.setattr("ray.util.collective.get_group_handle", lambda _: FakeGroup())
    monkeypatch.setattr("ray.util.collective.broadcast", broadcast)
    sender = WeightSender(Tied(), bucket_mb=1)
    group = sender.open_group(1, host="127.0.0.1", timeout_s=1.0)
    sender.gather()
    broken = dataclasses.replace(group, group_name="broken")
    sender.connect(broken)
    with pytest.raises(WeightSyncError, match="broke off: connection closed"):
        sender.send()
    assert left == [address(broken)], "peers that still receive must not wait for the rest"
    for name in ("second", "third"):  # a peer of the second group may have missed them
        sender.connect(dataclasses.replace(group, group_name=name))
        sender.send()
    num_bytes = sum(buffer.numel() for buffer in sender.staged)
    assert sent == [("second", num_bytes), ("third", num_bytes)]
    sender.release()
    with pytest.raises(WeightSyncError, match="comes before send"):
        sender.send()


def test_a_group_that_does_not_form_is_left_and_hopelessness_is_asked_for(monkeypatch):
    from ray_apr.weights import sender as sender_module

    asked, left = [], []

    def meet(joined, group, *, timeout_s, is_hopeless):
        asked.append((timeout_s, is_hopeless()))
        raise RuntimeError("a member will not come")

    monkeypatch.setattr("ray.util.collective.init_collective_group", lambda *_, **__: None)
    monkeypatch.setattr("ray.util.collective.is_group_initialized", lambda _: True)
    monkeypatch.setattr("ray.util.collective.destroy_collective_group", left.append)
    monkeypatch.setattr("ray.util.collective.get_group_handle", lambda _: FakeGroup())
    monkeypatch.setattr(sender_module, "meet", meet)
    sender = WeightSender(Tied(), bucket_mb=1)
    group = sender.open_group(1, host="127.0.0.1", timeout_s=7.0)
    with pytest.raises(WeightSyncError, match=r"did not join .*limit 7 s.*will not come"):
        sender.connect(group, is_hopeless=lambda: True)
    assert (asked, left) == ([(7.0, True)], [address(group)])


class FakeGroup:
    def wait(self, deadline: float) -> None:
        """All is there."""


def test_send_needs_a_group_and_gathered_weights():
    with pytest.raises(WeightSyncError, match="comes before send"):
        WeightSender(Tied(), bucket_mb=1).send()
