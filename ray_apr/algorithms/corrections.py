"""Corrections for data that an older policy sampled."""

from __future__ import annotations

from typing import get_args

import torch

from ray_apr.config.algorithm import Rejection
from ray_apr.core.exceptions import ConfigError

LEVELS = ("token", "sequence")
REJECTIONS = get_args(Rejection)
_LOG_RATIO_LIMIT = 20.0


@torch.no_grad()
def importance_weights(
    proximal_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str = "token",
    cap: float | None,
    batch_normalize: bool = False,
) -> torch.Tensor:
    """Truncated importance weights rho = min(proximal / behavior, cap), detached.

    Args:
        proximal_logprobs: [B, T], under the policy at the start of the update.
        behavior_logprobs: [B, T], under the policies that sampled the tokens.
        mask: [B, T], 1 where a token is trained.
        level: ``"token"``: one ratio for each token; ``"sequence"``: the product over the sample's
            tokens, the same for all of them.
        cap: Largest weight, in (0, inf); None does not truncate.
        batch_normalize: Divide the truncated weights by their mean, over the trained tokens or over
            the samples, so that the mean is 1. Training, which has a part of the batch at a time,
            divides by the mean of the whole batch instead.

    Returns:
        [B, T], 0 where the mask is 0.

    Raises:
        ConfigError: For a level that does not exist.
    """
    if level not in LEVELS:
        raise ConfigError("level", level, f"must be one of {', '.join(LEVELS)}")
    kept = mask != 0
    log_ratio = (proximal_logprobs - behavior_logprobs).masked_fill(~kept, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    weights = log_ratio.clamp(max=_LOG_RATIO_LIMIT).exp()
    if cap is not None:
        weights = weights.clamp(max=cap)
    if batch_normalize:
        counted = kept if level == "token" else kept.any(dim=1, keepdim=True)
        mean = weights.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)
        weights = weights / mean.clamp(min=torch.finfo(weights.dtype).tiny)
    return weights.expand_as(log_ratio if level == "token" else mask).masked_fill(~kept, 0.0)


@torch.no_grad()
def icepop_weights(
    proximal_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
) -> torch.Tensor:
    """Importance weights rho = proximal / behavior within [low, high], and 0 outside (IcePop).

    Args:
        proximal_logprobs: [B, T], under the policy at the start of the update.
        behavior_logprobs: [B, T], under the policies that sampled the tokens.
        mask: [B, T], 1 where a token is trained.
        low: Smallest ratio that is kept.
        high: Largest ratio that is kept.

    Returns:
        [B, T], 0 where the mask is 0.
    """
    kept = mask != 0
    ratio = _log_ratio(proximal_logprobs, behavior_logprobs, kept).exp()
    return ratio.masked_fill(~kept | (ratio < low) | (ratio > high), 0.0)


@torch.no_grad()
def rejection_mask(
    proximal_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    metric: str,
    bound: float | tuple[float, float],
) -> torch.Tensor:
    """Take tokens or whole responses out that are too far from the policy.

    With rho = proximal / behavior, k1 is the ratio itself and k3 = rho - log rho - 1.

    Args:
        proximal_logprobs: [B, T], under the policy at the start of the update.
        behavior_logprobs: [B, T], under the policies that sampled the tokens.
        mask: [B, T], 1 where a token is trained.
        metric: ``"token_k1"``, ``"token_k3"``: of each token; ``"seq_sum_k1"``: product of the
            response's ratios; ``"seq_mean_k1"``: their geometric mean; ``"seq_mean_k3"``,
            ``"seq_max_k3"``: mean and maximum of k3 over the response.
        bound: Largest value that is kept; for the k1 metrics also a pair (lower, upper) of ratios.

    Returns:
        [B, T], the mask with what is rejected set to 0, in the dtype of `mask`.

    Raises:
        ConfigError: For a metric that does not exist, or a pair of bounds for a k3 metric.
    """
    if metric not in REJECTIONS:
        known = ", ".join(REJECTIONS)
        raise ConfigError("algorithm.rejection", metric, f"must be one of {known}")
    is_pair = isinstance(bound, tuple | list)
    if is_pair and not metric.endswith("k1"):
        raise ConfigError("algorithm.rejection_bound", bound, f"must be one number for {metric}")
    low, high = bound if is_pair else (0.0, bound)  # type: ignore[misc]
    kept = mask != 0
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs, kept)
    values = torch.expm1(log_ratio) - log_ratio if metric.endswith("k3") else log_ratio
    lengths_B1 = kept.sum(dim=1, keepdim=True).clamp(min=1)
    if metric.startswith("seq_sum"):
        values = values.sum(dim=1, keepdim=True)
    elif metric.startswith("seq_mean"):
        values = values.sum(dim=1, keepdim=True) / lengths_B1
    elif metric.startswith("seq_max"):
        values = values.max(dim=1, keepdim=True).values
    if metric.endswith("k1"):
        values = values.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    return mask * ((values >= low) & (values <= high)).to(mask.dtype)


def _log_ratio(
    proximal_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """log(proximal / behavior), bounded, and 0 outside of the mask."""
    log_ratio = (proximal_logprobs - behavior_logprobs).masked_fill(~kept, 0.0)
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
