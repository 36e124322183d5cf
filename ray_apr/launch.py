"""From the settings of a run to a finished run folder: the plan, and the start on Ray.

`make_plan` only computes; `run_training` is the one place of the command line that starts Ray.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.exceptions import ConfigError
from ray_apr.settings import PromptsSettings, RunSettings
from ray_apr.settings_files import load_environment, load_function, read_json_rows

if TYPE_CHECKING:
    import ray.data


def make_plan(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Return what a run of these settings would do, section -> name -> value.

    Pure: no file is read and nothing is started.
    """
    rollout, partial, train = settings.rollout, settings.partial_rollout, settings.train
    batch_size = partial.step_size(train.batch_size)
    under_generation = math.ceil(partial.oversampling_factor * batch_size)
    return {
        "run": {
            "mode": settings.mode,
            "run folder": str(settings.run_dir),
            "model": settings.model,
            "prompts": settings.prompts.path,
            "first prompts only": settings.prompts.limit or "no, all of them",
            "reward": settings.reward or "given by the environment",
            "group filter": settings.group_filter or "none: every scored group is trained",
            "environment": settings.environment or "none: every response is one turn",
            "objective": _objective(settings),
            "evaluation": _evaluation(settings),
            "seed": train.seed,
        },
        "resources": _resources(settings),
        "each step": {
            "samples (batch)": batch_size,
            "groups": batch_size // rollout.group_size,
            "samples of a group": rollout.group_size,
            "response tokens, at most": batch_size * rollout.max_response_tokens,
        },
        "generation": {
            "samples under generation": under_generation,
            "in the engines at once, at most": partial.max_inflight or under_generation,
            "samples alive, at most": (partial.max_staleness + 1) * batch_size,
            "max staleness (steps)": partial.max_staleness,
            "interrupt": partial.interrupt,
            "response budget (tokens)": rollout.max_response_tokens,
        },
        "whole run": {
            "batches": train.steps,
            "mini-batches of each": train.mini_batches,
            "epochs of each": train.epochs,
            "samples trained": train.steps * batch_size,
            "checkpoint every": train.checkpoint_every or "only at the end",
        },
    }


def _evaluation(settings: RunSettings) -> str:
    held_out, config = settings.evaluation_prompts, settings.evaluation
    if held_out is None or config is None:
        return "none"
    return f"{held_out.path}, every {config.every} versions, {config.samples} samples a prompt"


def _objective(settings: RunSettings) -> str:
    algorithm, code = settings.algorithm, settings.objective
    loss, advantage = (code.get(k, getattr(algorithm, k)) for k in ("loss", "advantage"))
    return f"{loss} loss of {advantage} advantages, {algorithm.aggregation}"


def _resources(settings: RunSettings) -> dict[str, Any]:
    rollout, scaling = settings.rollout, settings.scaling
    engine_cpus = rollout.num_replicas * rollout.num_cpus_per_replica
    train_cpus = scaling.num_workers * scaling.num_cpus_per_worker
    reward_cpus = rollout.num_reward_workers * rollout.num_cpus_per_reward
    engine_gpus = rollout.num_replicas * rollout.tensor_parallel_size
    shared = ", in turns with the trainer" if rollout.is_colocated else ""
    engine_gpus_text = {"cpu": "0", "cuda": str(engine_gpus)}.get(
        rollout.device, f"{engine_gpus} if the cluster has GPUs, else 0"
    )
    cpus = settings.ray.num_cpus
    cluster = settings.ray.address or f"local, {'all' if cpus is None else cpus} CPUs"
    return {
        "Ray cluster": cluster,
        "placement": rollout.placement,
        "rollout replicas": rollout.num_replicas,
        "train workers": scaling.num_workers,
        "Ray CPUs reserved": round(engine_cpus + train_cpus + reward_cpus, 2),
        "GPUs of the engines": engine_gpus_text + shared,
        "GPUs of the trainer": scaling.num_workers if scaling.use_gpu else 0,
    }


def read_prompts(prompts: PromptsSettings) -> ray.data.Dataset:
    """Read the prompts file as a Ray Dataset; Ray runs already.

    The file lies on this machine and is read here: Ray Data's own readers would start several
    processes for it, which takes longer than a file of prompts does.
    """
    import pyarrow.parquet
    import ray.data

    if prompts.path.endswith(".parquet"):
        dataset = ray.data.from_arrow(pyarrow.parquet.read_table(prompts.path))
    else:  # read_json guesses types: an answer "007" would come out as the number 7
        dataset = ray.data.from_items(read_json_rows(Path(prompts.path)))
    return dataset if prompts.limit is None else dataset.limit(prompts.limit)


def check_new_run(settings: RunSettings) -> None:
    """Check that the run folder holds no run yet: two runs would be mixed in its files.

    Raises:
        ConfigError: If it does.
    """
    run_dir = settings.run_dir
    if (run_dir / "metrics.jsonl").exists():
        raise ConfigError(
            "run.name", run_dir.name, f"{run_dir} holds a run already; choose another name"
        )


def run_training(settings: RunSettings, *, progress: Callable[[str], None] | None = None) -> Path:
    """Start Ray, train, and stop Ray again.

    Args:
        settings: With a run name (`RunSettings.with_run_name`).
        progress: Gets one line a step; None logs them.

    Returns:
        The run folder.

    Raises:
        ConfigError: If the reward cannot be imported or the run folder holds a run already.
        APRError: If the run fails; what it wrote until then stays in the run folder.
    """
    check_new_run(settings)
    run_dir = settings.run_dir
    folder = settings.base_dir
    functions = {
        key: None if spec is None else load_function(key, spec, folder)
        for key, spec in (("reward", settings.reward), ("group_filter", settings.group_filter))
    }
    environment = None
    if settings.environment is not None:
        environment = load_environment(settings.environment, folder)
    objective: dict[str, Any] = {
        key: load_function(f"algorithm.{key}", spec, folder)
        for key, spec in settings.objective.items()
    }
    import ray
    import ray.train

    from ray_apr.trainer import APRTrainer

    joins = settings.ray.address or os.environ.get("RAY_ADDRESS")  # set inside of a Ray job
    local = {} if joins else {"include_dashboard": True, "num_cpus": settings.ray.num_cpus}
    ray.init(
        address=settings.ray.address,
        namespace=settings.ray.namespace,
        log_to_driver=False,
        **local,
    )
    try:
        held_out = settings.evaluation_prompts
        trainer = APRTrainer(
            model=settings.model,
            prompts=read_prompts(settings.prompts),
            environment=environment,
            reward=functions["reward"],
            group_filter=functions["group_filter"],
            rollout_config=settings.rollout,
            partial_rollout_config=settings.partial_rollout,
            buffer_config=settings.buffer,
            evaluation_prompts=None if held_out is None else read_prompts(held_out),
            evaluation_config=settings.evaluation,
            algorithm_config=dataclasses.replace(settings.algorithm, **objective),
            train_config=settings.train,
            scaling_config=ray.train.ScalingConfig(
                num_workers=settings.scaling.num_workers,
                use_gpu=settings.scaling.use_gpu,
                resources_per_worker=settings.scaling.resources_per_worker,
            ),
            run_config=ray.train.RunConfig(name=run_dir.name, storage_path=str(run_dir.parent)),
        )
        trainer.fit(progress=progress)
    finally:
        ray.shutdown()
    return run_dir
