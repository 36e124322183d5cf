"""Which arguments of vLLM's engine a run may give in ``rollout.engine.kwargs``, and why no others.

`TUNES` holds what changes speed and memory alone. What changes how many processes an engine has,
how weights are divided or stored, which tokens are drawn or what their log-probs mean is a field of
`RolloutConfig`, or refused: the trainer would know nothing of it. `REFUSED` says why, by name; a
name that is in neither table is refused, too. The names are those of vLLM 0.26 to 0.32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ray_apr.core.checks import is_number, is_whole, require
from ray_apr.core.names import did_you_mean, nearest

_FIELD = "rollout.engine.kwargs"
Check = tuple[Callable[[Any], bool], str]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        map(functools.partial(is_whole, minimum=1), value)
    )


_COUNT: Check = (functools.partial(is_whole, minimum=1), "must be a whole number of at least 1")
_LEVEL: Check = (functools.partial(is_whole, minimum=0), "must be a whole number of at least 0")
_FLAG: Check = (lambda value: isinstance(value, bool), "must be true or false")
_SHARE: Check = (lambda v: is_number(v) and 0 < v <= 1, "must be a number in (0, 1]")
_PART: Check = (lambda v: is_number(v) and 0 <= v < 1, "must be a number in [0, 1)")
_NAME: Check = (lambda value: isinstance(value, str) and bool(value), "must be a name")
_SIZES: Check = (_is_sizes, "must be a list of whole numbers of at least 1")
_TABLE: Check = (lambda value: isinstance(value, Mapping), "must be a mapping")
_EXPERTS = ("auto", "triton", "batched_triton", "flashinfer_trtllm", "flashinfer_cutlass", "aiter")
"""vLLM's kernels of experts that are not quantized and leave their layout alone."""
_ONE_OF_EXPERTS: Check = (lambda v: v in _EXPERTS, f"must be one of {', '.join(_EXPERTS)}")

