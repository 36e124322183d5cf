"""Runs side by side: reward against wall time and against steps, figures, other settings."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.names import dotted
from ray_apr.run.changes import is_digest
from ray_apr.run.folder import CHECKPOINTS
from ray_apr.tools.report.figures import SERIES, average_window, esc, figure, line, moving_average
from ray_apr.tools.report.html import number
from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.report.page import page, table, warning_list
from ray_apr.tools.report.parts import seconds_of, training_windows
from ray_apr.tools.report.summary import check_run, finite, mean, num_end_steps, summarize


class Line(NamedTuple):
    """One line of a comparison, as text."""

    name: str
    values: tuple[str, ...]
    """Of each run."""
    ratio: str = ""
    """Of two runs, first divided by second."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Of its row in a table."""
        return (self.name, *self.values, self.ratio)


class Comparison(NamedTuple):
    """What runs have in common, and what not."""

    labels: Sequence[str]
    """What the runs are called: by their names, or by their paths where those are the same."""
    figures: Sequence[Line]
    settings: Sequence[Line]
    """Those that differ."""
    notes: Sequence[str]
    """What makes the runs hard to compare, and what a reader must know of each."""


_FIGURES = (
    ("wall_s", "wall time (s)", ",.1f", True),
    ("setup_s", "of it starting (s)", ",.1f", True),
    ("steps", "steps", ",.0f", True),
    ("samples_trained", "samples trained", ",.0f", True),
    ("rollout_tokens_per_s", "tokens generated per second", ",.0f", True),
    ("tokens_generated", "tokens generated", ",.0f", True),
    ("generation_idle_ratio", "engines idle or paused", ".1%", False),
    ("trainer_idle_ratio", "trainer idle", ".1%", False),
    ("staleness_mean", "staleness, mean (steps)", ".2f", False),
    ("staleness_max", "staleness, max (steps)", ",.0f", False),
    ("samples_interrupted", "responses interrupted", ",.0f", False),
)
"""Key of the summary, name, format, whether a ratio says something."""
_OTHERWISE = "not set"
"""What a run has for a setting that only others have."""


def write_comparison(folders: Sequence[Path], out: Path) -> Comparison:
    """Write the page that compares run folders; returns what it says.

    Raises:
        ConfigError: If one is no run folder, or they are too many.
        RunFolderError: If one of their files is broken.
    """
    if len(folders) > len(SERIES):
        given = [str(folder) for folder in folders]
        raise ConfigError("RUN_DIR", given, f"are more than {len(SERIES)}; give fewer")
    runs = [load_run(folder) for folder in folders]
    summaries = [summarize(run) for run in runs]
    labels = _labels(runs)
    warnings = [
        f"{label}: {warning}"
        for label, run, summary in zip(labels, runs, summaries, strict=True)
        for warning in check_run(run, summary)
    ]
    compared = Comparison(
        labels,
        _figures(runs, summaries),
        other_settings(*(run.config for run in runs)),
        [*_notes(labels, summaries), *warnings],
    )
    body = [
        warning_list(compared.notes),
        _chart("Reward against wall time", "time since the run began (s)", "time_s", runs, labels),
        _chart("Reward against steps", "step", "step", runs, labels),
        table(_header(labels).cells, [row.cells for row in compared.figures]),
        "<h2>Settings that differ</h2>",
        table(["", *labels], [row.cells[:-1] for row in compared.settings])
        if compared.settings
        else "<p>None.</p>",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    text = page(f"ray_apr: {' against '.join(labels)}", _subtitle(runs, labels), "".join(body))
    out.write_text(text, encoding="utf-8")
    return compared


def comparison_text(compared: Comparison) -> str:
    """The comparison for a terminal."""
    lines = _aligned([_header(compared.labels), *compared.figures])
    lines += ["", "  settings that differ" + ("" if compared.settings else ": none")]
    lines += _aligned(compared.settings)
    lines += [f"  note: {note}" for note in compared.notes]
    return "\n".join(lines)


def _header(labels: Sequence[str]) -> Line:
    return Line("", tuple(labels), "ratio" if len(labels) == 2 else "")


def _aligned(rows: Sequence[Line]) -> list[str]:
    """Rows in columns."""
    widths = [max(map(len, column)) for column in zip(*(row.cells for row in rows), strict=True)]
    lines = []
    for row in rows:
        name, *others = row.cells
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(["", f"{name:<{widths[0]}}", *cells]).rstrip())
    return lines


def other_settings(*configs: Mapping[str, Any]) -> list[Line]:
    """Settings that runs do not have in common, by their dotted names.

    Args:
        configs: Of each run, as in ``config.json``.
    """
    of_each = [_as_text(config) for config in configs]

    def values(name: str) -> set[str | None]:
        found = {settings.get(name) for settings in of_each}
        return found - {None} if is_digest(name) else found

    return [
        Line(name, tuple(settings.get(name, _OTHERWISE) for settings in of_each))
        for name in dict.fromkeys(name for settings in of_each for name in settings)
        if len(values(name)) > 1 and name != CHECKPOINTS
    ]


