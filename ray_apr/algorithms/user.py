"""Functions of the user's in the objective: what they are given, and what they give back.

They see whole samples: `_N` of a micro-batch or `_B` of the whole batch, with their response
tokens `_T`. Where a micro-batch is padded, the mask is 0, and what stands in the other tensors has
no meaning. They may change what they are given, which is a copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ray_apr.core.exceptions import TrainError

MAX_METRICS = 16
"""Most figures of a loss."""


def advantages_of(
    function: Callable[..., Any],
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Advantages [B] by ``function(rewards, groups, **advantage_kwargs)``, of the whole batch.

    Args:
        function: Takes rewards [B] in float64, and the number of each sample's group [B].
        rewards_B: With what the settings take off them.
        groups_B: Samples of one prompt share a number.
        kwargs: ``algorithm.advantage_kwargs``.

    Raises:
        TrainError: If it does not return one number for each sample.
    """
    advantages_B = torch.as_tensor(function(rewards_B, groups_B, **kwargs))
    _check_shape("advantage", advantages_B, rewards_B, "one number for each sample of the batch")
    return advantages_B


def costs_of(
    function: Callable[..., Any],
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    behavior_logprobs: torch.Tensor,
    kwargs: Mapping[str, Any],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Costs [N, T] by ``function(logprobs, proximal_logprobs, advantages, mask, **loss_kwargs)``.

    A function that has a parameter `behavior_logprobs` gets these, too. It returns the costs of the
    tokens, or a pair of them and of figures by name, each [N, T], whose means over all tokens of
    the loss are ``loss/<name>`` of the step.

    Args:
        function: The loss.
        logprobs: [N, T], under the policy that is optimised; gradients flow here.
        proximal_logprobs: [N, T], under the policy at the start of the update.
        advantages: [N, T].
        mask: [N, T], 1 where a token is trained.
        behavior_logprobs: [N, T], under the policies that sampled the tokens.
        kwargs: ``algorithm.loss_kwargs``.

    Returns:
        The costs, and the figures, detached.

    Raises:
        TrainError: If one is of another shape, the costs have no gradients, or there are too many
            figures.
    """
    if _takes(function, "behavior_logprobs"):
        kwargs = {"behavior_logprobs": behavior_logprobs.clone(), **kwargs}
    given = (logprobs, proximal_logprobs, advantages, mask)
    returned = function(*(tensor.clone() for tensor in given), **kwargs)
    costs, figures = (returned, {}) if isinstance(returned, torch.Tensor) else _pair(returned)
    _check_shape("loss", costs, mask, "the cost of each token")
    if logprobs.requires_grad and not costs.requires_grad:
        if mask.any():
            raise TrainError(
                "the function algorithm.loss returned costs without gradients; make them of its "
                "first argument, logprobs, without detach() or no_grad()"
            )
        costs = costs + 0 * logprobs  # no token here is trained, but all ranks have a backward pass
    if len(figures) > MAX_METRICS:
        raise TrainError(f"algorithm.loss gives {len(figures)} figures; at most {MAX_METRICS} fit")
    for name, values in figures.items():
        _check_shape(f"loss, figure {name!r},", values, mask, "a number for each token")
    return costs, {name: values.detach() for name, values in figures.items()}


@torch.no_grad()
def weights_of(
    function: Callable[..., Any],
    proximal_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    mask: torch.Tensor,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Weights [N, T] by ``function(proximal_logprobs, behavior_logprobs, mask,
    **correction_kwargs)``, detached; they multiply the tokens' costs, and 0 leaves a token out.

    Args:
        function: The correction.
        proximal_logprobs: [N, T], under the policy at the start of the update.
        behavior_logprobs: [N, T], under the policies that sampled the tokens.
        mask: [N, T], 1 where a token is trained.
        kwargs: ``algorithm.correction_kwargs``.

    Raises:
        TrainError: If they are of another shape.
    """
    given = (proximal_logprobs, behavior_logprobs, mask)
    weights = function(*(tensor.clone() for tensor in given), **kwargs)
    _check_shape("correction", weights, mask, "the weight of each token")
    return weights.masked_fill(mask == 0, 0.0)  # type: ignore[no-any-return]


def _pair(returned: Any) -> tuple[Any, Mapping[str, torch.Tensor]]:
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[1], Mapping):
        raise TrainError(
            f"the function algorithm.loss returned {type(returned).__name__}, not a tensor, or a "
            "pair of a tensor and a mapping of names to tensors"
        )
    return returned


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # of compiled code, which says nothing of its arguments
        return False


def _check_shape(what: str, values: Any, like: torch.Tensor, meant: str) -> None:
    shape = tuple(getattr(values, "shape", ())) if isinstance(values, torch.Tensor) else None
    if shape != tuple(like.shape):
        got = type(values).__name__ if shape is None else f"shape {shape}"
        raise TrainError(
            f"the function algorithm.{what} returned {got}, not shape {tuple(like.shape)}: {meant}"
        )
