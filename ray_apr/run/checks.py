"""What a run is checked for before it starts, beside what its sections check (`config`)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from ray_apr.config import RolloutConfig, check_attestation, installed_vllm
from ray_apr.config.engine_options import LOGGED
from ray_apr.config.ranks import RankRange
from ray_apr.core.checks import answers_at_once, require, takes_one
from ray_apr.core.exceptions import ConfigError, one_line
from ray_apr.core.names import last_parts
from ray_apr.core.user import REWARD_SIGNATURE, Environment
from ray_apr.data.resumption import WEIGHTS, Begin, RolloutProgress
from ray_apr.rewards.answers import check_is_made, longest_s
from ray_apr.run.folder import check_storage
from ray_apr.run.model import check_engine, context_of, num_ids_of
from ray_apr.run.preflight import resources_of_worker
from ray_apr.run.spec import RESTARTS, RULES, RunSpec

if TYPE_CHECKING:
    import ray.train

_DEFAULT_RESTARTS = ((-1, "controller_failure_limit"), (-1, "max_preemption_failures"))
"""Ray's own, which nobody has asked for; the run sets them to 0."""

_LOG_LEVEL, _LOG_CONFIG = "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH"
"""vLLM's variables: a level, WARNING for the engines where it is not set (`serve.vllm.arguments`),
and a file which says what is logged in its place."""

_UPLOADED = "working_dir_files"
"""Folder of Ray's with the files that came with jobs; it goes with them."""


def check_spec(spec: RunSpec) -> None:
    """Check a run as far as that is possible without a cluster.

    Raises:
        ConfigError: Names what is wrong, its value and the remedy.
    """
    spec.check(spec.scaling)
    _check_code(spec)
    _check_sent(spec)
    _check_logged(spec.rollout)
    _check_context(spec.rollout, context_of(spec.model))
    _check_ends(spec.rollout, num_ids_of(spec.model))
    check_attestation(spec.partial_rollout, spec.rollout, installed_vllm())
    remedy = (
        "is in what --working-dir uploaded for a job, which Ray deletes; give the path of a folder "
        "that stays (in YAML: run.storage_path)"
    )
    if spec.run.storage_filesystem is None:
        check_storage("run_config.storage_path", str(spec.run.storage_path or ""))
    stays = spec.remote_storage is not None or _UPLOADED not in spec.folder.parts
    require(stays, "run_config.storage_path", str(spec.folder.parent), remedy)
    check_restarts(spec.run, spec.train.checkpoint_every)
    check_retention(spec.run, spec.train.hours_to_keep_checkpoints)


def _check_code(spec: RunSpec) -> None:
    """Check what the user's own code is to be, and that something gives the rewards."""
    reward, environment, rollout = spec.reward, spec.environment, spec.rollout
    if spec.group_filter is not None:
        remedy = "must be a function of a group's samples that returns whether it is kept"
        require(callable(spec.group_filter), "group_filter", spec.group_filter, remedy)
        takes_one("group_filter", spec.group_filter, remedy)
        answers_at_once("group_filter", spec.group_filter)
    drops_groups = spec.partial_rollout.filter_zero_variance or spec.group_filter is not None
    require(
        drops_groups or not spec.partial_rollout.max_filter_retries,
        "partial_rollout.max_filter_retries",
        spec.partial_rollout.max_filter_retries,
        "has no meaning where no group is filtered: set partial_rollout.filter_zero_variance or "
        "give a group_filter, or leave it out",
    )
    if isinstance(rollout.engine.factory, str) and rollout.engine.factory != "vllm":
        remedy = 'must be "vllm" or a function here; its name is taken in YAML'
        raise ConfigError("rollout.engine.factory", rollout.engine.factory, remedy)
    transport = spec.train.weight_transport
    if isinstance(transport, str) and ":" in transport:
        remedy = "must be a class or function here; its name is taken in YAML"
        raise ConfigError("train.weight_transport", transport, remedy)
    if environment is not None:
        _check_environment(environment)
    own = [] if spec.evaluation is None else list(spec.evaluation.rewards)
    if environment is not None and own:
        remedy = "cannot be had beside an environment, whose last step gives rewards; leave it out"
        raise ConfigError("evaluation.rewards", own, remedy)
    if environment is None and rollout.max_turns is not None:
        raise ConfigError(
            "rollout.max_turns",
            rollout.max_turns,
            "has no use without an environment; leave it out",
        )
    if reward is None and environment is not None:
        return
    if not callable(reward):
        raise ConfigError("reward", reward, "must be a function of a Sample")
    for field, given in _rewards_of(spec).items():
        check_is_made(field, given)
        longest = longest_s(given)
        require(
            longest < spec.rollout.reward.timeout_s,
            "rollout.reward.timeout_s",
            spec.rollout.reward.timeout_s,
            f"must exceed total_time_limit_s = {longest:g} of code_tests in {field}: slow programs "
            "would be failures, whose groups are dropped, in place of a reward of 0",
        )
    takes_one("reward", reward, REWARD_SIGNATURE)


