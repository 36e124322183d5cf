"""A trace made of what a run has measured: the lengths in its run folder."""

from __future__ import annotations

from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import RunData
from ray_apr.tools.simulator.trace import Trace

RUN_NOTE = (
    "lengths are those of the samples that the run trained: what it dropped, and what was still "
    "being generated at its end, is not among them; rewards count as instant, as it does not "
    "record their time"
)


def trace_of(run: RunData) -> Trace:
    """The trained samples of a run, a prompt for each of its groups.

    Raises:
        ConfigError: If it has no trained samples.
    """
    samples = run.samples
    if not samples:
        raise ConfigError("--run", str(run.path), "holds no trained sample; give a longer run")
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
                "response_tokens": sample["num_tokens"],
                "reward_s": sample.get("reward_s", 0.0),
            }
        )
    return Trace(rows)
