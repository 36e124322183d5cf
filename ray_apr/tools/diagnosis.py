"""What held a run back, by how much, and which setting to change.

All of it is read from the run folder, of a run that goes on, too.

What the trainer waits for samples has three causes, which are told apart by what the engines could
do at most: had they never been idle, a step would be shorter by the share that they are idle; had
no sync stopped them, by the share of that; the rest is the time that generating takes.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.run.failed_groups import is_failed
from ray_apr.tools.report.load import Row, RunData
from ray_apr.tools.report.summary import summarize
from ray_apr.tools.room import lacks
from ray_apr.tools.shares import Shares
from ray_apr.tools.simulator.measured import reward_s_of

_MUCH, _SOME = 0.10, 0.03
"""Shares from which on a side waits, and something else is worth a word."""
_MOSTLY = 0.5
_START_SHARE = 0.25
_MODE = "partial_rollout.mode"
_NOTHING = "nothing: what helps is set already"

Part = str | tuple[str, Any]
"""Of a remedy: words, or a dotted setting and the value to give it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that cost time or samples."""

    share: float
    """Of the time, of the tokens or of the samples: what `what` says."""
    what: str
    remedy: str


def findings(run: RunData, shares: Shares) -> list[Finding]:
    """What held a run back: what costs time, what costs tokens and samples, the start.

    Args:
        run: What it recorded.
        shares: Its `shares_of`.

    Returns:
        Of time and of samples each the largest share first. Time has the share of it in which the
        trainer waits for that reason, or, where the trainer is the limit, the engines do.
    """
    summary = summarize(run)
    of_samples = [*_of_tokens(run, summary), *_of_samples(run)]
    return [
        *_by_share(_of_time(run, shares)), *_by_share(of_samples), *_of_start(summary)
    ]  # fmt: skip


def _by_share(found: Iterator[Finding] | list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: -finding.share)


def _remedy(run: RunData, *parts: Part) -> str:
    """What to change, without settings that have their value already."""
    said = []
    for part in parts:
        if isinstance(part, str):
            said.append(part)
        elif _setting(run, part[0]) != part[1]:
            value = part[1] if isinstance(part[1], str) else json.dumps(part[1])
            said.append(f"{'mode' if part[0] == _MODE else part[0]}: {value}")
    *others, last = said or [_NOTHING]
    return f"{', '.join(others)}, or {last}" if others else last


def _setting(run: RunData, name: str) -> Any:
    """A setting by its dotted name; None where `config.json` does not tell it."""
    value: Any = run.config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# -- time ------------------------------------------------------------------------------------------


def _of_time(run: RunData, shares: Shares) -> Iterator[Finding]:
    if shares.handed >= _MUCH:
        yield _of_hand_over(shares)
    if shares.saves >= _SOME:
        yield Finding(
            share=shares.saves,
            what=f"checkpoints hold the trainer up {shares.told(shares.saves)} of the time: each "
            "waits until the one before is durable",
            remedy="a larger train.checkpoint_every",
        )
    shares_gpus = _setting(run, "rollout.engine.placement") == "colocated"
    takes_turns = shares_gpus and _setting(run, "rollout.engine.sleep") is not False
    starves, idle = shares.starves, shares.idle
    if starves < _MUCH:
        starves = 0.0
        if idle - shares.saves >= _MUCH:
            yield Finding(
                share=idle,
                what=f"the engines have nothing to do {shares.told(idle)} of the time, as the "
                f"trainer takes its batches no faster (it waits {shares.starves:.0%} for samples)",
                remedy=_remedy(
                    run, _more(run, "train workers"), *_fewer_engines(run),
                    *_packed(run), *_compiled(run), "larger train.micro_batch_tokens",
                ),
            )  # fmt: skip
    elif takes_turns and idle + shares.paused >= _MUCH:
        yield Finding(
            share=starves,
            what=f"engines and trainer take turns: the trainer waits {shares.told(starves)} of the "
            f"time, the engines are idle or asleep {idle + shares.paused:.0%}",
            remedy="a GPU for the trainer alone: "
            + _remedy(run, ("rollout.engine.placement", "disaggregated"), (_MODE, "apr")),
        )
        return
    by_idle = min(starves, idle)
    by_syncs = (
        0.0 if takes_turns else min(starves - by_idle, max(0.0, shares.paused - shares.syncs))
    )
    by_speed = starves - by_idle - by_syncs
    if by_idle >= _SOME:
        yield _of_idle_engines(run, shares, by_idle)
    if by_speed >= _SOME:
        shorter = "shorter responses (rollout.max_response_tokens)"
        yield Finding(
            share=by_speed,
            what=f"the trainer waits for samples {shares.told(by_speed)} of the time while "
            "the engines are busy",
            remedy=_remedy(run, _more(run, "engines"), *([] if _cut(run) >= _MUCH else [shorter])),
        )
    if not takes_turns and shares.syncs + by_syncs >= _SOME:
        yield _of_syncs(run, shares, shares.syncs + by_syncs, shares_gpus=shares_gpus)


def _more(run: RunData, parts: str) -> str:
    """Advice to have more engines or train workers; where there is no room, what that takes."""
    if parts == "engines":
        lacking, setting = lacks(run, engines=1), "rollout.num_replicas"
    else:
        lacking, setting = lacks(run, workers=1), "scaling.num_workers"
    more = f"more {parts} ({setting})"
    return more if lacking is None else f"a machine with more {lacking}, for {more}"


def _fewer_engines(run: RunData) -> list[Part]:
    return [] if _setting(run, "rollout.num_replicas") == 1 else ["fewer engines"]


def _packed(run: RunData) -> list[Part]:
    is_packed = _setting(run, "train.packing") == "auto" and _setting(run, "scaling.use_gpu")
    return [] if is_packed else [("train.packing", "packed")]


def _compiled(run: RunData) -> list[Part]:
    selective = _setting(run, "train.activation_checkpointing") == "selective"
    on_cpu = _setting(run, "scaling.use_gpu") is False  # there it makes tiny models no faster
    is_compiled = _setting(run, "train.compile") == "auto"  # on GPUs
    return [] if selective or on_cpu or is_compiled else [("train.compile", True)]


def _of_hand_over(shares: Shares) -> Finding:
    num_steps = sum(wait.has_batch for wait in shares.waits)
    return Finding(
        share=shares.handed,
        what=f"the trainer waits {shares.told(shares.handed)} of the time although a whole "
        f"batch lies in the buffer (at {num_steps} of {len(shares.waits)} steps): Ray Data "
        "reads it, and its samples are fetched",
        remedy="no setting: look whether other processes keep the CPU cores busy, those of "
        "engines and rewards among them; a larger train.batch_size pays it less often",
    )


def _of_syncs(run: RunData, shares: Shares, share: float, *, shares_gpus: bool) -> Finding:
    transport: tuple[Part, ...] = (
        "train.weight_transport and train.weight_bucket_mb",
        ("partial_rollout.overlap_sync", True),
    )
    return Finding(
        share=share,
        what=f"weight syncs cost {shares.told(share)} of the time: the trainer is in them "
        f"{shares.syncs:.0%} of it, the engines stop {shares.paused:.0%}",
        remedy=_remedy(run, *transport[shares_gpus:], *_less_often(run)),
    )


def _less_often(run: RunData) -> list[Part]:
    """Fewer syncs, as far as the bound of the staleness lets them be."""
    every, bound = (_setting(run, f"partial_rollout.{n}") for n in ("sync_every", "max_staleness"))
    most = (bound or 0) + 1
    return [] if (every or 1) >= most else [f"a larger partial_rollout.sync_every (at most {most})"]


def _of_idle_engines(run: RunData, shares: Shares, share: float) -> Finding:
    """Both sides wait: for rewards, environments, a limit of the scheduler, or the tail.

    Which one, is read from the rows at whose end the wait for samples begins.
    """
    what = (
        f"neither side is busy {shares.told(share)} of the time: the trainer waits for samples, "
        "and engines have nothing to do"
    )
    waits = [wait for wait in shares.waits if not wait.has_batch and wait.seconds > 0]
    told = [wait.before for wait in waits if wait.before.get("inflight") is not None]
    due = {name: _mean(told, name) for name in ("unscored", "stepping", "inflight")}
    limits = Counter(row["limited_by"] for row in told if row.get("limited_by"))
    parts: tuple[Part, ...]
    each_s = reward_s_of(run)
    if due["unscored"] > due["inflight"] and _take_long(run, shares, each_s):
        what += f"; {due['unscored']:.0f} samples wait for their reward, as a rule"
        what += f", which takes {each_s:.2g} s" if each_s else ""
        parts = (
            "faster rewards: a larger rollout.reward.concurrency or rollout.reward.num_workers",
            ("partial_rollout.overlap_rewards", True),
        )
    elif due["stepping"] > due["inflight"]:
        what += f"; {due['stepping']:.0f} samples wait for their environment, as a rule"
        parts = (
            "faster environments: a larger rollout.reward.concurrency or "
            "rollout.reward.num_workers",
        )
    elif limits and limits.total() >= _MOSTLY * len(told):
        limit = limits.most_common(1)[0][0]
        what += f"; when such a wait begins, no prompt may start, as a rule: {limit}"
        parts = (*_against(run, limit), (_MODE, "apr"))
    else:
        what += "; the longest responses of a batch are waited for"
        parts = ((_MODE, "apr"), *_more_samples(run, "oversampling_factor or max_staleness"))
    return Finding(share=share, what=what, remedy=_remedy(run, *parts))


def _take_long(run: RunData, shares: Shares, reward_s: float) -> bool:
    """Whether rewards of so many seconds can be what a run waits for; True where it is unknown."""
    at_once, batch = _setting(run, "rollout.reward.concurrency"), _setting(run, "train.batch_size")
    if not reward_s or not at_once or not batch:
        return True
    batch *= _setting(run, "partial_rollout.batches_per_step") or 1
    return bool(reward_s * max(1.0, batch / at_once) * len(shares.waits) >= _MUCH * shares.seconds)


def _against(run: RunData, limit: str) -> tuple[Part, ...]:
    """What moves a limit of the scheduler: of its settings, or of a rule of admission."""
    name = limit.removesuffix(" is reached")
    if name in ("oversampling_factor", "max_staleness"):
        return _more_samples(run, name)
    if name == "max_live_batches":
        return (f"a larger partial_rollout.{name}",)
    if name == "interrupt":
        return (("partial_rollout.after_interrupt", "resume"),)
    return (("partial_rollout.admission", "stream"),)


def _more_samples(run: RunData, names: str) -> tuple[Part, ...]:
    """Advice to keep more samples under generation, which the bound of staleness has to let be.

    Args:
        run: What it recorded.
        names: Of the settings that do it, or one of them.
    """
    partial = _setting(run, "partial_rollout") or {}
    if partial.get("mode") == "sync":
        return ()  # it has neither
    factor, bound = partial.get("oversampling_factor", 1.0), partial.get("max_staleness", 1)
    restarts = partial.get("interrupt") == "batch_full" and partial["after_interrupt"] != "resume"
    if factor >= bound + 1 and not restarts:  # it cannot be larger
        return ("a larger partial_rollout.max_staleness, and oversampling_factor with it",)
    return (f"a larger partial_rollout.{names}",)


def _mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean([row.get(name) or 0 for row in rows] or [0])


def _of_start(summary: Mapping[str, Any]) -> Iterator[Finding]:
    wall_s, setup_s = summary["wall_s"] or 0.0, summary["setup_s"] or 0.0
    parts = summary["parts"]
    start = "the start" if parts == 1 else f"the starts of its {parts} parts"
    if wall_s and setup_s / wall_s >= _START_SHARE:
        yield Finding(
            share=setup_s / wall_s,
            what=f"{start} took {setup_s:.0f} of {wall_s:.0f} s",
            remedy="more steps in a run: the start is paid once"
            + ("" if parts == 1 else ", and once more each time that it is gone on with"),
        )


# -- tokens and samples ----------------------------------------------------------------------------

_REMEDIES: Mapping[str, tuple[Part, ...]] = {
    "stale": (
        "a larger partial_rollout.max_staleness", "a smaller oversampling_factor",
        ("partial_rollout.on_stale", "wait"),
    ),
    "masked": ("a larger partial_rollout.max_staleness", "a smaller oversampling_factor"),
    "restarted": (("partial_rollout.after_interrupt", "resume"),),
    "surplus": (
        "a smaller partial_rollout.oversampling_factor",
        ("partial_rollout.interrupt", "weight_sync"),
    ),
    "failed": (
        "the reward, step or request that fails: `error` of its group's row in dropped.jsonl",
    ),
    "poison": ("the prompts in poison.jsonl",),
    "filtered": (
        "prompts that are neither solved nor failed by all samples of a group",
        "a larger rollout.group_size",
    ),
    "lost": ("parts that die: restarts.jsonl and resumes.jsonl have each time",),
}  # fmt: skip
_AT_THE_END = ("none: they were under way at the end of the run",)


def _of_tokens(run: RunData, summary: Mapping[str, Any]) -> Iterator[Finding]:
    """Tokens that were generated and not trained."""
    generated = summary["tokens_generated"] or 0
    is_least = _setting(run, "partial_rollout.oversampling_factor") == 1
    for reason, tokens in summary["tokens_discarded"].items():
        parts: Sequence[Part] = _REMEDIES.get(reason, _AT_THE_END)
        if is_least:
            parts = [part for part in parts if not str(part).endswith("oversampling_factor")]
        if generated and tokens / generated >= _SOME:
            yield Finding(
                share=tokens / generated,
                what=f"{tokens / generated:.0%} of the generated tokens were discarded: {reason}",
                remedy=_remedy(run, *parts) + _last_failure(run, reason),
            )


def _last_failure(run: RunData, reason: str) -> str:
    errors = [row["error"] for row in run.dropped if is_failed(row) and "error" in row]
    return f"; the last: {errors[-1]}" if errors and reason == "failed" else ""


def _of_samples(run: RunData) -> Iterator[Finding]:
    """Samples that were trained, and taught little."""
    groups: dict[tuple[int, str], list[float]] = {}
    for row in run.samples:
        if "group_id" in row:
            groups.setdefault((row["step"], row["group_id"]), []).append(row["reward"])
    of_several = [rewards for rewards in groups.values() if len(rewards) > 1]
    alike = sum(max(rewards) == min(rewards) for rewards in of_several)
    is_own = ":" in (_setting(run, "algorithm.advantage") or "")  # which may not compare them
    if of_several and not is_own and alike / len(of_several) >= _MOSTLY:
        yield Finding(
            share=alike / len(of_several),
            what=f"in {alike / len(of_several):.0%} of the trained groups all samples have the "
            "same reward, which then tells none of them apart",
            remedy=_remedy(
                run,
                ("partial_rollout.filter_zero_variance", True),
                "prompts of another difficulty",
                "a larger rollout.group_size",
            ),
        )
    cut = _cut(run)
    if cut >= _MUCH:
        yield Finding(
            share=cut,
            what=f"{cut:.0%} of the trained responses were cut at rollout.max_response_tokens",
            remedy=_remedy(
                run, "a larger rollout.max_response_tokens", ("algorithm.overlong_filter", True)
            ),
        )


def _cut(run: RunData) -> float:
    """Share of the trained responses that were cut at their budget."""
    cut = sum(row.get("finish_reason") == "length" for row in run.samples)
    return cut / len(run.samples) if run.samples else 0.0
