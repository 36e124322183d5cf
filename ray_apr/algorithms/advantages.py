"""Advantages of sampled responses, from their rewards alone.

Axis suffixes: `_B` samples of a batch, `_T` response tokens, `_G` groups.
"""

from __future__ import annotations

from typing import get_args

import torch

from ray_apr.config.algorithm import Estimator
from ray_apr.core.exceptions import ConfigError

ESTIMATORS = get_args(Estimator)
_STD_EPS = 1e-6
_VARIANCE_EPS = 1e-8


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Compare each reward with those of its group.

    Args:
        rewards: [B], one number for each sample.
        groups: [B], samples of one prompt share a whole number.
        mask: [B, T], 1 where a response token is trained.
        estimator: ``"grpo"``: (R - mean) / (std + 1e-6) with the sample standard deviation
            (2402.03300, eq. 4.1.2); ``"dr_grpo"``: R - mean (2503.20783); ``"rloo"``: R - mean of
            the others (2402.14740, eq. 8); ``"reinforce_plus_plus_baseline"``: R - mean, whitened
            over the trained tokens of the batch (2501.03262, eq. 9), which must then be whole. A
            group of one has mean 0 and standard deviation 1.

    Returns:
        [B, T], the sample's advantage on its trained tokens and 0 elsewhere, in the dtype of
        `rewards`; of whole numbers, true and false in float32.

    Raises:
        ConfigError: For an estimator that does not exist.

    Example:
        >>> group_advantages(
        ...     torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 1), "dr_grpo"
        ... ).flatten().tolist()
        [0.5, -0.5]
    """
    if not rewards.is_floating_point():
        rewards = rewards.float()
    mask_BT = mask.to(rewards.dtype)
    advantages_B = sample_advantages(rewards, groups, mask_BT.sum(dim=1), estimator)
    return advantages_B.unsqueeze(1) * mask_BT


def sample_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor, estimator: str
) -> torch.Tensor:
    """The advantage [B] of each sample, which all of its tokens share; see `group_advantages`.

    Training runs it on the whole batch, of which a rank has some tokens alone.

    Args:
        rewards: [B].
        groups: [B].
        lengths: [B], trained tokens of each sample, in the dtype of `rewards`.
        estimator: One of `ESTIMATORS`.

    Raises:
        ConfigError: For an estimator that does not exist.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(
            "algorithm.advantage", estimator, f"must be one of {', '.join(ESTIMATORS)}"
        )
    ids_B = torch.unique(groups, return_inverse=True)[1]
    size_G = torch.bincount(ids_B).to(rewards.dtype)
    alone_G = size_G == 1
    mean_G = torch.zeros_like(size_G).index_add(0, ids_B, rewards) / size_G
    mean_G = mean_G.masked_fill(alone_G, 0.0)
    advantages_B = rewards - mean_G[ids_B]
    if estimator == "grpo":
        square_G = torch.zeros_like(size_G).index_add(0, ids_B, advantages_B.square())
        std_G = (square_G / (size_G - 1).clamp(min=1)).sqrt().masked_fill(alone_G, 1.0)
        advantages_B = advantages_B / (std_G[ids_B] + _STD_EPS)
    elif estimator == "rloo":
        others_G = size_G / (size_G - 1).clamp(min=1)
        advantages_B = advantages_B * others_G[ids_B]
    if estimator == "reinforce_plus_plus_baseline":
        advantages_B = _whitened(advantages_B, lengths)
    return advantages_B


def overlong_penalties(
    lengths: torch.Tensor, *, max_tokens: int, buffer_tokens: int
) -> torch.Tensor:
    """DAPO's soft overlong punishment (2503.14476, eq. 13).

    Args:
        lengths: [B], response tokens.
        max_tokens: Budget of a response.
        buffer_tokens: Tokens below the budget within which the punishment grows.

    Returns:
        [B], 0 up to ``max_tokens - buffer_tokens``, from there falling linearly to -1.
    """
    over = lengths - (max_tokens - buffer_tokens)
    return -(over / buffer_tokens).clamp(0.0, 1.0)


def _whitened(values_B: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    """Values with mean 0 and sample variance 1, where value i counts `weights_B[i]` times."""
    count = weights_B.sum()
    centred_B = values_B - (values_B * weights_B).sum() / count.clamp(min=1)
    variance = (centred_B.square() * weights_B).sum() / (count - 1).clamp(min=1)
    return centred_B * (variance + _VARIANCE_EPS).rsqrt()
