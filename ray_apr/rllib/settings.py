"""From RLlib's names to our settings: what means the same is taken, all else is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import ray.train
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.policy.policy import PolicySpec
from ray.rllib.utils import force_list

from ray_apr.compat.rllib import STDERR_FILE, STDOUT_FILE, TRIAL_INFO
from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    EvaluationConfig,
    PartialRolloutConfig,
    PromptsConfig,
    RolloutConfig,
    Sections,
    TrainConfig,
)
from ray_apr.core.checks import is_number, is_whole, require
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.names import did_you_mean, nearest
from ray_apr.rllib.environment import check_spaces, is_text_environment
from ray_apr.rllib.sections import section

if TYPE_CHECKING:
    from ray_apr.rllib.config import APRConfig

CALLBACKS = (
    "on_algorithm_init",
    "on_train_result",
    "on_evaluate_start",
    "on_evaluate_end",
    "on_checkpoint_loaded",
)
"""Callbacks of RLlib that are called; the others are of what does not exist here."""

_OURS = frozenset(
    {"model", "prompts", "prompts_settings", "reward", "group_filter", "algorithm", "train"}
    | {"steps", "steps_per_iteration", "rollout", "partial_rollout", "buffer", "num_env_seeds"}
    | {"observations", "evaluation_prompts", "evaluation_settings", "storage_path"}
)
MAPPED = frozenset(
    {"lr", "grad_clip", "train_batch_size", "_train_batch_size_per_learner", "num_epochs"}
    | {"minibatch_size", "seed", "num_learners", "num_gpus_per_learner", "num_cpus_per_learner"}
    | {"custom_resources_per_learner", "num_env_runners", "num_cpus_per_env_runner"}
    | {"num_gpus_per_env_runner", "evaluation_interval", "evaluation_duration"}
)
_OBEYED = frozenset(
    {"env", "env_config", "observation_space", "action_space", "log_level", "log_sys_usage"}
    | {"callbacks_class", "num_cpus_for_main_process", "custom_resources_for_main_process"}
    | {f"callbacks_{name}" for name in CALLBACKS}
)
_NOT_SETTINGS = frozenset({"algo_class", "class", "_is_frozen", "_said"})
_OF_TUNE = frozenset({STDOUT_FILE, STDERR_FILE, TRIAL_INFO})

_REMEDIES = {
    "gamma": "must be 1: a reward is that of a whole response, and nothing is discounted",
    "grad_clip_by": 'must be "global_norm"',
    "explore": "must be true: set rollout.sampling, its temperature, top_p and top_k, with "
    ".rollouts(rollout=...)",
    "exploration_config": "leave it out: rollout.sampling says how responses "
    "are drawn, with .rollouts(rollout=...)",
    "replay_buffer_config": "leave it out: .rollouts(buffer=..., partial_rollout=...) says what is "
    "kept, and for how long",
    "optimizer": "leave it out: set betas, eps and weight_decay with .training(train=...)",
    "num_gpus": "must be 0: set num_gpus_per_learner and num_gpus_per_env_runner",
    "framework_str": 'must be "torch"',
    "evaluation_parallel_to_training": "must be true: evaluations run beside the training",
    "evaluation_duration_unit": 'must be "episodes": an episode is a response',
    "evaluation_num_env_runners": "must be 0: evaluations run on the servers of the run",
    "evaluation_config": "leave it out: set evaluation_settings, and evaluation_prompts",
    "num_envs_per_env_runner": "must be 1: set max_num_seqs among rollout.engine.kwargs",
    "rollout_fragment_length": "leave it out: responses are whole; rollout.max_response_tokens "
    "limits them",
    "sample_timeout_s": "leave it out: rollout.engine.stall_timeout_s and buffer.wait_timeout_s "
    "limit waits",
    "torch_compile_learner": "leave it out: set compile with .training(train=...)",
    "env_runner_cls": "leave it out: responses are made by rollout servers",
    "policies": "leave it out: there is one policy",
    "policy_mapping_fn": "leave it out: there is one policy",
}
_REMEDIES_OF_KINDS = {
    ("offline", "input", "output", "prelearner", "dataset_", "map_batches", "iter_batches"): (
        "leave it out: there is no offline data here"
    ),
    ("rl_module", "model_config", "learner_class", "algorithm_config_overrides"): (
        "leave it out: the policy is a language model, .training(model=...), with its own trainer"
    ),
    ("restart_failed", "ignore_", "max_num_env", "num_consecutive", "delay_between"): (
        "leave it out: engines that die are replaced; see rollout.max_consecutive_failures"
    ),
    ("callbacks_on_",): f"is never called here; those that are: {', '.join(CALLBACKS)}",
    ("min_",): "leave it out: steps_per_iteration is the length of an iteration",
}


@dataclass(frozen=True, kw_only=True)
class Settings(Sections):
    """The sections of a run, and its train workers."""

    scaling: ray.train.ScalingConfig


def resolve(config: APRConfig) -> Settings:
    """Translate and check all settings.

    Raises:
        ConfigError: For one that is wrong, that is given twice with different values, or that has
            no meaning here.
    """
    _refuse_others(config)
    _check_environment(config)
    for callbacks in force_list(config.callbacks_class):
        check_callbacks(callbacks)
    _require_whole("steps_per_iteration", config.steps_per_iteration, 1)
    _require_whole("num_learners", config.num_learners, 0)
    _require_whole("num_env_runners", config.num_env_runners, 0)
    for name in CALLBACKS:
        given = getattr(config, f"callbacks_{name}")
        are_functions = given is None or all(map(callable, force_list(given)))
        require(are_functions, f"callbacks_{name}", given, "must be a function, or a list of them")
    remedy, path = "must be a text: the path or URI of a folder", config.storage_path
    require(isinstance(path, str | None), "storage_path", path, remedy)
    return Settings(
        prompts=section(PromptsConfig, "prompts_settings", config.prompts_settings),
        rollout=section(RolloutConfig, "rollout", config.rollout, _rollout(config)),
        partial_rollout=section(
            PartialRolloutConfig, "partial_rollout", config.partial_rollout, preset="mode"
        ),
        buffer=section(BufferConfig, "buffer", config.buffer),
        algorithm=section(AlgorithmConfig, "algorithm", config.algorithm, preset="preset"),
        evaluation=_evaluation(config),
        train=section(TrainConfig, "train", config.train, _train(config)),
        scaling=_scaling(config),
    )


def refuse_unknown(given: Mapping[str, Any], method: Callable[..., Any]) -> None:
    """Refuse settings that a method of RLlib's config does not know.

    Raises:
        ConfigError: For the first of them.
    """
    from ray_apr.rllib.config import APRConfig

    known = signature(method).parameters
    for name, value in given.items():
        near = nearest(name, [*known, *signature(APRConfig.training).parameters])
        require(name in known, name, value, did_you_mean(near, _remedy(name), last=True))


def check_callbacks(callbacks: Any) -> None:
    """Refuse an RLlibCallback, or a class of them, with methods that nobody would call.

    Raises:
        ConfigError: Naming the method.
    """
    for cls in (callbacks if isinstance(callbacks, type) else type(callbacks)).__mro__:
        if cls is RLlibCallback or not issubclass(cls, RLlibCallback):
            continue
        for name in vars(cls):
            is_called = name in CALLBACKS or not name.startswith("on_")
            remedy = f"is never called here; those that are: {', '.join(CALLBACKS)}"
            require(is_called, f"callbacks_class.{name}", cls.__name__, remedy)


@cache
def _defaults() -> dict[str, Any]:
    from ray_apr.rllib.config import APRConfig

    return _plain(APRConfig())


def _plain(config: APRConfig) -> dict[str, Any]:
    """Attributes; policies as they come out of any of RLlib's ways to copy a config."""
    values = dict(vars(config))
    values["policies"] = {
        name: tuple(policy.get_state() if isinstance(policy, PolicySpec) else policy)
        for name, policy in config.policies.items()
    }
    return values


