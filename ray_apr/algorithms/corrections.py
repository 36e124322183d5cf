"""Corrections for data that an older policy sampled."""

from __future__ import annotations

import torch

from ray_apr.exceptions import ConfigError

LEVELS = ("token", "sequence")


@torch.no_grad()
def importance_weights(
    proximal_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str = "token",
    cap: float,
    batch_normalize: bool = False,
) -> torch.Tensor:
    """Truncated importance weights rho = min(proximal / behavior, cap), detached.

    Args:
        proximal_logprobs: [B, T], under the policy at the start of the update.
        behavior_logprobs: [B, T], under the policies that sampled the tokens.
        mask: [B, T], 1 where a token is trained.
        level: ``"token"``: one ratio for each token; ``"sequence"``: the product over the sample's
            tokens, the same for all of them.
        cap: Largest weight, in (0, inf).
        batch_normalize: Divide the truncated weights by their mean, over the trained tokens or over
            the samples, so that the mean is 1.

    Returns:
        [B, T], 0 where the mask is 0.

    Raises:
        ConfigError: For a level that does not exist.
    """
    if level not in LEVELS:
        raise ConfigError(
            "algorithm.importance_level", level, f"must be one of {', '.join(LEVELS)}"
        )
    kept = mask != 0
    log_ratio = (proximal_logprobs - behavior_logprobs).masked_fill(~kept, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    weights = log_ratio.exp().clamp(max=cap)
    if batch_normalize:
        counted = kept if level == "token" else kept.any(dim=1, keepdim=True)
        mean = weights.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)
        weights = weights / mean.clamp(min=torch.finfo(weights.dtype).tiny)
    return weights.expand_as(log_ratio if level == "token" else mask).masked_fill(~kept, 0.0)
