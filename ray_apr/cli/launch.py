"""From the settings of a run to a finished run folder: the checks, the start on Ray.

A dry run and a real one make the same `APRTrainer`, whose constructor checks; `run_training` is the
one place of the command line that starts Ray.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.cli.parts import hear_parts
from ray_apr.cli.prompt_files import read_prompts
from ray_apr.cli.quiet import no_advice_to_delete, ray_lines_in
from ray_apr.cli.settings import RaySettings, RunSettings
from ray_apr.cli.user_files import load_environment, load_function
from ray_apr.compat.ray import NONE_AHEAD, STATE_TRACKING, init_beside_dashboard, reach
from ray_apr.core.exceptions import ConfigError, ResourceError, one_line
from ray_apr.run.folder import absolute, check_new_folder
from ray_apr.run.model import check_engine, check_hub_model
from ray_apr.run.room import cpus_of_this_machine
from ray_apr.run.stopping import StopSignals
from ray_apr.serve.vllm.plugin import why_not_loaded

if TYPE_CHECKING:
    from ray_apr.data.rows import PromptRows
    from ray_apr.run.spec import RunSpec
    from ray_apr.trainer import APRTrainer

logger = logging.getLogger(__name__)

_PREVIEW_LIMIT_S = 60.0
"""Longest time that a dry run encodes prompts of one file."""
_STARTS = 3
_DASHBOARD_S = 60.0
_OBJECTS = 100_000
"""So many new ones begin a collection of garbage. What is imported stays, and with Python's 700 a
fifth of the time goes to looking through it."""
_NO_START = "timed out during startup"
"""What Ray says of a start for which this machine is too busy."""
JOB_METADATA = "ray_apr_run"
"""Key of a job's metadata under which Ray's table of jobs has the name of the run."""


@no_advice_to_delete()
def dry_run(settings: RunSettings, tell: Callable[[str], None]) -> list[str]:
    """Check what a run would check, all of its prompts, and one call of each reward; start nothing.

    A cluster that the run would join is joined for a moment, to ask what it has.

    Args:
        settings: Of the run.
        tell: Gets what follows from the prompts, and what each reward gave.

    Returns:
        Warnings: what could not be looked at here, columns that Arrow has no type for, rows without
        a column that others have, prompts that are left out, characters that the tokenizer does not
        know, a reward that is slow.

    Raises:
        ConfigError: What the run would refuse.
    """
    from ray_apr.cli.first_reward import call_rewards, rewards_of
    from ray_apr.data.preview import gaps_of, untyped_of

    files = {"prompts": settings.prompts, "evaluation.prompts": settings.evaluation_prompts}
    rows = {name: read_prompts(file) for name, file in files.items() if file is not None}
    trainer = make_trainer(settings, rows["prompts"], rows.get("evaluation.prompts"))
    resources = _resources_of_cluster(settings)
    trainer.check_cluster(resources)
    spec = trainer.spec.on_devices(has_gpus=resources.get("GPU", 0) >= 1)
    warnings = [
        said
        for name, prompts in rows.items()
        for said in (*untyped_of(prompts, name), *gaps_of(prompts, name))
    ]
    warnings += _preview(rows, spec, tell)
    return warnings + call_rewards(rewards_of(settings, rows, spec), spec, tell)


def _preview(
    rows: Mapping[str, PromptRows], spec: RunSpec, tell: Callable[[str], None]
) -> list[str]:
    """Encode the prompts with the model's tokenizer, if that is here."""
    from ray_apr.data.encoding import LengthLimit
    from ray_apr.data.preview import preview
    from ray_apr.data.tokenizers import load_tokenizer, num_token_ids, with_template_kwargs
    from ray_apr.run.ending import passes_line

    try:
        tokenizer = load_tokenizer(spec.model, is_here=True)
    except (OSError, ValueError) as error:
        if Path(spec.model).is_dir():
            remedy = f"its tokenizer cannot be loaded: {error}"
            raise ConfigError("model", spec.model, remedy) from error
        why = "so that no prompt was encoded, and no reward computed"
        return [f"{spec.model} is not on this machine, {why}"]
    check_hub_model(spec.model, is_here=True)
    engine = spec.rollout.engine
    check_engine(spec.model, engine.factory, engine.device, engine.tensor_parallel_size)
    max_prompt_tokens = spec.max_prompt_tokens(is_here=True)
    tokenizer = with_template_kwargs(tokenizer, spec.rollout.chat_template_kwargs)
    num_ids = num_token_ids(spec.model, tokenizer)
    warnings = []
    for name, prompts in rows.items():
        limit = LengthLimit(
            max_prompt_tokens,
            column=spec.rollout.prompt_column,
            drops=spec.prompts.on_too_long == "drop" if name == "prompts" else None,
            name=name,
            place=prompts.place,
        )
        warnings += preview(prompts, tokenizer, limit, limit_s=_PREVIEW_LIMIT_S, num_ids=num_ids)
        passes = spec.train.passes
        if name == "prompts" and passes is not None and limit.num_seen == len(prompts):
            counted = spec.with_steps(limit.num_left)
            tell(passes_line(passes, limit.num_left, counted.train.num_steps))
    return warnings


