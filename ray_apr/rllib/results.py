"""From rows of a run folder to what `Algorithm.train` returns, in names of RLlib's new API stack.

An episode is a sample that was trained; a step of the environment is one turn of it, which is one
action of the policy, so that an episode of a run without an environment has one step.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.rllib.core import ALL_MODULES, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner import DEFAULT_OPTIMIZER, ENTROPY_KEY, LR_KEY
from ray.rllib.utils import metrics as names

from ray_apr.core.checks import is_number

Row = Mapping[str, Any]

_LEARNER = {
    "loss": "total_loss",
    "entropy": ENTROPY_KEY,
    "grad_norm": f"gradients_{DEFAULT_OPTIMIZER}_global_norm",
    "learning_rate": f"{DEFAULT_OPTIMIZER}_{LR_KEY}",
    "policy_version": names.WEIGHTS_SEQ_NO,
}
_TIMERS = {
    "trainer_wait_s": names.SAMPLE_TIMER,
    "trainer_step_s": names.LEARNER_UPDATE_TIMER,
    "weight_sync_s": names.SYNCH_WORKER_WEIGHTS_TIMER,
}
_ROLLOUT = frozenset(
    {"reward_std", "response_tokens_mean", "response_tokens_max", "truncated_fraction"}
    | {"num_tokens", "inflight", "held", "buffered", "tokens_generated", "tokens_discarded"}
    | {"samples_interrupted", "samples_resumed", "unscored", "stepping", "engines_version"}
)
_ELSEWHERE = frozenset(
    {"step", "time_s", "reward_mean", "reward_min", "reward_max", "num_samples", "num_turns"}
)
_SUMS = frozenset({"num_tokens", "num_masked_tokens"})
_LAST = frozenset(
    {"policy_version", "learning_rate", "inflight", "held", "buffered", "tokens_generated"}
    | {"tokens_discarded", "samples_interrupted", "samples_resumed", "unscored", "stepping"}
    | {"engines_version", "engines_tokens", "engines_busy_s", "engines_idle_s"}
    | {"engines_request_s", "reward_s"}
)


@dataclass(slots=True)
class Lifetime:
    """Counts since the first run that this one goes back to."""

    episodes: int = 0
    env_steps: int = 0
    steps: int = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Count the episodes of these steps."""
        self.episodes += sum(row["num_samples"] for row in rows)
        self.env_steps += sum(row["num_turns"] for row in rows)
        self.steps += len(rows)

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return dataclasses.asdict(self)


def iteration_results(rows: Sequence[Row], lifetime: Lifetime, seconds: float) -> dict[str, Any]:
    """Results of an iteration.

    Args:
        rows: Of ``metrics.jsonl``, at least one.
        lifetime: Counts that include these rows.
        seconds: What the iteration took.
    """
    env_steps = sum(row["num_turns"] for row in rows)
    trained = {
        names.NUM_ENV_STEPS_TRAINED: env_steps,
        names.NUM_ENV_STEPS_TRAINED_LIFETIME: lifetime.env_steps,
    }
    module = {
        names.NUM_MODULE_STEPS_TRAINED: env_steps,
        names.NUM_MODULE_STEPS_TRAINED_LIFETIME: lifetime.env_steps,
    }
    kinds: dict[str, dict[str, float]] = {"env_runners": {}, "learner": {}, "timers": {}}
    for key, value in _over(rows).items():
        kind, name = _place(key)
        kinds[kind][name] = value
    return {
        names.ENV_RUNNER_RESULTS: {
            **kinds["env_runners"],
            **_episodes(rows),
            names.NUM_EPISODES_LIFETIME: lifetime.episodes,
            names.NUM_ENV_STEPS_SAMPLED: env_steps,
            names.NUM_ENV_STEPS_SAMPLED_LIFETIME: lifetime.env_steps,
            names.NUM_AGENT_STEPS_SAMPLED: {DEFAULT_AGENT_ID: env_steps},
            names.NUM_AGENT_STEPS_SAMPLED_LIFETIME: {DEFAULT_AGENT_ID: lifetime.env_steps},
            names.NUM_MODULE_STEPS_SAMPLED: {DEFAULT_MODULE_ID: env_steps},
            names.NUM_MODULE_STEPS_SAMPLED_LIFETIME: {DEFAULT_MODULE_ID: lifetime.env_steps},
        },
        names.LEARNER_RESULTS: {
            DEFAULT_MODULE_ID: {**kinds["learner"], **module},
            ALL_MODULES: {**trained, **module},
        },
        names.TIMERS: {
            **kinds["timers"],
            names.TRAINING_ITERATION_TIMER: seconds,
            names.TRAINING_STEP_TIMER: seconds / len(rows),
        },
        names.FAULT_TOLERANCE_STATS: {},
        names.NUM_TRAINING_STEP_CALLS_PER_ITERATION: len(rows),
        names.NUM_ENV_STEPS_SAMPLED_LIFETIME: lifetime.env_steps,
        "num_training_steps_lifetime": lifetime.steps,
    }


