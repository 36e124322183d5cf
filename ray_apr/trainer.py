"""`APRTrainer`: asynchronous RL post-training with partial rollouts, as a Ray trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from ray_apr.architectures import read_config
from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    EvaluationConfig,
    PartialRolloutConfig,
    RolloutConfig,
    TrainConfig,
    check_attestation,
    check_placement,
    check_together,
    installed_vllm,
)
from ray_apr.controller import run
from ray_apr.data.datasource import READ_TASK_CPUS
from ray_apr.data.prompts import check_dataset
from ray_apr.data.rows import PromptRows
from ray_apr.exceptions import ConfigError
from ray_apr.host import HostedRun, is_captured
from ray_apr.preflight import check_port
from ray_apr.protocols import Environment, GroupFilter, RewardFunction
from ray_apr.resume import find_begin
from ray_apr.run_plan import RESTARTS, RunPlan

if TYPE_CHECKING:
    from typing import TypeAlias

    import ray.data

    Prompts: TypeAlias = ray.data.Dataset | PromptRows

_DEFAULT_RESTARTS = ((-1, "controller_failure_limit"), (-1, "max_preemption_failures"))
"""Ray's own, which nobody has asked for; the run sets them to 0."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class APRTrainer:
    """Train a language model on its own answers, asynchronously.

    Generation (vLLM in Ray Serve), reward and training (FSDP2 in a ``TorchTrainer``) run at the
    same time. Answers that a weight sync interrupts keep their tokens and are resumed under the new
    weights; nothing older than ``max_staleness`` optimizer steps is trained.

    Args:
        model: Folder in Hugging Face's format, or hub id.
        prompts: Rows with a prompt column (text, chat messages or token ids) and whatever the
            reward reads from ``sample.row``.
        reward: ``def`` or ``async def`` function of a finished `Sample` that returns a finite
            number or a `RewardResult`; may be left out where the environment gives the rewards.
        environment: What answers the turns of a response (tools, users, games); None: every
            response is one turn.
        group_filter: Function of a scored group (its samples) that says whether it may be trained;
            it is quick and runs in the rollout worker. None keeps all.
        evaluation_prompts: Held-out rows like those of `prompts`, on which the policy is evaluated
            beside the run, with the same reward; None evaluates nothing.
        rollout_config: Servers, sampling, group size, rewards.
        partial_rollout_config: Staleness bound, supplementation, interruption.
        buffer_config: Time limits of the sample buffer.
        algorithm_config: Advantages, loss, correction.
        evaluation_config: When and how `evaluation_prompts` are evaluated.
        train_config: Optimizer, batch, checkpoints, weight sync.
        scaling_config: Train workers and their resources.
        run_config: Name and storage of the run. A run of this name that was interrupted is gone
            on with, from its last checkpoint on (docs/resume.md).
        checkpoint: Checkpoint of another run that this one begins with: weights, optimizer, step,
            policy version, and the prompts that come next. None begins with the model.

    Raises:
        ConfigError: For bad input, before anything is started.

    Example:
        >>> trainer = APRTrainer(                                        # doctest: +SKIP
        ...     model="Qwen/Qwen3-0.6B",
        ...     prompts=ray.data.read_parquet("prompts.parquet"),
        ...     reward=lambda sample: float(sample.response_text == sample.row["answer"]),
        ... )
        >>> result = trainer.fit()                                       # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        model: str,
        prompts: Prompts,
        reward: RewardFunction | None = None,
        environment: Environment | None = None,
        group_filter: GroupFilter | None = None,
        evaluation_prompts: Prompts | None = None,
        rollout_config: RolloutConfig | None = None,
        partial_rollout_config: PartialRolloutConfig | None = None,
        buffer_config: BufferConfig | None = None,
        algorithm_config: AlgorithmConfig | None = None,
        evaluation_config: EvaluationConfig | None = None,
        train_config: TrainConfig | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        checkpoint: str | Path | ray.train.Checkpoint | None = None,
    ) -> None:
        rollout = rollout_config or RolloutConfig()
        algorithm = algorithm_config or AlgorithmConfig()
        train = train_config or TrainConfig()
        scaling = scaling_config or ray.train.ScalingConfig(num_workers=1)
        check_together(rollout, train, algorithm)
        _check_code(reward, environment, rollout)
        if group_filter is not None and not callable(group_filter):
            remedy = "must be a function of a group's samples that returns whether it is kept"
            raise ConfigError("group_filter", group_filter, remedy)
        context = _check_model(model)
        max_model_len = _check_context(rollout, context)
        _check_workers(scaling, train, rollout)
        partial_rollout = partial_rollout_config or PartialRolloutConfig()
        check_placement(rollout, partial_rollout, train, scaling.num_workers)
        if isinstance(rollout.engine, str) and rollout.engine != "vllm":
            remedy = 'must be "vllm" or a function here; its name is taken in YAML'
            raise ConfigError("rollout.engine", rollout.engine, remedy)
        if isinstance(train.weight_transport, str) and ":" in train.weight_transport:
            remedy = "must be a class or function here; its name is taken in YAML"
            raise ConfigError("train.weight_transport", train.weight_transport, remedy)
        check_attestation(partial_rollout, rollout, installed_vllm())
        _check_restarts(run_config)
        check_port(rollout)
        check_dataset(prompts, model, rollout.prompt_column, rollout.replay_column)
        evaluation = _check_evaluation(evaluation_prompts, model, evaluation_config, rollout)
        self._prompts, self._held_out = prompts, evaluation_prompts
        self._plan = RunPlan(
            model=model,
            reward=reward,
            environment=environment,
            group_filter=group_filter,
            max_model_len=max_model_len,
            rollout=rollout,
            partial_rollout=partial_rollout,
            buffer=buffer_config or BufferConfig(),
            algorithm=algorithm,
            evaluation=evaluation,
            train=train,
            scaling=scaling,
            run=run_config or ray.train.RunConfig(),
            checkpoint=_as_checkpoint(checkpoint),
        )
        if self._plan.remote_storage is None:
            find_begin(self._plan)
        if ray.is_initialized():
            self.check_cluster(ray.cluster_resources())

    @classmethod
    def restore(cls, path: str | Path, **arguments: Any) -> APRTrainer:
        """Make a trainer that goes on with an interrupted run from its last checkpoint on.

        Args:
            path: The run's folder, ``<storage_path>/<name>``, or its URI on remote storage.
            arguments: As of the class; what is not given has its default, as in a new run.

        Raises:
            ConfigError: If there is no run, or it has trained all of its steps.
        """
        storage, _, name = str(path).rstrip("/").rpartition("/")
        run = arguments.pop("run_config", None) or ray.train.RunConfig()
        run = dataclasses.replace(run, name=name, storage_path=storage or ".")
        trainer = cls(**arguments, run_config=run)
        if not find_begin(trainer.plan).is_resumed:
            raise ConfigError("path", str(path), "holds no run to go on with")
        return trainer

    @property
    def plan(self) -> RunPlan:
        """What the run is made of."""
        return self._plan

    def check_cluster(self, resources: Mapping[str, float]) -> None:
        """Check that a cluster holds the run; where Ray runs already, this has been done.

        Args:
            resources: What the cluster has, e.g. ``{"CPU": 8.0, "GPU": 2.0}``.

        Raises:
            ConfigError: If it does not.
        """
        check_resources(self._plan.scaling, self._plan.rollout, resources)

    def fit(self, *, progress: Callable[[str], None] | None = None) -> ray.train.Result:
        """Run to the end and return Ray Train's result.

        Inside of a placement group, as in a trial of Ray Tune, the run is in a host outside of it.

        Args:
            progress: Gets one line a step, and one every few seconds while nothing moves, e.g.
                ``print``; None hands them to the logger ``ray_apr.controller`` at level INFO,
                which Python shows only where logging is set up for it.

        Returns:
            Metrics of the last step, the last checkpoint, and the path of the run folder.

        Raises:
            APRError: What the run failed of; nothing of it stays behind.
            Stopped: Somebody ended it, with Ctrl-C or SIGTERM.
        """
        if ray.is_initialized():
            self.check_cluster(ray.cluster_resources())
        if is_captured():
            return self.start_in_host(progress=progress).fit()
        return run(self._plan, *self._datasets(), progress=progress)

    def start_in_host(
        self, *, progress: Callable[[str], None] | None = None, is_gated: bool = False
    ) -> HostedRun:
        """Start the run in a task of its own; see `HostedRun`."""
        if not ray.is_initialized():
            ray.init()
        self.check_cluster(ray.cluster_resources())
        return HostedRun(self._plan, *self._datasets(), progress=progress, is_gated=is_gated)

    def _datasets(self) -> tuple[ray.data.Dataset, ray.data.Dataset | None]:
        prompts, held_out = (
            given.to_dataset() if isinstance(given, PromptRows) else given
            for given in (self._prompts, self._held_out)
        )
        return prompts, held_out


def _as_checkpoint(given: str | Path | ray.train.Checkpoint | None) -> Any:
    if given is None or isinstance(given, ray.train.Checkpoint):
        return given
    if "://" not in str(given) and not Path(given).is_dir():
        raise ConfigError("checkpoint", str(given), "no such folder")
    return ray.train.Checkpoint(str(given))


def _check_evaluation(
    prompts: Prompts | None,
    model: str,
    config: EvaluationConfig | None,
    rollout: RolloutConfig,
) -> EvaluationConfig | None:
    """Check the held-out prompts; returns the settings, None where nothing is evaluated."""
    if prompts is None:
        if config is not None:
            remedy = "needs evaluation_prompts; give a dataset, or leave it out"
            raise ConfigError("evaluation_config", config, remedy)
        return None
    config = config or EvaluationConfig()
    check_dataset(prompts, model, rollout.prompt_column)
    if (config.max_response_tokens or 0) > rollout.max_response_tokens:
        raise ConfigError(
            "evaluation.max_response_tokens",
            config.max_response_tokens,
            f"must be at most rollout.max_response_tokens = {rollout.max_response_tokens}, beside "
            "which every prompt is known to fit",
        )
    return config


def _check_code(
    reward: RewardFunction | None, environment: Environment | None, rollout: RolloutConfig
) -> None:
    """Check that something gives the rewards."""
    if environment is not None and not callable(getattr(environment, "step", None)):
        raise ConfigError("environment", environment, "must have a method step(sample) -> Step")
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


def _check_model(model: str) -> int | None:
    """Check a model folder and return its context in tokens; None for a hub id."""
    folder = Path(model)
    if not folder.exists():
        if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
            raise ConfigError("model", model, "no such folder; give a folder or a hub id")
        return None
    config = read_config(model, folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            "model",
            model,
            "the folder has no tokenizer; save one beside the weights "
            "(tokenizer.save_pretrained(folder))",
        )
    context = config.get("max_position_embeddings")
    return int(context) if context else None


def _check_context(rollout: RolloutConfig, context: int | None) -> int | None:
    """Longest prompt + response, and whether the response budget fits into it."""
    if rollout.max_model_len is not None:
        if context is not None and rollout.max_model_len > context:
            raise ConfigError(
                "rollout.max_model_len",
                rollout.max_model_len,
                f"exceeds the model's context of {context} tokens",
            )
        return rollout.max_model_len
    if context is not None and rollout.max_response_tokens >= context:
        raise ConfigError(
            "rollout.max_response_tokens",
            rollout.max_response_tokens,
            f"leaves no room for a prompt in the model's context of {context} tokens",
        )
    return context


def _check_workers(
    scaling: ray.train.ScalingConfig, train: TrainConfig, rollout: RolloutConfig
) -> None:
    """Check workers against the batch and the placement."""
    workers = scaling.num_workers
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError("scaling.num_workers", workers, "must be a whole number of at least 1")
    train.check_workers(workers)
    if rollout.is_colocated and "GPU" in (scaling.resources_per_worker or {}):
        raise ConfigError(
            "scaling.resources_per_worker",
            scaling.resources_per_worker,
            "leave GPU out with colocated engines: a worker has what its engine leaves of a GPU",
        )


def check_resources(
    scaling: ray.train.ScalingConfig, rollout: RolloutConfig, have: Mapping[str, float]
) -> None:
    """Check workers and servers against what a cluster has."""
    workers = scaling.num_workers
    gpus = have.get("GPU", 0.0)
    if scaling.use_gpu and gpus < 1:
        raise ConfigError(
            "scaling.use_gpu", True, "the cluster has no GPU; set it to false or add GPU nodes"
        )
    if rollout.device == "cuda" and gpus < 1:
        raise ConfigError(
            "rollout.device", "cuda", 'the cluster has no GPU; use "cpu" or add GPU nodes'
        )
    on_gpu = rollout.device == "cuda" or (rollout.device == "auto" and gpus >= 1)
    engine_gpus = rollout.num_replicas * rollout.tensor_parallel_size if on_gpu else 0
    if rollout.is_colocated:
        if on_gpu != bool(scaling.use_gpu):
            raise ConfigError(
                "scaling.use_gpu",
                scaling.use_gpu,
                f"must be {on_gpu} with colocated engines, which are on "
                f"{'GPUs' if on_gpu else 'CPUs'}",
            )
        engine_gpus = 0  # those of the workers
    wanted_gpus = workers * scaling.use_gpu + engine_gpus
    if wanted_gpus > gpus:
        raise ConfigError(
            "scaling.num_workers",
            workers,
            f"workers and {rollout.num_replicas} replicas want {wanted_gpus} GPUs together, the "
            f"cluster has {gpus:g}",
        )
    per_worker = (scaling.resources_per_worker or {}).get("CPU", 0 if scaling.use_gpu else 1)
    per_replica = rollout.num_cpus_per_replica + rollout.tensor_parallel_size * on_gpu
    wanted = workers * per_worker + rollout.num_replicas * per_replica
    cpus = have.get("CPU", 0.0)
    if wanted + workers * READ_TASK_CPUS > cpus:
        raise ConfigError(
            "rollout.num_replicas",
            rollout.num_replicas,
            f"replicas and {workers} train workers want {wanted:g} CPUs together, the cluster has "
            f"{cpus:g}, and Ray Data needs a part of one more; lower num_cpus_per_replica or start "
            "Ray with more (logical) CPUs",
        )


def _check_restarts(run_config: ray.train.RunConfig | None) -> None:
    """Check that Ray Train is not asked to start train workers again."""
    failures = run_config and run_config.failure_config
    for name in RESTARTS if failures else ():
        value = getattr(failures, name, 0)
        if value and (value, name) not in _DEFAULT_RESTARTS:
            raise ConfigError(
                f"run_config.failure_config.{name}",
                value,
                "must be 0: a train worker that is started again has the weights of a checkpoint, "
                "while the sample buffer and the rollout servers have gone on from there. A run "
                "whose train worker dies ends; go on with it by its name (docs/resume.md)",
            )
