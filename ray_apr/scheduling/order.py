"""The order in which a run hands prompts out; the simulator's runs have it, too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

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


def shares(num_prompts: int, weights: Sequence[float]) -> list[int]:
    """How many prompts of an epoch each source has: what its weight says, rounded so that the sum
    stays (largest remainders).

    Args:
        num_prompts: Of an epoch.
        weights: Of each source, above 0.

    Example:
        >>> shares(10, [2, 1])
        [7, 3]
    """
    exact = [num_prompts * weight / math.fsum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for i in by_remainder[: num_prompts - sum(found)]:
        found[i] += 1
    return found


def mixed_order(
    sources: Sequence[npt.NDArray[np.int64]], num_of: Sequence[int], *, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Numbers of the prompts of an epoch, of which each source has its share.

    A source goes through all of its own prompts, in an order of its own each time, before one comes
    again: over as many epochs as that takes, or several times in one.

    Args:
        sources: Numbers of each source's prompts, none of them empty.
        num_of: How many of an epoch's prompts are of each (`shares`).
        seed: Of the run, at least 0.
        epoch: From 0 on.
    """
    labels = np.repeat(np.arange(len(sources)), num_of)
    labels = labels[prompt_order(len(labels), seed=seed, epoch=epoch)]
    order = np.empty(len(labels), dtype=np.int64)
    for label, (rows, number) in enumerate(zip(sources, num_of, strict=True)):
        if not number:
            continue
        first, skipped = divmod(epoch * number, len(rows))
        turns = range(first, first + (skipped + number - 1) // len(rows) + 1)
        drawn = [np.random.default_rng([seed, turn, label + 1]).permutation(rows) for turn in turns]
        order[labels == label] = np.concatenate(drawn)[skipped : skipped + number]
    return order


def prompt_id(epoch: int, offset: int) -> str:
    """Id of the prompt at a place of an epoch's order."""
    return f"e{epoch}-{offset}"


def retried(prompt: Prompt, *, num_filtered: int = 0, num_stops: int = 0) -> Prompt:
    """A prompt as it is tried after so many filtered groups and stops: each further try has an id
    of its own."""
    number = num_filtered + num_stops
    if not number:
        return prompt
    again = f"{prompt.prompt_id.partition('~')[0]}~{number}"
    return dataclasses.replace(
        prompt, prompt_id=again, num_filtered=num_filtered, num_stops=num_stops
    )


def with_stops(prompt: Prompt, num_stops: Mapping[str, int]) -> Prompt:
    """A prompt that is known from an id alone, which has the sum of its tries.

    Args:
        prompt: All of its tries count as filtered.
        num_stops: How many of them were stops, by id; none of those of other ids.
    """
    stops = num_stops.get(prompt.prompt_id, 0)
    return retried(prompt, num_filtered=prompt.num_retries - stops, num_stops=stops)


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
