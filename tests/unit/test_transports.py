"""Which transport a run has, and what a user's own has to be (weights/transports)."""

from __future__ import annotations

import contextlib
import functools
import pickle
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest
import ray.cloudpickle
import torch

from ray_apr.cli.settings import load_settings
from ray_apr.cli.user_files import load_function
from ray_apr.config import PartialRolloutConfig, RolloutConfig, TrainConfig, check_placement
from ray_apr.config.train import WeightTransport
from ray_apr.core.exceptions import SYNC_BROKEN, ConfigError, SyncBrokenError, WeightSyncError
from ray_apr.core.messages import WeightGroup
from ray_apr.train.residency import Alternating
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.inbox import WeightInbox
from ray_apr.weights.transports import TRANSPORTS, make_sender, shared
from ray_apr.weights.transports.base import Parcel, WeightSender
from tests.run_specs import run_spec
from tests.whole_runs import CONFIG

EXAMPLES = CONFIG.parents[1]


def weights_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), staged=[])


@pytest.mark.parametrize(
    ("device", "shares_device", "name"),
    [("cuda", False, "nccl"), ("cpu", False, "gloo"), ("cuda", True, "shared")],
)
def test_auto_takes_what_fits_and_anything_else_is_refused(
    monkeypatch, device, shares_device, name
):
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))  # a GPU's alone
    make = functools.partial(make_sender, weights=weights_on(device), shares_device=shares_device)
    assert type(make("auto")) is type(make(name)) is TRANSPORTS[name]
    for other in {"nccl", "gloo", "shared"} - {name}:
        with pytest.raises(ConfigError, match=f'weight_transport.*must be "auto" or "{name}"'):
            make(other)


