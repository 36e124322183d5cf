"""How the members of an NCCL group meet, as far as that goes without a GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.weights import collective
from ray_apr.weights.plan import ParamSpec
from ray_apr.weights.transports import nccl
from ray_apr.weights.transports.nccl import NCCLEndpoint
from ray_apr.weights.transports.shared import SharedSender

LIMIT_S = 5.0


def nccl_group(timeout_s: float = LIMIT_S) -> NCCLEndpoint:
    return NCCLEndpoint(
        host="127.0.0.1", world_size=2, group_name="test",
        timeout_s=timeout_s, bucket_bytes=1 << 20, params=(ParamSpec("w", (3,), "float32"),),
        nccl_id=bytes(range(128)).hex(),
    )  # fmt: skip


class Member:
    """One whose peers come when `peers_are_there` is set, as NCCL waits: whatever happens."""

    def __init__(self) -> None:
        self.peers_are_there = threading.Event()
        self.waited = self.has_left = False
        self.error: Exception | None = None
        self.device: int | None = None

    def __call__(self, world_size: int, rank: int, group_name: str) -> Member:
        return self

    def broadcast(self, tensors, options) -> None:
        assert current.device == self.device, "a thread begins on the first device"
        if self.error is not None:
            raise self.error
        assert self.peers_are_there.wait(LIMIT_S)

    def destroy_group(self) -> None:
        self.has_left = True

    def wait(self, deadline: float) -> None:
        self.waited = True


current = threading.local()
"""The thread's CUDA device."""


@contextlib.contextmanager
def on_device(device: int):
    current.device = device
    yield


@pytest.fixture
def member(monkeypatch):
    monkeypatch.setattr(nccl, "byte_buffer", lambda *_: None)
    monkeypatch.setattr(nccl.torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(nccl.torch.cuda, "device", on_device)
    made = Member()
    made.device = 3
    yield made
    made.peers_are_there.set()


def test_members_that_come_have_met(member):
    threading.Timer(0.2, member.peers_are_there.set).start()
    nccl_group().meet(member, timeout_s=LIMIT_S)
    assert member.waited


def test_a_member_that_never_comes_is_waited_for_no_longer_than_the_limit(member):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"did not come within 0\.3 s"):
        nccl_group().meet(member, timeout_s=0.3)
    assert time.monotonic() - begin < LIMIT_S / 2


def test_a_member_that_is_known_to_have_died_is_not_waited_for(member):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="will not come"):
        nccl_group().meet(
            member, timeout_s=LIMIT_S, is_hopeless=lambda: time.monotonic() > begin + 0.2
        )
    assert time.monotonic() - begin < LIMIT_S / 2


def test_what_nccl_says_is_raised(member):
    member.error = RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
    with pytest.raises(RuntimeError, match="NCCL_ERROR_SYSTEM_ERROR"):
        nccl_group().meet(member, timeout_s=LIMIT_S)


def test_an_engine_worker_leaves_a_group_that_does_not_form_before_the_trainer_gives_up(
    member, monkeypatch
):
    from ray.util.collective.backend_registry import _global_registry

    monkeypatch.setattr(collective, "is_backend_available", lambda _: True)
    monkeypatch.setattr(_global_registry, "get", lambda _: member)
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"rank 1 of 2 .* within 0\.5 s"):
        collective.join(nccl_group(timeout_s=1.0), 1)
    assert member.has_left
    assert time.monotonic() - begin < 1.0


def test_nccl_gets_the_id_that_rank_0_made_as_cupy_wants_it():
    """In a process of its own, whose CuPy is a stand-in."""
    script = """
        import sys
        from tests.fakes import fake_cupy

        modules, made, aborted = fake_cupy()
        sys.modules.update(modules)
        from ray.util.collective.backend_registry import _global_registry
        from ray_apr.weights.transports import nccl

        group = nccl.NCCLEndpoint(
            host="", world_size=3, group_name="test", timeout_s=1, bucket_bytes=1, params=(),
            nccl_id=nccl.new_nccl_id(),
        )
        group.register()
        group.register()
        member = _global_registry.get(nccl.NCCL)(3, 2, group.address)
        communicators = member._get_nccl_collective_communicator("0", [0])
        assert member._get_nccl_collective_communicator("0", [0]) is communicators
        assert made == [(3, modules["cupy.cuda.nccl"].get_unique_id(), 2)], made
        assert not aborted
        member.destroy_group()
        assert aborted == [2], aborted
        try:  # as the thread that forms a group which was given up meanwhile
            late = member._get_nccl_collective_communicator("0", [0])
        except RuntimeError as error:
            assert "has left" in str(error), error
        else:
            raise AssertionError(late)
        assert aborted == [2, 2], aborted
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_a_missing_cupy_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.util.collective.collective_group.nccl_util", None)
    with pytest.raises(WeightSyncError, match=r"through CuPy.*install ray_apr\[gpu\]"):
        nccl.new_nccl_id()
    shared = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(WeightSyncError, match=r"through CuPy.*install ray_apr\[gpu\]"):
        SharedSender(shared)
