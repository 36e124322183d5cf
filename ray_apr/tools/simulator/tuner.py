"""Finds the GPU split and the scheduling settings that train the most tokens per second.

Every preset within the user's staleness bound is simulated first, each with its best split; those
that come near the best are simulated in full. From the best one, one setting at a time is moved
along a ladder, as long as that helps. So the choice is never worse than a preset, and the same
trace, cluster and seed give the same choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from ray_apr.config import Mode, PartialRolloutConfig
from ray_apr.core.exceptions import ConfigError, SimulationError
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.study import (
    Study,
    bound_tokens_per_s,
    climb,
    search_steps,
    split_of_bound,
)
from ray_apr.tools.simulator.trace import Trace

TUNED = ("max_staleness", "oversampling_factor", "max_live_batches", "max_inflight")
"""Settings that are searched, beside the GPU split."""
_NEAR = 0.85
"""Presets above this share of the best one, in a short run, are simulated in full."""
_AS_GOOD = 0.97
"""Two runs this near to each other differ by the order of the prompts as much."""
_MAX_SIMULATIONS = 60
_LADDERS: dict[str, tuple[Any, ...]] = {
    "max_live_batches": (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, None),
    "oversampling_factor": (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0),
    "max_staleness": (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulated candidate."""

    config: PartialRolloutConfig
    cluster: ClusterConfig
    """With the split, and the steps that were simulated."""
    study: Study

    @property
    def score(self) -> float:
        """Trained tokens per second."""
        return self.study.trained_tokens_per_s


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was chosen, and what it was chosen from."""

    choice: Trial
    trials: tuple[Trial, ...]
    """All that was simulated, in order."""
    presets: dict[str, Trial]
    """The best trial of each preset, in its longest run."""
    max_staleness: int
    """The user's bound."""