def _is_set(config: APRConfig, name: str) -> bool:
    """Whether somebody has said something, if it is no None, or has set what is not the default."""
    value = getattr(config, name)
    return bool(value != _defaults()[name]) or (name in config._said and value is not None)


def _refuse_others(config: APRConfig) -> None:
    defaults = _defaults()
    for name, value in _plain(config).items():
        if name in _OURS | MAPPED | _OBEYED | _NOT_SETTINGS | _OF_TUNE:
            continue
        if name not in defaults or (value is not defaults[name] and value != defaults[name]):
            raise ConfigError(name.lstrip("_"), value, _remedy(name.lstrip("_")))


def _remedy(name: str) -> str:
    if name in _REMEDIES:
        return _REMEDIES[name]
    for begins, remedy in _REMEDIES_OF_KINDS.items():
        if name.startswith(begins):
            return remedy
    return "has no meaning for APR; leave it out"


def _check_environment(config: APRConfig) -> None:
    check_spaces(config.observation_space, config.action_space)
    require(
        config.observations in ("text", "user"),
        "environment.observations",
        config.observations,
        "must be text or user",
    )
    if is_text_environment(config.env):
        remedy = "leave it out: with a text environment, prompts are its first observations"
        require(config.prompts is None, "prompts", config.prompts, remedy)
        held_out = config.evaluation_prompts
        require(held_out is None, "evaluation_prompts", held_out, remedy)
        _require_whole("environment.num_env_seeds", config.num_env_seeds, 1)
        return
    for name in ("env_config", "num_env_seeds", "observations", "observation_space"):
        require(
            not _is_set(config, name),
            f"environment.{name}",
            getattr(config, name),
            "needs a text environment in gymnasium's form; leave it out",
        )
    require(config.prompts is not None, "prompts", None, "is missing; give rows with a prompt each")


