"""`APRTrainer`: asynchronous RL post-training with partial rollouts, as a Ray trainer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.encoding import check_replayed
from ray_apr.data.prompts import Mix, check_dataset
from ray_apr.data.rows import PromptRows
from ray_apr.rollout.suites import check_suites
from ray_apr.run.checks import check_resources, check_spec
from ray_apr.run.controller import run
from ray_apr.run.ending import with_counted_steps
from ray_apr.run.folder import absolute
from ray_apr.run.host import HostedRun, is_captured
from ray_apr.run.options import RunOptions
from ray_apr.run.preflight import check_port
from ray_apr.run.resume import find_begin
from ray_apr.trackers import trackers_of

if TYPE_CHECKING:
    import ray.data

    from ray_apr.core.user import RunCallback

logger = logging.getLogger(__name__)


class APRTrainer(RunOptions):
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
            beside the run, with the same reward, but for suites that have their own
            (`EvaluationConfig.rewards`); None evaluates nothing.
        prompts_config: What becomes of prompts that are too long, and weights of their sources.
        rollout_config: Servers, sampling, group size, rewards.
        partial_rollout_config: Staleness bound, supplementation, interruption.
        buffer_config: Time limits of the sample buffer.
        algorithm_config: Advantages, loss, correction.
        evaluation_config: When and how `evaluation_prompts` are evaluated.
        train_config: Optimizer, batch, checkpoints, weight sync.
        scaling_config: Train workers and their resources.
        run_config: Name and storage of the run. A run of this name that was interrupted is gone
            on with, from its last checkpoint on (docs/resume.md).
        callbacks: What follows the run from its driver: a `RunCallback` of yours, or a logger
            callback of Ray's (``ray.tune.logger.LoggerCallback``).
        trackers_config: W&B, MLflow, TensorBoard.
        checkpoint: Checkpoint of another run that this one begins with: weights, optimizer, step,
            policy version, and the prompts that come next. None begins with the model.
        command: Of the command line, kept in the run folder for ``ray-apr resume``; None in Python.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        spec, held_out = self.spec, self.evaluation_prompts
        rollout = spec.rollout
        check_spec(spec)
        check_port(rollout)
        sources = spec.prompts.source_column if spec.prompts.weights else None
        columns = (rollout.prompt_column, rollout.replay_column, sources)
        has_messages = check_dataset(self.prompts, spec.model, *columns)
        if isinstance(self.prompts, PromptRows):  # others are here once Ray runs
            if sources is not None:
                Mix.of(self.prompts.column(sources), spec.prompts)
            if rollout.replay_column is not None:
                budget = rollout.max_response_tokens
                check_replayed(self.prompts, rollout.replay_column, budget)
        if held_out is not None and spec.evaluation is not None:
            suites = spec.evaluation.suite_column
            column, name = rollout.prompt_column, "evaluation_prompts"
            has_messages |= check_dataset(
                held_out, spec.model, column, suite_column=suites, name=name
            )
            if suites is not None and isinstance(held_out, PromptRows):
                check_suites(held_out.column(suites), spec.evaluation)
        variables = dict(rollout.chat_template_kwargs)
        remedy = "has no use: no prompt is chat messages; give them as these, or leave it out"
        is_rendered = has_messages or spec.environment is not None or not variables
        require(is_rendered, "rollout.chat_template_kwargs", variables, remedy)
        if spec.remote_storage is None:
            find_begin(spec, holds=False)
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
        storage, _, name = absolute(str(path)).rstrip("/").rpartition("/")
        run = arguments.pop("run_config", None) or ray.train.RunConfig()
        run = dataclasses.replace(run, name=name, storage_path=storage or "/")
        trainer = cls(**arguments, run_config=run)
        if not find_begin(trainer.spec, holds=False).is_resumed:
            raise ConfigError("path", str(path), "holds no run to go on with")
        return trainer

    def check_cluster(self, resources: Mapping[str, float]) -> None:
        """Check that a cluster holds the run; where Ray runs already, this has been done.

        Args:
            resources: What the cluster has, e.g. ``{"CPU": 8.0, "GPU": 2.0}``.

        Raises:
            ConfigError: If it does not.
        """
        check_resources(self.spec, resources)

    def fit(self, *, progress: Callable[[str], None] | None = None) -> ray.train.Result:
        """Run to the end and return Ray Train's result.

        Inside of a placement group, as in a trial of Ray Tune, the run is in a host outside of it.

        Waits for: the run. Unblocked by: its end; its parts have limits of their own, and Ctrl-C
        and SIGTERM end it.

        Args:
            progress: Gets one line a step and evaluation, and one every few seconds while nothing
                moves, e.g. ``print``; None hands them to the logger ``ray_apr.run.controller`` at
                level INFO, which Python shows only where logging is set up for it.

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
        return run(self.spec, *self._datasets(), progress=progress, callbacks=self._all_callbacks())

    def start_in_host(
        self, *, progress: Callable[[str], None] | None = None, is_gated: bool = False
    ) -> HostedRun:
        """Start the run in a task of its own; see `HostedRun`."""
        if not ray.is_initialized():
            ray.init()
        self.check_cluster(ray.cluster_resources())
        prompts, held_out = self._datasets()
        spec = self.spec  # who gives orders knows of the last one
        if is_gated:
            spec = with_counted_steps(spec, prompts, progress or logger.info)
        return HostedRun(
            spec,
            prompts,
            held_out,
            progress=progress,
            is_gated=is_gated,
            callbacks=self._all_callbacks(),
        )

    def _all_callbacks(self) -> tuple[RunCallback, ...]:
        return (*trackers_of(self.trackers_config), *self.run_callbacks)

    def _datasets(self) -> tuple[ray.data.Dataset, ray.data.Dataset | None]:
        prompts, held_out = (
            given.to_dataset() if isinstance(given, PromptRows) else given
            for given in (self.prompts, self.evaluation_prompts)
        )
        return prompts, held_out
