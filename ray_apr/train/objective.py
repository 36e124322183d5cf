"""The loss of one micro-batch: policies, correction, terms, and the figures that go with them.

Invariants:
    * Costs are divided by denominators of the whole mini-batch that count the ORIGINAL mask:
      neither micro-batches, nor ranks, nor rejected tokens change them.
    * Gradients flow through the current policy alone.
    * All policies are those that sample: log-probs, entropy and KL at the rollouts' temperature.

Axis suffixes: `_N` samples of a micro-batch, `_T` response tokens, `_A` ages of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ray_apr.algorithms.corrections import icepop_weights, importance_weights, rejection_mask
from ray_apr.algorithms.losses import (
    aggregate,
    is_clipped,
    kl_estimate,
    policy_loss,
    policy_ratio,
)
from ray_apr.algorithms.user import costs_of, weights_of
from ray_apr.config import AlgorithmConfig
from ray_apr.train.logprobs import MicroBatch, response_logprobs

SUMS = (
    "loss",
    "ratio",
    "clipped",
    "importance_weight",
    "importance_capped",
    "rejected",
    "kl_reference",
    "entropy",
)
NUM_AGES = 16
"""Ages, in versions, that the diagnostics tell apart; the last one stands for all beyond."""
GAPS = ("tokens", "ratio", "squared_ratio", "k3")
"""What is summed by age, with ratio = proximal / behavior."""
NUM_QUANTILE_TOKENS = 1024
"""Tokens of one rank and mini-batch from which quantiles are taken."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Log-probs [N, T] of a micro-batch that do not change during the update of its batch."""

    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What a micro-batch has to know of the whole batch."""

    advantages_B: torch.Tensor
    kept_B: torch.Tensor
    """1 for each sample of the loss, 0 for those that are filtered out."""
    normalizer: float
    """Denominator of its mini-batch."""
    policy_version: int
    temperature: float
    """Of the rollouts."""
    progress: float
    """Share of the batch's optimizer steps that are done."""
    mean_weight: float
    """What importance weights are divided by."""
    loss_scale: float


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Figures of one micro-batch, detached, in float64."""

    sums: torch.Tensor
    """[SUMS]"""
    gaps: torch.Tensor
    """[A, GAPS] between the engines' log-probs and the trainer's, by age in versions."""
    ratios: torch.Tensor
    """[tokens of the loss], current / proximal."""
    gap_ratios: torch.Tensor
    """[tokens of the loss], proximal / behavior."""
    logprobs: torch.Tensor
    """[N, T], of the current policy; with gradients no more."""
    of_loss: Mapping[str, torch.Tensor]
    """Sums over the tokens of the loss of what a loss of the user's tells, by name."""


@torch.no_grad()
def frozen_policies(
    model: nn.Module,
    reference: nn.Module | None,
    parts: list[MicroBatch],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    first_mini_batch: int,
) -> list[Frozen]:
    """Forward passes at the start of an update, where they are needed.

    In the first optimizer step of a batch the proximal policy is the one that is optimised, so that
    its log-probs need no pass; unless something of the whole batch depends on them.

    Args:
        model: The policy.
        reference: Of the KL term; None without one.
        parts: This rank's micro-batches.
        algorithm: What needs them.
        temperature: Of the rollouts.
        first_mini_batch: Micro-batches of the first optimizer step.
    """
    num_without = 0 if algorithm.freezes_all else first_mini_batch
    if algorithm.proximal != "forward":
        num_without = len(parts)

    def logprobs(policy: nn.Module, part: MicroBatch) -> torch.Tensor:
        return response_logprobs(policy, part, temperature=temperature)[0]

    return [
        Frozen(
            logprobs(model, part) if number >= num_without else None,
            logprobs(reference, part) if reference is not None else None,
        )
        for number, part in enumerate(parts)
    ]


