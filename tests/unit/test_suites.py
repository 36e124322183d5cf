"""Suites of held-out prompts: what scores each (rollout/suites.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

from ray_apr.config import EvaluationConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import Prompt, Sample
from ray_apr.data.prompts import TOKEN_IDS
from ray_apr.rollout.scoring import RewardWorker
from ray_apr.rollout.suites import reward_of_suites
from ray_apr.run import actors
from tests.run_specs import run_spec


async def test_a_suite_is_scored_by_its_own_reward():
    async def own(sample):
        return 0.25

    config = EvaluationConfig(suite_column="answer", rewards={"1": own, "2": lambda _: 0.5})
    score = reward_of_suites(lambda _: 1.0, config)
    worker = RewardWorker(score, 1)
    for answer, expected in enumerate((1.0, 0.25, 0.5, 1.0)):
        prompt = Prompt(prompt_id="0", token_ids=(1, 2, 3), row={"answer": answer})
        sample = Sample(sample_id="0", group_id="0", prompt=prompt, max_response_tokens=8)
        assert (await worker.call("score", sample, 5.0)).reward == expected
    without = EvaluationConfig(suite_column="answer")
    assert reward_of_suites(score, without) is score


@pytest.mark.parametrize(("field", "own"), [("rewards", len), ("suites", {"samples": 1})])
def test_suites_of_a_dataset_are_looked_at_once_they_are_here(monkeypatch, field, own):
    """Rows of a file are looked at when the trainer is made."""
    table = pa.table({TOKEN_IDS: [[1], [2]], "level": [1, 2]})
    monkeypatch.setattr(actors, "_fetched", lambda tables: tables)
    monkeypatch.setattr(actors, "put", lambda value: value)  # Ray does not run
    monkeypatch.setattr(actors, "load_tokenizer", lambda *_: None)
    made = []
    for name in ("1", "3"):
        config = EvaluationConfig(suite_column="level", **{field: {name: own}})
        parts = actors.Actors(run_spec(evaluation=config, reward=len))
        monkeypatch.setattr(parts, "_encode", lambda *_, **__: SimpleNamespace(tables=[table]))
        monkeypatch.setattr(parts, "make", lambda *_, **given: made.append(given))
        if name == "3":
            with pytest.raises(ConfigError, match=rf"evaluation.{field} = '3'.*which are 1, 2;"):
                parts.make_evaluator(None, None)
        else:
            parts.make_evaluator(None, None)
    assert len(made) == 1 and len(made[0]["make_prompts"]()) == 2
