"""The scoring of a model's logits, a chunk of them at a time.

Invariants:
    * Logits exist only at positions that predict a token of the loss, and no more than
      `_CHUNK_LOGITS` (`_CHUNK_LOGITS_COMPILED`) of them at a time; larger micro-batches compute
      them again in the backward pass.
    * Log-probs are those of the distribution that the engines draw from, whose log-probs they hand
      out: of logits / temperature, early in a response without what would end it, and with a top_k
      on those ids alone that the engine says could be drawn; in float32 whatever the forward pass
      runs in.

Axis suffixes: `_R` tokens of the loss of all samples in a row, `_V` vocabulary, `_E` ids that end a
response, `_K` ids that could be drawn.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from ray_apr.train.compilation import compile_for_all_sizes

METHOD = "response_logprobs"
"""Name of what `attach_response_logprobs` adds to a model."""
_CHUNK_LOGITS = 2**26
_CHUNK_LOGITS_COMPILED = 2**28
"""A compiled chunk makes no float32 copies of its logits, and large ones keep a GPU busier."""
_FORBIDDEN = -1e30
"""Logit of an id that cannot be drawn: no probability, and none of infinity's traps."""


def attach_response_logprobs(model: nn.Module, *, compiled: bool = False) -> None:
    """Give a causal language model the method that `response_logprobs` calls.

    Under FSDP2 the method counts as a forward pass of the root, which gathers the head's weights;
    calling the base model and the head from outside would not.

    Args:
        model: The model.
        compiled: Whether the scoring of the head's logits is compiled into few kernels.
    """
    score, chunk_logits = _score, _CHUNK_LOGITS
    if compiled:
        score, chunk_logits = compile_for_all_sizes(_score), _CHUNK_LOGITS_COMPILED
    method = partial(_response_logprobs, score, chunk_logits)
    setattr(model, METHOD, types.MethodType(method, model))
    register_fsdp_forward_method(model, METHOD)


def _response_logprobs(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    chunk_logits: int,
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    targets: torch.Tensor,
    drawn: tuple[float, torch.Tensor, torch.Tensor, torch.Tensor],
    entropy_gradients: bool,
    arguments: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [R] of `targets`, and the entropies [R]."""
    output = model.base_model(input_ids=input_ids, use_cache=False, **arguments)
    hidden = output.last_hidden_state.flatten(0, 1)
    head = model.get_output_embeddings()
    temperature, end_ids, is_early, support = drawn
    # a tensor: the compiler would compile again for each number
    divisor = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
    rows = max(1, chunk_logits // model.config.get_text_config().vocab_size)
    if len(targets) < 2:
        score = _score  # the compiler would compile once more for one row, and for none
    if len(targets) <= rows:
        rows_R = hidden.index_select(0, positions)
        return score(head, rows_R, targets, divisor, end_ids, is_early, support, entropy_gradients)
    num_chunks = -(-len(targets) // rows)
    parts = [
        # copies of their own, of about one size: the compiler tells views and single rows apart
        checkpoint(
            score,
            head,
            hidden.index_select(0, chunk),
            target_chunk.clone(),
            divisor,
            end_ids,
            early_chunk.clone(),
            support_chunk.clone(),
            entropy_gradients,
            use_reentrant=False,
        )
        for chunk, target_chunk, early_chunk, support_chunk in zip(
            *(t.tensor_split(num_chunks) for t in (positions, targets, is_early, support)),
            strict=True,
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    head: nn.Module,
    hidden_R: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: torch.Tensor,
    end_ids_E: torch.Tensor,
    is_early_R: torch.Tensor,
    support_RK: torch.Tensor,
    entropy_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [R] and entropies [R] of one chunk, in float32."""
    # changed in place, as the engines do: no further copy of the logits, and no loss in bfloat16
    logits_RV = head(hidden_R).float().div_(temperature)
    if len(end_ids_E):
        added_R1 = (_FORBIDDEN * is_early_R).unsqueeze(1)
        logits_RV.index_add_(1, end_ids_E, added_R1.expand(-1, len(end_ids_E)))
    if support_RK.shape[1]:
        return _score_within(logits_RV, targets_R, support_RK, entropy_gradients)
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropies_R = -(logprobs_RV.exp() * logprobs_RV).sum(dim=-1)
    return -F.nll_loss(logprobs_RV, targets_R, reduction="none"), entropies_R


def _score_within(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    support_RK: torch.Tensor,
    entropy_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the distribution on the ids that could be drawn."""
    ids_RK = support_RK.long()
    logits_RK = logits_RV.gather(1, ids_RK.clamp(min=0)).masked_fill(ids_RK < 0, _FORBIDDEN)
    logprobs_RK = logits_RK.log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropies_R = -(logprobs_RK.exp() * logprobs_RK).sum(dim=-1)
    own_R = logits_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1)
    return own_R - logits_RK.logsumexp(dim=-1), entropies_R
