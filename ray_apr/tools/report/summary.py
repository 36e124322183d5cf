"""The figures of a run, computed from what it recorded, and the cross-checks of its sources.

Ratios and rates are of the time in which the run trained (`parts`): starting up counts for neither
side, nor does what lies between the parts of a run that was gone on with.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.run.failed_groups import failed_line, poison_line
from ray_apr.tools.report.load import Row, RunData, set_at, train_workers_at
from ray_apr.tools.report.parts import Window, parts_of, seconds_of, setup_s, training_windows

_MOST_END_STEPS = 5

_PLACES = ("tokens_trained", "tokens_buffered", "tokens_interrupted")


def summarize(run: RunData) -> dict[str, Any]:
    """Return the content of summary.json; what the run did not record is None."""
    final = run.final or {}
    windows = training_windows(run)
    rewards = finite(row["reward_mean"] for row in run.steps)
    at_ends = num_end_steps(len(rewards))
    staleness = trained_ages(run)
    tokens_generated = _counter(run, "tokens_generated")
    return {
        "mode": final.get("mode") or _setting(run, "partial_rollout", "mode"),
        "steps": len(run.steps),
        "parts": len(parts_of(run)),
        "wall_s": final.get("wall_s", _last_time_s(run)),
        "setup_s": setup_s(run),
        "reward_first": mean(rewards[:at_ends]),
        "reward_last": mean(rewards[-at_ends:]),
        "reward_parts": {name: _first_and_last(run, name) for name in reward_parts(run)},
        "held_out": _held_out(run),
        "samples_trained": len(run.samples),
        "samples_interrupted": _counter(run, "samples_interrupted"),
        "samples_resumed": _counter(run, "samples_resumed"),
        "tokens_generated": tokens_generated,
        "tokens_trained": final.get("tokens_trained", _tokens_in_loss(run)),
        "tokens_buffered": final.get("tokens_buffered"),
        "tokens_interrupted": final.get("tokens_interrupted"),
        "tokens_discarded": dict(final.get("tokens_discarded") or {}),
        "ledger_error": final.get("ledger_error"),
        "staleness_max": max(staleness, default=None),
        "staleness_mean": mean(staleness),
        "max_staleness": _largest_bound(run),
        "policy_version": final.get("policy_version", _last(run, "policy_version")),
        "num_replicas": final.get("num_replicas", engine_counts(run)[-1][1] or None),
        "num_train_workers": final.get("num_train_workers", train_workers_at(run, math.inf)),
        "generation_idle_ratio": _generation_idle_ratio(run, windows),
        "trainer_idle_ratio": _trainer_idle_ratio(run, windows),
        "weight_sync_s": _weight_sync(run),
        "rollout_tokens_per_s": _rate(_tokens_by_last_step(run), windows),
        "read_ahead_max": final.get("read_ahead_max"),
    }


def num_end_steps(num_steps: int) -> int:
    """Steps that `reward_first` and `reward_last` average over: 5, or half of a short run's, so
    that no step is in both; a run of one step has only that."""
    return max(1, min(_MOST_END_STEPS, num_steps // 2))


def reward_parts(run: RunData) -> list[str]:
    """Names of the figures that rewards told beside their number."""
    begin, end = "reward/", "_mean"
    keys = {key for row in run.steps for key in row if key.startswith(begin) and key.endswith(end)}
    return sorted(key[len(begin) : -len(end)] for key in keys)


def _first_and_last(run: RunData, name: str) -> dict[str, float | None]:
    means = finite(row.get(f"reward/{name}_mean") for row in run.steps)
    at_ends = num_end_steps(len(means))
    return {"first": mean(means[:at_ends]), "last": mean(means[-at_ends:])}


def _held_out(run: RunData) -> dict[str, float] | None:
    """Mean rewards of the first, last and best evaluation, with their versions; None of none."""
    rows = [row for row in run.evaluations if finite([row.get("reward_mean")])]
    if not rows:
        return None
    rows.sort(key=lambda row: row["policy_version"])
    best = max(rows, key=lambda row: row["reward_mean"])  # the earliest of those
    told: dict[str, float] = {}
    for name, row in (("first", rows[0]), ("last", rows[-1]), ("best", best)):
        told |= {name: row["reward_mean"], f"{name}_version": row["policy_version"]}
    return told


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write summary.json; numbers that JSON has no word for (NaN) become null."""
    text = json.dumps(_finite_only(summary), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def engine_names(run: RunData) -> list[str]:
    """Engines that appear in the timeline."""
    names = {row["actor"] for row in run.timeline if row["actor"].startswith("engine")}
    return sorted(names, key=lambda name: (len(name), name))


def covered_s(spans: Iterable[Window], window: Window) -> float:
    """Length of the union of spans inside a window, in seconds."""
    total, reached = 0.0, window[0]
    for span_start, span_end in sorted(spans):
        start, end = max(span_start, reached), min(span_end, window[1])
        if end > start:
            total, reached = total + end - start, end
    return total


def how_it_ended(run: RunData) -> str:
    """How a run ended before its time; empty where it did not."""
    final = run.final or {}
    status, reason = final.get("status", "ok"), final.get("error") or "no error was recorded"
    if status == "ok":
        return ""
    return f"the run was {reason}" if status == "stopped" else f"the run failed: {reason}"


def check_run(run: RunData, summary: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know: a failure, broken promises, sources that disagree."""
    warnings = [*filter(None, [how_it_ended(run)]), *run.warnings]
    bound, oldest = summary["max_staleness"], summary["staleness_max"]
    if bound is not None and oldest is not None and oldest > bound:
        warnings.append(f"staleness {oldest} was trained, above the bound of {bound}")
    if summary["ledger_error"]:
        warnings.append(f"the token ledger is off by {summary['ledger_error']} tokens")
    if not run.samples:
        warnings.append("no sample was trained")
    broken = [row["step"] for row in run.steps if not math.isfinite(row["reward_mean"])]
    if broken:
        warnings.append(f"the mean reward is no finite number in {len(broken)} steps")
    failed = (failed_line(run.dropped, summary["tokens_generated"]), poison_line(run.poison))
    warnings += filter(None, failed)
    return warnings + _disagreements(run, run.final or {})


def _disagreements(run: RunData, final: Row) -> list[str]:
    """Compare what final.json says with what the rows say."""
    seen = {
        "steps": len(run.steps),
        "samples_trained": len(run.samples),
        "tokens_trained": _tokens_in_loss(run),
    }
    warnings = [
        f"final.json says {key} = {final[key]}, the recorded rows say {value}"
        for key, value in seen.items()
        if key in final and final[key] != value
    ]
    steps = [row["step"] for row in run.steps]
    if len(set(steps)) != len(steps):
        warnings.append("metrics.jsonl holds some steps twice")
    interrupted = sum(1 for row in run.samples if row["num_interruptions"] > 0)
    if interrupted > final.get("samples_interrupted", interrupted):
        warnings.append(
            f"final.json says samples_interrupted = {final['samples_interrupted']}, but "
            f"{interrupted} trained samples were interrupted"
        )
    error = counted_error(final)
    if error is not None and "ledger_error" in final and error != final["ledger_error"]:
        warnings.append(
            f"final.json says ledger_error = {final['ledger_error']}, its counters give {error}"
        )
    return warnings


def counted_error(final: Row) -> int | None:
    """The ledger's error by the counters of ``final.json``; None where it lacks one."""
    if not all(key in final for key in ("tokens_generated", *_PLACES)):
        return None
    placed = sum(final[key] for key in _PLACES)
    error: int = final["tokens_generated"] - placed
    return error - sum((final.get("tokens_discarded") or {}).values())


def trained_ages(run: RunData) -> list[int]:
    """Staleness of each trained sample, by its oldest token in the loss; none without such."""
    return [int(row["staleness"]) for row in run.samples if row["staleness"] is not None]


def _largest_bound(run: RunData) -> int | None:
    """Of the staleness in any step; one that was gone on with may have had another one before."""
    name = "max_staleness"
    last = (run.final or {}).get(name, _setting(run, "partial_rollout", name))
    told = [set_at(run.ranks, row["step"], name, last) for row in run.steps]
    return max((bound for bound in told if bound is not None), default=last)


def finite(values: Iterable[Any]) -> list[float]:
    """Keep what is a finite number."""
    return [v for v in values if isinstance(v, int | float) and math.isfinite(v)]


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return statistics.fmean(values) if values else None


def _setting(run: RunData, section: str, key: str) -> Any:
    values = run.config.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return run.config.get(key) if value is None else value


def _tokens_in_loss(run: RunData) -> int:
    return sum(
        row.get("num_generated", row["num_tokens"]) - row.get("num_masked_tokens", 0)
        for row in run.samples
    )


def _last(run: RunData, key: str) -> Any:
    return run.steps[-1].get(key) if run.steps else None


def _last_time_s(run: RunData) -> float | None:
    """Wall time of a run that could not write it down: the last time that it recorded."""
    times = itertools.chain(
        (row["time_s"] for row in run.steps), (row["end_s"] for row in run.timeline)
    )
    return max(times, default=None)


def _counter(run: RunData, key: str) -> int | None:
    """A cumulative counter: its final value, else that of the last step."""
    return (run.final or {}).get(key, _last(run, key))


def spans_of(run: RunData, actor: str, what: str) -> list[Window]:
    """Begins and ends of what an actor did, in seconds."""
    return [
        (row["start_s"], row["end_s"])
        for row in run.timeline
        if row["actor"] == actor and row["what"] == what
    ]


def share_of(run: RunData, what: str, windows: Sequence[Window]) -> float | None:
    """Share of some time in which the engines did something, mean of them; None without engines."""
    names = engine_names(run)
    if not windows or not names:
        return None
    spans = [spans_of(run, name, what) for name in names]
    done_s = sum(covered_s(of_one, window) for of_one in spans for window in windows)
    counts = engine_counts(run)
    return done_s / sum(_engine_seconds(counts, window) for window in windows)


def _generation_idle_ratio(run: RunData, windows: Sequence[Window]) -> float | None:
    """1 - generating time of all engines / (their number x windows)."""
    generates = share_of(run, "generate", windows)
    return None if generates is None else 1.0 - generates


def engine_counts(run: RunData) -> list[tuple[float, int]]:
    """Numbers of engines that a run had at once, each with the time since when, in order.

    Each part begins with the number of its settings, or of `ranks.jsonl` where that has it. The
    timeline may have more engines: one that Serve starts in the place of another has a lane of its
    own.
    """
    scalings = sorted(run.scalings, key=lambda row: row["time_s"])
    own = _setting(run, "rollout", "num_replicas")
    first = scalings[0]["before"] if scalings else own or len(engine_names(run))
    counts = [
        (-math.inf, first),
        *((row["time_s"], own or first) for row in run.resumes),
        *((row["time_s"], row["num_engines"]) for row in run.ranks if "num_engines" in row),
        *((row["time_s"], row["after"]) for row in scalings),
    ]
    return sorted(counts, key=lambda count: count[0])


def _engine_seconds(counts: Sequence[tuple[float, int]], window: Window) -> float:
    """Number of engines x time, inside a window."""
    begin, end = window
    return sum(
        number * max(0.0, min(until, end) - max(since, begin))
        for (since, number), (until, _) in itertools.pairwise([*counts, (math.inf, 0)])
    )


def _trainer_idle_ratio(run: RunData, windows: Sequence[Window]) -> float | None:
    """Waiting time of the trainer / windows."""
    if not windows or not any(row["actor"] == "trainer" for row in run.timeline):
        return None
    waits = spans_of(run, "trainer", "wait")
    return sum(covered_s(waits, window) for window in windows) / seconds_of(windows)


def _weight_sync(run: RunData) -> dict[str, float | None]:
    synced = (row.get("weight_sync_s") for row in run.steps)
    times = [time_s for time_s in finite(synced) if time_s > 0]  # 0: no sync ended in that step
    return {
        "p50": statistics.median(times) if times else None,
        "max": max(times, default=None),
    }


def _tokens_by_last_step(run: RunData) -> int | None:
    """Tokens of the training time, which ends there: a run that was ended before its time may have
    generated for long after it. A part that came to no step has none; that of the ones before it
    goes to their ends."""
    if (run.final or {}).get("status", "ok") == "ok":
        return _counter(run, "tokens_generated")
    counts = (row.get("tokens_generated") for row in (*run.resumes, *run.steps[-1:]))
    return max((count for count in counts if count is not None), default=None)


def _rate(tokens: int | None, windows: Sequence[Window]) -> float | None:
    return None if tokens is None or not windows else tokens / seconds_of(windows)


def _finite_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite_only(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
