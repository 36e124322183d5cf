"""Runs as an algorithm of RLlib: ``APRConfig().build_algo().train()``, ``Tuner("APR")``.

Importing this package registers "APR" for Ray Tune. It needs the extra ``rllib``.
"""

from __future__ import annotations

try:
    import ray.rllib  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"ray_apr.rllib needs RLlib, and {error.name} is not installed: "
        "pip install 'ray-apr[rllib]'"
    ) from error

from ray import tune

from ray_apr.rllib.algorithm import APR
from ray_apr.rllib.config import APRConfig

__all__ = ["APR", "APRConfig"]

tune.register_trainable("APR", APR)
