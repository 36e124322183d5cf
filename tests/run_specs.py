"""The spec of a run, for tests of what follows from one."""

from __future__ import annotations

from typing import Any

import ray.train

from ray_apr.config.ranks import RankRange
from ray_apr.run.spec import RunSpec


def run_spec(**replaced: Any) -> RunSpec:
    """A spec of defaults, with some of its parts replaced; its name is that of `run`, if any."""
    run = replaced.pop("run", ray.train.RunConfig(name="app"))
    scaling = replaced.pop("scaling", ray.train.ScalingConfig())
    parts = {"name": run.name, "model": "none", "run": run, "scaling": scaling}
    parts["ranks"] = RankRange.of(scaling.num_workers)
    return RunSpec(**parts | replaced)