def _require_whole(name: str, value: Any, least: int) -> None:
    require(is_whole(value, least), name, value, f"must be a whole number of at least {least}")


def _train(config: APRConfig) -> dict[str, tuple[str, Any]]:
    """Fields of `TrainConfig` that RLlib has names for: field -> (its name there, value)."""
    found = {
        field: (name, getattr(config, name))
        for field, name in (
            ("learning_rate", "lr"),
            ("max_grad_norm", "grad_clip"),
            ("epochs", "num_epochs"),
            ("seed", "seed"),
            ("steps", "steps"),
        )
        if _is_set(config, name)
    }
    if found.get("max_grad_norm", ("", 1))[1] is None:
        remedy = "must be a number: gradients are always clipped, by a large one never"
        raise ConfigError("grad_clip", None, remedy)
    learners = config.num_learners or 1
    size = config.train_batch_size
    if _is_set(config, "train_batch_size"):
        _require_whole("train_batch_size", size, 1)
    if config._train_batch_size_per_learner is not None:
        own = config._train_batch_size_per_learner
        _require_whole("train_batch_size_per_learner", own, 1)
        total = own * learners
        if _is_set(config, "train_batch_size") and size != total:
            remedy = f"train_batch_size_per_learner x num_learners is {total}; give one of them"
            raise ConfigError("train_batch_size", size, remedy)
        found["batch_size"] = ("train_batch_size_per_learner", total)
        size = total
    elif _is_set(config, "train_batch_size"):
        found["batch_size"] = ("train_batch_size", size)
    elif isinstance(config.train, TrainConfig):
        size = config.train.batch_size
    if config.env is not None and "batch_size" in found:
        name = found["batch_size"][0]
        remedy = (
            "counts steps of the environment, which are turns; set batch_size, in responses, with "
            ".training(train=...)"
        )
        raise ConfigError(name, getattr(config, name), remedy)
    if config.minibatch_size is not None:
        found["mini_batches"] = ("minibatch_size", _mini_batches(config, size, learners))
    return found


def _mini_batches(config: APRConfig, batch_size: int, learners: int) -> int:
    """How many mini-batches of `minibatch_size` samples a learner has of a batch."""
    size, remedy = config.minibatch_size, "must divide the train batch of a learner"
    if config.env is not None:
        remedy = "counts steps of the environment; set mini_batches with .training(train=...)"
    elif "batch_size" in (config.train if isinstance(config.train, Mapping) else {}):
        remedy = "needs train_batch_size; or set mini_batches with .training(train=...)"
    elif is_whole(size, 1) and batch_size % (size * learners) == 0:
        return batch_size // (size * learners)
    raise ConfigError("minibatch_size", size, remedy)


