"""Policy losses and KL estimates per token, and how they become one number.

Denominators count the ORIGINAL mask of the whole batch: a micro-batch or a rank that holds a part
of the batch passes `normalizer`, and then the parts add up to the loss of the whole.
"""

from __future__ import annotations

from typing import get_args

import torch

from ray_apr.config.algorithm import Aggregation, KLKind, Loss
from ray_apr.core.exceptions import ConfigError

LOSSES = get_args(Loss)
AGGREGATIONS = get_args(Aggregation)
KL_KINDS = get_args(KLKind)
_LENGTH_EPS = 1e-8
_LOG_RATIO_LIMIT = 20.0


def policy_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss: str,
    aggregation: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_weights: torch.Tensor | None = None,
    normalizer: float | None = None,
) -> torch.Tensor:
    """Clipped policy-gradient loss.

    With r = exp(logprobs - proximal_logprobs), w the importance weight and
    c(r) = clip(r, 1 - clip_low, 1 + clip_high), a token costs

    * ``"ppo"``: w max(-r A, -c(r) A): decoupled PPO (2110.00641; 2505.24298, eq. 5), and plain PPO
      without the weight;
    * ``"gspo"``: the same with s = exp(mean of log r over the response) in the place of r, whose
      gradient reaches each token through its own log-prob (2507.18071, eq. 14);
    * ``"cispo"``: -w sg(c(r)) A logprobs, where sg stops the gradient: clipped tokens still learn
      (2506.13585, eq. 4).

    Args:
        logprobs: [B, T], under the policy that is optimised; gradients flow here.
        proximal_logprobs: [B, T], under the policy at the start of the update.
        advantages: [B, T].
        mask: [B, T], 1 where a token is trained.
        loss: ``"ppo"``, ``"gspo"`` or ``"cispo"``.
        aggregation: ``"token-mean"``, ``"seq-mean-token-sum"`` or ``"seq-mean-token-mean"``.
        clip_low: r is clipped below at 1 - clip_low.
        clip_high: r is clipped above at 1 + clip_high.
        dual_clip: Bound c > 1 of -A * c on the cost of a token with a negative advantage; it has
            no meaning for ``"cispo"``, which takes no gradient through the ratio.
        importance_weights: [B, T], detached factors of the tokens' costs, in which training also
            puts what is rejected or filtered (0).
        normalizer: Denominator over the whole batch (see `loss_normalizer`) when these rows are a
            part of it; None counts the rows that are here.

    Returns:
        A scalar.

    Raises:
        ConfigError: For a loss or an aggregation that does not exist.
    """
    costs = policy_costs(
        logprobs,
        proximal_logprobs,
        advantages,
        mask,
        loss=loss,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    if importance_weights is not None:
        costs = costs * importance_weights
    return aggregate(costs, mask, aggregation, normalizer=normalizer)


def policy_costs(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Costs [B, T] of the tokens, before importance weights and aggregation; see `policy_loss`.

    Raises:
        ConfigError: For a loss that does not exist.
    """
    if loss not in LOSSES:
        raise ConfigError("algorithm.loss", loss, f"must be one of {', '.join(LOSSES)}")
    ratio = policy_ratio(logprobs, proximal_logprobs, mask, loss=loss)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss == "cispo":
        return -clipped.detach() * advantages * logprobs
    costs = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        bounded = torch.minimum(costs, -advantages * dual_clip)
        costs = torch.where(advantages < 0, bounded, costs)
    return costs


def policy_ratio(
    logprobs: torch.Tensor, proximal_logprobs: torch.Tensor, mask: torch.Tensor, *, loss: str
) -> torch.Tensor:
    """The ratio [B, T] that a loss clips: of the sequence for ``"gspo"``, else of each token."""
    ratio = _sequence_ratio if loss == "gspo" else _ratio
    return ratio(logprobs, proximal_logprobs, mask)


def aggregate(
    costs: torch.Tensor, mask: torch.Tensor, aggregation: str, *, normalizer: float | None = None
) -> torch.Tensor:
    """Reduce costs [B, T] of the masked tokens to a scalar.

    Args:
        costs: [B, T].
        mask: [B, T], 1 where a token counts.
        aggregation: One of `AGGREGATIONS`.
        normalizer: Denominator of the whole batch; None counts the rows that are here.

    Raises:
        ConfigError: For an aggregation that does not exist.
    """
    lengths_B = mask.sum(dim=1).to(costs.dtype)
    denominator = loss_normalizer(lengths_B, aggregation) if normalizer is None else normalizer
    sums_B = costs.masked_fill(mask == 0, 0.0).sum(dim=1)
    if aggregation == "seq-mean-token-mean":
        sums_B = sums_B / (lengths_B + _LENGTH_EPS)
    return sums_B.sum() / denominator


def loss_normalizer(lengths: torch.Tensor, aggregation: str) -> float:
    """Denominator of a batch: its trained tokens, or its samples that have any.

    Args:
        lengths: [B], trained tokens of each sample of the WHOLE batch, over all ranks.
        aggregation: One of `AGGREGATIONS`.

    Raises:
        ConfigError: For an aggregation that does not exist.
    """
    if aggregation not in AGGREGATIONS:
        raise ConfigError(
            "algorithm.aggregation", aggregation, f"must be one of {', '.join(AGGREGATIONS)}"
        )
    counted = lengths.sum() if aggregation == "token-mean" else (lengths > 0).sum()
    return max(1.0, float(counted))


def is_clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss: str,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Which tokens [B, T] the clip reaches (a diagnostic).

    With ``"cispo"`` that bounds the weight of a token; with the others it takes the gradient away,
    and does so only where the ratio has moved the way that the advantage pulls.
    """
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    if loss != "cispo":
        above, below = above & (advantages > 0), below & (advantages < 0)
    return (above | below) & (mask != 0)


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: str
) -> torch.Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy sampled.

    Args:
        logprobs: [B, T], under the policy.
        reference_logprobs: [B, T].
        kind: With d = logprobs - reference_logprobs: ``"k1"``: d, ``"k2"``: d^2 / 2, ``"k3"``:
            exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html).

    Returns:
        [B, T].

    Raises:
        ConfigError: For a kind that does not exist.
    """
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        clamped = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        return torch.expm1(-clamped) + clamped
    raise ConfigError("algorithm.kl", kind, f"must be one of {', '.join(KL_KINDS)}")


def _ratio(
    logprobs: torch.Tensor, proximal_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """exp(logprobs - proximal), finite, and 1 where the mask is 0 (whatever the padding holds)."""
    log_ratio = (logprobs - proximal_logprobs).masked_fill(mask == 0, 0.0)
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def _sequence_ratio(
    logprobs: torch.Tensor, proximal_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """exp(mean log ratio of a response) [B, T], with the gradient of each token's log-prob."""
    log_ratio = (logprobs - proximal_logprobs).masked_fill(mask == 0, 0.0)
    lengths_B1 = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B1 = (log_ratio.sum(dim=1, keepdim=True) / lengths_B1).detach()
    own = (logprobs - logprobs.detach()).masked_fill(mask == 0, 0.0)
    return (own + mean_B1).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
