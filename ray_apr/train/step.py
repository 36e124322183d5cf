"""One optimizer step of one rank, and its figures over all ranks.

Invariants:
    * A group's advantages and every denominator come from the WHOLE batch, so that the step does
      not depend on how the batch is cut into ranks and micro-batches. Denominators count tokens of
      the loss; a sample without any still counts for its group's advantages.
    * Each batch gets one optimizer step: the proximal policy is the one that is optimised, and its
      log-probs need no forward pass of their own.
    * Nothing that is not a finite number reaches the optimizer: all ranks see the same figures
      before it runs, and raise together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ray_apr.algorithms.advantages import group_advantages
from ray_apr.algorithms.corrections import importance_weights
from ray_apr.algorithms.losses import is_clipped, kl_estimate, loss_normalizer, policy_loss
from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.exceptions import TrainError
from ray_apr.staleness import staleness
from ray_apr.train.fsdp import (
    GradientSync,
    gradient_scale,
    learning_rate,
    scale_gradients,
    set_learning_rate,
    squared_gradient_norm,
)
from ray_apr.train.logprobs import MicroBatch, micro_batches, response_logprobs

if TYPE_CHECKING:
    from ray_apr.data.batch import RankBatch

_SUMS = (
    "loss",
    "ratio",
    "clipped",
    "importance_weight",
    "importance_capped",
    "kl_k3",
    "entropy",
)


@dataclass(frozen=True, slots=True)
class _Whole:
    """What a micro-batch has to know of the whole batch."""

    advantages_B: torch.Tensor
    normalizer: float
    loss_scale: float


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RankBatch,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
) -> dict[str, float | int]:
    """Forward and backward over this rank's micro-batches, then one optimizer step.

    Args:
        model: From `fsdp.build_model`, or any model with `logprobs.attach_response_logprobs`.
        optimizer: From `fsdp.build_optimizer`.
        batch: This rank's row (`data.batch.RankBatch`) of the step.
        algorithm: Advantages, loss, correction.
        train: Learning rate, clipping, data types.

    Returns:
        Figures of the step over all ranks, the same on each of them.

    Raises:
        TrainError: On all ranks, before the optimizer runs, if loss or gradient is not finite.
    """
    device = next(model.parameters()).device
    parts = micro_batches(batch, device)
    whole = _whole(batch, algorithm, gradient_scale(model), device)
    sync = GradientSync(model, train, device)
    totals = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
    for i, part in enumerate(parts):
        sync.before(is_last=i == len(parts) - 1)
        totals += _backward(model, part, algorithm, whole)
    figures = _figures(batch, totals, squared_gradient_norm(model))
    _check_finite(figures, batch.step)
    if figures["grad_norm"] > train.max_grad_norm:
        scale_gradients(model, train.max_grad_norm / figures["grad_norm"])
    figures["learning_rate"] = learning_rate(train, batch.step)
    set_learning_rate(optimizer, figures["learning_rate"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return figures


def _whole(
    batch: RankBatch, algorithm: AlgorithmConfig, loss_scale: float, device: torch.device
) -> _Whole:
    """Advantages [B] and denominator of the whole batch, in float64 and from one place."""
    rewards_B = torch.tensor(np.asarray(batch.rewards, dtype=np.float64))
    groups_B = torch.tensor(np.asarray(batch.groups, dtype=np.int64))
    ones_B1 = torch.ones(len(rewards_B), 1)
    advantages_B1 = group_advantages(rewards_B, groups_B, ones_B1, algorithm.advantage)
    lengths_B = torch.tensor(np.asarray(batch.all_loss_lens, dtype=np.int64))
    return _Whole(
        advantages_B=advantages_B1.squeeze(1).to(device, torch.float32),
        normalizer=loss_normalizer(lengths_B, algorithm.aggregation),
        loss_scale=loss_scale,
    )


def _backward(
    model: nn.Module, part: MicroBatch, algorithm: AlgorithmConfig, whole: _Whole
) -> torch.Tensor:
    """Add the gradients of one micro-batch; returns its part of `_SUMS`."""
    logprobs, entropy = response_logprobs(model, part)
    proximal, behavior, mask = logprobs.detach(), part.behavior_logprobs, part.mask
    weights = None
    if algorithm.importance_cap is None:
        proximal = behavior
    else:
        weights = importance_weights(proximal, behavior, mask, cap=algorithm.importance_cap)
    rows = torch.from_numpy(np.asarray(part.sample_index, dtype=np.int64)).to(mask.device)
    advantages = whole.advantages_B[rows].unsqueeze(1).expand_as(mask)
    loss = policy_loss(
        logprobs,
        proximal,
        advantages,
        mask,
        loss="ppo",
        aggregation=algorithm.aggregation,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        importance_weights=weights,
        normalizer=whole.normalizer,
    )
    (loss * whole.loss_scale).backward()
    with torch.no_grad():
        clipped = is_clipped(
            logprobs,
            proximal,
            advantages,
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        sums = [
            loss.detach(),
            ((logprobs - proximal).exp() * mask).sum(),
            clipped.sum(),
            mask.sum() if weights is None else weights.sum(),
            _num_capped(logprobs, behavior, mask, algorithm.importance_cap),
            (kl_estimate(behavior, logprobs, "k3") * mask).sum(),
            entropy,
        ]
        return torch.stack([s.double() for s in sums])


def _num_capped(
    logprobs: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor, cap: float | None
) -> torch.Tensor:
    """Tokens whose importance weight is cut off at the cap."""
    if cap is None:
        return mask.new_zeros(())
    return ((logprobs - behavior > math.log(cap)) & (mask != 0)).sum()


def _figures(
    batch: RankBatch, totals: torch.Tensor, squared_norm: torch.Tensor
) -> dict[str, float | int]:
    """Figures of the step over all ranks, with one exchange between them."""
    ages = [staleness(batch.policy_version, oldest) for oldest in oldest_versions(batch)]
    local = [float(sum(ages)), float(len(ages)), float(max(ages, default=0))]
    exchanged = _exchange(
        torch.cat([totals, squared_norm.to(totals).reshape(1), totals.new_tensor(local)])
    )
    names = (*_SUMS, "squared_norm", "age", "aged")
    sums = dict(zip(names, exchanged.sum(dim=0).tolist(), strict=False))
    rewards = np.asarray(batch.rewards, dtype=np.float64)
    lengths = np.asarray(batch.all_response_lens)
    num_tokens, num_in_loss = int(lengths.sum()), int(np.asarray(batch.all_loss_lens).sum())
    tokens = max(1, num_in_loss)
    squared = sums["squared_norm"]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": sums["age"] / max(1.0, sums["aged"]),
        "staleness_max": int(exchanged[:, -1].max()),
        "num_samples": len(rewards),
        "num_tokens": num_tokens,
        "num_masked_tokens": num_tokens - num_in_loss,
        "response_tokens_mean": num_tokens / len(rewards),
        "response_tokens_max": int(lengths.max()),
        "loss": sums["loss"],
        "grad_norm": math.sqrt(squared) if squared >= 0 else math.nan,
        "ratio_mean": sums["ratio"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "importance_weight_mean": sums["importance_weight"] / tokens,
        "importance_capped_fraction": sums["importance_capped"] / tokens,
        "kl_k3": sums["kl_k3"] / tokens,
        "entropy": sums["entropy"] / tokens,
    }


def oldest_versions(batch: RankBatch) -> Sequence[int]:
    """Policy version of the oldest token in the loss, of each of this rank's samples that has
    one."""
    lengths = np.asarray(batch.response_lens)
    begins = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    in_loss = np.asarray(batch.loss_mask) != 0
    none = np.iinfo(np.int64).max
    versions = np.where(in_loss, np.asarray(batch.token_versions, dtype=np.int64), none)
    oldest = np.minimum.reduceat(versions, begins)
    return oldest[oldest != none].tolist()


def _exchange(local_K: torch.Tensor) -> torch.Tensor:
    """Figures [ranks, K] of all ranks, in the order of ranks on each of them."""
    if not dist.is_initialized():
        return local_K.unsqueeze(0).cpu()
    gathered = [torch.empty_like(local_K) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local_K)
    return torch.stack(gathered).cpu()


def _check_finite(figures: dict[str, float | int], step: int) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(figures[name]):
            raise TrainError(
                f"step {step}: {name} is {figures[name]}; no weight was changed. Look at rewards "
                "and log-probs of this batch, lower the learning rate, or set importance_cap"
            )
