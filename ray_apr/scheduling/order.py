"""The order in which a run hands prompts out; the simulator's runs have it, too."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ray_apr.core.checks import require
from ray_apr.core.sample import Prompt


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


def prompt_id(epoch: int, offset: int) -> str:
    """Id of the prompt at a place of an epoch's order."""
    return f"e{epoch}-{offset}"


def retried(prompt: Prompt, number: int) -> Prompt:
    """A prompt as it is tried for the `number`-th time again: under an id of its own."""
    if not number:
        return prompt
    name = prompt.prompt_id.partition("~")[0]
    return dataclasses.replace(prompt, prompt_id=f"{name}~{number}", num_retries=number)


def num_retries(group_id: str) -> int:
    """How often the prompt of a group was tried again."""
    return int(group_id.partition("~")[2] or 0)


def prompt_position(group_id: str, num_prompts: int) -> int:
    """How many prompts were handed out before that of a group, or of one tried again (``~n``).

    Args:
        group_id: That of its prompt.
        num_prompts: Length of an epoch.

    Example:
        >>> prompt_position(prompt_id(2, 7) + "~1", 100)
        207
    """
    epoch, _, offset = group_id.partition("~")[0].removeprefix("e").partition("-")
    return int(epoch) * num_prompts + int(offset)