def evaluation_results(row: Row) -> dict[str, Any]:
    """Results of an evaluation.

    Args:
        row: Of ``evaluations.jsonl``.
    """
    num_episodes, num_turns = row["num_samples"], row["num_turns"]
    episodes = {
        names.EPISODE_RETURN_MEAN: row["reward_mean"],
        names.EPISODE_RETURN_MIN: row["reward_min"],
        names.EPISODE_RETURN_MAX: row["reward_max"],
        names.EPISODE_LEN_MEAN: num_turns / num_episodes if num_episodes else None,
    }
    return {
        names.ENV_RUNNER_RESULTS: {
            # as in RLlib, nothing is said of no episodes
            **{name: value for name, value in episodes.items() if value is not None},
            names.NUM_EPISODES: num_episodes,
            names.NUM_ENV_STEPS_SAMPLED: num_turns,
            "num_failed_episodes": row["num_failed"],
            "response_tokens_mean": row["response_tokens_mean"],
            **{f"pass_at_{k}": share for k, share in row["pass_at_k"].items()},
        },
        names.WEIGHTS_SEQ_NO: row["policy_version"],
        "seconds": row["seconds"],
    }


def _episodes(rows: Sequence[Row]) -> dict[str, float]:
    """Returns and lengths over all episodes of these steps."""
    sizes = [row["num_samples"] for row in rows]
    returns = statistics.fmean((row["reward_mean"] for row in rows), weights=sizes)
    return {
        names.EPISODE_RETURN_MEAN: returns,
        names.EPISODE_RETURN_MIN: min(row["reward_min"] for row in rows),
        names.EPISODE_RETURN_MAX: max(row["reward_max"] for row in rows),
        names.EPISODE_LEN_MEAN: sum(row["num_turns"] for row in rows) / sum(sizes),
        names.NUM_EPISODES: sum(sizes),
    }


def _place(key: str) -> tuple[str, str]:
    """Which results a figure is among, and its name there."""
    if key in _TIMERS or key.endswith("_s"):
        return "timers", _TIMERS.get(key, key.removesuffix("_s"))
    if key in _ROLLOUT or key.startswith("reward/"):
        return "env_runners", key.replace("/", "_")
    return "learner", _LEARNER.get(key, key)


def _over(rows: Sequence[Row]) -> dict[str, float]:
    """Each number of the rows, over the steps that have it."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in _ELSEWHERE)
    found = {key: [row[key] for row in rows if is_number(row.get(key))] for key in keys}
    return {key: _reduced(key, values) for key, values in found.items() if values}


def _reduced(key: str, values: Sequence[float]) -> float:
    if key in _LAST:
        return values[-1]
    if key in _SUMS:
        return sum(values)
    if key.endswith("_max"):
        return max(values)
    if key.endswith("_min"):
        return min(values)
    return statistics.fmean(values)
