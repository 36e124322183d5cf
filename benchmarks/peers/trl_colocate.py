"""One run of TRL's GRPOTrainer with vLLM in the trainer's processes, for `compare.py`.

    torchrun --nproc_per_node 2 benchmarks/peers/trl_colocate.py TASK.json

TASK.json has what `compare.py` wrote: model, prompts, settings, and where the result goes; each
process writes its steps to a file beside it as they end. Needs
`trl`, `datasets`, `accelerate`, and `liger-kernel` for `liger`. Two things of TRL are wrapped, to
know when the first generation begins and how long each takes, and, where lengths are replayed, to
give each request its own length; TRL itself stays as it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "arithmetic"))
import programs
import spelling
import task as arithmetic


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers' callbacks are untyped
    """Writes a line for each step: when it ended, its reward, and what its generation and its
    hand-over took.

    Args:
        file: Of this process.
    """

    def __init__(self, file: Path) -> None:
        self._lines = file.open("w", buffering=1)
        self._ended = 0.0
        self.generation = (0.0, 0.0)
        """When the last one began and ended, in seconds since the epoch."""
        self.sync_s = self.reward_s = 0.0
        self.num_tokens = 0
        """Of the responses that this process has trained."""

    def timed(self, reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """A reward function whose last call's time is noted."""

        def call(*args: Any, **kwargs: Any) -> list[float]:
            began = time.time()
            found = reward(*args, **kwargs)
            self.reward_s = time.time() - began
            return found

        return call

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note when an optimizer step has ended."""
        torch.cuda.synchronize()
        self._ended = time.time()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write the line of a step, which TRL logs after it."""
        if not logs or "reward" not in logs or not self._ended:
            return
        row = {
            "time": self._ended,
            "reward_mean": float(logs["reward"]),
            "num_tokens": self.num_tokens,
            "generation": self.generation,
            "sync_s": self.sync_s,
            "reward_s": self.reward_s,
        }
        self._lines.write(json.dumps(row) + "\n")
        self.num_tokens = 0


def main() -> None:
    """Train, and write the result from the first process."""
    task = json.loads(Path(sys.argv[1]).read_text())
    rows = pq.read_table(task["prompts"]).to_pylist()
    clock = Clock(Path(f"{task['out']}.{os.environ['RANK']}"))
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=clock.timed(REWARDS[task["kind"]]),
        args=grpo_config(task),
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    if task["kind"] == "replay":
        replay(trainer, rows, task["group_size"])
    time_generation(trainer, clock)
    trainer.train()
    if trainer.accelerator.is_main_process:
        result = {
            "attention": trainer.model.config._attn_implementation,
            "peak_trainer_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        Path(task["out"]).write_text(json.dumps(result))


def grpo_config(task: dict[str, Any]) -> GRPOConfig:
    """TRL's settings for the same batch, loss and optimizer as ours."""
    share = task["batch_size"] // task["gpus"]
    micro = min(share, task["micro_batch_rows"])
    return GRPOConfig(
        output_dir=str(Path(task["out"]).with_suffix("")),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=task["memory_share"],
        vllm_max_model_length=task["max_model_len"],
        num_generations=task["group_size"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        max_steps=task["steps"],
        max_completion_length=task["max_response_tokens"],
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        weight_decay=0.0,
        temperature=1.0,
        top_p=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        bf16=True,
        gradient_checkpointing=False,
        use_liger_kernel=task["liger"],
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=task["seed"],
    )


def time_generation(trainer: Any, clock: Clock) -> None:
    """Time the calls that generate and those that hand weights to the engine."""
    engine = trainer.vllm_generation
    generate, sync = engine.generate, engine.sync_weights

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        found = generate(*args, **kwargs)
        clock.generation = (began, time.time())
        clock.num_tokens += sum(map(len, found[1]))
        return found

    def timed_sync(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        began = time.time()
        sync(*args, **kwargs)
        torch.cuda.synchronize()
        clock.sync_s = time.time() - began

    engine.generate, engine.sync_weights = timed_generate, timed_sync


def replay(trainer: Any, rows: list[dict[str, Any]], group_size: int) -> None:
    """Have each request generate as many tokens as its row says; each prompt occurs once."""
    tokenizer = trainer.processing_class
    lengths = {tuple(tokenizer(row["prompt"])["input_ids"]): row["lengths"] for row in rows}
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def replayed(prompts: list[dict[str, Any]], sampling_params: Any, **kwargs: Any) -> Any:
        seen: Counter[tuple[int, ...]] = Counter()
        params = []
        for prompt in prompts:
            key = tuple(prompt["prompt_token_ids"])
            length = lengths[key][seen[key]]
            seen[key] += 1
            params.append(
                SamplingParams(
                    temperature=1.0,
                    max_tokens=length,
                    min_tokens=length,
                    ignore_eos=True,
                    logprobs=sampling_params.logprobs,
                )
            )
        assert set(seen.values()) == {group_size}, "a group is split over processes"
        return generate(prompts, sampling_params=params, **kwargs)

    llm.generate = replayed


def replay_reward(completions: list[str], **_: Any) -> list[float]:
    """Every second sample of a group is right."""
    return [float(index % 2) for index in range(len(completions))]


def arithmetic_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The arithmetic example's."""
    pairs = zip(completions, answer, strict=True)
    return [float(arithmetic.final_answer(text) == str(right)) for text, right in pairs]


REWARDS = {
    "replay": replay_reward,
    "arithmetic": arithmetic_reward,
    "spelling": spelling.trl_reward,
    "programs": programs.trl_reward,
}

if __name__ == "__main__":
    main()
