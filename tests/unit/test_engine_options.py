"""Arguments of vLLM's engine that a run may give (config/engine_options.py)."""

from __future__ import annotations

import dataclasses

import pytest

from ray_apr.config import RolloutConfig
from ray_apr.config.engine_options import REFUSED, TUNES
from ray_apr.core.exceptions import ConfigError
from ray_apr.serve.builder import start_rollout_servers
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm.arguments import engine_arguments


def refusal(**options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(engine={"kwargs": options})
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("tensor_parallel_size", 2, "rollout.engine.tensor_parallel_size"),
        ("pipeline_parallel_size", 2, "rollout.engine.tensor_parallel_size"),
        ("data_parallel_size", 2, "rollout.num_replicas"),
        ("enable_expert_parallel", True, "weight sync does not know"),
        ("quantization", "fp8", "rollout.engine.dtype"),
        ("kv_cache_dtype", "fp8", "precision"),
        ("dtype", "float16", "rollout.engine.dtype"),
        ("logprobs_mode", "processed_logits", "rollout.sampling"),
        ("speculative_config", {"method": "ngram"}, "which tokens are drawn"),
        ("seed", 1, "rollout.engine.seed"),
        ("max_model_len", 64, "rollout.engine.max_model_len"),
        ("enable_sleep_mode", False, "rollout.engine.placement"),
        ("enable_lora", True, "train.lora"),
        ("trust_remote_code", True, "code of the checkpoint"),
        ("scheduler_cls", "mine.Scheduler", "ray_apr has its own"),
        ("worker_cls", "mine.Worker", "ray_apr has its own"),
        ("distributed_executor_backend", "mp", "rollout.engine.device"),
        ("hf_overrides", {}, "another one"),
        ("kv_offloading_size", 4.0, "outlive a weight sync"),
        ("cpu_offload_gb", 4, "off the device"),
        ("load_format", "dummy", "otherwise than the trainer's"),
        ("limit_mm_per_prompt", {}, "only text"),
        ("profiler_config", {"profiler": "torch"}, "train.profile_steps"),
        ("cudagraph_metrics", True, "run has none"),
        ("numa_bind", True, "numactl"),
        ("numa_bind_cpus", ["0-3"], "numactl"),
    ],
)
def test_an_engine_argument_that_is_not_the_users_is_refused(name, value, remedy):
    """known fault: `profiler_config` was taken, and nothing was ever profiled; so was `numa_bind`,
    and nothing was bound."""
    error = refusal(**{name: value})
    assert error.field == f"rollout.engine.kwargs.{name}"
    assert remedy in error.remedy


def test_an_unknown_engine_argument_is_refused_with_its_like():
    assert "did you mean max_num_seqs" in refusal(max_num_seq=64).remedy
    assert "did you mean" not in refusal(zzz=1).remedy
    assert "did you mean mode? known: " in refusal(compilation_config={"mod": 1}).remedy
    assert refusal(**{"": 1}).field == "rollout.engine.kwargs."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", "64"),
        ("max_num_seqs", True),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("enforce_eager", "yes"),
        ("cudagraph_capture_sizes", [0]),
        ("compilation_config", 3),
        ("moe_backend", "deep_gemm_mega_moe"),
        ("moe_backend", ["triton"]),
    ],
)
def test_the_value_of_an_engine_argument_is_checked(name, value):
    assert "must be" in refusal(**{name: value}).remedy


def test_the_kernel_of_experts_may_be_chosen_as_the_refusal_of_one_says():
    RolloutConfig(engine={"kwargs": {"moe_backend": "triton"}})


def test_what_compiles_only_tunes():
    RolloutConfig(engine={"kwargs": {"compilation_config": {"cudagraph_mode": "FULL"}}})
    error = refusal(compilation_config={"pass_config": {"fuse_act_quant": True}})
    assert error.field == "rollout.engine.kwargs.compilation_config.pass_config"


