"""What held a run back, by how much, and which setting to change.

All of it is read from the run folder, of a run that goes on, too.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import Row, RunData
from ray_apr.tools.report.summary import (
    covered_s,
    engine_names,
    engine_seconds,
    spans_of,
    summarize,
    training_window,
)

FEWEST_STEPS = 4
"""Of which shares of time say something."""
_MUCH, _SOME = 0.10, 0.03
"""Shares from which on a side waits, and something else is worth a word."""
_MOSTLY = 0.5
_START_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that cost time or samples."""

    share: float
    """Of the training time, of the tokens or of the samples: what `what` says."""
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What trainer and engines did in the training window, as shares of it."""

    trains: float
    waits: float
    generates: float
    """Mean of the engines, as are the next two."""
    paused: float
    idle: float


def shares_of(run: RunData) -> Shares:
    """Where the time went.

    Raises:
        ConfigError: If the run has too few steps, or no timeline.
    """
    window = training_window(run)
    if window is None or len(run.steps) < FEWEST_STEPS:
        raise ConfigError(
            "RUN_DIR",
            str(run.path),
            f"has {len(run.steps)} steps, of which nothing can be said yet; wait for "
            f"{FEWEST_STEPS} of them",
        )
    length_s, engines = window[1] - window[0], engine_names(run)
    if not run.timeline:
        raise ConfigError("RUN_DIR", str(run.path), "has no timeline.jsonl, which says who waited")

    def seconds(actor: str, what: str) -> float:
        return covered_s(spans_of(run, actor, what), window)

    of_engines_s = engine_seconds(run, len(engines), window)
    generates, paused = (
        sum(seconds(engine, what) for engine in engines) / of_engines_s if engines else 0.0
        for what in ("generate", "paused")
    )
    return Shares(
        trains=seconds("trainer", "train") / length_s,
        waits=seconds("trainer", "wait") / length_s,
        generates=generates,
        paused=paused,
        idle=max(0.0, 1.0 - generates - paused),
    )


def findings(run: RunData, shares: Shares) -> list[Finding]:
    """What held a run back, the largest share first.

    Args:
        run: What it recorded.
        shares: Its `shares_of`.
    """
    summary = summarize(run)
    found = [
        *_of_time(run, shares), *_of_start(summary), *_of_tokens(summary), *_of_samples(run)
    ]  # fmt: skip
    return sorted(found, key=lambda finding: -finding.share)


def limit_of(shares: Shares) -> str:
    """Which side limits a run: trainer, engines, both, or neither of them alone."""
    trainer, engines = shares.waits < _MUCH, shares.idle + shares.paused < _MUCH
    if trainer and engines:
        return "both"
    if trainer:
        return "trainer"
    return "engines" if engines else "neither"


def _of_time(run: RunData, shares: Shares) -> Iterator[Finding]:
    limit = limit_of(shares)
    takes_turns = run.config.get("rollout", {}).get("engine", {}).get("placement") == "colocated"
    if limit == "engines":
        yield Finding(
            share=shares.waits,
            what=f"the trainer waits {shares.waits:.0%} of the time, and the engines are busy",
            remedy="more engines (rollout.num_replicas), or shorter responses "
            "(rollout.max_response_tokens)",
        )
    elif limit == "trainer" and shares.idle >= _MUCH:
        yield Finding(
            share=shares.idle,
            what=f"the engines have nothing to do {shares.idle:.0%} of the time, as the trainer "
            f"takes its batches no faster (it waits {shares.waits:.0%})",
            remedy="more train workers (scaling.num_workers) or fewer engines; a faster step: "
            "train.packing, train.compile, larger train.micro_batch_tokens",
        )
    elif limit == "neither" and takes_turns:
        yield Finding(
            share=shares.waits,
            what=f"engines and trainer take turns: the trainer waits {shares.waits:.0%} of the "
            f"time, the engines are idle or asleep {shares.idle + shares.paused:.0%}",
            remedy="a GPU for the trainer alone (rollout.engine.placement: disaggregated) with "
            "mode: apr",
        )
    elif limit == "neither":
        yield _of_neither(run, shares)
    if shares.paused >= _SOME and not takes_turns:
        yield Finding(
            share=shares.paused,
            what=f"weight syncs stop the engines {shares.paused:.0%} of the time",
            remedy="train.weight_transport and train.weight_bucket_mb, or a sync every second "
            "step (partial_rollout.sync_every: 2)",
        )


def _of_neither(run: RunData, shares: Shares) -> Finding:
    """Both sides wait: for rewards, environments, a limit of the scheduler, or the tail."""
    what = (
        f"neither side is busy: the trainer waits {shares.waits:.0%} of the time, the engines have "
        f"nothing to do {shares.idle:.0%}"
    )
    waiting = [row for row in run.steps if row.get("inflight") is not None]
    due = {name: _mean(waiting, name) for name in ("unscored", "stepping", "inflight")}
    limits = Counter(row["limited_by"] for row in waiting if row.get("limited_by"))
    if due["unscored"] > due["inflight"]:
        what += f"; {due['unscored']:.0f} samples wait for their reward, as a rule"
        remedy = (
            "faster rewards: rollout.reward.concurrency, rollout.reward.num_workers, and "
            "partial_rollout.overlap_rewards: true"
        )
    elif due["stepping"] > due["inflight"]:
        what += f"; {due['stepping']:.0f} samples wait for their environment, as a rule"
        remedy = "faster environments: rollout.reward.concurrency, rollout.reward.num_workers"
    elif limits and limits.total() >= _MOSTLY * len(waiting):
        limit = limits.most_common(1)[0][0]
        what += f"; no prompt may start, as {limit}"
        remedy = f"a larger partial_rollout.{limit.removesuffix(' is reached')}, or mode: apr"
    else:
        remedy = (
            "the longest responses of a batch are waited for: mode: apr, a larger "
            "partial_rollout.oversampling_factor or max_staleness"
        )
    return Finding(share=min(shares.waits, shares.idle), what=what, remedy=remedy)


def _mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean([row.get(name) or 0 for row in rows] or [0])


def _of_start(summary: Mapping[str, Any]) -> Iterator[Finding]:
    wall_s, setup_s = summary["wall_s"] or 0.0, summary["setup_s"] or 0.0
    if wall_s and setup_s / wall_s >= _START_SHARE:
        yield Finding(
            share=setup_s / wall_s,
            what=f"the start took {setup_s:.0f} of {wall_s:.0f} s",
            remedy="more steps in a run: the start is paid once",
        )


_REMEDIES = {
    "stale": "a larger partial_rollout.max_staleness, a smaller oversampling_factor, or on_stale: "
    "wait",
    "masked": "a larger partial_rollout.max_staleness, or a smaller oversampling_factor",
    "restarted": "partial_rollout.after_interrupt: resume, which keeps the tokens",
    "surplus": "a smaller partial_rollout.oversampling_factor, or interrupt: weight_sync",
    "failed": "rewards and requests that fail: dropped.jsonl has them, the log of the run says why",
    "poison": "the prompts in poison.jsonl",
    "filtered": "prompts that are neither solved nor failed by all samples of a group, or a larger "
    "rollout.group_size",
    "lost": "parts that die: restarts.jsonl and resumes.jsonl have each time",
}


def _of_tokens(summary: Mapping[str, Any]) -> Iterator[Finding]:
    """Tokens that were generated and not trained."""
    generated = summary["tokens_generated"] or 0
    for reason, tokens in summary["tokens_discarded"].items():
        if generated and tokens / generated >= _SOME:
            yield Finding(
                share=tokens / generated,
                what=f"{tokens / generated:.0%} of the generated tokens were discarded: {reason}",
                remedy=_REMEDIES.get(reason, "none: they were under way at the end of the run"),
            )


def _of_samples(run: RunData) -> Iterator[Finding]:
    """Samples that were trained, and taught little."""
    groups: dict[tuple[int, str], list[float]] = {}
    for row in run.samples:
        if "group_id" in row:
            groups.setdefault((row["step"], row["group_id"]), []).append(row["reward"])
    of_several = [rewards for rewards in groups.values() if len(rewards) > 1]
    alike = sum(max(rewards) == min(rewards) for rewards in of_several)
    if of_several and alike / len(of_several) >= _MOSTLY:
        yield Finding(
            share=alike / len(of_several),
            what=f"in {alike / len(of_several):.0%} of the trained groups all samples have the "
            "same reward, so that their advantages are 0",
            remedy="partial_rollout.filter_zero_variance: true, prompts of another difficulty, or "
            "a larger rollout.group_size",
        )
    cut = sum(row.get("finish_reason") == "length" for row in run.samples)
    if run.samples and cut / len(run.samples) >= _MUCH:
        yield Finding(
            share=cut / len(run.samples),
            what=f"{cut / len(run.samples):.0%} of the trained responses were cut at "
            "rollout.max_response_tokens",
            remedy="a larger rollout.max_response_tokens, or algorithm.overlong_filter: true",
        )
