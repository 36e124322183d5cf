"""Two runs side by side: reward against wall time and against steps, figures, other settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_apr.tools.report.figures import SERIES, average_window, esc, figure, line, moving_average
from ray_apr.tools.report.html import number
from ray_apr.tools.report.load import RunData, dotted, load_run
from ray_apr.tools.report.page import page, table, warning_list
from ray_apr.tools.report.parts import seconds_of, training_windows
from ray_apr.tools.report.summary import check_run, finite, summarize


class Line(NamedTuple):
    """One line of a comparison, as text."""

    name: str
    first: str
    second: str
    ratio: str = ""
    """First divided by second."""


class Comparison(NamedTuple):
    """What two runs have in common, and what not."""

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
    ("samples_interrupted", "responses interrupted", ",.0f", False),
)
"""Key of the summary, name, format, whether a ratio says something."""
_OTHERWISE = "not set"
"""What a run has for a setting that only the other one has."""


def write_comparison(first: Path, second: Path, out: Path) -> Comparison:
    """Write the page that compares two run folders; returns what it says.

    Raises:
        ConfigError: If one is no run folder.
        RunFolderError: If one of their files is broken.
    """
    runs = [load_run(first), load_run(second)]
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
        _chart("Reward against steps", "optimizer step", "step", runs, labels),
        table(["", *labels, "ratio"], compared.figures),
        "<h2>Settings that differ</h2>",
        table(["", *labels], [row[:3] for row in compared.settings])
        if compared.settings
        else "<p>None.</p>",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    text = page(f"ray_apr: {labels[0]} against {labels[1]}", _subtitle(runs, labels), "".join(body))
    out.write_text(text, encoding="utf-8")
    return compared


def comparison_text(compared: Comparison) -> str:
    """The comparison for a terminal."""
    first, second = compared.labels
    lines = _aligned([Line("", first, second, "ratio"), *compared.figures])
    lines += ["", "  settings that differ" + ("" if compared.settings else ": none")]
    lines += _aligned(compared.settings)
    lines += [f"  note: {note}" for note in compared.notes]
    return "\n".join(lines)


def _aligned(rows: Sequence[Line]) -> list[str]:
    """Rows in columns."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [
        f"  {row.name:<{widths[0]}}  {row.first:>{widths[1]}}  {row.second:>{widths[2]}}  "
        f"{row.ratio:>{widths[3]}}".rstrip()
        for row in rows
    ]


def other_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Line]:
    """Settings that two runs do not have in common, by their dotted names.

    Args:
        first: Of one run, as in ``config.json``.
        second: Of the other.
    """
    ours, theirs = _as_text(first), _as_text(second)
    return [
        Line(name, ours.get(name, _OTHERWISE), theirs.get(name, _OTHERWISE))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
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
    if steps[0] == steps[1]:
        return []
    of_each = " and ".join(f"{label} {number(n)}" for label, n in zip(labels, steps, strict=True))
    return [f"the runs have different numbers of steps: {of_each}"]


def _figures(runs: Sequence[RunData], summaries: Sequence[dict[str, Any]]) -> list[Line]:
    rows = []
    training = [seconds_of(training_windows(run)) or None for run in runs]
    rows.append(_row("training window (s)", training[0], training[1], ",.1f", with_ratio=True))
    for key, name, form, with_ratio in _FIGURES:
        first, second = (summary[key] for summary in summaries)
        rows.append(_row(name, first, second, form, with_ratio=with_ratio))
    averages = [_averages(run) for run in runs]
    highest = [max(rewards) for of_run in averages if (rewards := finite(of_run))]
    if len(highest) == 2:
        goal = min(highest)  # both have reached it
        ours, theirs = map(_time_to, runs, averages, (goal, goal))
        rows.append(_row(f"time to reward {goal:.3f} (s)", ours, theirs, ",.1f", with_ratio=True))
    return rows


def _row(
    name: str, first: float | None, second: float | None, form: str, *, with_ratio: bool
) -> Line:
    ratio = f"{first / second:.2f}" if with_ratio and first is not None and second else ""
    return Line(name, number(first, form), number(second, form), ratio)


def _time_to(run: RunData, averages: Sequence[float], goal: float) -> float:
    """When the moving average of the reward first reached the goal, as it did."""
    pairs = zip(run.steps, averages, strict=True)
    return next(float(row["time_s"]) for row, value in pairs if value >= goal)


def _averages(run: RunData) -> list[float]:
    rewards = [float(row["reward_mean"]) for row in run.steps]
    return moving_average(rewards, average_window(len(rewards)))


def _labels(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    return names if names[0] != names[1] else [str(run.path) for run in runs]


def _subtitle(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    modes = [run.config.get("partial_rollout", {}).get("mode") for run in runs]
    named = [
        f"{label} ({mode})" if mode else label for label, mode in zip(labels, modes, strict=True)
    ]
    return " against ".join(named) + "; ratio = first / second"


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
