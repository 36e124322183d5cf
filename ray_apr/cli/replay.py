"""``ray-apr replay RUN_DIR --step K``: a step of a run once more, and whether it is the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.cli.launch import read_prompts, trainer_arguments
from ray_apr.cli.quiet import no_advice_to_delete
from ray_apr.cli.resume import settings_of_run
from ray_apr.run.changes import changed_text

if TYPE_CHECKING:
    from ray_apr.run.replaying import Replay

_SHOWN = 60
"""Characters of a prompt or a response in a line."""


@no_advice_to_delete()
def replay_run(run_dir: Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Train a step of a run again, from its folder, into which nothing is written.

    Args:
        run_dir: The run folder; the run may be going on.
        step: Number of the step in ``metrics.jsonl``, from 0.
        overrides: What the run folder does not keep (a control token).

    Raises:
        ConfigError: If the step cannot be replayed.
    """
    settings = settings_of_run(run_dir.expanduser().resolve(), overrides)
    arguments, held_out = trainer_arguments(settings), settings.evaluation_prompts
    prompts = read_prompts(settings.prompts)
    from ray_apr.run.options import RunOptions
    from ray_apr.run.replaying import replay_step

    spec = RunOptions(
        prompts=prompts,
        evaluation_prompts=None if held_out is None else read_prompts(held_out),
        **arguments,
    ).spec
    spec = spec.on_devices(has_gpus=bool(spec.scaling.use_gpu))
    return replay_step(spec, prompts, step)


def replay_json(replay: Replay) -> str:
    """All of it, for programs."""
    steps = [dataclasses.asdict(s) | {"different": s.different} for s in replay.steps]
    return json.dumps(dataclasses.asdict(replay) | {"steps": steps, "same": replay.is_same})


def replay_text(replay: Replay) -> str:
    """The figures of the step, what differs in those before it, and its samples, for people."""
    last = replay.steps[-1]
    begin = "the model" if replay.begins_at == 0 else f"the checkpoint of {replay.begins_at} steps"
    ranks = "1 rank" if replay.num_ranks == 1 else f"{replay.num_ranks} ranks"
    lines = [f"step {last.step}: {len(replay.steps)} trained again on {ranks}, from {begin} on", ""]
    lines.append(f"{'figure':<28} {'run':<24} {'replay':<24}")
    for name, value in last.figures.items():
        same = "DIFFERS" if name in last.different else "equal"
        lines.append(f"{name:<28} {_value(last.recorded.get(name)):<24} {_value(value):<24} {same}")
    lines += [
        f"step {step.step} before it differs: {', '.join(step.different)}"
        for step in replay.steps[:-1]
        if step.different
    ]
    if replay.changed and not replay.is_same:
        lines.append(
            "trained with the settings of today; the run changed some after step "
            f"{replay.begins_at}: {changed_text(replay.changed)}"
        )
    lines += ["", f"{'sample':<14} {'reward':>8} {'advantage':>10}  prompt → response"]
    lines += [
        f"{s.sample_id:<14} {s.reward:>8.3f} {s.advantage:>10.3f}  "
        f"{_short(s.prompt)} → {_short(s.response)}"
        for s in replay.samples
    ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, list):
        value = f"{len(value)} numbers" if len(value) > 1 else value
    return str(value)


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