def test_prompts_in_steps_and_seeds_end_an_engine_on_cpu(monkeypatch):
    """vLLM turns the generators of such requests back, and those of the CPU have no offset."""
    kwargs = {"enable_chunked_prefill": True}
    with pytest.raises(ConfigError, match="ends vLLM on CPU") as caught:
        RolloutConfig(engine={"device": "cpu", "kwargs": kwargs}, sampling={"seed": 1})
    assert caught.value.field == "rollout.engine.kwargs.enable_chunked_prefill"
    auto = RolloutConfig(sampling={"seed": 1}, engine={"kwargs": kwargs})
    spec = EngineSpec.of_run("m", auto)
    monkeypatch.setattr("ray.cluster_resources", dict)
    with pytest.raises(ConfigError, match="ends vLLM on CPU"):
        start_rollout_servers("app", spec, auto)
    on_cuda = engine_arguments(dataclasses.replace(spec, device="cuda"))
    assert on_cuda["enable_chunked_prefill"]
    RolloutConfig(engine={"device": "cpu", "kwargs": kwargs})


def test_prompts_that_an_engine_on_cpu_would_never_take_in_are_refused(monkeypatch):
    """known fault: their requests waited until the engine counted as stalled, again and again."""
    kwargs = {"max_num_scheduled_tokens": 16}
    with pytest.raises(ConfigError, match="needs enable_chunked_prefill on CPU") as caught:
        RolloutConfig(engine={"device": "cpu", "kwargs": kwargs})
    assert caught.value.field == "rollout.engine.kwargs.max_num_scheduled_tokens"
    auto = RolloutConfig(engine={"kwargs": kwargs})
    monkeypatch.setattr("ray.cluster_resources", dict)
    with pytest.raises(ConfigError, match="needs enable_chunked_prefill on CPU"):
        start_rollout_servers("app", EngineSpec.of_run("m", auto), auto)
    both = kwargs | {"enable_chunked_prefill": True}
    RolloutConfig(engine={"device": "cpu", "kwargs": both})
    RolloutConfig(engine={"device": "cuda", "kwargs": kwargs})


def test_a_limit_on_cpu_that_no_prompt_exceeds_is_taken():
    """known fault: it was refused as one that is too small for some prompt is."""
    kwargs = {"max_num_scheduled_tokens": 256}
    engine = {"device": "cpu", "max_model_len": 256, "kwargs": kwargs}
    RolloutConfig(max_response_tokens=128, engine=engine)
    with pytest.raises(ConfigError, match="at most as large"):
        RolloutConfig(max_response_tokens=128, engine=engine | {"max_model_len": 257})


@pytest.mark.parametrize(
    ("engine", "sleeps", "memory"),
    [
        ({}, None, None),
        ({"placement": "colocated"}, True, 0.8),
        ({"placement": "colocated", "sleep": False}, None, 0.5),
        ({"placement": "colocated", "kwargs": {"gpu_memory_utilization": 0.3}}, True, 0.3),
    ],
)
def test_engines_on_the_trainers_gpus_leave_it_memory(engine, sleeps, memory):
    given = engine_arguments(
        EngineSpec.of_run("m", RolloutConfig(engine={"device": "cuda", **engine}))
    )
    assert given.get("enable_sleep_mode") is sleeps
    assert given.get("gpu_memory_utilization") == memory


def test_a_folder_of_any_name_is_an_ascii_tag_of_vllms_metrics():
    """known fault: Ray's metrics ended the engine at the folder's name."""
    named = [engine_arguments(EngineSpec(model=m))["served_model_name"] for m in ("o/m", "/ü/m")]
    assert named == ["o/m", r"/\xfc/m"]


def test_an_argument_is_in_one_table_and_each_refusal_says_what_to_do():
    assert not TUNES.keys() & REFUSED.keys()
    assert all(("set " in r or "leave it out" in r or "change " in r) for r in REFUSED.values())
