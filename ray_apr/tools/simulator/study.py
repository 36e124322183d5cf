"""What is asked of the simulator: one run with its figures, the best split, the bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray_apr.config import PartialRolloutConfig
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.outcome import Outcome
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.trace import Trace

_SEARCH_SAMPLES = 1 << 18
"""Samples of one run of a search; longer runs are searched with fewer steps."""
_SEARCH_STEPS = 8
_DECILES = range(10)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A simulated run and the machine that it ran on."""

    config: PartialRolloutConfig
    cluster: ClusterConfig
    outcome: Outcome
    bound_tokens_per_s: float

    @property
    def rollout_gpus(self) -> int:
        """GPUs that generate; all of them where colocated."""
        split = None if self.cluster.is_colocated else self.cluster.rollout_gpus
        return split or self.cluster.gpus

    @property
    def trained_tokens_per_s(self) -> float:
        """Tokens that entered the loss, over the wall time."""
        return self.outcome.trained_tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        """All figures, as the command line prints them.

        `tokens_held` counts what is generated and neither trained nor dropped at the end.
        `trained_share_by_length_decile` is about prompts by the longest of their responses: of
        those whose fate was decided by the end of the run, the share that was trained;
        `undecided_share_by_length_decile` is the share whose fate was not.
        """
        out, ledger = self.outcome, self.outcome.ledger
        discarded = sum(ledger.discarded.values())
        started, alive = out.started_by_decile, out.alive_by_decile
        return {
            "mode": self.config.mode,
            "wall_s": out.wall_s,
            "steps": self.cluster.steps,
            "rollout_gpus": self.rollout_gpus,
            "tokens_generated": ledger.generated,
            "tokens_trained": ledger.trained,
            "tokens_discarded": discarded,
            "tokens_discarded_by_reason": dict(ledger.discarded),
            "tokens_held": ledger.interrupted + ledger.pending + ledger.buffered,
            "tokens_reprefilled": out.tokens_reprefilled,
            "trained_tokens_per_s": self.trained_tokens_per_s,
            "bound_tokens_per_s": self.bound_tokens_per_s,
            "staleness_max": out.staleness_max,
            "staleness_mean": out.staleness_mean,
            "generation_idle_ratio": out.generation_idle_ratio,
            "trainer_idle_ratio": out.trainer_idle_ratio,
            "interrupted": out.interrupted,
            "resumed": out.resumed,
            "preempted": out.preempted,
            "ledger_error": ledger.error,
            "trained_share_by_length_decile": [
                _share(out.trained_by_decile[d], started[d] - alive[d]) for d in _DECILES
            ],
            "undecided_share_by_length_decile": [_share(alive[d], started[d]) for d in _DECILES],
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def study(
    trace: Trace, cluster: ClusterConfig, config: PartialRolloutConfig, *, seed: int = 0
) -> Study:
    """Simulate one run; a disaggregated cluster without ``rollout_gpus`` gets its best split.

    Raises:
        SimulationError: If the run gets stuck.
    """
    if not cluster.is_colocated and cluster.rollout_gpus is None:
        cluster = cluster.with_rollout_gpus(best_split(trace, cluster, config, seed=seed))
    return Study(
        config=config,
        cluster=cluster,
        outcome=Simulation(trace, cluster, config, seed=seed).run(),
        bound_tokens_per_s=bound_tokens_per_s(
            trace, cluster.with_batches_per_step(config.batches_per_step)
        ),
    )


def best_split(
    trace: Trace, cluster: ClusterConfig, config: PartialRolloutConfig, *, seed: int = 0
) -> int:
    """Find the number of rollout GPUs that trains the most tokens per second.

    Simulates splits around the one of the bound, uphill until no neighbour is better; with many
    GPUs the neighbours are first far and then near.
    """
    steps = search_steps(cluster)

    def score(rollout_gpus: int) -> float:
        tried = dataclasses.replace(cluster, rollout_gpus=rollout_gpus, steps=steps)
        return Simulation(trace, tried, config, seed=seed).run().trained_tokens_per_s

    return climb(score, split_of_bound(trace, cluster), 1, cluster.gpus - 1)


def search_steps(cluster: ClusterConfig) -> int:
    """Steps of one run of a search: all of them, unless that takes too long."""
    too_long = cluster.steps * cluster.batch.size > _SEARCH_SAMPLES
    return min(cluster.steps, _SEARCH_STEPS) if too_long else cluster.steps


def climb(score: Callable[[int], float], start: int, low: int, high: int) -> int:
    """The whole number in low ... high with the best score, uphill from `start`.

    Args:
        score: What is to be largest; called once for each number.
        start: Where to begin.
        low: Smallest number.
        high: Largest number.
    """
    scores: dict[int, float] = {}

    def known(number: int) -> float:
        if number not in scores:
            scores[number] = score(number)
        return scores[number]

    best, stride = start, max(1, (high - low + 1) // 32)
    while stride:
        neighbours = [n for n in (best - stride, best + stride) if low <= n <= high]
        better = max(neighbours, key=known, default=best)
        if known(better) > known(best):
            best = better
        else:
            stride //= 2
    return best


def bound_tokens_per_s(trace: Trace, cluster: ClusterConfig) -> float:
    """What a schedule without any waste could train, in tokens per second.

    The tokens of a run over the time of the best split k of the GPUs: the larger of the generation
    work at the engines' best batch rate over k, and the training work over GPUs - k plus the
    overhead of each step. Colocated GPUs do one after the other, each with all of them. It knows
    neither staleness, nor the start, nor the end of a run.
    """
    tokens, generation_s, training_s, overhead_s = _work(trace, cluster)
    if cluster.is_colocated:
        return tokens / ((generation_s + training_s) / cluster.gpus + overhead_s)
    k = split_of_bound(trace, cluster)
    return tokens / max(generation_s / k, training_s / (cluster.gpus - k) + overhead_s)


def split_of_bound(trace: Trace, cluster: ClusterConfig) -> int:
    """The number of rollout GPUs of `bound_tokens_per_s`, of a disaggregated cluster."""
    _, generation_s, training_s, overhead_s = _work(trace, cluster)
    return min(
        range(1, cluster.gpus),
        key=lambda k: max(generation_s / k, training_s / (cluster.gpus - k) + overhead_s),
    )


def _work(trace: Trace, cluster: ClusterConfig) -> tuple[float, float, float, float]:
    """Of a whole run: tokens, GPU seconds of generation and of training, seconds of overhead."""
    samples = [(group.prompt_tokens, s.response_tokens) for group, s in trace.samples]
    per_sample = sum(response for _, response in samples) / len(samples)
    num_samples = cluster.steps * cluster.batch.size
    tokens = num_samples * per_sample
    generation_s = tokens / engine_rate(trace, cluster)
    training_s = tokens / cluster.trainer.tokens_per_s_per_gpu
    return tokens, generation_s, training_s, cluster.steps * cluster.trainer.step_overhead_s


def engine_rate(trace: Trace, cluster: ClusterConfig) -> float:
    """Tokens per second of one engine that is as full as its KV entries allow.

    A sample holds ``prompt + response / 2`` tokens on average over its life, and a token is made
    for each step that one lives: the mean context is weighted by response length.
    """
    engine = cluster.engine
    lengths = [(group.prompt_tokens, s.response_tokens) for group, s in trace.samples]
    held = math.fsum(response * (prompt + response / 2) for prompt, response in lengths)
    context = held / sum(response for _, response in lengths)
    running = min(engine.max_sequences, max(1.0, engine.kv_capacity_tokens / context))
    step_s = engine.decode_base_s + running * (
        engine.decode_per_sequence_s + engine.decode_per_context_token_s * context
    )
    return running / step_s
