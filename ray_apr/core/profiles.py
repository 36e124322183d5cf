"""Names of what profiles of steps are: those who write and those who read them agree on these."""

from __future__ import annotations

PROFILES = "profiles"
"""Folder of a run folder."""
ENGINE_STEPS_FILE = "engine_steps.jsonl"
"""Of a run folder: what engines did step by step in the profiled steps."""
PROFILE_MARK = "ray_apr step at "
"""Begin of the name of a span over the whole profile; what follows are the seconds since the run's
begin at which it began."""


def profile_name(step: int, rank: int) -> str:
    """File of a step and train worker."""
    return f"step-{step:06d}-rank-{rank}.json.gz"