def run_training(
    settings: RunSettings,
    *,
    progress: Callable[[str], None] | None = None,
    ray_log: Path | None = None,
) -> Path:
    """Check, start or join Ray, train, and leave Ray again.

    Waits for: the run. Unblocked by: its end; its parts have limits of their own, and Ctrl-C and
    SIGTERM end it.

    Args:
        settings: Of the run.
        progress: Gets one line a step; None logs them.
        ray_log: Gets what Ray says and all that parts of the run print; None: the terminal does.

    Returns:
        The run folder.

    Raises:
        ConfigError: If the reward cannot be imported or the run folder holds a run already.
        APRError: If the run fails; what it wrote until then stays in the run folder.
        Stopped: Somebody ended it, with Ctrl-C or SIGTERM.
    """
    gc.set_threshold(_OBJECTS)
    held_out = settings.evaluation_prompts
    quiet = nullcontext() if ray_log is None else ray_lines_in(ray_log)  # imports Ray
    signals = StopSignals()
    with signals.listen(), _fork_servers(settings) as runtime_env, quiet:
        trainer = make_trainer(
            settings,
            read_prompts(settings.prompts),
            None if held_out is None else read_prompts(held_out),
        )
        import ray

        from ray_apr.core.imports import imported_meanwhile

        os.environ.setdefault(STATE_TRACKING, "1")
        hears = hear_parts(None if ray_log is None else progress or logger.info, ray_log)
        with imported_meanwhile():
            with hears:
                name = settings.run_dir.name
                dashboard = _init_ray(settings.ray, name, runtime_env(), log_to_driver=True)
            tell = functools.partial(_tell_of_dashboard, progress or logger.info)
            dashboard.add_done_callback(tell)
            try:
                with signals.listen():  # `ray.init` has set a handler of its own
                    trainer.fit(progress=progress)
            finally:
                concurrent.futures.wait([dashboard], _DASHBOARD_S)  # so that Ray ends it, too
                ray.shutdown()
    return settings.run_dir


def _tell_of_dashboard(tell: Callable[[str], None], dashboard: Future[str | None]) -> None:
    if error := dashboard.exception():
        logger.warning("the run has no Ray dashboard: %s", one_line(error))
    elif address := dashboard.result(timeout=0):
        tell(f"dashboard: http://{address}")


def _fork_servers(
    settings: RunSettings,
) -> AbstractContextManager[Callable[[], dict[str, str]]]:
    """What the workers of a run are forked from that starts its own Ray with vLLM."""
    engine = settings.rollout.engine
    if engine.factory != "vllm" or joined_address(settings.ray) is not None:
        return nullcontext(dict)
    from ray_apr.run.forking import run_fork_servers

    return run_fork_servers(engine.device)


def make_trainer(
    settings: RunSettings, prompts: PromptRows, held_out: PromptRows | None
) -> APRTrainer:
    """Import the user's code and make the trainer, which checks all of it; Ray need not run.

    Raises:
        ConfigError: What is wrong.
        ResourceError: If engines on this machine would not find ray_apr.
    """
    is_vllm_here = (
        settings.rollout.engine.factory == "vllm" and joined_address(settings.ray) is None
    )
    if is_vllm_here and (missing := why_not_loaded()):
        raise ResourceError(missing)
    if not settings.run.resume:
        check_new_folder(settings.run_dir)
    from ray_apr.trainer import APRTrainer

    return APRTrainer(prompts=prompts, evaluation_prompts=held_out, **trainer_arguments(settings))


