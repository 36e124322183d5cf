"""Train workers that come and go, 2 -> 1 -> 2, train what a fixed number of them trains."""

from __future__ import annotations

import pytest
import torch

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.core.messages import SamplingParams
from ray_apr.train.spec import LearnerSpec
from tests.rank_steps import train_on
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 9
TRAIN = TrainConfig(learning_rate=1e-4, num_threads=1, weight_decay=0.01)


def batches(num_ranks, first, last):
    """Rows of the same samples at the same step, for any number of ranks."""
    return [
        [row.to_row() for row in make_batches(
            make_samples(seed=step, num_segments=3), num_ranks=num_ranks, step=step,
        )]
        for step in range(first, last)
    ]  # fmt: skip


def test_ranks_that_change_at_checkpoints_train_as_those_that_do_not(tmp_path):
    spec = LearnerSpec(
        model=str(make_tiny_model(tmp_path / "model", hidden_size=32)),
        train=TRAIN, algorithm=AlgorithmConfig(), sampling=SamplingParams(),
        max_response_tokens=32, num_replicas=1,
    )  # fmt: skip
    one, two = (train_on(n, tmp_path / f"fixed-{n}", spec, batches(n, 0, STEPS)) for n in (1, 2))
    figures, checkpoint = [], None
    for n, first in ((2, 0), (1, 3), (2, 6)):
        part = train_on(
            n, tmp_path / f"from-{first}", spec, batches(n, first, first + 3), checkpoint
        )
        figures += part.figures
        checkpoint = part.checkpoint
    for fixed in (one, two):
        for changed, same in zip(figures, fixed.figures, strict=True):
            assert changed["loss"] == pytest.approx(same["loss"], abs=1e-5)
            assert changed["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-5)
        for name, weight in fixed.weights.items():
            assert torch.allclose(part.weights[name], weight, rtol=0, atol=1e-5), name
