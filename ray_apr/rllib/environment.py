"""A text environment in gymnasium's form, as an environment of a run.

``reset(seed=...) -> (text, info)`` gives the prompt, ``step(text) -> (text, reward, terminated,
truncated, info)`` answers a turn. A run calls in any process, and again after failures, so that
nothing is kept between calls but the turns so far: each call makes an environment anew, with the
episode's seed, and plays them again.

Invariants:
    * An episode is its seed and its turns: the environment answers the same to the same.
    * The return of an episode is the sum of its rewards. A turn that its budget cut off is no
      action of it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import gymnasium

from ray_apr.compat.rllib import ENV_CREATOR, EnvContext, _global_registry
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import Sample
from ray_apr.core.user import Environment, Step
from ray_apr.data.rows import PromptRows

SEED_COLUMN = "env_seed"
_TURNS = "turns"


def is_text_environment(env: Any) -> bool:
    """Whether `env` is in gymnasium's form: its class, what makes it, or a name of that; one of
    ours is an object with a method ``step(sample)``."""
    return env is not None and (isinstance(env, str) or callable(env))


def check_spaces(observation_space: Any, action_space: Any) -> None:
    """Refuse spaces other than of text.

    Raises:
        ConfigError: Naming the space.
    """
    spaces = {"observation_space": observation_space, "action_space": action_space}
    for name, space in spaces.items():
        require(
            space is None or isinstance(space, gymnasium.spaces.Text),
            f"environment.{name}",
            space,
            "must be a gymnasium.spaces.Text, or left out: a language model reads and writes text",
        )


def env_maker(env: Any, env_config: Mapping[str, Any]) -> Callable[[], Any]:
    """What makes an environment of the settings of ``.environment(env, env_config=...)``.

    Raises:
        ConfigError: If there is no such environment.
    """
    if not isinstance(env, str):
        return lambda: env(EnvContext(env_config, worker_index=0))
    if _global_registry.contains(ENV_CREATOR, env):
        creator = _global_registry.get(ENV_CREATOR, env)
        return lambda: creator(EnvContext(env_config, worker_index=0))
    if "." in env:
        module, _, name = env.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError("environment.env", env, f"cannot be imported: {error}") from error
        return lambda: cls(EnvContext(env_config, worker_index=0))
    if env not in gymnasium.registry:
        remedy = "is known to neither Tune nor gymnasium; register it, or give the class"
        raise ConfigError("environment.env", env, remedy)
    return lambda: gymnasium.make(env, **env_config)


class TextEnvironment(Environment):
    """Episodes of an environment that is made anew for each call.

    Args:
        make: Makes one.
        observations: What observations are: plain text, or messages of a chat's user.
    """

    def __init__(
        self, make: Callable[[], Any], observations: Literal["text", "user"] = "text"
    ) -> None:
        self._make = make
        self._observations = observations

    def step(self, sample: Sample) -> Step:
        """Play the episode to its last turn."""
        turns = [*sample.environment_state.get(_TURNS, ())]
        if sample.finish_reason is None:
            turns.append(sample.turn_text)
        total, text, is_over = 0.0, "", False
        with self._begun(sample.row[SEED_COLUMN]) as (env, _):
            for turn in turns:
                text, reward, terminated, truncated, _ = env.step(turn)
                total, is_over = total + float(reward), bool(terminated or truncated)
        state = {_TURNS: turns}
        if is_over or sample.finish_reason is not None:
            return Step(done=True, reward=total, state=state)
        return Step(**self._said(text), state=state)

    def _said(self, text: str) -> dict[str, Any]:
        if self._observations == "user":
            return {"messages": ({"role": "user", "content": text},)}
        return {"text": text}

    def prompt(self, seed: int) -> Any:
        """The first observation of an episode, as a prompt."""
        with self._begun(seed) as (_, text):
            return text if self._observations == "text" else [{"role": "user", "content": text}]

    def rows(self, seeds: Iterable[int], column: str) -> PromptRows:
        """A prompt for the episode of each seed."""
        return PromptRows([{column: self.prompt(seed), SEED_COLUMN: seed} for seed in seeds])

    def check(self) -> None:
        """Make two of them, and look at what they say.

        Raises:
            ConfigError: If it is no text environment, or its seed does not tell its begin.
        """
        texts = []
        for _ in range(2):
            with self._begun(0) as (env, text):
                spaces = (getattr(env, f"{name}_space", None) for name in ("observation", "action"))
                check_spaces(*spaces)
                texts.append(text)
        is_text = isinstance(texts[0], str) and texts[0] != ""
        remedy = "must say a text at reset(seed=...), with an info"
        require(is_text, "environment.env", texts[0], remedy)
        remedy = "says something else at the second reset(seed=0); a seed must tell the episode"
        require(texts[0] == texts[1], "environment.env", texts[1], remedy)

    @contextlib.contextmanager
    def _begun(self, seed: int) -> Iterator[tuple[Any, Any]]:
        """An environment at its begin, and its first observation."""
        env = self._make()
        try:
            text, _ = env.reset(seed=int(seed))
            yield env, text
        finally:
            close = getattr(env, "close", None)
            if close is not None:
                close()
