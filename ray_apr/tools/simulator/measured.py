"""A trace made of what a run has measured: the lengths in its run folder."""

from __future__ import annotations

from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import Row, RunData
from ray_apr.tools.simulator.trace import Trace

RUN_NOTE = (
    "lengths are those of the samples that the run trained: what it dropped, and what was still "
    "being generated at its end, is not among them; each reward takes the mean time of the run's; "
    "what an environment says between turns, and the time that it takes, are left out"
)


def trace_of(run: RunData) -> Trace:
    """The trained samples of a run, a prompt for each of its groups.

    Raises:
        ConfigError: If it has no trained samples.
    """
    samples = run.samples
    if not samples:
        raise ConfigError("--run", str(run.path), "holds no trained sample; give a longer run")
    reward_s = reward_s_of(run)
    seen: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        group_id = str(sample.get("group_id", number))
        seen[group_id] = seen.get(group_id, -1) + 1
        rows.append(
            {
                "prompt_id": group_id,
                "sample_index": seen[group_id],
                "prompt_tokens": sample.get("num_prompt_tokens", 0),
                "response_tokens": _num_generated(sample),
                "reward_s": reward_s,
            }
        )
    return Trace(rows)


def generated_share(run: RunData) -> float:
    """Share of the trained samples' tokens that engines made; an environment said the others."""
    num_tokens = sum(sample["num_tokens"] for sample in run.samples)
    return sum(map(_num_generated, run.samples)) / num_tokens if num_tokens else 1.0


def _num_generated(sample: Row) -> int:
    tokens: int = sample.get("num_generated", sample["num_tokens"])
    return tokens


def reward_s_of(run: RunData) -> float:
    """Mean seconds of a reward of a run; 0 where no function of its own gives them."""
    told = (row.get("reward_s") for row in reversed(run.steps))
    return next((float(seconds) for seconds in told if seconds is not None), 0.0)
