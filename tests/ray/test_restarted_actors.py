"""Actors of a run that Ray starts again (run/actors.py): what they are made with is still there."""

from __future__ import annotations

import gc

import pytest
import ray
import ray.data

from ray_apr.config import EvaluationConfig
from ray_apr.run.actors import Actors
from tests.run_specs import run_spec
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

LARGE = b"x" * 1_000_000
"""Ray puts an argument of this size into the object store, as the tokenizer of any real model."""


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, namespace="ns", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.mark.parametrize("what", ["prompts", "tokenizer", "reward", "suite"])
def test_an_evaluator_that_died_is_made_again(tmp_path, cluster, monkeypatch, what):
    """known fault: Ray had let go of its prompts, and of a tokenizer of more than 100 KB."""
    large = LARGE if what in ("reward", "suite") else b""

    def reward(sample):
        return float(len(large))

    own = EvaluationConfig(suite_column="suite", rewards={"sums": reward})
    spec = run_spec(
        model=str(make_tiny_model(tmp_path / "model")),
        evaluation=own if what == "suite" else EvaluationConfig(),
        reward=reward if what == "reward" else len,
    )
    actors = Actors(spec)
    if what == "tokenizer":
        monkeypatch.setattr(actors, "_tokenizer", lambda: LARGE)
    prompts = ray.data.from_items([{"prompt": "1+1=", "suite": "sums"}]).materialize()
    evaluator = actors.make_evaluator(prompts, None)
    ray.get(evaluator.wait_until_idle.remote(), timeout=60)
    for _ in range(4):  # Ray lets go of something some moments after nobody has it
        gc.collect()
        ray.kill(evaluator, no_restart=False)
        ray.get(evaluator.wait_until_idle.remote(), timeout=60)
    actors.kill()
