"""Engines that users bring (serve/engine.py), and what is refused of them."""

from __future__ import annotations

import dataclasses

import pytest

from ray_apr.config import PartialRolloutConfig, RolloutConfig, check_attestation
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.messages import GenerateRequest, Origin, PromptInput, SamplingParams
from ray_apr.serve.engine import make_engine
from ray_apr.serve.spec import EngineSpec
from tests.run_specs import run_spec
from tests.scripted_backend import ScriptedBackend

MINE = RolloutConfig(engine={"factory": ScriptedBackend, "kwargs": {"num_ids": 9, "longest": 4}})


def refusal(spec: EngineSpec) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        make_engine(spec, "r")
    return refused.value


def test_a_factory_gets_the_spec_and_the_replicas_id():
    engine = make_engine(EngineSpec.of_run("m", MINE), "replica-1")
    assert isinstance(engine, ScriptedBackend) and engine.replica_id == "replica-1"


def test_what_it_cannot_do_is_refused_by_name():
    class Silent(ScriptedBackend):
        attests_versions = False

    class Half:
        def __init__(self, spec, replica_id):
            pass

        def shutdown(self):
            pass

    spec = EngineSpec.of_run("m", MINE)
    error = refusal(dataclasses.replace(spec, weight_check_every="auto"))
    assert error.field == "train.weight_check_every" and "must be 0" in str(error)
    across = EngineSpec.of_run("m", MINE, PartialRolloutConfig.preset("in_flight"))
    make_engine(across, "r")
    error = refusal(dataclasses.replace(across, factory=Silent))
    assert error.field == "partial_rollout.interrupt" and "attests_versions" in str(error)
    error = refusal(dataclasses.replace(spec, factory=Half))
    assert error.field == "rollout.engine.factory" and "lacks start, generate, abort" in str(error)


@pytest.mark.parametrize("engine", ["sglang", 3, None])
def test_what_makes_no_engine_is_refused(engine):
    with pytest.raises(ConfigError, match=r"rollout\.engine\.factory"):
        RolloutConfig(engine={"factory": engine})


def test_vllms_own_rules_are_vllms_alone():
    check_attestation(PartialRolloutConfig.preset("in_flight"), MINE, "0.26.0")
    RolloutConfig(
        engine={
            "factory": ScriptedBackend,
            "device": "cpu",
            "kwargs": {"enable_chunked_prefill": True},
        },
        sampling={"seed": 1},
    )
    with pytest.raises(ConfigError, match=r"rollout\.engine\.placement"):
        RolloutConfig(engine={"factory": ScriptedBackend, "placement": "colocated"})


def test_the_run_folder_names_it():
    described = run_spec(rollout=MINE).describe()
    assert described["rollout"]["engine"]["factory"] == "tests.scripted_backend:ScriptedBackend"


async def test_the_one_that_is_written_out_counts_tokens_by_who_asked_for_them():
    """known fault: with an evaluation the token ledger of its runs was off."""
    engine = ScriptedBackend(EngineSpec.of_run("m", MINE), "r")
    for origin in Origin:
        request = GenerateRequest(
            request_id=origin, prompt=PromptInput(token_ids=(1,)), max_tokens=1,
            sampling=SamplingParams(origin=origin),
        )  # fmt: skip
        await engine.generate(request)
    status = engine.status()
    counted = (status.tokens_generated, status.tokens_evaluated, status.tokens_outside)
    assert (counted, status.tokens_made) == ((1, 1, 1), 3)
