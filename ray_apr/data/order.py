"""The order in which a run hands prompts out; the simulator's runs have it, too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_apr.checks import require


def prompt_order(num_prompts: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Numbers of all prompts, in the order of an epoch [num_prompts].

    Args:
        num_prompts: How many there are.
        seed: Of the run, at least 0.
        epoch: From 0 on.

    Raises:
        ConfigError: If the seed is negative.
    """
    require(seed >= 0, "seed", seed, "must be at least 0")
    return np.random.default_rng([seed, epoch]).permutation(num_prompts)
