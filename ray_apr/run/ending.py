"""Where a run ends whose prompts say it (``train.passes``): they are counted when it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ray_apr.data.encoding import count_fitting
from ray_apr.run.preflight import wait_for_cpu

if TYPE_CHECKING:
    import ray.data

    from ray_apr.run.spec import RunSpec


def with_counted_steps(
    spec: RunSpec, prompts: ray.data.Dataset, show: Callable[[str], None]
) -> RunSpec:
    """The spec with a number of steps; nothing is counted where it has one.

    Where prompts that are too long are left out, all are encoded for it, once more than for the run
    itself, whose parts may be made several times.

    Waits for: a CPU, then Ray Data. Unblocked by: `rollout.engine.start_timeout_s`; its count, or
    its error.

    Args:
        spec: Of the run; Ray runs already.
        prompts: What to train on.
        show: Gets the number in a line.

    Raises:
        ConfigError: If the prompts fill no batch, or one cannot be encoded.
        ResourceError: If no CPU becomes free.
    """
    passes = spec.train.passes
    if passes is None:
        return spec
    wait_for_cpu(spec.rollout.engine.start_timeout_s)
    if spec.prompts.on_too_long == "drop":
        num_prompts = count_fitting(
            prompts,
            model=spec.model,
            column=spec.rollout.prompt_column,
            max_prompt_tokens=spec.max_prompt_tokens(),
            chat_template_kwargs=spec.rollout.chat_template_kwargs,
            name=f"{spec.name}-count",
        )
    else:
        num_prompts = prompts.count()
    counted = spec.with_steps(num_prompts)
    show(passes_line(passes, num_prompts, counted.train.num_steps))
    return counted


def passes_line(passes: int, num_prompts: int, num_steps: int) -> str:
    """What passes over the prompts come to."""
    return f"train.passes = {passes}: {passes} x {num_prompts} prompts fill {num_steps} batches"
