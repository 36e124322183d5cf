"""Where and how the reward function and the environment are called."""

from __future__ import annotations

from dataclasses import dataclass

from ray_apr.core.checks import at_least, positive, whole


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Calls of the reward function and of the environment: workers, tries, time."""

    timeout_s: float = 60.0
    """Limit for one call of the reward function, or of the environment."""
    retries: int = 1
    """Further tries after such a call raised or timed out."""
    concurrency: int = 16
    """Such calls at the same time."""
    num_workers: int = 1
    """Processes that run the reward function and the environment."""
    num_cpus_per_worker: float = 0.0
    """Ray CPUs of one such process; 0 shares what is there."""

    def __post_init__(self) -> None:
        s = "rollout.reward"
        whole(s, self, "retries", "concurrency", "num_workers")
        at_least(s, self, 1, "concurrency", "num_workers")
        at_least(s, self, 0, "retries", "num_cpus_per_worker")
        positive(s, self, "timeout_s")

    def reserved_cpus(self, *, evaluates: bool) -> float:
        """Ray CPUs of all such processes; held-out prompts have as many of their own."""
        return self.num_workers * self.num_cpus_per_worker * (2 if evaluates else 1)
