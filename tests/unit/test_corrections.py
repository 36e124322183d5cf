from __future__ import annotations

import pytest
import torch

from ray_apr.algorithms import importance_weights
from ray_apr.exceptions import ConfigError
from tests.loss_oracle import CASES, tensor

WEIGHTS = [(case, expected) for case in CASES for expected in case["corrections"]]


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
