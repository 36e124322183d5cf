"""What verl's processes load in a run of `compare.py`: attention, sampler and scores.

verl 0.9 takes attention over packed tokens and their cross entropy from the package `flash_attn`,
which has no wheels in the registry. Without it verl takes the log-probs of packed tokens one by
one, for 6 seconds a step. Here it gets PyTorch's variable-length flash attention and cross entropy.
Its buffer looks for a batch once in two seconds, which is longer than a step; here each 20 ms.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import verl.utils.torch_functional
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from ray_apr.train.attention import varlen_attention

sys.path.insert(0, str(Path(__file__).parent))
import spelling

POLL_S = 0.02
ATTENTION = "packed_varlen"


def attention(*args: Any, position_ids: torch.Tensor, **options: Any) -> Any:
    """Attention of a Transformers model over a packed row, each sample by itself."""
    return varlen_attention(*args, **{**options, **boundaries(position_ids)})


@functools.lru_cache(maxsize=1)  # tensors are told apart by identity
def boundaries(position_ids: torch.Tensor) -> dict[str, Any]:
    """Where the samples of a packed row lie, found once for all layers of a pass."""
    (starts,) = (position_ids[0] == 0).nonzero(as_tuple=True)
    ends = starts.new_tensor([position_ids.shape[1]])
    where = torch.cat((starts, ends)).to(torch.int32)
    return {"cu_seq_lens_q": where, "max_length_q": int(where.diff().max())}


def logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs [T] of labels [T] among logits [T, vocabulary]."""
    return -nn.functional.cross_entropy(logits.float(), labels, reduction="none")


class Sampler(ReplayBuffer):  # type: ignore[misc]  # verl is untyped
    """verl's buffer of `sync`, looked at more often."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=POLL_S)


class AsyncSampler(ReplayBufferAsync):  # type: ignore[misc]  # verl is untyped
    """verl's buffer of the asynchronous modes, looked at more often."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=POLL_S)


def score(solution_str: str, ground_truth: str, **_: Any) -> float:
    """The spelling task's."""
    return spelling.score(solution_str, ground_truth)


verl.utils.torch_functional.logprobs_from_logits_v2 = logprobs
AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
