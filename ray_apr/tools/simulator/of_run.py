"""A run as the simulator sees it: its machine, measured from its own rows, and what would help it.

An engine's decode step is fitted as ``decode_base_s + decode_per_sequence_s * n`` to the steps of
the run, which had different numbers n of requests; what a request costs beside that is in these
two. A trainer's step is fitted as ``step_overhead_s + tokens / tokens_per_s``, where tokens are
those that engines made. The run as it was is simulated, too: how far that is off is told beside the
estimates.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ray_apr.config import PartialRolloutConfig, TrainConfig
from ray_apr.config.ranks import RankRange
from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import Row, RunData, train_workers_at
from ray_apr.tools.report.parts import FILLING_STEPS, left_out, parts_of, seconds_of, steady_steps
from ray_apr.tools.report.summary import engine_counts
from ray_apr.tools.room import lacks
from ray_apr.tools.simulator.cluster import BatchConfig, ClusterConfig, EngineConfig, TrainerConfig
from ray_apr.tools.simulator.measured import generated_share, reward_s_of, trace_of
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.trace import Trace

_FEWEST = 6
"""Steps that can be fitted."""
_NO_LIMIT = 1 << 40
_MOST_OFF = 0.3
"""Share by which the simulation of the run as it was may be off for its estimates to be told."""
_SHORT = 20
"""Steps that are enough as a rule. Below, a simulation that is farther off is blamed on the run:
what its rows have of the engines is up to a second older than they are."""
_MOST_SAMPLES = 1 << 13
"""Samples of one simulation, but for `_SHORT` steps of large batches: a few hundred steps tell what
thousands do."""
_STALENESS_MORE = 2
_SLOW_REWARDS = 0.1
"""Share of a step's time that its rewards need at least, from which more of them at once are tried.
"""
_COUNTED = ("engines_tokens", "engines_busy_s", "engines_request_s")
"""Of the engines, in a step's row; one has none of them before the rollout worker told any."""

Tried = tuple[str, ClusterConfig, PartialRolloutConfig]
"""What is changed, in words, and the machine and settings with it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a run, and what the simulator makes of it."""

    what: str
    gain: float
    """By which share more steps are trained in a time; below 0: fewer."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What would change a run."""

    off: float
    """Simulated over measured time of the run as it was, minus 1."""
    changes: tuple[Change, ...]
    """The best first."""


def estimate(run: RunData) -> Estimate:
    """Simulate a run as it was, and with one thing changed each time.

    Raises:
        ConfigError: If it has too few steps, its engines and train workers are on the same GPUs, or
            the simulation of the run as it was is far off.
        SimulationError: If a simulated run gets stuck.
    """
    cluster = cluster_of(run)
    trace, config = trace_of(run), _config_of(run)
    num_steps = steps_to_simulate(cluster.with_batches_per_step(config.batches_per_step))
    cluster = dataclasses.replace(cluster, steps=num_steps)
    base = _step_s(trace, cluster, config)
    off = base / measured_step_s(run) - 1
    if abs(off) > _MOST_OFF:
        raise _misfit(run, off)
    changes = [
        Change(what=what, gain=base / _step_s(trace, on, changed) - 1)
        for what, on, changed in _changes(run, cluster, config, reward_s_of(run) / base)
    ]
    return Estimate(off=off, changes=tuple(sorted(changes, key=lambda change: -change.gain)))