def test_memory_that_pytorch_keeps_for_later_is_freed_for_what_is_shared(monkeypatch):
    """known fault: with an engine beside it the trainer ended with cudaErrorMemoryAllocation."""

    class CUDARuntimeError(RuntimeError):
        pass

    def allocate(num_bytes: int) -> str:
        if not freed:
            raise CUDARuntimeError("out of memory")
        return f"{num_bytes} bytes"

    freed: list[bool] = []
    cuda = SimpleNamespace(
        Device=lambda index: contextlib.nullcontext(),
        Memory=allocate,
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(shared, "_as_tensor", lambda memory, num_bytes, device: memory)
    assert shared._shareable(8, torch.device("cuda", 0)) == "8 bytes" and freed == [True]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    freed.clear()
    with pytest.raises(CUDARuntimeError):
        shared._shareable(8, torch.device("cuda", 0))


def test_the_settings_know_all_transports():
    assert set(get_args(WeightTransport)) == {"auto", *TRANSPORTS}
    with pytest.raises(ConfigError, match=r"train\.weight_transport = 'mpi'"):
        TrainConfig(weight_transport="mpi")


@pytest.mark.parametrize(
    ("transport", "placement"), [("shared", "disaggregated"), ("nccl", "colocated")]
)
def test_a_transport_that_does_not_fit_the_placement_is_refused_before_the_run(
    transport, placement
):
    train = TrainConfig(weight_transport=transport)
    with pytest.raises(ConfigError, match=f'weight_transport.*placement = "{placement}"'):
        check_placement(
            RolloutConfig(engine={"placement": placement}), PartialRolloutConfig(), train, 1
        )


def test_a_transport_of_a_file_is_checked_with_the_settings_and_named_in_the_run_folder():
    named = "train.weight_transport=../transports/folder.py:FolderSender"
    assert load_settings(CONFIG, [named]).train.weight_transport.endswith(":FolderSender")
    for wrong, said in (("folder.py:Nobody", "defines no Nobody"), ("nowhere.py:A", "no file")):
        with pytest.raises(ConfigError, match=rf"train\.weight_transport.*{said}"):
            load_settings(CONFIG, [f"train.weight_transport=../transports/{wrong}"])
    described = run_spec(train=TrainConfig(weight_transport=WeightSender)).describe()
    sender = "ray_apr.weights.transports.base:WeightSender"
    assert described["train"]["weight_transport"] == sender


@pytest.mark.parametrize("transport", ["auto", WeightSender])
def test_engines_that_wake_up_wait_for_the_release(transport):
    """Those that stay awake have their memory."""
    for shares, turns in ((False, False), (True, False), (True, True)):
        sender = make_sender(transport, weights_on("cpu"), shares_device=shares, takes_turns=turns)
        assert sender.holds_device == turns
    assert not WeightSender.holds_device and not TRANSPORTS["shared"].holds_device


def test_what_is_no_transport_is_refused():
    with pytest.raises(ConfigError, match=r"lacks .*prepare.*WeightSender"):
        make_sender(lambda weights: object(), weights_on("cpu"), shares_device=False)


# -- a user's own ----------------------------------------------------------------------------------


def test_a_transport_of_a_file_reaches_processes_that_do_not_know_the_file(tmp_path):
    """As an engine worker does; and its files are gone after the release."""
    sender_cls = load_function(
        "train.weight_transport", "transports/folder.py:FolderSender", EXAMPLES
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    sender = make_sender(
        functools.partial(sender_cls, folder=str(tmp_path)),
        GatheredWeights(model, bucket_mb=0.00001),
        shares_device=False,
    )
    sender.gather()
    endpoint = ray.cloudpickle.dumps(sender.open(1, host="", timeout_s=1.0))
    notice = pickle.dumps(sender.prepare())
    script = f"""
        from ray_apr.core.messages import WeightGroup
        from ray_apr.weights.inbox import WeightInbox

        inbox = WeightInbox()
        inbox.join(WeightGroup(timeout_s=1.0, endpoint={endpoint!r}), 1)
        print(sum(float(tensor.abs().sum()) for _, tensor in inbox.receive({notice!r})))
    """
    read = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip
    expected = sum(float(p.detach().abs().sum()) for p in model.parameters())
    assert float(read.stdout) == pytest.approx(expected)
    assert list(tmp_path.rglob("*.safetensors"))
    sender.release()
    assert not list(tmp_path.rglob("*.safetensors"))
    sender.close()
    assert not list(tmp_path.iterdir())


class Broken:
    """An endpoint whose receiver fails in the midst of things."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.closed = 0

    def join(self, member) -> Broken:
        return self

    def receive(self, notice):
        yield Parcel([("a", torch.zeros(1))])
        raise self._error

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("error", "expected", "num_closed"),
    [
        (OSError("no such file"), SyncBrokenError, 1),
        (RuntimeError("connection reset"), SyncBrokenError, 1),
        (WeightSyncError("does not fit"), WeightSyncError, 0),
    ],
)
def test_errors_of_a_receiver_say_whether_another_try_may_do(error, expected, num_closed):
    inbox, broken = WeightInbox(), Broken(error)
    inbox._receiver = broken
    with pytest.raises(WeightSyncError, match=str(error)) as raised:
        list(inbox.receive())
    assert type(raised.value) is expected
    assert (SYNC_BROKEN in str(raised.value)) == (expected is SyncBrokenError)
    assert broken.closed == num_closed


def test_a_transport_that_an_engine_cannot_import_is_named():
    endpoint = b"cno_such_package\nEndpoint\n."  # a pickle of a name
    with pytest.raises(WeightSyncError, match=r"cannot import .*no_such_package.*every node"):
        WeightInbox().join(WeightGroup(timeout_s=1.0, endpoint=endpoint), 1)


def test_a_sender_has_to_gather_first():
    sender = WeightSender(GatheredWeights(torch.nn.Linear(2, 2), bucket_mb=1))
    with pytest.raises(WeightSyncError, match="comes before deliver"):
        sender.deliver()
    sender.gather()
    sender.deliver()
    sender.release()
    sender.release()
    assert not sender.has_weights


# -- the device ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rank_0", [True, False])
def test_a_device_is_left_and_taken_in_the_order_that_memory_demands(monkeypatch, is_rank_0):
    order: list[str] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda ranks: order.append(f"meet {ranks}"))
    offload = SimpleNamespace(
        to_host=lambda: order.append("to host"), to_device=lambda: order.append("to device")
    )
    control = SimpleNamespace(
        sleep_engines=lambda: order.append("engines sleep"),
        record_span=lambda what, start_s, end_s: order.append(what),
    )
    residency = Alternating(offload, control if is_rank_0 else None, "ranks")
    residency.enter()
    residency.leave()
    assert [step for step in order if step not in ("engines sleep", "switch")] == [
        "meet ranks", "to device", "to host", "meet ranks",
    ]  # fmt: skip
    assert ("engines sleep" in order) == ("switch" in order) == is_rank_0
    assert order[0] == "engines sleep" or not is_rank_0