class Tuner:
    """Simulates candidates, each once.

    Args:
        trace: Prompts with the lengths of their responses.
        cluster: The machine; with ``rollout_gpus`` the split is not searched.
        max_staleness: The most staleness that is allowed.
        seed: Order of the prompts and the rewards.
    """

    def __init__(
        self, trace: Trace, cluster: ClusterConfig, *, max_staleness: int = 4, seed: int = 0
    ) -> None:
        if max_staleness < 0:
            raise ConfigError("--max-staleness", max_staleness, "must be at least 0")
        self._trace = trace
        self._cluster = cluster
        self._max_staleness = max_staleness
        self._seed = seed
        self._steps = search_steps(cluster)
        self._bound = bound_tokens_per_s(trace, cluster)
        self._known: dict[tuple[PartialRolloutConfig, int | None, int], Trial | None] = {}

    def run(self, mode: str = "apr") -> Tuning:
        """Search.

        Args:
            mode: Preset whose settings are tuned, if it is about as good as the best one.

        Raises:
            ConfigError: For an unknown mode.
            SimulationError: If no candidate comes to its end.
        """
        PartialRolloutConfig.preset(mode)
        presets = self._try_presets(mode)
        if not presets:
            raise SimulationError("no preset comes to its end on this trace and cluster")
        full = [trial for trial in presets.values() if trial.cluster.steps == self._steps]
        best = max(full, key=lambda trial: trial.score)
        wanted = presets.get(mode, best)
        found = best
        if wanted.cluster.steps == self._steps and wanted.score >= _AS_GOOD * best.score:
            found = self._descend(wanted)
        if found.score < best.score or found is best:
            found = self._descend(best)
        finals = (self._in_full(trial) for trial in (found, *full))
        choice = max((t for t in finals if t), key=lambda trial: trial.score, default=found)
        return Tuning(
            choice=choice,
            trials=tuple(trial for trial in self._known.values() if trial),
            presets=presets,
            max_staleness=self._max_staleness,
        )

    def _in_full(self, trial: Trial) -> Trial | None:
        """The same candidate over all steps of the cluster."""
        return self._trial(trial.config, trial.cluster.rollout_gpus, self._cluster.steps)

    def _try_presets(self, mode: str) -> dict[str, Trial]:
        """The best split of each preset: in a short run, and in full for those near the best."""
        names = sorted(get_args(Mode), key=lambda name: name != mode)
        configs = {name: self._within_bound(name) for name in names}
        short = min(self._steps, max(8, self._steps // 2))
        found: dict[str, Trial] = {}
        for name, config in configs.items():
            trial = self._best_split(config, short)
            if trial is not None:
                found[name] = trial
        best = max((trial.score for trial in found.values()), default=0.0)
        for name, trial in tuple(found.items()):
            if trial.score >= _NEAR * best:
                found[name] = self._best_split(trial.config, self._steps) or trial
        return found

    def _within_bound(self, name: str) -> PartialRolloutConfig:
        """A preset, with what the staleness bound asks for."""
        config = PartialRolloutConfig.preset(name)
        if config.max_staleness <= self._max_staleness:
            return config
        factor = min(config.oversampling_factor, self._max_staleness + 1)
        return dataclasses.replace(
            config, max_staleness=self._max_staleness, oversampling_factor=factor
        )

    def _best_split(self, config: PartialRolloutConfig, steps: int) -> Trial | None:
        cluster = self._cluster
        if cluster.is_colocated or cluster.rollout_gpus is not None:
            return self._trial(config, cluster.rollout_gpus, steps)

        def score(rollout_gpus: int) -> float:
            trial = self._trial(config, rollout_gpus, steps)
            return trial.score if trial else 0.0

        start = split_of_bound(self._trace, cluster)
        return self._trial(config, climb(score, start, 1, cluster.gpus - 1), steps)

    def _descend(self, best: Trial) -> Trial:
        """Move one setting at a time, until none helps or the budget is spent."""
        before = None
        while before is not best and self._has_budget():
            before = best
            for neighbours in (self._splits, *map(self._steps_of, TUNED)):
                best = self._follow(best, neighbours)
        return best

    def _follow(self, best: Trial, neighbours: Callable[[Trial], Iterator[Trial | None]]) -> Trial:
        """Go to a better neighbour while there is one."""
        improved = True
        while improved and self._has_budget():
            improved = False
            for trial in neighbours(best):
                if trial is not None and trial.score > best.score:
                    best, improved = trial, True
                    break
        return best

    def _has_budget(self) -> bool:
        return len(self._known) < _MAX_SIMULATIONS

    def _splits(self, trial: Trial) -> Iterator[Trial | None]:
        split = trial.cluster.rollout_gpus
        if split is not None and self._cluster.rollout_gpus is None:
            for number in (split - 1, split + 1):
                if 1 <= number < self._cluster.gpus:
                    yield self._trial(trial.config, number, trial.cluster.steps)

    def _steps_of(self, name: str) -> Callable[[Trial], Iterator[Trial | None]]:
        """The neighbours of a trial that differ in one setting."""

        def neighbours(trial: Trial) -> Iterator[Trial | None]:
            for value in self._values_near(name, trial):
                try:
                    config = dataclasses.replace(trial.config, **{name: value})
                except ConfigError:
                    continue  # the other settings rule it out
                yield self._trial(config, trial.cluster.rollout_gpus, trial.cluster.steps)

        return neighbours

    def _values_near(self, name: str, trial: Trial) -> list[Any]:
        now, batch = getattr(trial.config, name), self._cluster.batch.size
        if name == "max_inflight":
            numbers = [max(1, round(share * batch)) for share in (0.75, 1.0, 1.5)]
            return [value for value in ("adaptive", None, *numbers) if value != now]
        ladder = list(_LADDERS[name])
        if name == "max_staleness":
            ladder = sorted({*(v for v in ladder if v <= self._max_staleness), self._max_staleness})
        if name == "max_live_batches" and now is None:
            ladder = [v for v in ladder if v is None or v <= trial.config.max_staleness + 1]
        if now not in ladder:
            ladder = sorted({*ladder, now}, key=lambda v: float("inf") if v is None else v)
        place = ladder.index(now)
        return ladder[place + 1 : place + 2] + ladder[max(0, place - 1) : place]

    def _trial(self, config: PartialRolloutConfig, split: int | None, steps: int) -> Trial | None:
        """Simulate a candidate; None if the run gets stuck."""
        key = (config, split, steps)
        if key not in self._known:
            cluster = dataclasses.replace(self._cluster, rollout_gpus=split, steps=steps)
            try:
                outcome = Simulation(self._trace, cluster, config, seed=self._seed).run()
            except SimulationError:
                self._known[key] = None
            else:
                study = Study(
                    config=config,
                    cluster=cluster,
                    outcome=outcome,
                    bound_tokens_per_s=self._bound,
                )
                self._known[key] = Trial(config=config, cluster=cluster, study=study)
        return self._known[key]
