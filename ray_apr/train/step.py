"""The update of one batch on one rank, and its figures over all ranks.

Invariants:
    * A group's advantages and every denominator come from the WHOLE batch or mini-batch, so that
      an optimizer step does not depend on how it is cut into ranks and micro-batches. Denominators
      count tokens of the loss; a sample without any still counts for its group's advantages.
    * The proximal policy is the model at the start of the batch, whatever the number of its
      mini-batches and epochs.
    * Nothing that is not a finite number reaches the weights: the optimizer itself leaves them
      alone then, on all ranks, and from then on. The step raises at its end, as the device is
      waited for nowhere else: what it computes next is in its queue by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ray_apr.algorithms.advantages import overlong_penalties, sample_advantages
from ray_apr.algorithms.losses import kl_estimate, loss_normalizer
from ray_apr.algorithms.user import advantages_of
from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.core.exceptions import TrainError
from ray_apr.core.messages import SamplingParams
from ray_apr.core.staleness import is_stale
from ray_apr.train.figures import Figures, Totals, ages_of, batch_figures, oldest_versions
from ray_apr.train.fsdp import (
    StepSync,
    give_states_memory_of_their_own,
    gradient_scale,
    learning_rate,
    limit_next_step,
    set_learning_rate,
    squared_gradient_norm,
)
from ray_apr.train.logprobs import MicroBatch, micro_batches
from ray_apr.train.objective import (
    Frozen,
    Whole,
    backward,
    correction,
    frozen_policies,
)
from ray_apr.train.tensors import compute_device

if TYPE_CHECKING:
    from ray_apr.scheduling.batch import RankBatch
    from ray_apr.train.checkpoint import Progress

_PLAIN = SamplingParams()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RankBatch,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    *,
    sampling: SamplingParams = _PLAIN,
    reference: nn.Module | None = None,
    max_response_tokens: int | None = None,
    show_advantages: Callable[[torch.Tensor], None] | None = None,
) -> Figures:
    """Forward and backward over this rank's micro-batches, and the optimizer's steps.

    Args:
        model: From `fsdp.build_model`, or any model with `head.attach_response_logprobs`.
        optimizer: From `fsdp.build_optimizer`.
        batch: This rank's row (`scheduling.batch.RankBatch`) of the step.
        algorithm: Advantages, loss, correction.
        train: Learning rate, clipping, data types.
        sampling: How the responses were drawn: of that distribution are all log-probs, the entropy
            and the KL. With `min_tokens`, `stop_token_ids` are all ids that end a response, those
            of the model included.
        reference: Like `model`, for the KL term; needed where ``algorithm.kl_coef > 0``.
        max_response_tokens: Budget of a response; needed for the overlong punishment.
        show_advantages: Gets the advantages [B] of the whole batch, on the device.

    Returns:
        Figures of the step over all ranks, the same on each of them.

    Raises:
        TrainError: On all ranks, if loss or gradient is not finite; that mini-batch and those after
            it have then left the weights alone.
    """
    device = compute_device(model)
    parts = micro_batches(
        batch,
        device,
        packed=train.packs(device.type),
        sampling=sampling,
    )
    num_steps = len(batch.mini_batch_sizes) * train.epochs
    first = int(batch.mini_batch_sizes[0])
    temperature = sampling.temperature
    frozen = frozen_policies(
        model, reference, parts, algorithm, temperature=temperature, first_mini_batch=first
    )
    advantages_B = _advantages(batch, parts, frozen, algorithm, max_response_tokens, device)
    if show_advantages is not None:
        show_advantages(advantages_B)
    mean_weight = _mean_weight(parts, frozen, algorithm, device)
    kept_B = _kept(batch, algorithm).to(device)
    set_learning_rate(optimizer, learning_rate(train, batch.step))
    sync = StepSync(model, train, device)
    num_known = None if algorithm.proximal == "forward" else 1
    totals = Totals(ages_of(batch), train.epochs, num_steps_known=num_known)
    for number, (numbers, lengths) in enumerate(_mini_batches(batch) * train.epochs):
        whole = Whole(
            advantages_B=advantages_B,
            kept_B=kept_B,
            normalizer=loss_normalizer(lengths, algorithm.aggregation),
            policy_version=batch.policy_version,
            temperature=temperature,
            progress=number / num_steps,
            mean_weight=mean_weight,
            loss_scale=gradient_scale(model),
        )
        found = []
        for i in numbers:
            sync.before_backward(is_last=i == numbers[-1])
            found.append(backward(model, parts[i], frozen[i], algorithm, whole))
            if algorithm.proximal == "forward" and frozen[i].proximal is None:
                # for the epochs that follow
                frozen[i] = replace(frozen[i], proximal=found[-1].logprobs)
        norm, is_finite = totals.add(found, squared_gradient_norm(model))
        limit_next_step(optimizer, norm, train.max_grad_norm, is_finite=is_finite)
        if not optimizer.state:
            give_states_memory_of_their_own(device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync.after_optimizer()
    figures = {
        **batch_figures(batch),
        **totals.figures(batch.step),
        "learning_rate": learning_rate(train, batch.step),
    }
    if not isinstance(algorithm.loss, str):
        del figures["clip_fraction"]  # what a loss of the user clips is not known
    return figures


def _mini_batches(batch: RankBatch) -> list[tuple[range, torch.Tensor]]:
    """Of each mini-batch: the numbers of its micro-batches, and how many tokens of the loss each of
    its samples has, over all ranks."""
    ends = np.cumsum(batch.mini_batch_sizes).tolist()
    lengths_B = torch.tensor(np.asarray(batch.all_loss_lens, dtype=np.int64))
    begins = [0, *ends[:-1]]
    return list(zip(map(range, begins, ends), lengths_B.chunk(len(ends)), strict=True))


def _kept(batch: RankBatch, algorithm: AlgorithmConfig) -> torch.Tensor:
    """[B], 0 for the samples of the whole batch that are filtered out of the loss."""
    truncated_B = torch.tensor(np.asarray(batch.truncated, dtype=np.float32))
    return 1 - truncated_B if algorithm.overlong_filter else torch.ones_like(truncated_B)


def _advantages(
    batch: RankBatch,
    parts: list[MicroBatch],
    frozen: list[Frozen],
    algorithm: AlgorithmConfig,
    max_response_tokens: int | None,
    device: torch.device,
) -> torch.Tensor:
    """Advantages [B] of the whole batch, in float64 and from one place."""
    rewards_B = torch.tensor(np.asarray(batch.rewards, dtype=np.float64))
    groups_B = torch.tensor(np.asarray(batch.groups, dtype=np.int64))
    if algorithm.overlong_buffer_tokens is not None and max_response_tokens is not None:
        rewards_B = rewards_B + algorithm.overlong_penalty * overlong_penalties(
            torch.tensor(np.asarray(batch.all_response_lens, dtype=np.float64)),
            max_tokens=max_response_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
        )
    if algorithm.needs_reference and algorithm.kl_in == "reward":
        kl_B = torch.zeros(len(rewards_B), dtype=torch.float64, device=device)
        for part, policies in zip(parts, frozen, strict=True):
            kl = kl_estimate(policies.proximal, policies.reference, algorithm.kl) * part.mask
            kl_B.index_add_(0, part.sample_index, kl.sum(dim=1).double())
        rewards_B = rewards_B - algorithm.kl_coef * _sum_over_ranks(kl_B).cpu()
    if not isinstance(algorithm.advantage, str):
        kwargs = algorithm.advantage_kwargs
        advantages_B = advantages_of(algorithm.advantage, rewards_B, groups_B, kwargs)
    else:
        lengths_B = torch.tensor(np.asarray(batch.all_loss_lens, dtype=np.float64))
        advantages_B = sample_advantages(rewards_B, groups_B, lengths_B, algorithm.advantage)
    return advantages_B.to(device, torch.float32)


def _mean_weight(
    parts: list[MicroBatch],
    frozen: list[Frozen],
    algorithm: AlgorithmConfig,
    device: torch.device,
) -> float:
    """Mean of the importance weights over the batch: its tokens, or its samples; 1 unless asked."""
    if not algorithm.importance_normalize or algorithm.importance is None:
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for part, policies in zip(parts, frozen, strict=True):
        weights = correction(policies.proximal, part.behavior_logprobs, part.mask, algorithm)
        assert weights is not None
        counted = part.mask
        if algorithm.importance == "sequence":
            weights, counted = weights.amax(dim=1), counted.amax(dim=1)
        sums += torch.stack([weights.sum().double(), counted.sum().double()])
    total, count = _sum_over_ranks(sums).tolist()
    return max(total / max(1.0, count), 1e-30)


def _sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def check_batch(batch: RankBatch, progress: Progress, max_staleness: int) -> None:
    """Check a row before it is trained (invariant 2 does not rest on the buffer alone).

    Raises:
        TrainError: If it is the row of another step, or a token of the loss is beyond the bound.
    """
    if (batch.step, batch.policy_version) != (progress.step, progress.policy_version):
        raise TrainError(
            f"expected the batch of step {progress.step} at version {progress.policy_version}, got "
            f"that of step {batch.step} at version {batch.policy_version}"
        )
    oldest = min(oldest_versions(batch), default=batch.policy_version)
    if is_stale(batch.policy_version, oldest, max_staleness):
        raise TrainError(
            f"step {batch.step} at version {batch.policy_version} would train a token of version "
            f"{oldest}, beyond max_staleness = {max_staleness}"
        )
