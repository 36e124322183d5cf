"""`APR`: an algorithm of RLlib whose `train` goes some steps further in one living run.

Invariants:
    * Nothing is started before the first `train`: a checkpoint that is loaded until then is what
      the run begins with. One that is loaded later ends the run, and another one begins.
    * A run that fails, and one that is stopped, leaves nothing behind.
    * What a run begins with is a copy: it lasts until the first step is trained, whatever becomes
      of the checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.data
import ray.train
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_METRICS_LOGGER
from ray.rllib.utils import force_list, merge_dicts
from ray.rllib.utils import metrics as names
from ray.tune import PlacementGroupFactory
from ray.tune.result import DONE, TRAINING_ITERATION

from ray_apr.compat.rllib import TRIAL_INFO, Checkpointable, make_callback
from ray_apr.core.checks import is_number, require
from ray_apr.core.exceptions import ConfigError, TrainError
from ray_apr.data.rows import PromptRows
from ray_apr.rllib.config import APRConfig, as_rows
from ray_apr.rllib.environment import TextEnvironment, env_maker, is_text_environment
from ray_apr.rllib.results import Lifetime, evaluation_results, iteration_results
from ray_apr.rllib.settings import Settings, check_callbacks, num_held_out, resolve
from ray_apr.run.folder import is_remote
from ray_apr.trainer import APRTrainer

RUN_FOLDER = "run"
"""Of a checkpoint: what the run goes on with."""


class APR(Algorithm):
    """Asynchronous partial rollouts as an algorithm of RLlib; made by `APRConfig.build_algo`.

    Engines and train workers live from the first `train` until `stop`. The algorithm itself is a
    small process: in a trial of Tune they are outside of the trial's placement group, so that
    ``TuneConfig(max_concurrent_trials=...)`` has to say how many runs fit into the cluster.
    """

    _session: Any = None

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        # RLlib's configs drop what Tune says of the trial
        self._given_trial = config.get(TRIAL_INFO) if isinstance(config, dict) else None
        super().__init__(config, **kwargs)

    @classmethod
    def get_default_config(cls) -> APRConfig:
        """Settings with all defaults."""
        return APRConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """The algorithm's own process; engines and train workers are outside of it."""
        checked = cls.get_default_config().update_from_dict(dict(config))
        checked.validate()
        cpus = checked.num_cpus_for_main_process
        remedy = "must be above 0: Ray has no placement group without resources"
        require(is_number(cpus) and cpus > 0, "num_cpus_for_main_process", cpus, remedy)
        return PlacementGroupFactory([{"CPU": cpus, **checked.custom_resources_for_main_process}])

    @staticmethod
    def _get_env_id_and_creator(env_specifier: Any, config: Any) -> tuple[None, None]:
        return None, None  # there are no env runners: reward workers make the environments

    def setup(self, config: APRConfig) -> None:
        """Check all that a run needs; start nothing."""
        if self._given_trial is not None:
            self._trial_info, self._given_trial = self._given_trial, None
        self._set_up_metrics()
        if self.config.log_level:
            for name in ("ray.rllib", "ray_apr"):
                logging.getLogger(name).setLevel(self.config.log_level)
        self.callbacks = [make() for make in force_list(self.config.callbacks_class)]
        for callbacks in self.callbacks:
            check_callbacks(callbacks)
        self._lifetime = Lifetime()
        self._last_evaluation: dict[str, Any] | None = None
        self._settings = resolve(self.config)
        self._copy: tuple[pyarrow.fs.FileSystem, str] | None = None
        self._trainer: APRTrainer | None = self._make_trainer()
        self._call_back("on_algorithm_init", metrics_logger=self.metrics)

    def step(self) -> dict[str, Any]:
        """Train the steps of an iteration, in the run that there is."""
        begun, num_steps = time.monotonic(), self.config.steps_per_iteration
        session = self._living_session()
        if self._is_evaluated(session.step, num_steps):
            self._call_back("on_evaluate_start", metrics_logger=self.metrics)
        try:
            progressed = session.train(num_steps)
        except BaseException:
            self._end_session()
            raise
        if not progressed.steps:
            raise TrainError(
                f"the run has trained all of its {session.num_steps} steps; set more of "
                "them with .training(steps=...)"
            )
        self._drop_copy()
        self._lifetime.add(progressed.steps)
        seconds = time.monotonic() - begun
        results = iteration_results(progressed.steps, self._lifetime, seconds)
        results |= self._evaluations(progressed.evaluations)
        results[DONE] = session.step >= session.num_steps
        return merge_dicts(self.metrics.compile(), results)

    def _is_evaluated(self, step: int, num_steps: int) -> bool:
        """Whether a version of the next steps is due to be evaluated."""
        evaluation = self._settings.evaluation
        if evaluation is None:
            return False
        versions = range(step if step == 0 else step + 1, step + num_steps + 1)
        return any(map(evaluation.is_due, versions))

    def _evaluations(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Results of the last evaluation that has ended meanwhile, if one has."""
        if not rows:
            return {}
        for row in rows:
            self._last_evaluation = evaluation_results(row)
            self._call_back(
                "on_evaluate_end",
                metrics_logger=self.metrics,
                evaluation_metrics=self._last_evaluation,
            )
        return {names.EVALUATION_RESULTS: self._last_evaluation}

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Results of the last evaluation that has ended; they run beside the training.

        Raises:
            ConfigError: If nothing is evaluated.
            TrainError: If none has ended yet.
        """
        if self._settings.evaluation is None:
            remedy = "set it, and evaluation_prompts: nothing is evaluated without them"
            raise ConfigError("evaluation_interval", None, remedy)
        if self._last_evaluation is None:
            raise TrainError(
                "no evaluation has ended yet: they run beside the training, every "
                f"{self._settings.evaluation.every} steps; call train()"
            )
        return self._last_evaluation

    def training_step(self) -> None:
        """Refused: `step` is what trains."""
        raise NotImplementedError("APR has no training_step; call train()")

    # ---- checkpoints

    def save_to_path(
        self,
        path: str | Path | None = None,
        *,
        state: dict[str, Any] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        use_msgpack: bool = False,
    ) -> str:
        """Write settings, counts, and a checkpoint of the step that the run stands at."""
        path = tempfile.mkdtemp() if path is None else path
        filesystem, folder = _place(path, filesystem)
        if self._session is not None:
            with _local(filesystem, f"{folder}/{RUN_FOLDER}") as run_folder:
                self._session.save(run_folder)
        elif self._copy is not None:
            source, kept = self._copy
            filesystem.create_dir(f"{folder}/{RUN_FOLDER}", recursive=True)
            _copy_files(source, kept, filesystem, f"{folder}/{RUN_FOLDER}")
        return str(
            Checkpointable.save_to_path(
                self, folder, state=state, filesystem=filesystem, use_msgpack=use_msgpack
            )
        )

    def restore_from_path(
        self,
        path: str | Path,
        *,
        component: str | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin another run with a checkpoint; this algorithm's settings stay.

        Raises:
            ConfigError: For a component, as there are none.
        """
        require(component is None, "component", component, "leave it out: APR has no components")
        filesystem, folder = _place(path, filesystem)
        Checkpointable.restore_from_path(self, folder, filesystem=filesystem)
        self._end_session()
        self._drop_copy()
        run_folder = f"{folder}/{RUN_FOLDER}"
        if filesystem.get_file_info(run_folder).type == pyarrow.fs.FileType.Directory:
            root, target = _place(f"{self._storage_path()}/restored-{secrets.token_hex(4)}")
            root.create_dir(target, recursive=True)
            self._copy = (root, target)
            _copy_files(filesystem, run_folder, root, target)
        self._trainer = None

    def get_checkpointable_components(self) -> list[Any]:
        """None: the run's checkpoint is one piece."""
        return []

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """What a checkpoint has beside the run's."""
        return {
            "lifetime": self._lifetime.state(),
            COMPONENT_METRICS_LOGGER: self.metrics.get_state(),
            TRAINING_ITERATION: self.training_iteration,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take what `get_state` gave."""
        self._lifetime = Lifetime(**state["lifetime"])
        self.metrics.set_state(state[COMPONENT_METRICS_LOGGER])
        self._iteration = state[TRAINING_ITERATION]

    # ---- Tune

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Become another trial, for Tune's ``reuse_actors``."""
        self.cleanup()
        config = self.get_default_config().update_from_dict(dict(new_config))
        config.validate()
        config.freeze()
        self.config = config
        self.setup(config)
        return True

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As of RLlib; the settings in a result say how many prompts there are, not which."""
        filled: dict[str, Any] = super().get_auto_filled_metrics(*args, **kwargs)
        for key in ("prompts", "evaluation_prompts"):
            given = filled["config"].get(key)
            if given is not None:
                filled["config"][key] = repr(given)
        return filled

    def cleanup(self) -> None:
        """End the run; nothing of it stays but its folder."""
        self._end_session()
        self._drop_copy()

    # ---- the run

    def _living_session(self) -> Any:
        if self._session is None:
            self._session = self._open_session(self._trainer or self._make_trainer())
        return self._session

    @staticmethod
    def _open_session(trainer: APRTrainer) -> Any:
        from ray_apr.session import TrainingSession

        return TrainingSession(trainer)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.stop()

    def _drop_copy(self) -> None:
        kept = getattr(self, "_copy", None)
        self._copy = None
        if kept is not None:
            filesystem, folder = kept
            filesystem.delete_dir(folder)

    def _make_trainer(self) -> APRTrainer:
        """Check all that a run needs, whose folder is a new one."""
        config, settings, trial = self.config, self._settings, self._trial_info
        environment, prompts, held_out = self._environment(settings)
        name = [] if trial is None else [trial.trial_id]
        copy = self._copy
        return APRTrainer(
            model=config.model,
            prompts=prompts,
            reward=config.reward,
            environment=environment,
            group_filter=config.group_filter,
            evaluation_prompts=held_out,
            prompts_config=settings.prompts,
            rollout_config=settings.rollout,
            partial_rollout_config=settings.partial_rollout,
            buffer_config=settings.buffer,
            algorithm_config=settings.algorithm,
            evaluation_config=settings.evaluation,
            train_config=settings.train,
            scaling_config=settings.scaling,
            run_config=ray.train.RunConfig(
                name="-".join(["apr", *name, secrets.token_hex(4)]),
                storage_path=self._storage_path(),
            ),
            checkpoint=None if copy is None else ray.train.Checkpoint(copy[1], copy[0]),
        )

    def _environment(self, settings: Settings) -> tuple[Any, Any, Any]:
        """Environment, prompts and held-out prompts."""
        config, evaluation = self.config, settings.evaluation
        if not is_text_environment(config.env):
            return config.env, _rows(config.prompts), _rows(config.evaluation_prompts)
        environment = TextEnvironment(env_maker(config.env, config.env_config), config.observations)
        environment.check()
        column, num_seeds = settings.rollout.prompt_column, config.num_env_seeds
        prompts, held_out = environment.rows(range(num_seeds), column), None
        if evaluation is not None:
            end = num_seeds + num_held_out(config) // evaluation.samples
            held_out = environment.rows(range(num_seeds, end), column)
        return environment, prompts, held_out

    def _storage_path(self) -> str:
        """Where the run folder is made."""
        if self.config.storage_path is not None:
            return str(self.config.storage_path)
        if self._storage is None:
            return str(self.logdir)
        is_local = isinstance(self._storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
        remedy = "must be given with .checkpointing(): Tune's storage is no folder of this machine"
        require(is_local, "storage_path", None, remedy)
        return str(self._storage.trial_fs_path)

    def _call_back(self, name: str, **kwargs: Any) -> None:
        make_callback(
            name,
            self.callbacks,
            getattr(self.config, f"callbacks_{name}"),
            kwargs={"algorithm": self, **kwargs},
        )


def _rows(given: Any) -> PromptRows | ray.data.Dataset | None:
    """Prompts, from what gives them."""
    return as_rows(given() if callable(given) else given)


def _place(
    path: str | Path, filesystem: pyarrow.fs.FileSystem | None = None
) -> tuple[pyarrow.fs.FileSystem, str]:
    """File system and path in it of a path or URI."""
    if filesystem is not None:
        return filesystem, str(path)
    if not is_remote(str(path)):
        path = os.path.abspath(path)
    found: tuple[pyarrow.fs.FileSystem, str] = pyarrow.fs.FileSystem.from_uri(str(path))
    return found


@contextlib.contextmanager
def _local(filesystem: pyarrow.fs.FileSystem, folder: str) -> Iterator[Path]:
    """A folder of this machine whose files end up in `folder`."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as here:
        yield Path(here)
        filesystem.create_dir(folder, recursive=True)
        _copy_files(pyarrow.fs.LocalFileSystem(), here, filesystem, folder)


def _copy_files(
    source: pyarrow.fs.FileSystem, old: str, target: pyarrow.fs.FileSystem, new: str
) -> None:
    pyarrow.fs.copy_files(old, new, source_filesystem=source, destination_filesystem=target)
