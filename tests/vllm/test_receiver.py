"""The engine's end of a weight sync without an engine (serve/vllm/receiver.py)."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from ray_apr.core.exceptions import SYNC_BROKEN, SyncBrokenError, WeightSyncError
from ray_apr.serve.vllm import receiver as receiver_module
from ray_apr.serve.vllm.receiver import ReceiverInit, ReceiverUpdate, WeightReceiver
from ray_apr.serve.vllm.reload import parameters_to_load, reloading
from ray_apr.weights.buffers import Stages
from ray_apr.weights.inbox import WeightInbox
from ray_apr.weights.plan import ParamSpec, plan_buckets
from ray_apr.weights.transports.base import Parcel
from ray_apr.weights.transports.nccl import NCCLReceiver

pytestmark = pytest.mark.vllm


class KeepsProducts(nn.Module):
    """A model that no reload renews."""

    def process_weights_after_loading(self) -> None: ...


def make(**attributes) -> WeightReceiver:
    receiver = WeightReceiver.__new__(WeightReceiver)
    for name, value in attributes.items():
        setattr(receiver, name, value)
    return receiver


def test_a_model_that_is_refused_joins_no_group(monkeypatch):
    """known fault: all members met, and broke off afterwards."""
    joined: list[int] = []
    monkeypatch.setattr(WeightInbox, "join", lambda inbox, group, rank: joined.append(rank))
    receiver = make(model=KeepsProducts(), device=torch.device("cpu"))
    with pytest.raises(WeightSyncError, match="KeepsProducts keeps something"):
        receiver.init_transfer_engine(ReceiverInit(endpoint=b"", timeout_s=5.0, first_rank=1))
    assert joined == []


@pytest.mark.parametrize("reloads", [True, False])
def test_a_layer_that_reloads_waits_for_its_bucket_with_the_deadline(monkeypatch, reloads):
    """known fault: loading waited for the device, behind a broadcast without end."""
    order: list[object] = []

    class Silent:
        stream = SimpleNamespace(record_event=lambda event: event)

        def broadcast(self, buffers, options) -> None:
            order.append("broadcast")

        def wait(self, deadline) -> None:
            order.append("wait")
            raise RuntimeError("a peer did not take part in time")

        def destroy_group(self) -> None:
            order.append("leave")

    stream = SimpleNamespace(
        record_event=lambda event: event,
        wait_stream=lambda other: None,
        wait_event=lambda event: None,
        cuda_stream=0,
        device_index=0,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(ExternalStream=lambda *_: contextlib.nullcontext()))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    inbox = WeightInbox()
    (bucket,) = plan_buckets([ParamSpec("w", (1,), "float32")], 64)
    inbox._receiver = NCCLReceiver(
        Silent(),
        (bucket,),
        Stages([bucket], torch.device("cpu")),
        timeout_s=5.0,
        loads_wait=reloads,
    )
    receiver = make(device=torch.device("cuda"), _inbox=inbox, _stream=stream, _reloads=reloads)
    monkeypatch.setattr(
        receiver, "_loading", lambda: contextlib.nullcontext(lambda *_: order.append("load"))
    )
    with pytest.raises(SyncBrokenError, match=f"{SYNC_BROKEN}: a peer"):
        receiver.receive_weights(ReceiverUpdate(policy_version=3))
    expected = ["broadcast", "wait", "leave"]
    assert order == (expected if reloads else ["broadcast", "load", "wait", "leave"])
    with pytest.raises(SyncBrokenError, match="in no weight group"):
        receiver.receive_weights(ReceiverUpdate(policy_version=3))


def test_an_error_of_a_loader_that_says_nothing_is_told_with_its_line(monkeypatch):
    """Known fault: vLLM asserts shapes, and the run ended with an error without any words."""

    def load_weights(tensors):
        assert dict(tensors)["w"].shape == (2,)

    monkeypatch.setattr(receiver_module, "reloading", lambda *_: contextlib.nullcontext(set()))
    inbox = SimpleNamespace(parcels=lambda notice: (p for p in [Parcel([("w", torch.zeros(3))])]))
    model = SimpleNamespace(load_weights=load_weights)
    receiver = make(device=torch.device("cpu"), model=model, model_config=None, _inbox=inbox)
    with pytest.raises(WeightSyncError, match=r"version 3 .*test_receiver\.py.*shape.*Assertion"):
        receiver.receive_weights(ReceiverUpdate(policy_version=3))


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_parameter_without_weights_is_named_where_nothing_is_reloaded(monkeypatch, is_staged):
    """known fault: on GPUs a dense model kept an old weight that a sync did not send."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    model = nn.Linear(2, 2)

    def load_weights(tensors):
        for name, tensor in tensors:
            model.get_parameter(name).data.copy_(tensor)
            yield name

    model.load_weights = load_weights
    receiver = make(
        model=model, _reloads=False, _stream=None, _copies={}, _wanted=parameters_to_load(model)
    )
    buffer = torch.zeros(6)
    parcels = [Parcel([("weight", buffer[:4].view(2, 2))]), Parcel([("bias", buffer[4:])])]
    for parcel in parcels:
        parcel.staged = buffer if is_staged else None

    def sync(sent):
        with receiver._loading() as load:
            for number, parcel in enumerate(sent):
                load(number, parcel)

    for value in (1.0, 2.0):  # the second time by a replay
        buffer.fill_(value)
        sync(parcels)
        assert model.weight.eq(value).all() and model.bias.eq(value).all()
    with pytest.raises(WeightSyncError, match=r"1 parameters got no weights: bias; the names"):
        sync(parcels[:1])


@pytest.mark.parametrize("part", ["", "routed_experts."])
def test_experts_count_as_loaded_by_either_of_their_names(monkeypatch, part):
    """vLLM 0.26 reports names of experts without a part that its parameters have."""
    from vllm.model_executor.model_loader import reload as of_vllm

    monkeypatch.setattr(of_vllm, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(of_vllm, "finalize_layerwise_reload", lambda model, config: None)
    model = nn.ModuleDict({"experts": nn.ModuleDict({"routed_experts": nn.Linear(2, 2)})})
    with reloading(model, None, torch.device("cuda")) as loaded:
        loaded |= {f"experts.{part}weight", f"experts.{part}bias"}
    with (
        pytest.raises(WeightSyncError, match=r"1 parameters got no weights: experts\.bias"),
        reloading(model, None, torch.device("cuda")) as loaded,
    ):
        loaded |= {f"experts.{part}weight"}
