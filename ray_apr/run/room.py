"""How many parts of a run the nodes of a cluster have room for, each one on a single node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_apr.config import RolloutConfig

_ROUNDING = 1e-9
"""Three times 0.1 have room in 0.3."""


def cpus_of_this_machine(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs that Ray finds here: those of the container, if it has a quota."""
    cpus = os.cpu_count() or 1
    try:
        allowed, period = (float(word) for word in quota.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return cpus
    return max(1, min(cpus, int(allowed / period)))


def resources_of_engine(rollout: RolloutConfig) -> dict[str, float]:
    """What one engine reserves, on the device that is set."""
    return rollout.engine.resources(on_gpus=rollout.engine.device == "cuda")


def count_places(free: Iterable[Mapping[str, float]], wanted: Mapping[str, float]) -> int:
    """How many parts of one kind have room.

    Args:
        free: What each node has that nobody has reserved.
        wanted: What a part reserves; where that is nothing, there is room for any number.

    Example:
        >>> count_places([{"CPU": 5.0, "GPU": 2.0}, {"CPU": 1.0}], {"CPU": 2.0, "GPU": 1.0})
        2
    """
    amounts = {name: amount for name, amount in wanted.items() if amount > 0}
    if not amounts:
        return 1 << 20
    return sum(
        int(min(node.get(name, 0.0) / amount + _ROUNDING for name, amount in amounts.items()))
        for node in free
    )


def num_that_fit(
    free: Sequence[Mapping[str, float]], wanted: Mapping[str, float], most: int
) -> int:
    """The same, at most `most`."""
    return min(count_places(free, wanted), most)


def without(
    free: Sequence[Mapping[str, float]], wanted: Mapping[str, float], number: int
) -> list[dict[str, float]]:
    """What is left of each node once so many parts have taken theirs, node after node."""
    left = [dict(node) for node in free]
    for node in left:
        taken = num_that_fit([node], wanted, number)
        number -= taken
        for name, amount in wanted.items():
            node[name] = node.get(name, 0.0) - taken * amount
    return left


def num_beside_prompts(
    free: Sequence[Mapping[str, float]], wanted: Mapping[str, float], most: int
) -> int:
    """As `num_that_fit`, beside the task of Ray Data that encodes the prompts with one CPU, on the
    node where that leaves the most room.

    Example:
        >>> num_beside_prompts([{"CPU": 2.0}, {"CPU": 3.0}], {"CPU": 2.0}, 9)
        2
    """
    encodes = {"CPU": 1.0}
    left = [
        [*free[:i], *without([node], encodes, 1), *free[i + 1 :]]
        for i, node in enumerate(free)
        if count_places([node], encodes)
    ]
    return max((num_that_fit(nodes, wanted, most) for nodes in left), default=0)


def num_elsewhere(number: int, num_leaving: int, room: int, counts: Sequence[int]) -> int | None:
    """How many train workers a run can have without those that have to leave; None: not even the
    least number.

    Args:
        number: That it has.
        num_leaving: Of them, those on nodes that are drained.
        room: Further ones that have room on other nodes.
        counts: The numbers that it may have.

    Example:
        >>> num_elsewhere(4, 1, 0, [1, 2, 4]), num_elsewhere(1, 1, 0, [1, 2])
        (2, None)
    """
    return max((n for n in counts if n <= number - num_leaving + room), default=None)


def engines_that_fit(
    free: Sequence[Mapping[str, float]],
    engine: Mapping[str, float],
    num_engines: int,
    worker: Mapping[str, float],
    num_workers: int,
    *,
    least: int = 1,
) -> int:
    """As many engines of a number as have room beside train workers; all of them where fewer than
    the least have: they are waited for.

    Args:
        free: What each node has that nobody has reserved.
        engine: What an engine reserves.
        num_engines: That are wanted.
        worker: What a train worker reserves.
        num_workers: That must have room.
        least: Engines.

    Example:
        >>> engines_that_fit([{"CPU": 4.0}], {"CPU": 1.0}, 4, {"CPU": 1.0}, 2)
        2
    """

    def fit(number: int, nodes: Sequence[Mapping[str, float]]) -> bool:
        left = without(nodes, engine, number)
        has_all = num_that_fit(nodes, engine, number) == number
        return has_all and num_that_fit(left, worker, num_workers) == num_workers

    either_way = (free, free[::-1])  # engines may take what train workers need, and need not
    counts = range(num_engines, least - 1, -1)
    fitting = (n for n in counts if any(fit(n, nodes) for nodes in either_way))
    return next(fitting, num_engines)
