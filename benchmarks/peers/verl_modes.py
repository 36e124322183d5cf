"""Runs of verl for `compare.py`: its command, its prompts, and what its log says of each step.

The modes are those of verl's V1 trainer: `sync` and `colocate_async` have engine and trainer on
each GPU (engines awake), `separate_async` has half of the GPUs for its engines. All take
the rollout's own log-probs as old ones, pack tokens, and have the batch, loss and optimizer that
the others have. Needs `verl` 0.9.1 with what it asks for, and an environment without TRL 1.x.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MODES = ("sync", "colocate_async", "separate_async")
PARTS = Path(__file__).with_name("verl_parts.py")
LOOK_S = 0.01
"""Between looks at verl's log."""


def write_prompts(task: dict[str, Any], file: Path) -> None:
    """The task's prompts in verl's columns."""
    rows = pq.read_table(task["prompts"]).to_pylist()
    found = [
        {
            "data_source": task["kind"],
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(found), file)


def command(mode: str, seed: int, task: dict[str, Any], prompts: Path) -> list[str]:
    """verl's command line."""
    separate = mode == "separate_async"
    gpus = task["gpus"] // 2 if separate else task["gpus"]
    num_prompts = task["batch_size"] // task["group_size"]
    responses = task["max_response_tokens"]
    settings = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": num_prompts,
        "data.val_batch_size": num_prompts,
        "data.max_prompt_length": task["max_model_len"] - responses,
        "data.max_response_length": responses,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "reward.custom_reward_function.path": PARTS,
        "reward.custom_reward_function.name": "score",
        "trainer.v1.trainer_mode": mode,
        "trainer.v1.sampler.max_off_policy_threshold": 4,
        "trainer.v1.sampler.custom_sampler.path": PARTS,
        "trainer.v1.sampler.custom_sampler.name": "Sampler" if mode == "sync" else "AsyncSampler",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        "trainer.n_gpus_per_node": gpus,
        "trainer.logger": "[file]",
        "trainer.total_training_steps": task["steps"],
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        **_of("actor_rollout_ref.model", {
            "path": task["model"],
            "external_lib": "verl_parts",
            "+override_config.attn_implementation": "packed_varlen",
            "enable_gradient_checkpointing": False,
            "use_remove_padding": True,
            "use_liger": task["liger"],
        }),
        **_of("actor_rollout_ref.actor", {
            "strategy": "fsdp2",
            "fsdp_config.strategy": "fsdp2",
            "ppo_mini_batch_size": num_prompts,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 16384,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "loss_agg_mode": "token-mean",
            "grad_clip": 1.0,
            "optim.lr": task["learning_rate"],
            "optim.betas": "[0.9,0.95]",
            "optim.weight_decay": 0.0,
            "data_loader_seed": seed,
        }),
        **_of("actor_rollout_ref.rollout", {
            "name": "vllm",
            "n": task["group_size"],
            "seed": seed,
            "tensor_model_parallel_size": 1,
            "gpu_memory_utilization": task["memory_share"],
            "max_model_len": task["max_model_len"],
            "free_cache_engine": False,
            "load_format": "auto",
        }),
        "ray_kwargs.ray_init.num_cpus": 16 * task["gpus"],
    }  # fmt: skip
    if separate:
        settings |= _of("actor_rollout_ref", {
            "rollout.nnodes": 1,
            "rollout.n_gpus_per_node": task["gpus"] - gpus,
            "rollout.checkpoint_engine.backend": "nccl",
        })  # fmt: skip
    given = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *given]


def environment(log: Path) -> dict[str, str]:
    """Variables of verl's processes: where its log goes, and where `verl_parts` is."""
    folders = [str(PARTS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "VERL_FILE_LOGGER_PATH": str(log),
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }


class Steps:
    """Stamps the lines of verl's log as they come, as verl gives them no time.

    Args:
        file: What verl's file logger writes.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines: list[tuple[float, dict[str, Any]]] = []

    def found(self, task: dict[str, Any]) -> dict[str, Any]:
        """`compare.py`'s keys of a run; nothing if no step has ended."""
        if not self._lines:
            return {}
        ended, row = self._lines[0]
        first = ended - row["timing_s/step"]
        return {
            "first_generation": first,
            "steps": [
                {
                    "time_s": ended - first,
                    "reward_mean": row["critic/score/mean"],
                    "num_tokens": row["response_length/mean"] * task["batch_size"],
                }
                for ended, row in self._lines
            ],
            "of_steps": [
                {key: value for key, value in row.items() if key.startswith("timing_s/")}
                for _, row in self._lines
            ],
        }

    def look(self) -> None:
        """Take in what has come since the last look."""
        if not self._file.exists():
            return
        whole = self._file.read_text().split("\n")[:-1]
        now = time.time()
        self._lines += [(now, json.loads(line)["data"]) for line in whole[len(self._lines) :]]


def _of(section: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a section by their whole names; Hydra's plus goes first."""
    return {
        f"+{section}.{name[1:]}" if name.startswith("+") else f"{section}.{name}": value
        for name, value in settings.items()
    }
