"""The trainer's end of a weight sync (weights/transports/group.py)."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import ray.cloudpickle
import torch

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.core.messages import WeightGroup
from ray_apr.weights.collective import from_rank_0, join
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.inbox import WeightInbox
from ray_apr.weights.transports.gloo import GlooEndpoint, GlooSender


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(5)


def make_sender() -> GlooSender:
    return GlooSender(GatheredWeights(Tied(), bucket_mb=0.0001))


def test_the_weights_arrive_whole_at_every_member_and_tied_ones_once():
    model = Tied()
    weights = GatheredWeights(model, bucket_mb=0.0001)
    sender = GlooSender(weights)
    assert [p.name for p in weights.params] == ["embed.weight", "norm.weight", "norm.bias"]
    assert len(weights.buckets) > 1
    endpoint = sender.open(2, host="127.0.0.1", timeout_s=20)
    group = WeightGroup(timeout_s=20, endpoint=ray.cloudpickle.dumps(endpoint))
    received: dict[int, dict[str, torch.Tensor]] = {1: {}, 2: {}}

    def receive(rank: int) -> None:
        inbox = WeightInbox()
        inbox.join(group, rank)
        received[rank] = {name: tensor.clone() for name, tensor in inbox.receive()}
        inbox.close()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in received]
    for thread in threads:
        thread.start()
    sender.gather()
    member = join(endpoint, 0)
    for bucket in weights.staged:
        member.broadcast([bucket], from_rank_0())
    for thread in threads:
        thread.join(timeout=20)
    for found in (*received.values(), dict(weights.named())):
        assert set(found) == {p.name for p in weights.params}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=0)


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
    sender = make_sender()
    group = sender.open(1, host="127.0.0.1", timeout_s=1.0)
    sender.gather()
    broken = dataclasses.replace(group, group_name="broken")
    sender.connect(broken)
    with pytest.raises(WeightSyncError, match="broke off: connection closed"):
        sender.deliver()
    assert left == [broken.address], "peers that still receive must not wait for the rest"
    for name in ("second", "third"):  # a peer of the second group may have missed them
        sender.connect(dataclasses.replace(group, group_name=name))
        sender.deliver()
    sizes = [buffer.numel() for buffer in sender.weights.staged]
    assert sent == [(name, size) for name in ("second", "third") for size in sizes]
    sender.release()
    with pytest.raises(WeightSyncError, match="comes before deliver"):
        sender.deliver()


def test_a_group_that_does_not_form_is_left_and_hopelessness_is_asked_for(monkeypatch):
    asked, left = [], []

    def meet(self, joined, *, timeout_s, is_hopeless):
        asked.append((timeout_s, is_hopeless()))
        raise RuntimeError("a member will not come")

    monkeypatch.setattr("ray.util.collective.init_collective_group", lambda *_, **__: None)
    monkeypatch.setattr("ray.util.collective.is_group_initialized", lambda _: True)
    monkeypatch.setattr("ray.util.collective.destroy_collective_group", left.append)
    monkeypatch.setattr("ray.util.collective.get_group_handle", lambda _: FakeGroup())
    monkeypatch.setattr(GlooEndpoint, "meet", meet)
    sender = make_sender()
    group = sender.open(1, host="127.0.0.1", timeout_s=7.0)
    with pytest.raises(WeightSyncError, match=r"did not join .*limit 7 s.*will not come"):
        sender.connect(group, is_hopeless=lambda: True)
    assert (asked, left) == ([(7.0, True)], [group.address])


class FakeGroup:
    def wait(self, deadline: float) -> None:
        """All is there."""


def test_delivering_needs_a_group_and_gathered_weights():
    with pytest.raises(WeightSyncError, match="comes before deliver"):
        make_sender().deliver()
