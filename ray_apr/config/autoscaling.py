"""Settings of the number of engines, where a run changes it by itself."""

from __future__ import annotations

from dataclasses import dataclass

from ray_apr.core.checks import at_least, positive, require, whole


@dataclass(frozen=True, kw_only=True)
class AutoscalingConfig:
    """When a run asks for more or fewer engines; `scheduling.autoscaling` has the rules.

    Example:
        >>> AutoscalingConfig(max_replicas=8).min_replicas
        1
    """

    min_replicas: int = 1
    """Fewest engines."""
    max_replicas: int = 1
    """Most engines; what the cluster has no place for is not asked for."""
    target_ongoing_requests: float = 32.0
    """Requests of an engine while it generates, below which others beside it speed nothing up: no
    engine is added that would leave each one fewer."""
    upscale_delay_s: float = 60.0
    """Time, of at least three steps, over which the trainer has to starve before engines come."""
    downscale_delay_s: float = 600.0
    """Time, of at least three steps, over which engines have to be too many before some go; at
    least twice as long as an engine takes to start."""

    def __post_init__(self) -> None:
        s = "rollout.engine.autoscaling"
        whole(s, self, "min_replicas", "max_replicas")
        at_least(s, self, 1, "min_replicas", "max_replicas")
        positive(s, self, "target_ongoing_requests", "upscale_delay_s", "downscale_delay_s")
        require(
            self.max_replicas >= self.min_replicas,
            f"{s}.max_replicas",
            self.max_replicas,
            f"must be at least min_replicas = {self.min_replicas}",
        )
