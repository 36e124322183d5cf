"""Names of settings and columns: which one somebody may have meant, which ones rows have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_ALIKE = 0.7
_LEAST_PREFIX = 4
_CALLED_ELSEWHERE = {
    "prompts": "train_dataset train_files",
    "prompt_column": "prompt_key",
    "on_too_long": "filter_overlong_prompts",
    "chat_template_kwargs": "apply_chat_template_kwargs",
    "every": "eval_steps test_freq",
    "reward": "reward_funcs custom_reward_function",
    "num_replicas": "num_engines replicas",
    "group_size": "num_generations n_samples n",
    "max_response_tokens": "max_tokens max_new_tokens max_completion_length max_response_length",
    "tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "kwargs": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "placement": "vllm_mode",
    "sleep": "vllm_enable_sleep_mode free_cache_engine",
    "aggregation": "loss_type loss_agg_mode",
    "advantage": "scale_rewards norm_adv_by_std_in_grpo adv_estimator",
    "loss": "importance_sampling_level loss_mode",
    "clip_low": "epsilon clip_ratio_low",
    "clip_high": "epsilon_high clip_ratio_high",
    "dual_clip": "clip_ratio_c",
    "kl_coef": "beta kl_loss_coef",
    "kl_in": "use_kl_loss use_kl_in_reward",
    "kl": "kl_loss_type",
    "entropy_coef": "entropy_coeff",
    "overlong_filter": "mask_truncated_completions",
    "overlong_buffer_tokens": "overlong_buffer",
    "overlong_penalty": "penalty_factor",
    "importance": "vllm_importance_sampling_mode rollout_is",
    "importance_cap": "vllm_importance_sampling_cap rollout_is_threshold",
    "importance_normalize": "rollout_is_batch_normalize",
    "rejection": "rollout_rs",
    "rejection_bound": "rollout_rs_threshold",
    "proximal": "bypass_mode",
    "filter_zero_variance": "filter_groups",
    "max_staleness": "staleness_threshold",
    "sync_every": "trigger_parameter_sync_step",
    "steps": "num_steps max_steps total_training_steps",
    "passes": "num_epochs num_train_epochs total_epochs",
    "batch_size": "per_device_train_batch_size gradient_accumulation_steps train_batch_size",
    "mini_batches": "steps_per_generation ppo_mini_batch_size",
    "epochs": "num_iterations ppo_epochs",
    "micro_batch_tokens": "ppo_max_token_len_per_gpu",
    "lr_schedule": "lr_scheduler_type",
    "betas": "adam_beta1 adam_beta2",
    "max_grad_norm": "grad_clip",
    "attention": "attn_implementation",
    "activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "lora": "peft_config",
    "rank": "r lora_rank",
    "alpha": "lora_alpha",
    "checkpoint_every": "save_steps save_freq",
    "num_checkpoints_to_keep": "save_total_limit max_actor_ckpt_to_keep",
    "trackers": "report_to logger",
    "storage_path": "output_dir default_local_dir",
    "name": "run_name experiment_name",
    "resume": "resume_from_checkpoint resume_mode",
    "checkpoint": "resume_from_path",
}
OTHER_NAMES: Mapping[str, str] = {
    other: name for name, others in _CALLED_ELSEWHERE.items() for other in others.split()
}
"""What other libraries, or other parts of this one, call a setting."""


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Known names that may be meant, the most likely ones first; none if nothing is like it.

    A name is like another one as what other libraries call it, which is meant alone then, by its
    letters, as its initials, or as its begin.

    Args:
        name: That was written.
        known: Names that there are.

    Example:
        >>> known = ["learning_rate", "steps", "batch_size", "temperature"]
        >>> [nearest(name, known) for name in ("lr", "temprature", "batch", "zzz")]
        [['learning_rate'], ['temperature'], ['batch_size'], []]
    """
    meant = OTHER_NAMES.get(name)
    if meant is not None and meant in known:
        return [meant]
    begins = [each for each in known if len(name) >= _LEAST_PREFIX and each.startswith(name)]
    found = [
        *(each for each in known if "_" in each and _initials(each) == name.lower()),
        *difflib.get_close_matches(name, known, cutoff=_ALIKE),
        *(begins if len(begins) == 1 else []),
    ]
    return list(dict.fromkeys(found))


def did_you_mean(near: Sequence[str], remedy: str, *, last: bool = False) -> str:
    """A remedy with a question before it, or after it if `last`; alone if there is no name near.

    Example:
        >>> did_you_mean(["steps"], "leave it out", last=True)
        'leave it out; did you mean steps?'
    """
    if not near:
        return remedy
    question = f"did you mean {' or '.join(near)}?"
    return f"{remedy}; {question}" if last else f"{question} {remedy}"


def names_in(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Names that any of these rows has, in the order in which they come.

    Example:
        >>> names_in([{"prompt": "1+1="}, {"answer": 2, "prompt": "1+2="}])
        ['prompt', 'answer']
    """
    return list(dict.fromkeys(name for row in rows for name in row))


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings as in ``config.json`` with their dotted names; an empty mapping is a value.

    Example:
        >>> list(dotted({"mode": "apr", "train": {"steps": 2, "lora": {}}}))
        [('mode', 'apr'), ('train.steps', 2), ('train.lora', {})]
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def last_parts(names: Iterable[str]) -> str:
    """The last parts of dotted names, each once.

    Example:
        >>> last_parts(["layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj"])
        'k_proj, q_proj'
    """
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
