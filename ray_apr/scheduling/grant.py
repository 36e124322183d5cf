"""A step of the trainer: its batch, and what is told of it once it is trained.

Pure: no I/O, no clock, no ray, no torch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_apr.core.staleness import staleness
from ray_apr.core.user import MAX_REWARD_METRICS

if TYPE_CHECKING:
    from ray_apr.core.group import GroupMeta
    from ray_apr.scheduling.batch import BatchPlan
    from ray_apr.scheduling.orders import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTicket:
    """The batch of one step, or what comes before it; without either the stream has ended."""

    plan: BatchPlan | None = None
    order: Order | None = None
    """What all ranks do before the batch."""
    refs: tuple[Any, ...] = ()
    """Each group's samples as they are carried (`data.store`), in the plan's order; None of those
    that the rank does not need."""


@dataclass(slots=True)
class Grant:
    """A step that the trainer asked for or will ask for next, and its batch once there is one."""

    step: int
    policy_version: int
    oldest_version: int
    """Version of the oldest token that enters the loss of the step."""
    granted_at: float
    ready_at: float = 0.0
    """When it was granted and had its batch."""
    groups: tuple[GroupMeta, ...] = ()
    """The batch, in order of the ids; empty until it was chosen."""
    refs: tuple[Any, ...] = ()
    """Payload of each group."""
    num_samples: int = 0
    plan: BatchPlan | None = None
    """Made when it is first handed out."""

    def fill(self, chosen: Sequence[tuple[GroupMeta, Any]]) -> None:
        """Give the step its batch.

        Args:
            chosen: Its groups with their payload.
        """
        ordered = sorted(chosen, key=lambda pair: pair[0].group_id)
        self.groups = tuple(group for group, _ in ordered)
        self.refs = tuple(ref for _, ref in ordered)
        self.num_samples = sum(len(group.samples) for group in self.groups)


def reward_figures(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean, least and greatest of each figure of a batch's rewards, over the samples that have it.

    Args:
        metrics: `RewardResult.metrics` of each sample. Names beyond `MAX_REWARD_METRICS` are left
            out, the last of the alphabet first.

    Example:
        >>> reward_figures([{"form": 1.0}, {"form": 0.0}, {}])
        {'reward/form_mean': 0.5, 'reward/form_min': 0.0, 'reward/form_max': 1.0}
    """
    names = sorted({name for found in metrics for name in found})[:MAX_REWARD_METRICS]
    figures: dict[str, float] = {}
    for name in names:
        values = [found[name] for found in metrics if name in found]
        figures[f"reward/{name}_mean"] = statistics.fmean(values)
        figures[f"reward/{name}_min"] = min(values)
        figures[f"reward/{name}_max"] = max(values)
    return figures


def told_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a trainer is told of a step that it has trained.

    Args:
        rows: Of `sample_rows`.

    Returns:
        Figures of what rewards told beside their number (see `reward_figures`), and the turns of
        the samples together.
    """
    turns: dict[str, float] = {"num_turns": sum(row["num_turns"] for row in rows)}
    return turns | reward_figures([row["reward_metrics"] for row in rows])


def sample_rows(grant: Grant) -> list[dict[str, Any]]:
    """A row of the run folder for each sample of a step that was trained.

    A sample without any token in the loss has no staleness.
    """
    rows = []
    for sample in (sample for group in grant.groups for sample in group.samples):
        version = sample.trained_version(grant.oldest_version)
        trained = sample.trainable_tokens(grant.oldest_version)
        row = {
            "step": grant.step,
            "staleness": None if version is None else staleness(grant.policy_version, version),
            "num_generated": sample.num_generated,
            "num_masked_tokens": sample.num_generated - trained,
        }
        rows.append(row | dataclasses.asdict(sample))
    return rows
