"""What users of TRL and verl call a setting, and which one the error names (core/names.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_apr.cli.settings import load_settings
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.names import OTHER_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "from_trl_or_verl.md"
NO_HINT = {
    # of the same name, or found by its letters
    *("prompt", "warmup_steps", "temperature", "top_k", "top_p", "learning_rate", "lr"),
    *("chat_template_kwargs", "max_grad_norm"),
    # values, parts of names, and what no one setting is for
    *("path", "grpo", "rloo", "enable", "len", "max_prompt_length", "eval_dataset", "val_files"),
    *("reward_weights", "load_best_model_at_end", "metric_for_best_model", "n_gpus_per_node"),
    "nnodes",
    # a preset, for which the setting stands
    *("importance_sampling_level", "loss_mode"),
}


def told_by_the_page() -> dict[str, str]:
    """What other libraries say -> the last cells of its rows."""
    lines = PAGE.read_text().partition("## What is other")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    told: dict[str, str] = {}
    for row in cells:
        for name in re.findall(r"`([a-z](?:[a-z0-9_.]*[a-z0-9_])?)(?:`|=)", " ".join(row[:-1])):
            last = name.rpartition(".")[2]
            told[last] = told.get(last, "") + row[-1]
    return {name: here for name, here in told.items() if name not in NO_HINT}


def refusal(folder: Path, override: str) -> str:
    file = folder / "run.yaml"
    file.write_text("{model: m, prompts: p.jsonl, reward: 'r.py:f'}")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, [override])
    return str(caught.value)


def test_the_page_and_the_errors_say_the_same():
    told = told_by_the_page()
    assert len(told) > 60
    strange = [name for name, here in told.items() if OTHER_NAMES.get(name, "?") not in here]
    assert not strange


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm.epsilon_high=0.3", "clip_high"),
        ("algorithm.beta=0.1", "kl_coef"),
        ("train.beta=0.1", "algorithm.kl_coef"),
        ("train.save_steps=5", "checkpoint_every"),
        ("train.report_to=wandb", "trackers at the top level"),
        ("partial_rollout.staleness_threshold=1", "max_staleness"),
        ("adv_estimator=grpo", "algorithm.advantage"),
    ],
)
def test_a_name_of_another_library_is_answered_by_ours(tmp_path, override, meant):
    """known fault: most had no hint, or one by their letters (`beta`: `train.betas`)."""
    assert f"unknown key; did you mean {meant}" in refusal(tmp_path, override)