OF_MEMORY = frozenset(
    {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
)
"""vLLM's arguments by which a user says how large the KV cache is."""
TUNES: Mapping[str, Check] = {
    # how much is computed at once, and in which order
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": _COUNT,
    "max_num_scheduled_tokens": _COUNT,
    "long_prefill_token_threshold": _LEVEL,
    "enable_chunked_prefill": _FLAG,
    "scheduler_reserve_full_isl": _FLAG,
    "async_scheduling": _FLAG,
    "watermark": _PART,
    # memory of the KV cache
    "gpu_memory_utilization": _SHARE,
    "kv_cache_memory_bytes": _COUNT,
    "num_gpu_blocks_override": _COUNT,
    "block_size": _COUNT,
    "enable_prefix_caching": _FLAG,
    "prefix_caching_hash_algo": _NAME,
    "disable_hybrid_kv_cache_manager": _FLAG,
    # how the same sums are launched
    "enforce_eager": _FLAG,
    "cudagraph_capture_sizes": _SIZES,
    "max_cudagraph_capture_size": _LEVEL,
    "compilation_config": _TABLE,
    "optimization_level": _LEVEL,
    "performance_mode": _NAME,
    "enable_flashinfer_autotune": _FLAG,
    "attention_backend": _NAME,
    "moe_backend": _ONE_OF_EXPERTS,
    "disable_custom_all_reduce": _FLAG,
    # how long the processes wait for each other
    "distributed_timeout_seconds": _COUNT,
    "cpu_distributed_timeout_seconds": _COUNT,
    # what is told
    "disable_log_stats": _FLAG,
    "enable_log_requests": _FLAG,
    "enable_logging_iteration_details": _FLAG,
    "kv_cache_metrics": _FLAG,
    "kv_cache_metrics_sample": _SHARE,
    "enable_mfu_metrics": _FLAG,
    "enable_layerwise_nvtx_tracing": _FLAG,
    "use_tqdm_on_load": _FLAG,
}
"""Name of an argument and what its value must be; vLLM checks the rest as the engine starts."""

LOGGED = ("enable_log_requests", "enable_logging_iteration_details")
"""Those of `TUNES` that vLLM logs at level INFO."""

COMPILATION = (
    "mode",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "cudagraph_num_of_warmups",
    "cudagraph_copy_inputs",
    "compile_sizes",
)
"""Keys of ``compilation_config`` that change speed and memory alone."""

_OURS: Mapping[str, str] = {
    "model": "is the model of the run; set model",
    "model_weights": "is the model of the run; set model",
    "revision": "is the model of the run; download that revision, and set model to its folder",
    "dtype": "is a field of its own; set rollout.engine.dtype",
    "max_model_len": "is a field of its own; set rollout.engine.max_model_len",
    "tensor_parallel_size": "is a field of its own; set rollout.engine.tensor_parallel_size",
    "data_parallel_size": "is not built; set rollout.num_replicas, engines of their own",
    "seed": "is a field of its own; set rollout.engine.seed, or rollout.sampling.seed for those of "
    "requests",
    "enable_sleep_mode": 'follows from rollout.engine.placement: set it to "colocated"',
    "scheduling_policy": "follows from the evaluation, whose requests go first; leave it out",
    "logprobs_mode": "follows from what the trainer computes; set rollout.sampling",
    "override_generation_config": "sets how tokens are drawn; set rollout.sampling",
    "generation_config": "sets how tokens are drawn; set rollout.sampling",
    "enable_lora": "is not how adapters are sent: they are merged; set train.lora",
    "download_dir": "is the engines' alone; set HF_HOME, which the trainer obeys, too",
    "hf_token": "is the engines' alone; set HF_TOKEN, which the trainer obeys, too",
    "distributed_executor_backend": "follows from rollout.engine.device; leave it out",
    "device_ids": "follows from what Ray places on a node; leave it out",
    "cudagraph_metrics": "is told in the lines of statistics of vLLM, of which a run has none; "
    "leave it out",
    "profiler_config": "profiles what a call of vLLM's begins, and a run makes none; set "
    "train.profile_steps",
}
"""What a run sets otherwise."""

_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "changes what runs in the engine's processes: ray_apr has its own there; leave it out",
        "worker_cls worker_extension_cls scheduler_cls additional_config weight_transfer_config "
        "model_impl model_class_overrides io_processor_plugin",
    ),
    (
        "changes how an engine is divided, which the weight sync does not know; "
        "set rollout.engine.tensor_parallel_size or rollout.num_replicas",
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "disable_nccl_for_dp_synchronization dp_sync_interval prefill_schedule_interval "
        "enable_expert_parallel enable_ep_weight_filter all2all_backend enable_elastic_ep "
        "elastic_ep_max_dp_size enable_eplb eplb_config expert_placement_strategy enable_hc_sp "
        "enable_batch_sharded_sampling enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold fault_tolerance_config enable_fault_tolerance "
        "enable_nccl_comm_suspend enable_shm_tensor_arena",
    ),
    (
        "changes where an engine's workers are, which Ray decides; leave it out",
        "master_addr master_port nnodes node_rank ray_workers_use_nsight _api_process_count "
        "_api_process_rank",
    ),
    (
        "binds processes that vLLM spawns, and an engine's are forked, or Ray's actors: nothing "
        "would be bound; leave it out, and call `ray start` by numactl",
        "numa_bind numa_bind_nodes numa_bind_cpus",
    ),
    (
        "changes the precision of weights, activations or the KV cache: log-probs would not be "
        "the trainer's; set rollout.engine.dtype",
        "quantization quantization_config allow_deprecated_quantization kv_cache_dtype "
        "kv_cache_dtype_skip_layers calculate_kv_scales override_attention_dtype "
        "enable_bf16x3_router_gemm mamba_cache_dtype mamba_ssm_cache_dtype "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds attention_config",
    ),
    (
        "changes which tokens are drawn, or what their log-probs mean; set "
        "rollout.sampling.temperature and its kin",
        "max_logprobs use_fp64_gumbel return_sampling_mask logits_processors speculative_config "
        "spec_method spec_model spec_tokens watermark_config diffusion_config "
        "structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config "
        "enable_trace_replay per_request_spec_decode_metrics",
    ),
    (
        "changes the model that the engine computes: the trainer's would be another one; "
        "change the checkpoint's config.json",
        "hf_overrides hf_config_path config_format runner convert pooler_config "
        "disable_sliding_window kv_sharing_fast_prefill engram_config mamba_config",
    ),
    (
        "changes how a kernel keeps its weights, which a weight sync could not renew; leave it out",
        "linear_backend kernel_config ir_op_priority sparse_indexer_topk_backend "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_backend "
        "mamba_ssu_algorithm",
    ),
    (
        "moves weights off the device, where a weight sync writes to; lower "
        "gpu_memory_utilization, or set a larger rollout.engine.tensor_parallel_size",
        "offload_backend cpu_offload_gb cpu_offload_params offload_group_size "
        "offload_num_in_group offload_prefetch_step offload_params sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names enable_cumem_allocator",
    ),
    (
        "keeps KV entries outside of the engine, where those of earlier weights would outlive a "
        "weight sync; leave it out",
        "kv_offloading_size kv_offloading_backend kv_transfer_config kv_events_config "
        "ec_transfer_config ec_manager_config prefix_cache_retention_interval prefix_match_unit",
    ),
    (
        "loads the engine's model otherwise than the trainer's; set model to a folder that both "
        "read",
        "load_format safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size model_loader_extra_config ignore_patterns "
        "max_parallel_loading_workers pt_load_map_location code_revision",
    ),
    (
        "lets code of the checkpoint run; only architectures that transformers and vLLM have "
        "themselves are trained; leave it out",
        "trust_remote_code",
    ),
    (
        "has no use: token ids go in and come out; leave it out",
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init served_model_name "
        "enable_prompt_embeds stream_interval tokens_only renderer_num_workers "
        "enable_return_routed_experts aux_output_config",
    ),
    (
        "is for images, sound or video; only text is trained; leave it out",
        "language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings "
        "media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling "
        "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb mm_device_do_normalize allowed_local_media_path "
        "allowed_media_domains disable_chunked_mm_input enable_mm_processor_stats",
    ),
    (
        "is for adapters inside of the engine; they are merged before weights are sent; "
        "set train.lora",
        "max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype "
        "lora_target_modules enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    ),
    (
        "limits requests beside the run's own limits; set partial_rollout.max_inflight",
        "max_num_active_seqs max_num_queued_reqs max_num_queued_tokens shutdown_timeout",
    ),
    (
        "is not known to change speed alone; leave it out",
        "swa_bounded_replay use_replayssm replayssm_buffer_len mamba_block_size mamba_cache_mode "
        "enable_mamba_shared_prefix_checkpoint max_num_partial_prefills "
        "max_long_partial_prefills long_prefill_token_threshold_adaptive disable_cascade_attn "
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "custom_histogram_buckets jit_monitor_mode jit_monitor_verbose aggregate_engine_logging "
        "logging_config log_level log_config_file fail_on_environ_validation",
    ),
)

REFUSED: Mapping[str, str] = {
    **{name: reason for reason, names in _GROUPS for name in names.split()},
    **_OURS,
}
"""Name of an argument, why it is refused, and what to do."""


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Check the arguments that a run gives to vLLM.

    Raises:
        ConfigError: For one that does more than tune, is not known, or has a value of another kind.

    Example:
        >>> check_engine_options({"max_num_seqs": 64})
    """
    for name, value in options.items():
        field = f"{_FIELD}.{name}"
        if name in TUNES:
            check, remedy = TUNES[name]
            require(check(value), field, value, remedy)
        else:
            require(name in REFUSED, field, value, _unknown(name))
            require(False, field, value, REFUSED[name])
    for key, value in options.get("compilation_config", {}).items():
        close = nearest(str(key), COMPILATION)
        known = did_you_mean(close, f"known: {', '.join(COMPILATION)}")
        remedy = f"is not known to change speed alone; {known}"
        require(key in COMPILATION, f"{_FIELD}.compilation_config.{key}", value, remedy)


def _unknown(name: Any) -> str:
    close = nearest(str(name), [*TUNES, *REFUSED])
    remedy = "is no argument of vLLM's that is known to change speed alone"
    return did_you_mean(close, remedy, last=True)
