"""Blocks of vLLM's KV cache, not looked at for tokens that lie within one.

vLLM's scheduler asks its KV cache manager for room for the next token of each request that decodes,
and tells it of each new token, in case it fills a block that others may share. Of a block, which
has 16 tokens or more, all but two change nothing, yet these looks were a seventh of the time of the
engine core's main thread (docs/performance.md, "Generation").

Invariant: requests have the blocks that they would have, and a block can be shared as early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_apr.serve.vllm.private import (
    FullAttentionManager,
    KVCacheManager,
    Request,
    RequestStatus,
    SingleTypeKVCacheManager,
)


def look_at_ends_only(manager: KVCacheManager) -> bool:
    """Have a manager pass over tokens within a block; whether it may.

    It may where all layers keep all tokens: those with a window, or with a state of their own, have
    something to do at each one.

    Args:
        manager: That of a scheduler. Its two methods are replaced.
    """
    groups: Sequence[SingleTypeKVCacheManager] = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
        return False
    size, num_cached = groups[0].block_size, groups[0].num_cached_block
    allocate, cache = manager.allocate_slots, manager.cache_blocks
    nothing = manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, num_new_tokens: int, *args: Any, **asked: Any) -> Any:
        is_decode = num_new_tokens == 1 and request.status == RequestStatus.RUNNING
        if is_decode and not args and not any(asked.values()):  # no drafts, none from elsewhere
            place = request.num_computed_tokens % size
            if 0 < place < size - 1:  # the first one needs a block, and the last one fills it
                return nothing
        return allocate(request, num_new_tokens, *args, **asked)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > num_cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
    return True
