"""`APRConfig`: the settings of a run in RLlib's form.

Invariants, kept by `validate`:
    * A setting of RLlib's is mapped to one of ours that means the same (`rllib.settings`), or its
      value is the default, or it is refused by its name.
    * A setting that is given in both forms has one value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig as RLlibConfig
from ray.rllib.algorithms.algorithm_config import NotProvided

from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    EvaluationConfig,
    PartialRolloutConfig,
    PromptsConfig,
    RolloutConfig,
    TrainConfig,
)
from ray_apr.core.checks import require
from ray_apr.core.user import GroupFilter, RewardFunction
from ray_apr.data.rows import PromptRows
from ray_apr.rllib.settings import MAPPED, refuse_unknown, resolve
from ray_apr.run.folder import is_remote

_PROMPTS = ("prompts", "evaluation_prompts")


class APRConfig(RLlibConfig):
    """Settings of an `APR` algorithm.

    RLlib's own settings are taken where they mean the same here (docs/rllib.md has the table); the
    sections of a run are given as our configs, or as mappings, in which Tune's samplers may be.

    Example:
        >>> config = (                                                   # doctest: +SKIP
        ...     APRConfig()
        ...     .training(model="Qwen/Qwen3-0.6B", prompts=rows, reward=reward, lr=1e-6)
        ...     .rollouts(rollout={"group_size": 8})
        ...     .learners(num_learners=2, num_gpus_per_learner=1)
        ... )
        >>> algo = config.build_algo()                                   # doctest: +SKIP
    """

    def __init__(self, algo_class: type | None = None) -> None:
        if algo_class is None:
            from ray_apr.rllib.algorithm import APR

            algo_class = APR
        super().__init__(algo_class=algo_class)
        train = TrainConfig()
        # what a run has where nobody says anything
        self.lr = train.learning_rate
        self.grad_clip = train.max_grad_norm
        self.train_batch_size = train.batch_size
        self.gamma = 1.0
        self.evaluation_parallel_to_training = True
        self.evaluation_duration: Any = None  # RLlib's 10 would look as if nobody had said it
        self.num_cpus_for_main_process = 0.1
        # `.training()`
        self.model: Any = None
        self.prompts: Any = None
        self.prompts_settings: Any = None
        self.reward: RewardFunction | None = None
        self.group_filter: GroupFilter | None = None
        self.algorithm: Any = None
        self.train: Any = None
        self.steps: int | None = None
        self.steps_per_iteration = 1
        # `.rollouts()`
        self.rollout: Any = None
        self.partial_rollout: Any = None
        self.buffer: Any = None
        # `.environment()`
        self.num_env_seeds = 1024
        self.observations: Literal["text", "user"] = "text"
        # `.evaluation()`
        self.evaluation_prompts: Any = None
        self.evaluation_settings: Any = None
        # `.checkpointing()`
        self.storage_path: str | None = None
        self._said: tuple[str, ...] = ()  # of RLlib's: they may have been given their defaults

    def __setattr__(self, key: str, value: Any) -> None:
        """As of RLlib; what is assigned is said, as what a method is given."""
        super().__setattr__(key, value)
        if key in MAPPED and "_said" in vars(self):  # else it is being made
            self._note({key: value})

    def training(
        self,
        *,
        model: str | Mapping[str, Any] = NotProvided,
        prompts: PromptRows | Sequence[Mapping[str, Any]] | Callable[[], Any] = NotProvided,
        prompts_settings: PromptsConfig | Mapping[str, Any] | None = NotProvided,
        reward: RewardFunction | None = NotProvided,
        group_filter: GroupFilter | None = NotProvided,
        algorithm: AlgorithmConfig | Mapping[str, Any] | None = NotProvided,
        train: TrainConfig | Mapping[str, Any] | None = NotProvided,
        steps: int | None = NotProvided,
        steps_per_iteration: int = NotProvided,
        **kwargs: Any,
    ) -> APRConfig:
        """Set what is trained, and how.

        Args:
            model: Folder in Hugging Face's format, or hub id.
            prompts: Rows, a Ray Dataset, or a function that gives either; as of `APRTrainer`.
                They are left out with a text environment, whose first observations they are.
            prompts_settings: What becomes of prompts that are too long, and weights.
            reward: As of `APRTrainer`.
            group_filter: As of `APRTrainer`.
            algorithm: Advantages, loss, correction; a mapping may name a ``preset``.
            train: What RLlib has no names for: schedule, data types, checkpoints and others.
            steps: Batches of the whole run (``train.steps``); after them a result says ``done``.
            steps_per_iteration: Batches that one call of `train` trains.
            kwargs: As of RLlib: lr, grad_clip, train_batch_size, train_batch_size_per_learner,
                num_epochs, minibatch_size.

        Raises:
            ConfigError: For a setting of another algorithm of RLlib's.
        """
        refuse_unknown(kwargs, RLlibConfig.training)
        super().training(**kwargs)
        self._note(kwargs)
        # Tune moves its workers into other folders
        self._take(model=_absolute(model), prompts=prompts, reward=reward, train=train)
        self._take(prompts_settings=prompts_settings)
        self._take(group_filter=group_filter, algorithm=algorithm, steps=steps)
        return self._take(steps_per_iteration=steps_per_iteration)

    def rollouts(
        self,
        *,
        rollout: RolloutConfig | Mapping[str, Any] | None = NotProvided,
        partial_rollout: PartialRolloutConfig | Mapping[str, Any] | None = NotProvided,
        buffer: BufferConfig | Mapping[str, Any] | None = NotProvided,
    ) -> APRConfig:
        """Set how responses are made.

        Args:
            rollout: Servers, sampling, group size, rewards.
            partial_rollout: Staleness, interruption; a mapping may name a ``mode``.
            buffer: Time limits of the sample buffer.
        """
        return self._take(rollout=rollout, partial_rollout=partial_rollout, buffer=buffer)

    def environment(
        self,
        env: Any = NotProvided,
        *,
        num_env_seeds: int = NotProvided,
        observations: Literal["text", "user"] = NotProvided,
        **kwargs: Any,
    ) -> APRConfig:
        """Set what the policy talks to.

        Args:
            env: A text environment in gymnasium's form (a class, a function of its settings, or a
                name that RLlib knows), or one of `ray_apr.Environment`.
            num_env_seeds: Episodes begin with seeds from 0 to this number; each is a prompt.
            observations: What observations are: plain text, or messages of a chat's user.
            kwargs: As of RLlib: env_config, observation_space, action_space.
        """
        given = kwargs.get("env_config", {})
        remedy = "must be a mapping: it is given to the environment"
        require(isinstance(given, Mapping) or given is NotProvided, "env_config", given, remedy)
        super().environment(env, **kwargs)
        return self._take(num_env_seeds=num_env_seeds, observations=observations)

    def evaluation(
        self,
        *,
        evaluation_prompts: Any = NotProvided,
        evaluation_settings: EvaluationConfig | Mapping[str, Any] | None = NotProvided,
        **kwargs: Any,
    ) -> APRConfig:
        """Set when and on what the policy is evaluated.

        Args:
            evaluation_prompts: Held-out rows, as the prompts of `training`.
            evaluation_settings: Sampling and limits.
            kwargs: As of RLlib: evaluation_interval (in iterations), evaluation_duration.
        """
        super().evaluation(**kwargs)
        return self._take(
            evaluation_prompts=evaluation_prompts, evaluation_settings=evaluation_settings
        )

    def checkpointing(self, *, storage_path: str | None = NotProvided, **kwargs: Any) -> APRConfig:
        """Set where runs are kept.

        Args:
            storage_path: Where run folders are made, shared by all nodes of the cluster. None: in
                the trial's folder of a Tune run, else in the algorithm's `logdir`.
            kwargs: As of RLlib; all are refused.
        """
        super().checkpointing(**kwargs)
        if isinstance(storage_path, os.PathLike) or (
            isinstance(storage_path, str) and not is_remote(storage_path)
        ):
            storage_path = os.path.abspath(storage_path)
        return self._take(storage_path=storage_path)

    def learners(self, **kwargs: Any) -> APRConfig:
        """As of RLlib: num_learners, num_gpus_per_learner and others (docs/rllib.md)."""
        super().learners(**kwargs)
        return self._note(kwargs)

    def env_runners(self, **kwargs: Any) -> APRConfig:
        """As of RLlib: num_env_runners, num_gpus_per_env_runner and others (docs/rllib.md)."""
        super().env_runners(**kwargs)
        return self._note(kwargs)

    def debugging(self, **kwargs: Any) -> APRConfig:
        """As of RLlib: seed, log_level, log_sys_usage."""
        super().debugging(**kwargs)
        return self._note(kwargs)

    def update_from_dict(self, config_dict: dict[str, Any]) -> APRConfig:
        """As of RLlib; what `to_dict` gave has all settings, whoever has said them."""
        said = config_dict.get("_said", self._said)
        super().update_from_dict(config_dict)
        if "_train_batch_size_per_learner" not in config_dict:
            return self._note(config_dict)
        self._said = tuple(said)
        return self

    def validate(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: For one that is wrong, or has no meaning here.
        """
        resolve(self)

    def _note(self, given: Mapping[str, Any]) -> APRConfig:
        """Keep which of RLlib's settings somebody has said."""
        names = {name for name, value in given.items() if value is not NotProvided}
        self._said = tuple(sorted({*self._said, *names}))
        return self

    def _take(self, **given: Any) -> APRConfig:
        for name, value in given.items():
            if value is not NotProvided:
                setattr(self, name, as_rows(value) if name in _PROMPTS else value)
        return self


def as_rows(given: Any) -> Any:
    """Rows in one piece, which Tune does not search for samplers; anything else as it is."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return PromptRows(given) if is_list else given


def _absolute(path: Any) -> Any:
    """A folder that is here by its full path; anything else as it is."""
    return os.path.abspath(path) if isinstance(path, str) and Path(path).is_dir() else path
