"""What tests of RLlib's side share: a config that builds without a cluster, an environment."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gymnasium

from ray_apr.rllib import APR, APRConfig
from tests.fakes import FakeSession


class FakeAPR(APR):
    """An algorithm whose runs train nothing, and earn as much as their learning rate is high."""

    _open_session = staticmethod(FakeSession)


def reward(sample: Any) -> float:
    return 1.0


def config(model: Path | str = "owner/name", **training: Any) -> APRConfig:
    """Of a tiny run; `training` goes to ``.training()``."""
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    given: dict[str, Any] = {"model": str(model), "prompts": rows, "reward": reward, "steps": 10}
    return (
        APRConfig()
        .training(**given | training)
        .rollouts(rollout={"group_size": 2, "max_response_tokens": 16})
    )


class Guess(gymnasium.Env[str, str]):
    """Guess the seed's last digit: a guess that is too low costs 0.25, the right one gives 1."""

    observation_space = gymnasium.spaces.Text(64, charset=string.printable)
    action_space = gymnasium.spaces.Text(64)
    num_open = 0

    def __init__(self, env_config: Any = None) -> None:
        self.limit = (env_config or {}).get("limit", 10)
        type(self).num_open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self.number, self.turns = (seed or 0) % 10, 0
        return f"below {self.limit}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turns += 1
        guess = int(action)
        if guess == self.number:
            return "yes", 1.0, True, False, {}
        said = "higher" if guess < self.number else "lower"
        return said, -0.25 if said == "higher" else 0.0, False, self.turns >= 4, {}

    def close(self) -> None:
        type(self).num_open -= 1
