"""vLLM's scheduler without a model: what its fakes have in common, and the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class BareScheduler:
    """Requests by their ids, which end from outside or are paused."""

    max_num_running_reqs = 100

    def __init__(self, graphs="NONE", **additional_config):
        self.requests = {}
        self.pause_state = PauseState.UNPAUSED
        self.vllm_config = SimpleNamespace(
            additional_config=additional_config,
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs]),
        )

    def has_requests(self):
        return bool(self.requests) and self.pause_state == PauseState.UNPAUSED

    def set_pause_state(self, pause_state):
        self.pause_state = pause_state

    def finish_requests(self, names, status):
        names = list(self.requests) if names is None else names
        return [self.requests.pop(name) for name in names if name in self.requests]


BLOCK = 16
"""Tokens of a block of `real_scheduler`."""


def real_scheduler(
    make: Callable[..., Any],
    model: Path,
    *,
    num_blocks: int,
    is_async: bool = True,
    window: int | None = None,
    **arguments: Any,
) -> Any:
    """vLLM's own scheduler, as `make` makes it, with room for so many blocks and no engine.

    Args:
        make: What vLLM is given as ``scheduler_cls``.
        model: Folder of a model.
        num_blocks: Of the KV cache; vLLM keeps one for itself.
        is_async: Whether a step is scheduled before the tokens of the one before are there.
        window: Tokens that a layer looks back at; None: all.
        arguments: Others of vLLM; by default 8 requests of at most 256 tokens, 48 in a step.
    """
    given = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 48} | arguments
    config = EngineArgs(
        model=str(model), block_size=BLOCK, enforce_eager=True, enable_chunked_prefill=True,
        enable_prefix_caching=True, **given,
    ).create_engine_config()  # fmt: skip
    init_none_hash(sha256)  # with which hashes of blocks begin
    config.scheduler_config.async_scheduling = is_async  # which vLLM has none of on a CPU
    config.cache_config.num_gpu_blocks = num_blocks
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    spec = (
        SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    )
    return make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def real_request(name: str, prompt: list[int], max_tokens: int) -> Request:
    """A request of vLLM whose response nobody reads before its end."""
    params = SamplingParams(
        max_tokens=max_tokens, logprobs=0, ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    params.update_from_generation_config({}, 0)
    return Request(name, prompt, params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def made_tokens(
    step: SchedulerOutput, requests: dict[str, Request], token: int
) -> ModelRunnerOutput:
    """What a model makes in a step: this token for each request whose prompt is all there."""
    ids = list(step.num_scheduled_tokens)
    computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    cached = step.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    is_made = [
        computed[i] + step.num_scheduled_tokens[i] >= requests[i].num_prompt_tokens for i in ids
    ]
    column = np.full((len(ids), 1), token, np.int32)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=[[token] if made else [] for made in is_made],
        logprobs=LogprobsLists(column, -column / np.float32(7), column[:, 0], None),
        prompt_logprobs_dict={},
    )