def trainer_arguments(settings: RunSettings) -> dict[str, Any]:
    """Import the user's code: the arguments of `APRTrainer` but for the prompts.

    Raises:
        ConfigError: What cannot be imported.
    """
    folder = settings.base_dir
    functions = {
        key: None if spec is None else load_function(key, spec, folder)
        for key, spec in (("reward", settings.reward), ("group_filter", settings.group_filter))
    }
    environment = None
    if settings.environment is not None:
        environment = load_environment(settings.environment, folder)
    objective: dict[str, Any] = {
        key: given if key.endswith("_kwargs") else load_function(f"algorithm.{key}", given, folder)
        for key, given in settings.objective.items()
    }
    evaluation = settings.evaluation
    if evaluation is not None and settings.evaluation_rewards:
        rewards = {
            suite: load_function(f"evaluation.rewards.{suite}", spec, folder)
            for suite, spec in settings.evaluation_rewards.items()
        }
        evaluation = dataclasses.replace(evaluation, rewards=rewards)
    rollout = settings.rollout
    if isinstance(rollout.engine.factory, str) and rollout.engine.factory != "vllm":
        engine = load_function("rollout.engine.factory", rollout.engine.factory, folder)
        rollout = dataclasses.replace(
            rollout, engine=dataclasses.replace(rollout.engine, factory=engine)
        )
    train = settings.train
    if isinstance(train.weight_transport, str) and ":" in train.weight_transport:
        transport = load_function("train.weight_transport", train.weight_transport, folder)
        train = dataclasses.replace(train, weight_transport=transport)
    rules: dict[str, Any] = {
        key: load_function(f"partial_rollout.{key}", spec, folder)
        for key, spec in settings.scheduling.items()
    }
    import ray.train

    return dict(
        model=settings.model,
        environment=environment,
        reward=functions["reward"],
        group_filter=functions["group_filter"],
        prompts_config=settings.prompts.config,
        rollout_config=rollout,
        partial_rollout_config=dataclasses.replace(settings.partial_rollout, **rules),
        buffer_config=settings.buffer,
        evaluation_config=evaluation,
        algorithm_config=dataclasses.replace(settings.algorithm, **objective),
        train_config=train,
        scaling_config=ray.train.ScalingConfig(
            num_workers=settings.scaling.num_workers,
            elastic_resize_monitor_interval_s=settings.scaling.elastic_resize_monitor_interval_s,
            use_gpu=settings.scaling.use_gpu,
            resources_per_worker=settings.scaling.resources_per_worker,
        ),
        run_config=ray.train.RunConfig(
            name=settings.run_dir.name,
            storage_path=absolute(settings.run.storage_path),
            failure_config=ray.train.FailureConfig(max_failures=settings.run.max_failures),
        ),
        trackers_config=settings.trackers,
        checkpoint=settings.run.checkpoint_path,
        command=settings.command,
    )


def joined_address(settings: RaySettings) -> str | None:
    """Address of the cluster that a run joins; None: it starts its own.

    Without `ray.address` a run joins the cluster of RAY_ADDRESS, which is set inside of a Ray job,
    and no other one, although one may run on this machine.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    return None if address == "local" else address


def _init_ray(
    settings: RaySettings,
    run: str = "",
    runtime_env: dict[str, str] | None = None,
    *,
    log_to_driver: bool = False,
) -> Future[str | None]:
    """Start a cluster, or join one; returns where its dashboard will be, if it has one.

    A start that this machine is too busy for is tried again.

    Args:
        settings: Which one.
        run: Name of the run, for the table of jobs.
        runtime_env: What Ray gives the workers of this job.
        log_to_driver: Of `ray.init`.

    Raises:
        ConfigError: If there is none to join.
        ResourceError: If none starts.
    """
    import ray

    joined = joined_address(settings)
    for _ in range(_STARTS):
        try:
            return _init_once(settings, joined, run, runtime_env, log_to_driver)
        except OSError as error:  # among them ConnectionError, which Ray raises
            if joined is None:
                raise ResourceError(
                    f"Ray cannot start on this machine: {error}; it has a token in ~/.ray, unless "
                    "RAY_AUTH_MODE=disabled, and all else in /tmp/ray: make room there, or set "
                    "HOME to a folder that can be written to"
                ) from error
            remedy = f"no Ray cluster can be joined there: {error}"
            raise ConfigError("ray.address", joined, remedy) from error
        except Exception as error:  # that is all that Ray says it is
            if joined or _NO_START not in str(error):
                raise
            logger.warning("Ray did not start within half a minute")
            ray.shutdown()
    raise ResourceError(
        f"Ray did not start on this machine in {_STARTS} tries; it is perhaps too busy (load "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs): end what else runs here and try "
        "again; nothing of the run has begun"
    )


def _init_once(
    settings: RaySettings,
    joined: str | None,
    run: str,
    runtime_env: dict[str, str] | None,
    log_to_driver: bool,
) -> Future[str | None]:
    from ray.job_config import JobConfig

    metadata = {JOB_METADATA: run} if run else {}
    local: dict[str, Any] = {}
    if not joined:
        local |= {"include_dashboard": True, "num_cpus": settings.num_cpus}
    if runtime_env:
        local["_system_config"] = NONE_AHEAD
    reach(joined)
    return init_beside_dashboard(
        address=joined or "local",
        namespace=settings.namespace,
        log_to_driver=log_to_driver,
        job_config=JobConfig(metadata=metadata, runtime_env=runtime_env or None),
        **local,
    )


def _resources_of_cluster(settings: RunSettings) -> Mapping[str, float]:
    """What the cluster of a run has, or would have."""
    if joined_address(settings.ray) is None:
        uses_gpus = settings.scaling.use_gpu or settings.rollout.engine.device != "cpu"
        cpus = settings.ray.num_cpus or cpus_of_this_machine()
        return {"CPU": float(cpus), "GPU": float(_num_gpus() if uses_gpus else 0)}
    import ray

    _init_ray(settings.ray)
    try:
        resources: dict[str, float] = ray.cluster_resources()
    finally:
        ray.shutdown()
    return resources


def _num_gpus() -> int:
    import torch

    return int(torch.cuda.device_count())
