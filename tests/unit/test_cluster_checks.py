"""What a run wants of a cluster with GPUs (run/checks.py), without one."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import transformers

from ray_apr.config import (
    EvaluationConfig,
    PartialRolloutConfig,
    RolloutConfig,
    Sections,
    TrainConfig,
)
from ray_apr.core.architectures import CPU_HEADS, SUPPORTED, check_on_cpu
from ray_apr.core.exceptions import ConfigError
from ray_apr.run import checks, training
from ray_apr.serve import builder
from ray_apr.serve.spec import EngineSpec
from tests.run_specs import run_spec


@pytest.fixture
def check():
    """Check replicas and workers against a cluster of two GPUs and a number of CPUs."""

    def check(
        *, replicas, workers, cpus=8, use_gpu=True, each=None, reward=None, evaluates=False,
        **engine,
    ):  # fmt: skip
        spec = SimpleNamespace(
            model="a/model",
            scaling=ray.train.ScalingConfig(
                num_workers=workers, use_gpu=use_gpu, resources_per_worker=each
            ),
            rollout=RolloutConfig(num_replicas=replicas, engine=engine, reward=reward or {}),
            evaluation=EvaluationConfig() if evaluates else None,
        )
        checks.check_resources(spec, {"GPU": 2.0, "CPU": float(cpus)})

    return check


def test_disaggregated_engines_and_train_workers_have_gpus_of_their_own(check):
    check(replicas=1, workers=1)
    check(replicas=2, workers=1, use_gpu=False)
    with pytest.raises(ConfigError, match=r"want 3 GPUs together, the cluster has 2"):
        check(replicas=1, workers=2)


def test_gpus_are_counted_as_train_workers_reserve_them(check):
    """known fault: workers with two GPUs each counted as one, and were waited for in vain."""
    check(replicas=1, workers=1, each={"GPU": 1})
    check(replicas=1, workers=1, each={"CPU": 6})
    with pytest.raises(ConfigError, match=r"want 3 GPUs together, the cluster has 2"):
        check(replicas=1, workers=1, each={"GPU": 2})
    with pytest.raises(ConfigError, match=r"want 8 CPUs together"):
        check(replicas=1, workers=1, each={"CPU": 7})


def test_cpus_of_rewards_are_reserved_too_and_once_more_for_evaluations(check):
    one = {"replicas": 1, "workers": 1, "reward": {"num_workers": 2, "num_cpus_per_worker": 1.5}}
    check(**one, cpus=5)
    with pytest.raises(ConfigError, match=r"want 4 \(3 of them for rewards\) CPUs together"):
        check(**one, cpus=4)
    check(**one, cpus=8, evaluates=True)
    with pytest.raises(ConfigError, match=r"want 7 \(6 of them for rewards\) CPUs together"):
        check(**one, cpus=7, evaluates=True)


def test_colocated_ones_have_the_same(check):
    check(replicas=2, workers=2, placement="colocated")
    check(replicas=1, workers=2, tensor_parallel_size=2, placement="colocated")
    with pytest.raises(ConfigError, match=r"want 4 GPUs together"):
        check(replicas=4, workers=4, placement="colocated")
    with pytest.raises(ConfigError, match=r"scaling\.use_gpu = False: must be True"):
        check(replicas=2, workers=2, use_gpu=False, placement="colocated")
    with pytest.raises(ConfigError, match=r"scaling\.use_gpu = True: must be False"):
        check(replicas=2, workers=2, device="cpu", placement="colocated")


@pytest.mark.parametrize("given", [None, {"CPU": 2.0}])
def test_colocated_train_workers_reserve_what_an_engine_leaves_of_a_gpu(given):
    scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=given)
    plan = run_spec(rollout=RolloutConfig(engine={"placement": "colocated"}), scaling=scaling)
    wanted = plan.worker_scaling.resources_per_worker
    spec = EngineSpec(model="m", device="cuda", shares_device=plan.rollout.is_colocated)
    alone = builder._placement(spec, 1.0, {})["ray_actor_options"]["num_gpus"]
    spec = dataclasses.replace(spec, tensor_parallel_size=2)
    ((_, *bundles), options) = map(
        builder._placement(spec, 1.0, {}).get, ("placement_group_bundles", "ray_actor_options")
    )
    assert "num_gpus" not in options
    assert [bundle["GPU"] for bundle in bundles] == [alone, alone]
    assert wanted.get("CPU", 0.0) == (2.0 if given else 0.0)
    assert wanted["GPU"] + alone == 1.0, "a GPU has one of both"
    assert 2 * alone > 1.0, "and no second engine"
    assert run_spec(scaling=scaling).worker_scaling is scaling


@pytest.mark.parametrize(
    ("engine", "shares_device", "takes_turns"),
    [
        ({}, False, False),
        ({"placement": "colocated"}, True, True),
        ({"placement": "colocated", "sleep": False}, True, False),
    ],
)
def test_engines_and_train_workers_hear_alike_what_they_share(
    monkeypatch, engine, shares_device, takes_turns
):
    class MadeError(Exception):
        pass

    def made(**fields):
        raise MadeError(fields["shares_device"], fields["takes_turns"])

    monkeypatch.setattr(training, "WorkerSpec", made)
    rollout = RolloutConfig(engine={"device": "cpu", "dtype": "float32", **engine})
    with pytest.raises(MadeError) as caught:
        training.make_torch_trainer(run_spec(rollout=rollout), buffer=None)
    assert caught.value.args == (shares_device, takes_turns)
    spec = EngineSpec.of_run("m", rollout)
    assert (spec.shares_device, spec.takes_turns) == (shares_device, takes_turns)


@pytest.mark.parametrize(("workers", "gpus"), [(2, 0.5), (1, 2), (2, 2), ((1, 2), 0.5)])
def test_a_train_worker_has_one_gpu_and_several_have_one_each(workers, gpus):
    """NCCL refused two of them on one, once engines and trainer had started."""
    each = {"CPU": 1, "GPU": gpus}
    scaling = ray.train.ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker=each)
    train = TrainConfig(checkpoint_every=1)
    with pytest.raises(ConfigError, match=r"scaling\.resources_per_worker = .*must have 1 GPU"):
        Sections(train=train).check(scaling)
    for num_workers, given in ((2, 1), (1, 0.5)):
        each = {"CPU": 1, "GPU": given}
        Sections().check(
            ray.train.ScalingConfig(
                num_workers=num_workers, use_gpu=True, resources_per_worker=each
            )
        )


def test_a_share_of_a_gpu_that_colocated_workers_would_not_get_is_refused():
    """It was replaced without a word."""
    scaling = ray.train.ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5})
    with pytest.raises(ConfigError, match=r"scaling\.resources_per_worker = .*leave GPU out"):
        Sections(
            rollout=RolloutConfig(engine={"placement": "colocated"}),
            partial_rollout=PartialRolloutConfig.preset("sync"),
        ).check(scaling)
    Sections().check(scaling)


def test_each_worker_of_an_engine_of_several_gpus_has_a_cpu_too(check):
    check(replicas=1, workers=1, cpus=2)
    with pytest.raises(ConfigError, match=r"want 1 CPUs together, the cluster has 1, and Ray Data"):
        check(replicas=1, workers=1, cpus=1)
    with pytest.raises(ConfigError, match=r"`ray: {num_cpus: 2}` in a file, `ray_apr.init\(num_c"):
        check(replicas=1, workers=1, cpus=1)
    several = {"use_gpu": False, "tensor_parallel_size": 2}
    check(replicas=1, workers=1, cpus=5, **several)
    with pytest.raises(ConfigError, match=r"want 4 CPUs together, the cluster has 4, and Ray Data"):
        check(replicas=1, workers=1, cpus=4, **several)


def test_an_engine_on_cpu_has_one_worker():
    """known fault: it died as it started, of an error in a background process."""
    several = {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size = 2: must be 1 on CPU"):
        RolloutConfig(engine=several | {"device": "cpu"})
    spec = SimpleNamespace(
        model="a/model",
        scaling=ray.train.ScalingConfig(num_workers=1),
        rollout=RolloutConfig(engine=several),
        evaluation=None,
    )
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size = 2: must be 1 on CPU"):
        checks.check_resources(spec, {"CPU": 8.0})
    checks.check_resources(spec, {"CPU": 8.0, "GPU": 2.0})


def test_a_model_that_engines_on_cpu_would_die_of_is_refused(tmp_path):
    """known fault: each engine died at its first request, and the prompts were set aside for it."""
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = SimpleNamespace(
        model=str(tmp_path),
        scaling=ray.train.ScalingConfig(num_workers=1),
        rollout=RolloutConfig(),
        evaluation=None,
    )
    with pytest.raises(
        ConfigError, match=r"model = .*heads have a size of 16, which vLLM does not"
    ):
        checks.check_resources(spec, {"CPU": 8.0})
    checks.check_resources(spec, {"CPU": 8.0, "GPU": 1.0})
    spec.rollout = RolloutConfig(engine={"factory": lambda spec, replica_id: None})
    checks.check_resources(spec, {"CPU": 8.0})
    latent = config | {"kv_lora_rank": 16}
    for fits in (config | {"head_dim": 32}, config | {"num_attention_heads": 2}, latent):
        check_on_cpu("m", fits)


@pytest.mark.parametrize(
    ("heads", "of_keys", "size", "divides"),
    [
        (14, 2, 2, True),
        (14, 2, 4, False),
        (12, 4, 6, False),
        (32, 8, 16, True),
        (32, None, 8, True),
        (32, None, 3, False),
    ],
)
def test_gpus_of_an_engine_that_do_not_divide_the_heads_are_refused(
    tmp_path, heads, of_keys, size, divides
):
    """known fault: each engine imported vLLM first, and the error named rollout.engine.kwargs."""
    config = {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": heads}
    config |= {} if of_keys is None else {"num_key_value_heads": of_keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = SimpleNamespace(
        model=str(tmp_path),
        scaling=ray.train.ScalingConfig(num_workers=1),
        rollout=RolloutConfig(engine={"tensor_parallel_size": size}),
        evaluation=None,
    )
    has = {"CPU": 64.0, "GPU": 16.0}
    if divides:
        checks.check_resources(spec, has)
        return
    told = rf"tensor_parallel_size = {size}: does not divide .* has {heads} attention heads"
    with pytest.raises(ConfigError, match=told):
        checks.check_resources(spec, has)
    latent = config | {"kv_lora_rank": 16, "num_attention_heads": 2 * size}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    checks.check_resources(spec, has)
    spec.rollout = RolloutConfig(
        engine={"factory": lambda spec, replica_id: None, "tensor_parallel_size": size}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    checks.check_resources(spec, has)


def test_heads_that_are_left_to_the_family_have_its_size():
    """known fault: a Qwen3 whose config has no head_dim was refused, of heads that it has not."""
    of_heads = {"hidden_size": 64, "num_attention_heads": 4}
    num_checked = 0
    for name in SUPPORTED:
        family = getattr(transformers, name).config_class
        size = getattr(family(**of_heads, num_key_value_heads=4), "head_dim", None) or 16
        if size != 16 and not hasattr(family(), "kv_lora_rank"):
            num_checked += 1
            assert size in CPU_HEADS
            check_on_cpu("m", {"architectures": [name], **of_heads})
            with pytest.raises(ConfigError, match="heads have a size of 16"):
                check_on_cpu("m", {"architectures": [name], **of_heads, "head_dim": 16})
    assert num_checked


@pytest.mark.parametrize(("num_cpus", "num_bundles"), [(0.0, 2), (1.0, 3)])
def test_serve_takes_what_an_engine_of_several_gpus_reserves(num_cpus, num_bundles):
    """known fault: without CPUs of its own it had a bundle of nothing, which Ray refuses."""
    spec = EngineSpec(model="m", device="cuda", tensor_parallel_size=2)
    placed = builder._placement(spec, num_cpus, {})
    assert len(placed["placement_group_bundles"]) == num_bundles
    builder.serve.deployment(builder.RolloutServer, num_replicas=1, **placed)


class NotMade(Exception):
    pass


@pytest.fixture
def deployed(monkeypatch) -> dict[str, Any]:
    """Options of the deployment of engines that was asked for last, which is not made."""
    made: dict[str, Any] = {}

    def deployment(_, **options):
        made.update(options)
        raise NotMade

    context = SimpleNamespace(namespace="n", get_job_id=lambda: "job")
    monkeypatch.setattr(builder.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(builder.serve, "deployment", deployment)
    return made


def deploy(**fields):
    spec = EngineSpec(model="m", **fields)
    with pytest.raises(NotMade):
        builder.build_rollout_app(spec, RolloutConfig(), num_behind_http=1)


@pytest.mark.parametrize(("device", "size", "seen"), [("cuda", 1, "0"), ("cuda", 2, None)])
def test_an_engine_of_one_gpu_sees_that_one_alone(deployed, monkeypatch, device, size, seen):
    """Also where Ray's actors are told to see all: each engine takes the first that it sees."""
    monkeypatch.setenv(builder.SEES_ALL_GPUS, "1")
    deploy(device=device, tensor_parallel_size=size)
    env = deployed["ray_actor_options"]["runtime_env"]["env_vars"]
    assert env.get(builder.SEES_ALL_GPUS) == seen