def _rewards_of(spec: RunSpec) -> dict[str, Any]:
    """The reward of a run and those of its suites, by their settings."""
    own = {} if spec.evaluation is None else spec.evaluation.rewards
    return {"reward": spec.reward} | {f"evaluation.rewards.{s}": of for s, of in own.items()}


def _check_environment(environment: Environment) -> None:
    """Check that an environment answers turns, as a run calls it."""
    remedy = "must be an object that has a method step(sample) -> Step"
    step = getattr(environment, "step", None)
    has_own = getattr(step, "__func__", step) is not Environment.step
    require(callable(step) and has_own, "environment", environment, remedy)
    takes_one("environment", step, remedy)
    if callable(reset := getattr(environment, "reset", None)):
        takes_one("environment", reset, "must have reset(sample) as its method, or no reset at all")


def _check_sent(spec: RunSpec) -> None:
    """Check that the user's code can be sent to the processes of the run."""
    code = {name: getattr(spec, name) for name in ("environment", "group_filter")}
    code |= _rewards_of(spec)
    for section, names in RULES.items():
        code |= {f"{section}.{name}": getattr(getattr(spec, section), name) for name in names}
    for name, given in code.items():
        try:
            cloudpickle.dumps(given)
        except Exception as error:  # what pickling an object of the user's may raise
            remedy = (
                f"cannot be sent to the run's processes: {one_line(error)}; make what it holds "
                "where it is called, as in the function"
            )
            raise ConfigError(name, getattr(given, "__qualname__", given), remedy) from error


def _check_logged(rollout: RolloutConfig) -> None:
    """Check that what engines are asked to log is not below their level."""
    is_told = os.environ.get(_LOG_LEVEL, "").upper() in ("INFO", "DEBUG")
    is_told = is_told or bool(os.environ.get(_LOG_CONFIG))
    remedy = f"is logged at level INFO: set {_LOG_LEVEL}=INFO in the environment, or leave it out"
    for name in LOGGED if rollout.engine.factory == "vllm" and not is_told else ():
        is_asked = rollout.engine.kwargs.get(name, False)
        require(not is_asked, f"rollout.engine.kwargs.{name}", is_asked, remedy)


def _check_context(rollout: RolloutConfig, context: int | None) -> None:
    """Check that prompt and response budget fit into the model."""
    longest, budget = rollout.engine.max_model_len, rollout.max_response_tokens
    if context is None:
        return
    if longest is not None and longest > context:
        raise ConfigError(
            "rollout.engine.max_model_len",
            longest,
            f"exceeds the model's context of {context} tokens",
        )
    if budget >= context:
        raise ConfigError(
            "rollout.max_response_tokens",
            budget,
            f"leaves no room for a prompt in the model's context of {context} tokens",
        )


def _check_ends(rollout: RolloutConfig, num_ids: int | None) -> None:
    """Check that the ids which end a response are the model's: engines refuse all requests else."""
    if num_ids is None:
        return
    wrong = [i for i in rollout.sampling.stop_token_ids if i >= num_ids]
    remedy = f"are no token ids of the model, which are 0 to {num_ids - 1}; give those of the model"
    require(not wrong, "rollout.sampling.stop_token_ids", wrong, remedy)