def _as_text(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted name -> value as JSON, text without its quotes."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in dotted(config)
    }


def _notes(labels: Sequence[str], summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What makes the runs hard to compare."""
    steps = [summary["steps"] for summary in summaries]
    if len(set(steps)) == 1:
        return []
    of_each = " and ".join(f"{label} {number(n)}" for label, n in zip(labels, steps, strict=True))
    return [f"the runs have different numbers of steps: {of_each}"]


def _figures(runs: Sequence[RunData], summaries: Sequence[dict[str, Any]]) -> list[Line]:
    training = [seconds_of(training_windows(run)) or None for run in runs]
    rows = [_row("training window (s)", training, ",.1f", with_ratio=True)]
    for key, name, form, with_ratio in _FIGURES:
        rows.append(_row(name, [s[key] for s in summaries], form, with_ratio=with_ratio))
    for name, is_last in (("first", False), ("last", True)):
        means = tuple(_mean_reward(run, is_last=is_last) for run in runs)
        rows.append(Line(f"reward, {name} steps (at most 5; ± standard error)", means))
    held = [summary["held_out"] for summary in summaries]
    if any(held):
        last = [of_run and of_run["last"] for of_run in held]
        rows.append(_row("held-out reward, last evaluation", last, ".3f", with_ratio=False))
        best = (f"{h['best']:.3f}, version {h['best_version']}" if h else number(h) for h in held)
        rows.append(Line("held-out reward, best evaluation", tuple(best)))
    averages = [_whole_averages(run) for run in runs]
    highest = [max(rewards) for of_run in averages if (rewards := finite(of_run))]
    if len(highest) == len(runs):
        goal = min(highest)  # all have reached it
        times = [_training_s_to(goal, *of_run) for of_run in zip(runs, averages, strict=True)]
        rows.append(_row(f"training to reward {goal:.3f} (s)", times, ",.1f", with_ratio=True))
    return rows


def _row(name: str, values: Sequence[float | None], form: str, *, with_ratio: bool) -> Line:
    first, second, *more = values
    is_told = with_ratio and not more
    ratio = f"{first / second:.2f}" if is_told and first is not None and second else ""
    return Line(name, tuple(number(value, form) for value in values), ratio)


def _mean_reward(run: RunData, *, is_last: bool) -> str:
    """Of the first or the last steps, with the standard error of so many steps' mean."""
    rewards = finite(row["reward_mean"] for row in run.steps)
    at_end = num_end_steps(len(rewards))
    rewards = rewards[-at_end:] if is_last else rewards[:at_end]
    told = number(mean(rewards), ".3f")
    if len(rewards) < 2:
        return told
    return f"{told} ± {statistics.stdev(rewards) / len(rewards) ** 0.5:.3f}"


def _training_s_to(goal: float, run: RunData, averages: Sequence[float]) -> float:
    """Seconds of training until the moving average of the reward first reached the goal, as it
    did."""
    pairs = zip(run.steps, averages, strict=True)
    reached_s = next(float(row["time_s"]) for row, value in pairs if value >= goal)
    windows = training_windows(run)
    return seconds_of([(begin, min(end, reached_s)) for begin, end in windows if begin < reached_s])


def _averages(run: RunData) -> list[float]:
    rewards = [float(row["reward_mean"]) for row in run.steps]
    return moving_average(rewards, average_window(len(rewards)))


def _whole_averages(run: RunData) -> list[float]:
    """The same, with NaN for the first ones, which are of fewer steps: the very first of a single
    batch."""
    averages = _averages(run)
    num_partial = average_window(len(averages)) - 1
    return [math.nan] * len(averages[:num_partial]) + averages[num_partial:]


def _labels(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _subtitle(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    modes = [run.config.get("partial_rollout", {}).get("mode") for run in runs]
    named = [
        f"{label} ({mode})" if mode else label for label, mode in zip(labels, modes, strict=True)
    ]
    return " against ".join(named) + ("; ratio = first / second" if len(runs) == 2 else "")


def _chart(
    title: str, x_label: str, key: str, runs: Sequence[RunData], labels: Sequence[str]
) -> str:
    if not finite(row["reward_mean"] for run in runs for row in run.steps):
        return ""
    traces = []
    for color, label, run in zip(SERIES, labels, runs, strict=False):
        xs = [row[key] for row in run.steps]
        rewards = [float(row["reward_mean"]) for row in run.steps]
        named = esc(label)
        traces += [
            line(xs, rewards, f"{named}: each step", color, opacity=0.4, line={"width": 1}),
            line(xs, _averages(run), f"{named}: moving average", color, line={"width": 2.6}),
        ]
    return figure(title, traces, x_label=x_label, y_label="mean reward", height=360)
