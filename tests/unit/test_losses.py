from __future__ import annotations

import pytest
import torch

from ray_apr.algorithms import importance_weights, kl_estimate, policy_loss
from ray_apr.algorithms.losses import AGGREGATIONS, is_clipped, loss_normalizer, policy_ratio
from ray_apr.core.exceptions import ConfigError
from tests.loss_oracle import CASES, tensor

LOSSES = [(case, expected) for case in CASES for expected in case["losses"]]
CLIPS = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(("case", "expected"), LOSSES)
def test_value_and_gradient_equal_independent_implementation(case, expected):
    logprobs = tensor(case["current_logprobs"]).requires_grad_()
    proximal, mask = tensor(case["proximal_logprobs"]), tensor(case["mask"])
    weights = None
    if expected["importance"] is not None:
        behavior, cap = tensor(case["behavior_logprobs"]), expected["importance_cap"]
        weights = importance_weights(
            proximal, behavior, mask, level=expected["importance"], cap=cap
        )
    value = policy_loss(
        logprobs,
        proximal,
        tensor(case["advantages"][expected["advantage"]]),
        mask,
        loss=expected["loss"],
        aggregation=expected["aggregation"],
        clip_low=expected["clip_low"],
        clip_high=expected["clip_high"],
        dual_clip=expected["dual_clip"],
        importance_weights=weights,
    )
    value.backward()
    assert value.item() == pytest.approx(expected["value"], abs=1e-9)
    torch.testing.assert_close(logprobs.grad, tensor(expected["grad"]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_of_a_batch_add_up_to_the_whole(aggregation):
    case = CASES[0]
    logprobs, proximal = tensor(case["current_logprobs"]), tensor(case["proximal_logprobs"])
    mask, advantages = tensor(case["mask"]), tensor(case["advantages"]["grpo"])
    whole = policy_loss(logprobs, proximal, advantages, mask, aggregation=aggregation, **CLIPS)
    normalizer = loss_normalizer(mask.sum(1), aggregation)
    parts = [
        policy_loss(
            logprobs[rows],
            proximal[rows],
            advantages[rows],
            mask[rows],
            aggregation=aggregation,
            normalizer=normalizer,
            **CLIPS,
        )
        for rows in (slice(0, 1), slice(1, 7), slice(7, None))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)


def test_denominators_count_the_whole_batch():
    lengths = torch.tensor([3, 0, 2])
    assert [loss_normalizer(lengths, a) for a in AGGREGATIONS] == [5.0, 2.0, 2.0]


def test_padding_may_hold_anything():
    mask = tensor([[1.0, 1.0, 0.0]])
    garbage = tensor([[-1.0, -2.0, float("nan")]]).requires_grad_()
    value = policy_loss(
        garbage, tensor([[-1.0, -2.0, 0.0]]), tensor([[1.0] * 3]), mask,
        aggregation="token-mean", **CLIPS,
    )  # fmt: skip
    value.backward()
    assert value.item() == pytest.approx(-1.0)
    assert garbage.grad[0, 2] == 0


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    proximal, mask = torch.zeros(1, 1), torch.ones(1, 1)
    args = (torch.full((1, 1), 3.0), proximal, torch.full((1, 1), -1.0), mask)
    free = policy_loss(*args, aggregation="token-mean", **CLIPS)
    bounded = policy_loss(*args, aggregation="token-mean", dual_clip=3.0, **CLIPS)
    assert free.item() == pytest.approx(20.0855, rel=1e-4)
    assert bounded.item() == pytest.approx(3.0)


def test_is_clipped_where_the_gradient_is_cut_off():
    case = CASES[1]
    logprobs = tensor(case["current_logprobs"]).requires_grad_()
    proximal, mask = tensor(case["proximal_logprobs"]), tensor(case["mask"])
    advantages = tensor(case["advantages"]["grpo"])
    policy_loss(logprobs, proximal, advantages, mask, aggregation="token-mean", **CLIPS).backward()
    ratio = policy_ratio(logprobs.detach(), proximal, mask, loss="ppo")
    clipped = is_clipped(ratio, advantages, mask, loss="ppo", clip_low=0.2, clip_high=0.28)
    assert clipped.any()
    assert torch.equal(clipped, (logprobs.grad == 0) & (mask != 0))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_equals_independent_implementation(case, kind):
    estimate = kl_estimate(
        tensor(case["current_logprobs"]), tensor(case["proximal_logprobs"]), kind
    )
    expected = tensor(case["kl"][kind])
    torch.testing.assert_close(estimate * tensor(case["mask"]), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "alike"), [("k1", 0.0), ("k2", 1.0), ("k3", 0.99)])
def test_which_estimators_have_a_gradient_towards_the_reference(kind, alike):
    """Over all outcomes, drawn from the policy itself: why k1 is refused in the loss."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    drawn = logprobs.detach().exp()
    terms = (drawn * kl_estimate(logprobs, reference, kind)).sum()
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (found,) = torch.autograd.grad(terms, logits, retain_graph=True)
    (true,) = torch.autograd.grad(divergence, logits)
    assert (found.norm() < 1e-9) == (kind == "k1")
    assert torch.cosine_similarity(found, true, dim=0) == pytest.approx(alike, abs=0.01)


def test_unknown_names_are_told_the_known_ones():
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="must be one of ppo"):
        policy_loss(
            one, one, one, one, loss="a2c", aggregation="token-mean", clip_low=0.2, clip_high=0.2
        )
    with pytest.raises(ConfigError, match="seq-mean-token-sum"):
        policy_loss(one, one, one, one, aggregation="mean", **CLIPS)
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_estimate(one, one, "k4")
