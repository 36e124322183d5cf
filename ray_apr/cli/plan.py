"""What a run of some settings would do; nothing is started for it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ray_apr.cli.launch import joined_address
from ray_apr.config.engine_options import OF_MEMORY
from ray_apr.run.model import context_of, kv_values_of, num_parameters

if TYPE_CHECKING:
    from ray_apr.cli.prompt_files import PromptsSettings
    from ray_apr.cli.settings import RunSettings
    from ray_apr.config import TrainConfig

_TOO_LONG = {"error": "an error", "drop": "left out, and counted"}
_UNCOUNTED = "counted with the prompts"


def make_plan(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Return what a run of these settings would do, section -> name -> value.

    Of files only the headers of the model's weights are read.
    """
    rollout, partial, train = settings.rollout, settings.partial_rollout, settings.train
    batch_size, num_steps = settings.step_size, settings.with_steps().train.steps
    under_generation = math.ceil(partial.oversampling_factor * batch_size)
    alive = partial.max_buffered_samples(batch_size)
    if partial.restarts and partial.on_stale != "wait":  # what generates has no age there
        alive += under_generation
    return {
        "run": {
            "mode": settings.mode,
            "run folder": str(settings.run_dir),
            "model": settings.model,
            "parameters": _parameters(settings),
            "begins with": settings.run.checkpoint_path or "the model",
            "prompts": str(settings.prompts),
            "first prompts only": _first_prompts(settings.prompts),
            "prompts that are too long": _TOO_LONG[settings.prompts.on_too_long],
            "reward": settings.reward or "given by the environment",
            "group filter": _filter(settings),
            "environment": settings.environment or "none: every response is one turn",
            "objective": _objective(settings),
            "learning rate": _learning_rate(train),
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
            "samples alive, at most": alive,
            "max staleness (steps)": partial.max_staleness,
            "interrupt": partial.interrupt,
            "response budget (tokens)": rollout.max_response_tokens,
        },
        "whole run": {
            "ends after": _end(train),
            "batches": _UNCOUNTED if num_steps is None else num_steps,
            "mini-batches of each": train.mini_batches,
            "epochs of each": train.epochs,
            "samples trained": _UNCOUNTED if num_steps is None else num_steps * batch_size,
            "checkpoint every": train.checkpoint_every or "only at the end",
        },
    }


def _first_prompts(prompts: PromptsSettings) -> str:
    limits = [str(file.limit or "all") for file in prompts.all_files]
    return "no, all of them" if set(limits) == {"all"} else ", ".join(limits)


def _filter(settings: RunSettings) -> str:
    drops = settings.partial_rollout.filter_zero_variance
    equal = "drops groups whose rewards are all equal" if drops else ""
    filters = filter(None, (settings.group_filter, equal))
    return ", and ".join(filters) or "none: every scored group is trained"


def _end(train: TrainConfig) -> str:
    if train.total_samples is not None:
        return f"{train.total_samples} samples, rounded up to whole batches"
    if train.passes is not None:
        return f"passes over the prompts: {train.passes}, rounded down to whole batches"
    return f"{train.num_steps} batches"


def _evaluation(settings: RunSettings) -> str:
    held_out, config = settings.evaluation_prompts, settings.evaluation
    if held_out is None or config is None:
        return "none"
    own = "".join(f", {s} scored by {c}" for s, c in settings.evaluation_rewards.items())
    for suite, drawn in config.suites.items():
        given = [f"{k} {v}" for k, v in dataclasses.asdict(drawn).items() if v is not None]
        own += f", {suite} with {' and '.join(given)}" if given else ""
    return f"{held_out}, every {config.every} versions, {config.samples} samples a prompt{own}"


def _objective(settings: RunSettings) -> str:
    algorithm, code = settings.algorithm, settings.objective
    loss, advantage = (code.get(k, getattr(algorithm, k)) for k in ("loss", "advantage"))
    return f"{loss} loss of {advantage} advantages, {algorithm.aggregation}"


def _parameters(settings: RunSettings) -> str:
    number, lora = num_parameters(settings.model), settings.train.lora
    told = "not known here, as its weights are no files of a folder"
    if number is not None:
        told = f"{number:,}"
    return told if lora is None else f"{told}; adapters of rank {lora.rank} are trained"


def _learning_rate(train: TrainConfig) -> str:
    warmup = f" after a warm-up of {train.warmup_steps} steps" if train.warmup_steps else ""
    return f"{train.learning_rate:g}, {train.lr_schedule}{warmup}"


def _resources(settings: RunSettings) -> dict[str, Any]:
    rollout, scaling = settings.rollout, settings.scaling
    per_engine = rollout.engine.resources(on_gpus=rollout.engine.device != "cpu")
    engine_cpus = rollout.num_replicas * per_engine.get("CPU", 0.0)  # of one GPU as on CPU
    ranks = scaling.ranks
    train_cpus = ranks.most * scaling.num_cpus_per_worker
    reward_cpus = rollout.reward.reserved_cpus(evaluates=settings.evaluation is not None)
    engine_gpus = rollout.num_replicas * rollout.engine.tensor_parallel_size
    shared = ", those of the trainer" if rollout.is_colocated else ""
    shared += ", in turns with it" if rollout.takes_turns else ""
    engine_gpus_text = {"cpu": "0", "cuda": str(engine_gpus)}.get(
        rollout.engine.device, f"{engine_gpus} if the cluster has GPUs, else 0"
    )
    cpus = settings.ray.num_cpus
    joined = joined_address(settings.ray)
    cluster = f"joins {joined}" if joined else f"its own, {'all' if cpus is None else cpus} CPUs"
    return {
        "Ray cluster": cluster,
        "placement": rollout.engine.placement,
        "rollout replicas": rollout.num_replicas,
        "engine": rollout.engine.factory,
        "train workers": f"{ranks.least} to {ranks.most}" if ranks.is_elastic else ranks.most,
        "Ray CPUs reserved": round(engine_cpus + train_cpus + reward_cpus, 2),
        "GPUs of the engines": engine_gpus_text + shared,
        "GPUs of the trainer": ranks.most if scaling.use_gpu else 0,
        "KV cache of an engine, at most": _kv_cache(settings),
    }


def _kv_cache(settings: RunSettings) -> str:
    engine = settings.rollout.engine
    if engine.factory != "vllm":
        return f"as {engine.factory} takes it"
    if OF_MEMORY & engine.kwargs.keys():
        return "as rollout.engine.kwargs says"
    if engine.device == "cpu":
        return "as vLLM takes it on a CPU"
    requests = settings.partial_rollout.most_requests(settings.step_size, settings.evaluation)
    longest = engine.max_model_len or context_of(settings.model)
    if longest is None:
        return f"{requests} requests of the model's full length"
    told, values = f"{requests} requests of {longest} tokens", kv_values_of(settings.model)
    if values is None:
        return told
    size = requests * longest * values * (4 if engine.dtype == "float32" else 2)
    return f"{told}, {size / 2**30:.2f} GiB"