def steps_to_simulate(cluster: ClusterConfig) -> int:
    """Steps of a run that are simulated: all of them, unless that takes long.

    Args:
        cluster: Machine and length of the run.
    """
    return min(cluster.steps, max(_SHORT, _MOST_SAMPLES // cluster.batch.size))


def _misfit(run: RunData, off: float) -> ConfigError:
    if len(run.steps) < _SHORT:
        return _too_short(run)
    by = f"{abs(off):.0%}" if abs(off) <= 1 else "more than 100%"
    return ConfigError(
        "RUN_DIR",
        str(run.path),
        f"the simulator does not fit this run: {by} off in its seconds a step; its estimates are "
        "left out",
    )


def _too_short(run: RunData) -> ConfigError:
    steps, fewest = f"{len(run.steps)} steps", _SHORT
    if len(run.steps) >= fewest:  # of several parts
        steps += f", {len(steady_steps(run))} without {left_out(run)}"
        fewest -= FILLING_STEPS
    return ConfigError(
        "RUN_DIR",
        str(run.path),
        f"this run is too short to simulate ({steps}); it takes {fewest}",
    )


def cluster_of(run: RunData) -> ClusterConfig:
    """The machine of a run; a GPU stands for an engine or a train worker. It has as many of both as
    the run had last.

    Raises:
        ConfigError: If the run cannot tell it.
    """
    settings = run.config
    engine = settings.get("rollout", {}).get("engine", {})
    if engine.get("placement") == "colocated":
        raise ConfigError(
            "RUN_DIR",
            str(run.path),
            "has engines and train workers on the same GPUs, for which its rows do "
            "not tell the simulator enough; see `ray_apr simulate`",
        )
    rows = steady_steps(run)
    if len(rows) < _FEWEST:
        raise _too_short(run)
    if not engine or not any(row.keys() >= set(_COUNTED) for row in rows):
        raise ConfigError(
            "RUN_DIR",
            str(run.path),
            "does not tell its settings, or what its engines did in a step: an older ray_apr made "
            "it, or config.json is missing",
        )
    num_workers = train_workers_at(run, rows[-1]["step"])
    num_engines = engine_counts(run)[-1][1]
    group_size = settings["rollout"]["group_size"]
    return ClusterConfig(
        gpus=num_engines + num_workers,
        rollout_gpus=num_engines,
        engine=_engine_of(run),
        trainer=_trainer_of(run),
        weight_sync_s=_stop_s(rows),
        reward_workers=settings["rollout"]["reward"]["concurrency"],
        batch=BatchConfig(
            prompts=settings["train"]["batch_size"] // group_size, group_size=group_size
        ),
        steps=len(run.steps),
        notes=f"measured from {run.path.name}",
    )


def _stop_s(rows: Sequence[Row]) -> float:
    """What a sync stops the engines for, of steps some of which had none; 0 if none had."""
    stops = [row["generation_stopped_s"] for row in rows if row["generation_stopped_s"] > 0]
    return statistics.median(stops) if stops else 0.0


def _config_of(run: RunData) -> PartialRolloutConfig:
    names = {field.name for field in dataclasses.fields(PartialRolloutConfig)}
    given = {k: v for k, v in run.config["partial_rollout"].items() if k in names and k != "mode"}
    for name in ("admission", "resume_order"):
        if ":" in given.get(name, ""):
            raise ConfigError(
                "RUN_DIR",
                str(run.path),
                f"has code of its own as partial_rollout.{name}, which the simulator has not",
            )
    return PartialRolloutConfig.preset(run.config["partial_rollout"]["mode"], **given)


def _engine_of(run: RunData) -> EngineConfig:
    points = []
    parts = [[row for row in part.steady if row.keys() >= set(_COUNTED)] for part in parts_of(run)]
    for before, after in itertools.chain.from_iterable(map(itertools.pairwise, parts)):
        tokens, busy_s, request_s = (after[name] - before[name] for name in _COUNTED)
        if tokens > 0 and busy_s > 0 and request_s > 0:
            points.append((request_s / busy_s, request_s / tokens))
    if not points:
        raise ConfigError("RUN_DIR", str(run.path), "has steps in which no engine made tokens")
    base_s, slope_s = fitted(points)
    kwargs = run.config["rollout"]["engine"]["kwargs"]
    return EngineConfig(
        decode_base_s=base_s,
        decode_per_sequence_s=slope_s,
        decode_per_context_token_s=0.0,
        kv_capacity_tokens=_NO_LIMIT,
        max_sequences=kwargs.get("max_num_seqs", 1024),
        prefill_tokens_per_s=float(_NO_LIMIT),
    )


def _trainer_of(run: RunData) -> TrainerConfig:
    share = generated_share(run)
    points = [
        (share * row["num_tokens"] / train_workers_at(run, row["step"]), row["trainer_step_s"])
        for row in steady_steps(run)
    ]
    overhead_s, slope_s = fitted(points)
    return TrainerConfig(
        tokens_per_s_per_gpu=1.0 / max(slope_s, 1.0 / _NO_LIMIT), step_overhead_s=overhead_s
    )


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of ``y = a + b * x`` with b >= 0 and a at least a tenth of the mean of y.

    Returns:
        a, b.
    """
    x_mean = statistics.fmean(x for x, _ in points)
    y_mean = statistics.fmean(y for _, y in points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0
    slope = min(max(slope, 0.0), 0.9 * y_mean / x_mean) if x_mean else 0.0
    return y_mean - slope * x_mean, slope


def _changes(
    run: RunData, cluster: ClusterConfig, config: PartialRolloutConfig, reward_steps: float
) -> list[Tried]:
    """What is tried, each alone.

    Args:
        run: What it recorded.
        cluster: Of the run as it was.
        config: The same.
        reward_steps: What a reward takes, in steps.
    """
    engines, workers = cluster.rollout_gpus or 0, cluster.num_train_gpus()
    tried: list[Tried] = []
    for what, more_engines, more_workers in _machines(run, engines, workers):
        gpus, of_engines = cluster.gpus + more_engines + more_workers, engines + more_engines
        other = dataclasses.replace(cluster, gpus=gpus, rollout_gpus=of_engines)
        tried.append((what, other, config))
    at_once = cluster.reward_workers
    num_samples = config.step_size(cluster.batch.size)
    if reward_steps * num_samples >= _SLOW_REWARDS * at_once:
        tried.append(
            (f"rollout.reward.concurrency: {2 * at_once}, if rewards wait more than they compute",
             dataclasses.replace(cluster, reward_workers=2 * at_once), config)
        )  # fmt: skip
    if config.mode != "apr":
        apr = _as_apr(config)
        tried += [] if apr is None else [("mode: apr", cluster, apr)]
    else:
        staleness = config.max_staleness + _STALENESS_MORE
        older = dataclasses.replace(config, max_staleness=staleness)
        tried.append((f"partial_rollout.max_staleness: {staleness}", cluster, older))
    return tried


def _machines(run: RunData, engines: int, workers: int) -> Iterator[tuple[str, int, int]]:
    """Other numbers of engines and train workers: in words, and how many more of each. There is
    room for them, and a batch can be cut for these train workers."""
    names = ("batch_size", "mini_batches", "shard_ranks")
    train = TrainConfig(**{k: v for k, v in run.config["train"].items() if k in names})
    counts = RankRange(1, train.batch_size).counts(train)
    up = min((n for n in counts if n > workers), default=workers) - workers
    down = workers - max((n for n in counts if n < workers), default=workers)
    for what, more_engines, more_workers in (
        (f"an engine more (rollout.num_replicas: {engines + 1}){_own(1)}", 1, 0),
        (f"{_workers(up)} more (scaling.num_workers: {workers + up}){_own(up)}", 0, up),
        (f"{_engines(up)} less and {_workers(up)} more ({engines - up} and {workers + up})",
         -up, up),
        (f"{_workers(down)} less and {_engines(down)} more ({workers - down} and {engines + down})",
         down, -down),
    ):  # fmt: skip
        has_some = (more_engines or more_workers) and engines + more_engines > 0
        if has_some and lacks(run, engines=more_engines, workers=more_workers) is None:
            yield what, more_engines, more_workers


def _engines(number: int) -> str:
    return "an engine" if number == 1 else f"{number} engines"


def _workers(number: int) -> str:
    return "a train worker" if number == 1 else f"{number} train workers"


def _own(number: int) -> str:
    return f", {'' if number == 1 else 'each '}with a GPU or CPU cores of its own"


def _as_apr(config: PartialRolloutConfig) -> PartialRolloutConfig | None:
    """What ``mode: apr`` makes of a run's settings beside its mode; None if it refuses one."""
    preset = PartialRolloutConfig.preset(config.mode)
    names = (field.name for field in dataclasses.fields(config) if field.name != "mode")
    own = {n: getattr(config, n) for n in names if getattr(config, n) != getattr(preset, n)}
    try:
        return PartialRolloutConfig.preset("apr", **own)
    except ConfigError:
        return None


def measured_step_s(run: RunData) -> float:
    """Mean seconds of a run's steps, without those in which engines fill.

    Raises:
        ConfigError: If it has too few.
    """
    steady = [part.steady for part in parts_of(run) if len(part.steady) > 1]
    if not steady:
        raise _too_short(run)
    windows = [(rows[0]["time_s"], rows[-1]["time_s"]) for rows in steady]
    return seconds_of(windows) / sum(len(rows) - 1 for rows in steady)


def _step_s(trace: Trace, cluster: ClusterConfig, config: PartialRolloutConfig) -> float:
    """Simulated seconds of a step, without those in which engines fill."""
    ends = Simulation(trace, cluster, config).run().step_ends[FILLING_STEPS:]
    return (ends[-1] - ends[0]) / (len(ends) - 1)
