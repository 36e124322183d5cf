"""How many train workers a run may have: a number, or as many as there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_apr.config.train import TrainConfig
from ray_apr.core.checks import is_whole, require


@dataclass(frozen=True, slots=True)
class RankRange:
    """Least and most train workers; the same number where it is fixed."""

    least: int
    most: int

    @classmethod
    def of(cls, num_workers: Any) -> RankRange:
        """Read ``scaling.num_workers``, a number or a pair of them.

        Raises:
            ConfigError: If it is neither.
        """
        pair = tuple(num_workers) if isinstance(num_workers, list | tuple) else (num_workers,) * 2
        require(
            len(pair) == 2 and all(map(is_whole, pair)) and 1 <= pair[0] <= pair[1],
            "scaling.num_workers",
            num_workers,
            "must be a whole number of at least 1, or least and most of them as [1, 2]",
        )
        return cls(*pair)

    @property
    def is_elastic(self) -> bool:
        """Whether the number may change while the run goes on."""
        return self.least < self.most

    def counts(self, train: TrainConfig) -> list[int]:
        """The numbers that a batch can be cut for, in ascending order."""
        return [n for n in range(self.least, self.most + 1) if train.takes_workers(n)]