def backward(
    model: nn.Module, part: MicroBatch, frozen: Frozen, algorithm: AlgorithmConfig, whole: Whole
) -> Diagnostics:
    """Add the gradients of one micro-batch to the model's."""
    entropy_gradients = algorithm.entropy_coef > 0
    logprobs, entropies = response_logprobs(
        model, part, temperature=whole.temperature, entropy_gradients=entropy_gradients
    )
    proximal = _proximal(logprobs.detach(), part, frozen, algorithm, whole)
    mask, behavior = part.mask, part.behavior_logprobs
    advantages = whole.advantages_B[part.sample_index].unsqueeze(1).expand_as(mask)
    weights = correction(proximal, behavior, mask, algorithm)
    factors = whole.kept_B[part.sample_index].unsqueeze(1).expand_as(mask)
    num_capped = mask.new_zeros(())
    if weights is not None:
        is_capped = algorithm.importance in ("token", "sequence") and algorithm.correction is None
        if is_capped and algorithm.importance_cap is not None:
            num_capped = (weights >= algorithm.importance_cap).sum()
        weights = weights / whole.mean_weight
        factors = factors * weights
    kept = mask
    if algorithm.rejection is not None:
        kept = rejection_mask(
            proximal,
            behavior,
            mask,
            metric=algorithm.rejection,
            bound=algorithm.rejection_bound,
        )
        factors = factors * kept
    loss, of_loss = _policy_loss(
        logprobs, proximal, advantages, factors, part, algorithm, whole.normalizer
    )
    kl = None
    terms = torch.zeros_like(mask)
    if frozen.reference is not None:
        kl = kl_estimate(logprobs, frozen.reference, algorithm.kl)
        if algorithm.kl_in == "loss":
            terms = terms + algorithm.kl_coef * kl
    if entropy_gradients:
        terms = terms - algorithm.entropy_coef * entropies
    if terms.requires_grad:
        terms = terms * whole.kept_B[part.sample_index].unsqueeze(1)
        loss = loss + aggregate(terms, mask, algorithm.aggregation, normalizer=whole.normalizer)
    (loss * whole.loss_scale).backward()
    with torch.no_grad():
        ratio, clipped = _clipping(logprobs.detach(), proximal, advantages, mask, algorithm)
        sums = {
            "loss": loss.detach(),
            "ratio": (ratio * mask).sum(),
            "clipped": clipped.sum(),
            "importance_weight": (mask if weights is None else weights).sum(),
            "importance_capped": num_capped,
            "rejected": (mask - kept).sum(),
            "kl_reference": mask.new_zeros(()) if kl is None else (kl * mask).sum(),
            "entropy": entropies.sum(),
        }
        begin = logprobs.detach() if frozen.proximal is None else frozen.proximal
        log_gap = _in_loss(begin - behavior, part)
        return Diagnostics(
            sums=torch.stack([sums[name].double() for name in SUMS]),
            gaps=_gaps(log_gap, _in_loss(part.versions, part), whole.policy_version),
            ratios=_in_loss(ratio, part).double(),
            gap_ratios=log_gap.double().exp(),
            logprobs=logprobs.detach(),
            of_loss={
                name: values.masked_fill(mask == 0, 0.0).double().sum()
                for name, values in of_loss.items()
            },
        )


def correction(
    proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor, algorithm: AlgorithmConfig
) -> torch.Tensor | None:
    """Importance weights [N, T] as the settings ask for them, before they are normalised."""
    if algorithm.correction is not None:
        kwargs = algorithm.correction_kwargs
        return weights_of(algorithm.correction, proximal, behavior, mask, kwargs)
    if algorithm.importance is None or algorithm.proximal == "behavior":
        return None
    if algorithm.importance == "icepop":
        low, high = algorithm.icepop_bounds
        return icepop_weights(proximal, behavior, mask, low=low, high=high)
    return importance_weights(
        proximal, behavior, mask, level=algorithm.importance, cap=algorithm.importance_cap
    )


def _proximal(
    current: torch.Tensor,
    part: MicroBatch,
    frozen: Frozen,
    algorithm: AlgorithmConfig,
    whole: Whole,
) -> torch.Tensor:
    """Log-probs [N, T] of the policy at the start of the update."""
    if algorithm.proximal == "behavior":
        return part.behavior_logprobs
    if frozen.proximal is not None:
        return frozen.proximal
    if algorithm.proximal == "forward" or whole.progress == 0:
        return current
    # AReaL's interpolation: the version of the current policy lies between two whole ones
    age = (whole.policy_version - part.versions).clamp(min=0).to(current.dtype)
    share = age / (age + whole.progress)
    return part.behavior_logprobs + share * (current - part.behavior_logprobs)


def _in_loss(values: torch.Tensor, part: MicroBatch) -> torch.Tensor:
    """Of values [N, T] those [R] of the tokens in the loss."""
    return values.flatten().index_select(0, part.places)


def _policy_loss(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    factors: torch.Tensor,
    part: MicroBatch,
    algorithm: AlgorithmConfig,
    normalizer: float,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The policy's loss, whose costs are multiplied by `factors` [N, T]; and what a loss of the
    user's tells."""
    if isinstance(algorithm.loss, str):
        loss = policy_loss(
            logprobs,
            proximal,
            advantages,
            part.mask,
            loss=algorithm.loss,
            aggregation=algorithm.aggregation,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            importance_weights=factors,
            normalizer=normalizer,
        )
        return loss, {}
    costs, of_loss = costs_of(
        algorithm.loss,
        logprobs,
        proximal,
        advantages,
        part.mask,
        behavior_logprobs=part.behavior_logprobs,
        kwargs=algorithm.loss_kwargs,
    )
    loss = aggregate(costs * factors, part.mask, algorithm.aggregation, normalizer=normalizer)
    return loss, of_loss


def _clipping(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio [N, T] that the loss is made of, and which tokens its clip reaches.

    Of a loss of the user it is the ratio of each token; what that loss clips is not known here.
    """
    if not isinstance(algorithm.loss, str):
        ratio = policy_ratio(logprobs, proximal, mask, loss="ppo")
        return ratio, torch.zeros_like(mask)
    ratio = policy_ratio(logprobs, proximal, mask, loss=algorithm.loss)
    return ratio, is_clipped(
        ratio,
        advantages,
        mask,
        loss=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )


def _gaps(log_gap: torch.Tensor, versions: torch.Tensor, policy_version: int) -> torch.Tensor:
    """Sums [A, GAPS] over tokens of each age."""
    log_gap = log_gap.double()
    ratio = log_gap.exp()
    values = torch.stack(
        [torch.ones_like(ratio), ratio, ratio.square(), torch.expm1(log_gap) - log_gap], dim=1
    )
    ages = (policy_version - versions).clamp(0, NUM_AGES - 1)
    return values.new_zeros(NUM_AGES, len(GAPS)).index_add(0, ages, values)
