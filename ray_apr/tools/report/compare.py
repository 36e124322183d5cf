"""Two runs side by side: reward against wall time and against steps, and a table of figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_apr.tools.report.figures import SERIES, average_window, esc, figure, line, moving_average
from ray_apr.tools.report.html import number
from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.report.page import page, table, warning_list
from ray_apr.tools.report.summary import check_run, finite, summarize, training_window


class Comparison(NamedTuple):
    """One line of the comparison, as text."""

    name: str
    first: str
    second: str
    ratio: str
    """First divided by second."""


_FIGURES = (
    ("wall_s", "wall time (s)", ",.1f", True),
    ("setup_s", "of it starting (s)", ",.1f", True),
    ("steps", "optimizer steps", ",.0f", True),
    ("samples_trained", "samples trained", ",.0f", True),
    ("reward_first", "reward, first steps (at most 5)", ".3f", False),
    ("reward_last", "reward, last steps (at most 5)", ".3f", False),
    ("rollout_tokens_per_s", "tokens generated per second", ",.0f", True),
    ("tokens_generated", "tokens generated", ",.0f", True),
    ("generation_idle_ratio", "engines idle", ".1%", False),
    ("trainer_idle_ratio", "trainer idle", ".1%", False),
    ("staleness_mean", "staleness, mean (steps)", ".2f", False),
    ("staleness_max", "staleness, max (steps)", ",.0f", False),
    ("samples_interrupted", "samples interrupted", ",.0f", False),
)
"""Key of the summary, name, format, whether a ratio says something."""


def write_comparison(first: Path, second: Path, out: Path) -> list[Comparison]:
    """Write the page that compares two run folders; returns its table.

    Raises:
        ConfigError: If one is no run folder.
        RunFolderError: If one of their files is broken.
    """
    runs = [load_run(first), load_run(second)]
    summaries = [summarize(run) for run in runs]
    rows = _rows(runs, summaries)
    labels = _labels(runs, summaries)
    warnings = [
        f"{label}: {warning}"
        for label, run, summary in zip(labels, runs, summaries, strict=True)
        for warning in check_run(run, summary)
    ]
    body = [
        warning_list(warnings),
        _chart("Reward against wall time", "time since the run began (s)", "time_s", runs, labels),
        _chart("Reward against steps", "optimizer step", "step", runs, labels),
        table(["", *labels, "ratio"], rows),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    text = page(f"ray_apr: {labels[0]} against {labels[1]}", _subtitle(runs), "".join(body))
    out.write_text(text, encoding="utf-8")
    return rows


def comparison_table(rows: Sequence[Comparison]) -> str:
    """The table as plain text."""
    head = Comparison("", "first", "second", "ratio")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    return "\n".join(
        f"  {row.name:<{widths[0]}}  {row.first:>{widths[1]}}  {row.second:>{widths[2]}}  "
        f"{row.ratio:>{widths[3]}}"
        for row in (head, *rows)
    )


def _rows(runs: Sequence[RunData], summaries: Sequence[dict[str, Any]]) -> list[Comparison]:
    rows = []
    windows = [training_window(run) for run in runs]
    training = [None if window is None else window[1] - window[0] for window in windows]
    rows.append(_row("training window (s)", training[0], training[1], ",.1f", with_ratio=True))
    for key, name, form, with_ratio in _FIGURES:
        first, second = (summary[key] for summary in summaries)
        rows.append(_row(name, first, second, form, with_ratio=with_ratio))
    goal = _common_reward(summaries)
    if goal is not None:
        times = [_time_to(run, goal) for run in runs]
        rows.append(
            _row(f"time to reward {goal:.3f} (s)", times[0], times[1], ",.1f", with_ratio=True)
        )
    return rows


def _row(
    name: str, first: float | None, second: float | None, form: str, *, with_ratio: bool
) -> Comparison:
    ratio = f"{first / second:.2f}" if with_ratio and first is not None and second else ""
    return Comparison(name, number(first, form), number(second, form), ratio)


def _common_reward(summaries: Sequence[dict[str, Any]]) -> float | None:
    """The lower of both last rewards: what both runs reached."""
    rewards = finite(summary["reward_last"] for summary in summaries)
    return min(rewards) if len(rewards) == 2 else None


def _time_to(run: RunData, goal: float) -> float | None:
    """When the moving average of the reward first reached the goal."""
    averages = _averages(run)
    return next(
        (row["time_s"] for row, value in zip(run.steps, averages, strict=True) if value >= goal),
        None,
    )


def _averages(run: RunData) -> list[float]:
    rewards = [float(row["reward_mean"]) for row in run.steps]
    return moving_average(rewards, average_window(len(rewards)))


def _labels(runs: Sequence[RunData], summaries: Sequence[dict[str, Any]]) -> list[str]:
    modes = [str(summary["mode"]) for summary in summaries]
    if modes[0] != modes[1]:
        return modes
    names = [run.name for run in runs]
    return names if names[0] != names[1] else [f"{names[0]} (first)", f"{names[1]} (second)"]


def _subtitle(runs: Sequence[RunData]) -> str:
    return " against ".join(run.name for run in runs) + "; ratio = first / second"


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
