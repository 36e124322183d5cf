from __future__ import annotations

import pytest
import torch

from ray_apr.algorithms import group_advantages
from ray_apr.algorithms.advantages import ESTIMATORS
from ray_apr.core.exceptions import ConfigError
from tests.loss_oracle import CASES, tensor


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_independent_implementation(case, estimator):
    advantages = group_advantages(
        tensor(case["reward"]), torch.tensor(case["group"]), tensor(case["mask"]), estimator
    )
    torch.testing.assert_close(advantages, tensor(case["advantages"][estimator]), rtol=0, atol=1e-9)


def test_group_of_one_has_mean_zero_and_deviation_one():
    advantages = group_advantages(tensor([3.0]), torch.tensor([0]), tensor([[1.0]]), "grpo")
    assert advantages.item() == pytest.approx(3.0 / (1 + 1e-6), rel=1e-12)
    plain = group_advantages(tensor([3.0]), torch.tensor([0]), tensor([[1.0]]), "dr_grpo")
    assert plain.item() == 3.0


def test_equal_rewards_give_zero():
    advantages = group_advantages(
        tensor([1.0] * 3), torch.tensor([5] * 3), torch.ones(3, 2), "grpo"
    )
    assert advantages.tolist() == [[0.0, 0.0]] * 3


def test_groups_need_not_be_neighbours_nor_numbered_from_zero():
    rewards, mask = tensor([1.0, 10.0, 3.0, 30.0]), torch.ones(4, 1)
    advantages = group_advantages(rewards, torch.tensor([7, 2, 7, 2]), mask, "dr_grpo")
    assert advantages.flatten().tolist() == [-1.0, -10.0, 1.0, 10.0]


def test_unknown_estimator_names_the_known_ones():
    with pytest.raises(ConfigError, match="grpo, dr_grpo"):
        group_advantages(tensor([1.0]), torch.tensor([0]), torch.ones(1, 1), "gae")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_rewards_may_be_whole_numbers_or_true_and_false(estimator, dtype):
    """Known faults: grpo ended with an error of torch's about data types, all of them did with
    what is true or false, and sums beyond 255 of small whole numbers began at 0 again."""
    rewards = torch.tensor([200, 100, 0, 3, 3]).to(dtype)
    groups, mask = torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, 2)
    found = group_advantages(rewards, groups, mask, estimator)
    torch.testing.assert_close(found, group_advantages(rewards.float(), groups, mask, estimator))
