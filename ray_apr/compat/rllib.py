"""What is used of RLlib and Tune that they do not promise to keep (see `lookup`)."""

from __future__ import annotations

from typing import Any

from ray_apr.compat.lookup import PrivateNames

RLLIB = PrivateNames(
    distributions=("ray",),
    tested="2.58 to 2.60",
    names={
        "Algorithm": "ray.rllib.algorithms.algorithm",
        "AlgorithmConfig": "ray.rllib.algorithms.algorithm_config",
        "Checkpointable": "ray.rllib.utils.checkpoints",
        "EnvContext": "ray.rllib.env.env_context",
        "MetricsLogger": "ray.rllib.utils.metrics.metrics_logger",
        "Trainable": "ray.tune.trainable.trainable",
        "_global_registry": "ray.tune.registry",
        "make_callback": "ray.rllib.callbacks.utils",
        "ENV_CREATOR": "ray.tune.registry",
        "STDERR_FILE": "ray.tune.result",
        "STDOUT_FILE": "ray.tune.result",
        "TRIAL_INFO": "ray.tune.result",
    },
    members={
        "Algorithm": "_get_env_id_and_creator(env_specifier,config) _set_up_metrics step evaluate "
        "get_auto_filled_metrics save_checkpoint load_checkpoint log_result cleanup",
        "AlgorithmConfig": "_train_batch_size_per_learner get_state from_state update_from_dict "
        "callbacks_on_algorithm_init callbacks_on_train_result callbacks_on_evaluate_start "
        "callbacks_on_evaluate_end callbacks_on_checkpoint_loaded evaluation_parallel_to_training",
        "Checkpointable": "save_to_path(path,state,filesystem,use_msgpack) "
        "restore_from_path(path,component,filesystem)",
        "MetricsLogger": "compile get_state set_state",
        "Trainable": "_trial_info _storage _iteration reset_config logdir",
        "make_callback": "(callback_name,callbacks_objects,callbacks_functions,kwargs)",
    },
)


def __getattr__(name: str) -> Any:
    return RLLIB.get(name)
