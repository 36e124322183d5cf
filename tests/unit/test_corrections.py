from __future__ import annotations

import pytest
import torch

from ray_apr.algorithms import icepop_weights, importance_weights, rejection_mask
from ray_apr.core.exceptions import ConfigError
from tests.loss_oracle import CASES, tensor

CORRECTIONS = [(case, expected) for case in CASES for expected in case["corrections"]]
WEIGHTS = [(c, e) for c, e in CORRECTIONS if e["kind"] == "importance"]
REJECTED = [(c, e) for c, e in CORRECTIONS if e["kind"] == "rejection"]


@pytest.mark.parametrize(("case", "expected"), WEIGHTS)
def test_equals_independent_implementation(case, expected):
    weights = importance_weights(
        tensor(case["proximal_logprobs"]),
        tensor(case["behavior_logprobs"]),
        tensor(case["mask"]),
        level=expected["level"],
        cap=expected["cap"],
        batch_normalize=expected["batch_normalize"],
    )
    torch.testing.assert_close(weights, tensor(expected["weights"]), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("case", "expected"), REJECTED)
def test_rejection_equals_independent_implementation(case, expected):
    bounds = tuple(float(bound) for bound in str(expected["bound"]).split("_"))
    mask = rejection_mask(
        tensor(case["proximal_logprobs"]),
        tensor(case["behavior_logprobs"]),
        tensor(case["mask"]),
        metric=expected["metric"],
        bound=bounds if len(bounds) > 1 else bounds[0],
    )
    torch.testing.assert_close(mask, tensor(expected["mask"]), rtol=0, atol=0)


def test_icepop_keeps_ratios_within_its_bounds_and_drops_the_others():
    log_ratios = torch.tensor([[-1.0, -0.1, 0.0, 0.1, 1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    weights = icepop_weights(log_ratios, torch.zeros(1, 6), mask, low=0.5, high=2.0)
    expected = torch.tensor([[0.0, -0.1, 0.0, 0.1, 0.0, 0.0]]).exp()
    expected[0, [0, 4, 5]] = 0.0
    torch.testing.assert_close(weights, expected)


def test_a_single_bound_is_an_upper_one_and_k3_takes_no_pair():
    ratio = torch.tensor([[0.1, 1.0, 3.0]]).log()
    one, zero = torch.ones(1, 3), torch.zeros(1, 3)
    kept = rejection_mask(ratio, zero, one, metric="token_k1", bound=2.0)
    assert kept.tolist() == [[1.0, 1.0, 0.0]]
    with pytest.raises(ConfigError, match="one number"):
        rejection_mask(ratio, zero, one, metric="token_k3", bound=(0.5, 2.0))
    with pytest.raises(ConfigError, match="seq_max_k3"):
        rejection_mask(ratio, zero, one, metric="token_k2", bound=2.0)


def test_detached_and_zero_outside_of_the_mask():
    proximal = torch.zeros(2, 3, requires_grad=True)
    behavior = torch.tensor([[0.0, -5.0, float("nan")], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for level in ("token", "sequence"):
        weights = importance_weights(proximal, behavior, mask, level=level, cap=2.0)
        assert not weights.requires_grad
        assert weights[0, 1] == 2.0
        assert torch.equal(weights != 0, mask != 0)


def test_unknown_level_names_the_known_ones():
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="token, sequence"):
        importance_weights(one, one, one, level="group", cap=2.0)