def check_resources(spec: RunSpec, have: Mapping[str, float]) -> None:
    """Check workers and servers of a run against what a cluster has."""
    scaling, rollout = spec.scaling, spec.rollout
    workers = RankRange.of(scaling.num_workers).least
    gpus = have.get("GPU", 0.0)
    if scaling.use_gpu and gpus < 1:
        raise ConfigError(
            "scaling.use_gpu", True, "the cluster has no GPU; set it to false or add GPU nodes"
        )
    if rollout.engine.device == "cuda" and gpus < 1:
        raise ConfigError(
            "rollout.engine.device", "cuda", 'the cluster has no GPU; use "cpu" or add GPU nodes'
        )
    on_gpu = rollout.engine.device == "cuda" or (rollout.engine.device == "auto" and gpus >= 1)
    if not on_gpu:
        rollout.check_on_cpu()
    if Path(spec.model).is_dir():  # a hub id's is checked once its config is here
        device, num_gpus = "cuda" if on_gpu else "cpu", rollout.engine.tensor_parallel_size
        check_engine(spec.model, rollout.engine.factory, device, num_gpus)
    engine_gpus = rollout.num_replicas * rollout.engine.tensor_parallel_size if on_gpu else 0
    if rollout.is_colocated:
        if on_gpu != bool(scaling.use_gpu):
            raise ConfigError(
                "scaling.use_gpu",
                scaling.use_gpu,
                f"must be {on_gpu} with colocated engines, which are on "
                f"{'GPUs' if on_gpu else 'CPUs'}",
            )
        engine_gpus = 0  # those of the workers
    per_worker = resources_of_worker(scaling)
    wanted_gpus = workers * per_worker.get("GPU", 0.0) + engine_gpus
    if wanted_gpus > gpus:
        raise ConfigError(
            "scaling.num_workers",
            workers,
            f"workers and {rollout.num_replicas} replicas want {wanted_gpus:g} GPUs together, the "
            f"cluster has {gpus:g}",
        )
    per_replica = rollout.engine.resources(on_gpus=on_gpu).get("CPU", 0.0)
    of_rewards = rollout.reward.reserved_cpus(evaluates=spec.evaluation is not None)
    of_workers = workers * per_worker.get("CPU", 0.0)
    wanted = of_workers + rollout.num_replicas * per_replica + of_rewards
    cpus = have.get("CPU", 0.0)
    if wanted >= cpus:
        least = math.floor(wanted) + 1
        told = f"{wanted:g} ({of_rewards:g} of them for rewards)" if of_rewards else f"{wanted:g}"
        raise ConfigError(
            "rollout.num_replicas",
            rollout.num_replicas,
            f"replicas and {workers} train workers want {told} CPUs together, the cluster has "
            f"{cpus:g}, and Ray Data needs one to encode the prompts; lower num_cpus_per_replica, "
            f"or give Ray more, whatever the machine has: `ray: {{num_cpus: {least}}}` in a file, "
            f"`ray_apr.init(num_cpus={least})` in Python",
        )


def check_restarts(run: ray.train.RunConfig, checkpoint_every: int) -> None:
    """Check that a run can go on after failures as it is asked to."""
    failures = run.failure_config
    if failures is None:
        return
    if failures.max_failures and not checkpoint_every:
        raise ConfigError(
            "run_config.failure_config.max_failures",
            failures.max_failures,
            "needs checkpoints to go on with: set train.checkpoint_every",
        )
    for name in RESTARTS[1:]:
        value = getattr(failures, name, 0)
        if value and (value, name) not in _DEFAULT_RESTARTS:
            raise ConfigError(
                f"run_config.failure_config.{name}",
                value,
                "must be 0: all parts of a run begin again together; set max_failures, which "
                "counts failures of any part",
            )


def check_retention(run: ray.train.RunConfig, hours_to_keep: float | None) -> None:
    """Check that checkpoints that stay for their score are not to go for their age."""
    checkpoints = run.checkpoint_config or ray.train.CheckpointConfig()
    score = checkpoints.checkpoint_score_attribute
    if hours_to_keep is not None and score is not None:
        raise ConfigError(
            "train.hours_to_keep_checkpoints",
            hours_to_keep,
            f"the best checkpoints by {score} stay however old they are; leave out one of the two",
        )


def check_goes_on(spec: RunSpec, begin: Begin, rollout: RolloutProgress) -> None:
    """Check that a run has what its checkpoint fixes.

    Args:
        spec: Of the run.
        begin: What the checkpoint says of the trainer.
        rollout: The same of the prompts.

    Raises:
        ConfigError: If something is other than in the checkpoint.
    """
    train, weights = spec.train, spec.prompts.weights
    of_order = {
        "train.seed": (train.seed, rollout.seed),
        WEIGHTS: (weights, rollout.sampled.get(WEIGHTS)),
    }
    for name, (now, then) in of_order.items():
        remedy = f"the order of the prompts goes on only with that of the checkpoint, {then}"
        require(now == then, name, now, remedy)
    if train.lora is None:
        remedy = "must be that of the checkpoint, which has adapters"
        require(begin.lora_alpha is None, "train.lora", None, remedy)
        return
    remedy = "must be left out: the checkpoint has no adapters"
    require(begin.lora_rank != 0, "train.lora", train.lora, remedy)
    for name, there in (("rank", begin.lora_rank), ("alpha", begin.lora_alpha)):
        value = getattr(train.lora, name)
        remedy = f"the adapters of the checkpoint go on only with theirs, {there}"
        require(there in (None, value), f"train.lora.{name}", value, remedy)
    named, layers = train.lora.target_modules, begin.lora_layers
    if layers is not None and named != "all-linear":  # which the model alone can tell
        known = last_parts(named).split(", ")  # perhaps also of layers that the model has not
        remedy = f"the adapters of the checkpoint go on only in the layers that have one, {layers}"
        goes_on = all(layer in known for layer in layers.split(", "))
        require(goes_on, "train.lora.target_modules", named, remedy)