def test_calls_of_an_engine_are_not_logged(deployed):
    """known fault: each call was a line of a log that Ray does not cut, 2 MB an hour and engine
    with two steps a second."""
    deploy()
    assert not deployed["logging_config"].enable_access_log


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ({"location": "NoServer"}, "runs on this cluster without HTTP"),
        ({"location": SimpleNamespace(value="Disabled")}, "runs on this cluster without HTTP"),
        ({"host": None}, "runs on this cluster without HTTP"),
        ({"port": 8001}, "runs on this cluster with HTTP at 127.0.0.1:8001"),
        ({"host": "0.0.0.0"}, "runs on this cluster with HTTP at 0.0.0.0:8000"),
        ({}, None),
    ],
)
def test_a_port_that_serve_does_not_open_is_refused(monkeypatch, runs, why):
    """known fault: beside another run, or a Serve application of the user's, nothing listened at
    the port, and the verbs were behind the other one's address, whoever reached it."""
    http = SimpleNamespace(**{"host": "127.0.0.1", "port": 8000, "location": None} | runs)
    client = SimpleNamespace(http_config=http)
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    monkeypatch.setattr(builder.serve, "start", lambda **_: None)
    deployed = []
    monkeypatch.setattr(builder, "_deploy", lambda name, *_: deployed.append(name))
    monkeypatch.setattr(builder, "_wait_until_running", lambda *_: None)
    config = RolloutConfig(engine={"device": "cpu"}, http={"port": 8000})
    spec = EngineSpec.of_run("m", config)
    if why is None:
        builder.start_rollout_servers("app", spec, config)
        assert deployed == ["app"]
        return
    with pytest.raises(ConfigError, match=why) as caught:
        builder.start_rollout_servers("app", spec, config)
    assert (caught.value.field, deployed) == ("rollout.http.port", [])