def _rollout(config: APRConfig) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    if _is_set(config, "num_env_runners"):
        found["num_replicas"] = ("num_env_runners", config.num_env_runners or 1)
    if _is_set(config, "num_cpus_per_env_runner"):
        cpus = config.num_cpus_per_env_runner
        found["engine.num_cpus_per_replica"] = ("num_cpus_per_env_runner", cpus)
    gpus = config.num_gpus_per_env_runner
    if gpus:
        remedy = "must be a whole number: the GPUs of one rollout server"
        are_whole = is_number(gpus) and gpus == int(gpus)
        require(are_whole, "num_gpus_per_env_runner", gpus, remedy)
        found["engine.tensor_parallel_size"] = ("num_gpus_per_env_runner", int(gpus))
        found["engine.device"] = ("num_gpus_per_env_runner", "cuda")
    return found


def _scaling(config: APRConfig) -> ray.train.ScalingConfig:
    gpus, cpus = config.num_gpus_per_learner, config.num_cpus_per_learner
    require(
        is_number(gpus) and gpus in (0, 1),
        "num_gpus_per_learner",
        gpus,
        "must be 0 or 1: a train worker has one",
    )
    custom = config.custom_resources_per_learner
    is_custom = isinstance(custom, Mapping) and all(
        is_number(n) and n >= 0 for n in custom.values()
    )
    remedy = "must be a mapping from names of resources to numbers of at least 0"
    require(is_custom, "custom_resources_per_learner", custom, remedy)
    resources = dict(custom)
    if cpus != "auto":
        remedy = 'must be a number of at least 0, or "auto"'
        require(is_number(cpus) and cpus >= 0, "num_cpus_per_learner", cpus, remedy)
        resources["CPU"] = cpus
    return ray.train.ScalingConfig(
        num_workers=config.num_learners or 1,
        use_gpu=bool(gpus),
        resources_per_worker=resources or None,
    )


def _evaluation(config: APRConfig) -> EvaluationConfig | None:
    interval, given = config.evaluation_interval, config.evaluation_settings
    is_env, prompts = is_text_environment(config.env), config.evaluation_prompts
    if interval is None and given is None:
        remedy = "needs evaluation_interval, or evaluation_settings; without them nobody reads it"
        for name in ("evaluation_prompts", "evaluation_duration"):
            value = getattr(config, name)
            require(value is None, name, value, remedy)
        return None
    if prompts is None and not is_env:
        remedy = "needs evaluation_prompts: held-out rows, as those of .training(prompts=...)"
        raise ConfigError("evaluation_interval", interval, remedy)
    found: dict[str, tuple[str, Any]] = {}
    if interval is not None:
        remedy = "must be a whole number of iterations, at least 1, or None"
        require(is_whole(interval, 1), "evaluation_interval", interval, remedy)
        found["every"] = ("evaluation_interval", interval * config.steps_per_iteration)
        if given is None:  # as in RLlib, which begins with a training iteration
            found["at_start"] = ("evaluation_interval", False)
    if config.evaluation_duration is not None and not is_env:
        found["samples"] = ("evaluation_duration", _samples(config))
    evaluation: EvaluationConfig = section(EvaluationConfig, "evaluation_settings", given, found)
    if "samples" in found:
        own = [suite for suite, drawn in evaluation.suites.items() if drawn.samples is not None]
        remedy = f"is for all suites, and {', '.join(own)} have samples of their own; leave one out"
        require(not own, "evaluation_duration", config.evaluation_duration, remedy)
    if is_env:
        duration = num_held_out(config)
        remedy = f"must be a multiple of evaluation_settings.samples = {evaluation.samples}"
        is_multiple = is_whole(duration, 1) and duration % evaluation.samples == 0
        require(is_multiple, "evaluation_duration", duration, remedy)
    return evaluation


def num_held_out(config: APRConfig) -> Any:
    """Episodes of an evaluation with a text environment; as many as in RLlib, if nobody says it."""
    return 10 if config.evaluation_duration is None else config.evaluation_duration


def _samples(config: APRConfig) -> int:
    """Responses to each held-out prompt, so that `evaluation_duration` is that of all of them."""
    episodes, prompts = config.evaluation_duration, config.evaluation_prompts
    if not hasattr(prompts, "__len__"):
        remedy = "needs rows as evaluation_prompts; or set evaluation_settings.samples"
        raise ConfigError("evaluation_duration", episodes, remedy)
    remedy = f"must be a multiple of the {len(prompts)} evaluation prompts: all are evaluated"
    is_multiple = is_whole(episodes, 1) and episodes % len(prompts) == 0
    require(is_multiple, "evaluation_duration", episodes, remedy)
    return int(episodes // len(prompts))
