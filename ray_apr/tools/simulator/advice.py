"""What the tuner found, in words, as YAML for a run, and as one JSON object."""

from __future__ import annotations

import math
from typing import Any

import yaml

from ray_apr.config import PartialRolloutConfig
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.tuner import TUNED, Trial, Tuning

_BUSY = 0.10
"""A side that idles less than this share of the time is what limits the run."""


def tuning_to_dict(tuning: Tuning, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """One JSON object: the choice with its figures, why, and all that was tried."""
    choice = tuning.choice
    return {
        "mode": choice.config.mode,
        "rollout_gpus": choice.study.rollout_gpus,
        **{name: getattr(choice.config, name) for name in TUNED},
        "max_staleness_allowed": tuning.max_staleness,
        "limited_by": limited_by(choice),
        "why": [*why(tuning), *notes],
        "settings": settings(choice),
        "result": choice.study.to_dict(),
        "presets": {name: _row(trial) for name, trial in tuning.presets.items()},
        "tried": [_row(trial) for trial in tuning.trials],
    }


def tuning_text(tuning: Tuning, notes: tuple[str, ...] = ()) -> str:
    """The YAML to use, the reasons as comments, and a table of what was tried."""
    reasons = "\n".join(f"# {line}" for line in [*why(tuning), *notes])
    text = yaml.safe_dump(settings(tuning.choice), sort_keys=False)
    rows = sorted(tuning.trials, key=lambda trial: (-trial.cluster.steps, -trial.score))
    lines = [f"{'tokens/s':>9}  {'steps':>5}  {'GPUs':>5}  staleness  settings"]
    for trial in rows:
        changes = _changes(trial.config)
        lines.append(
            f"{trial.score:9.0f}  {trial.cluster.steps:5d}  {trial.study.rollout_gpus:5d}  "
            f"{trial.study.outcome.staleness_mean:4.1f}/{trial.study.outcome.staleness_max:<4d}  "
            f"{trial.config.mode}{changes}"
        )
    return f"{reasons}\n{text}\n# tried, best first:\n" + "\n".join(f"# {line}" for line in lines)


def settings(choice: Trial) -> dict[str, Any]:
    """The sections of a run's YAML file; one rollout server for each GPU that generates."""
    config, cluster = choice.config, choice.cluster
    partial: dict[str, Any] = {name: getattr(config, name) for name in TUNED}
    rollout: dict[str, Any] = {"num_replicas": choice.study.rollout_gpus}
    if cluster.is_colocated:
        partial["overlap_sync"] = False  # as the simulator has it there
        rollout["engine"] = {"placement": cluster.placement}
    scaling = {"num_workers": cluster.num_train_gpus()}
    return {
        "mode": config.mode, "partial_rollout": partial, "rollout": rollout, "scaling": scaling,
    }  # fmt: skip


def limited_by(trial: Trial) -> str:
    """trainer, generation, both, or staleness: which side has nothing to give any more."""
    out = trial.study.outcome
    trainer, engines = out.trainer_idle_ratio < _BUSY, out.generation_idle_ratio < _BUSY
    if trainer and engines:
        return "both"
    if trainer:
        return "trainer"
    return "generation" if engines else "staleness"


def why(tuning: Tuning) -> list[str]:
    """Sentences: what limits the choice, how it compares, what the neighbours gave."""
    choice = tuning.choice
    return [
        _limit(choice),
        *_against_presets(tuning),
        *(line for name in TUNED if (line := _alternatives(tuning, name))),
        *_splits(tuning),
        *_batch(choice.cluster),
    ]


def _limit(trial: Trial) -> str:
    out, share = trial.study.outcome, trial.score / trial.study.bound_tokens_per_s
    idle = (
        f"the engines are idle or paused {out.generation_idle_ratio:.0%} of the time and the "
        f"trainer idles {out.trainer_idle_ratio:.0%}; {trial.score:.0f} trained tokens/s are "
        f"{share:.0%} of what a schedule without waste could reach"
    )
    reason = {
        "trainer": "the trainer limits: more of the GPUs on its side, or a faster step, would help",
        "generation": "generation limits: more or faster engines would help",
        "both": "generation and trainer are both busy: only more or faster GPUs would help",
        "staleness": "neither side is busy all the time: the tail of long responses, the "
        f"staleness bound ({trial.config.max_staleness}), the start of the run or the turns that "
        "colocated GPUs take limit it",
    }[limited_by(trial)]
    return f"{reason}; {idle}"


def _against_presets(tuning: Tuning) -> list[str]:
    rows = sorted(tuning.presets.items(), key=lambda item: -item[1].score)
    figures = ", ".join(
        f"{name} {trial.score:.0f}"
        + ("" if trial.cluster.steps == tuning.choice.cluster.steps else " (short run)")
        for name, trial in rows
    )
    return [f"presets, each with its best split, in trained tokens/s: {figures}"]


def _alternatives(tuning: Tuning, name: str) -> str:
    """The other values of one setting that were tried, the rest being as chosen."""
    choice = tuning.choice
    found = {
        getattr(trial.config, name): trial.score
        for trial in tuning.trials
        if trial.cluster == choice.cluster
        and {k for k, v in vars(trial.config).items() if v != getattr(choice.config, k)} == {name}
    }
    if not found:
        return ""
    others = ", ".join(f"{value} gave {score:.0f}" for value, score in found.items())
    return f"{name} = {getattr(choice.config, name)}: {choice.score:.0f} tokens/s; {others}"


def _splits(tuning: Tuning) -> list[str]:
    choice = tuning.choice
    found = {
        trial.study.rollout_gpus: trial.score
        for trial in tuning.trials
        if trial.config == choice.config and trial.cluster.steps == choice.cluster.steps
    }
    if len(found) < 2:
        return []
    figures = ", ".join(f"{split}: {found[split]:.0f}" for split in sorted(found))
    return [f"trained tokens/s by GPUs that generate: {figures}"]


def _row(trial: Trial) -> dict[str, Any]:
    out = trial.study.outcome
    return {
        "mode": trial.config.mode,
        **{name: getattr(trial.config, name) for name in TUNED},
        "rollout_gpus": trial.study.rollout_gpus,
        "steps": trial.cluster.steps,
        "trained_tokens_per_s": trial.score,
        "staleness_mean": out.staleness_mean,
        "staleness_max": out.staleness_max,
        "generation_idle_ratio": out.generation_idle_ratio,
        "trainer_idle_ratio": out.trainer_idle_ratio,
    }


def _changes(config: PartialRolloutConfig) -> str:
    preset = PartialRolloutConfig.preset(config.mode)
    changed = [n for n in TUNED if getattr(config, n) != getattr(preset, n)]
    return "".join(f" {name}={getattr(config, name)}" for name in changed)


def _batch(cluster: ClusterConfig) -> list[str]:
    """What a batch has to be for the chosen train workers, where it cannot be cut for them."""
    workers, batch = cluster.num_train_gpus(), cluster.batch
    if batch.size % workers == 0:
        return []
    unit = math.lcm(workers, batch.group_size)
    sizes = [n for n in (batch.size // unit * unit, (batch.size // unit + 1) * unit) if n]
    return [
        f"a batch of {batch.size} cannot be cut for {workers} train workers: take a "
        f"train.batch_size of {' or '.join(map(str, sizes))}, or another number of them"
    ]
