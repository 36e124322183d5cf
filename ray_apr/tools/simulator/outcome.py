"""What a simulated run comes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ray_apr.core.group import GroupMeta
from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.core.staleness import staleness


@dataclass(slots=True)
class Outcome:
    """Counters of a run; times are seconds, idle ratios shares of the wall time."""

    wall_s: float = 0.0
    ledger: LedgerSnapshot = field(default_factory=LedgerSnapshot)
    tokens_reprefilled: int = 0
    staleness_max: int = 0
    staleness_sum: int = 0
    samples_trained: int = 0
    interrupted: int = 0
    resumed: int = 0
    preempted: int = 0
    generation_idle_ratio: float = 0.0
    trainer_idle_ratio: float = 0.0
    started_by_decile: Counter[int] = field(default_factory=Counter)
    trained_by_decile: Counter[int] = field(default_factory=Counter)
    alive_by_decile: Counter[int] = field(default_factory=Counter)
    """Of those that were started, the prompts that are neither trained nor dropped at the end."""
    num_events: int = 0
    step_ends: list[float] = field(default_factory=list)
    """When each step was done."""

    @property
    def staleness_mean(self) -> float:
        """Staleness of a trained sample, on average."""
        return self.staleness_sum / max(1, self.samples_trained)

    @property
    def trained_tokens_per_s(self) -> float:
        """Tokens that entered the loss, over the wall time."""
        return self.ledger.trained / self.wall_s

    def count_trained(self, group: GroupMeta, policy_version: int, oldest_version: int) -> None:
        """Count a group that is trained at `policy_version`, from `oldest_version` on."""
        for sample in group.samples:
            version = sample.trained_version(oldest_version)
            if version is None:
                continue  # all of its tokens are masked
            age = staleness(policy_version, version)
            self.staleness_max = max(self.staleness_max, age)
            self.staleness_sum += age
            self.samples_trained += 1
