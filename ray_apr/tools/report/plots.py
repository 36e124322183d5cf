"""The charts of one run: what was learned, on how old data, and where the time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from ray_apr.tools.report.figures import (
    BAD,
    SERIES,
    SOFT,
    average_window,
    empty,
    esc,
    figure,
    line,
    moving_average,
    note_of_part,
)
from ray_apr.tools.report.load import RunData
from ray_apr.tools.report.summary import finite, reward_parts, trained_ages

_NUM_LENGTH_BINS = 24
_MAX_PARTS = 12
"""Figures of rewards that have a chart; metrics.jsonl has all."""
_STEP = "step"
_SMALL_PX = 230

STEP_PARTS = {
    "trainer_wait_s": ("waits for data", "#a9b3bf"),
    "trainer_step_s": ("trains", "#2b9a66"),
    "weight_wait_s": ("waits for a sync", "#e07b18"),
}
"""Column of metrics.jsonl -> (what the trainer does, colour)."""


def reward_chart(run: RunData) -> str:
    """Mean reward of each step, with a moving average."""
    rewards = _column(run, "reward_mean")
    if not finite(rewards):
        return empty("Reward", "no step was recorded")
    steps, window = _steps(run), average_window(len(rewards))
    traces = [
        line(steps, rewards, "each step", SERIES[0], opacity=0.45, line={"width": 1}),
    ]
    if len(rewards) > window:
        average = moving_average(rewards, window)
        name = f"mean of the last {window} steps"
        traces.append(line(steps, average, name, SERIES[0], line={"width": 2.6}))
    return figure("Reward", traces, x_label=_STEP, y_label="mean reward of a batch", height=340)


def staleness_chart(run: RunData, bound: int | None) -> str:
    """How many samples were trained at which staleness."""
    title = "Staleness of the trained samples"
    counts = Counter(trained_ages(run))
    if not counts:
        return empty(title, "no sample was trained")
    total, ages = sum(counts.values()), sorted(counts)
    bars = go.Bar(
        x=ages,
        y=[counts[age] for age in ages],
        text=[f"{counts[age] / total:.1%}" for age in ages],
        textposition="outside",
        cliponaxis=False,
        marker={"color": [BAD if bound is not None and a > bound else SERIES[0] for a in ages]},
        hovertemplate="staleness %{x}: %{y} samples<extra></extra>",
    )
    layout: dict[str, Any] = {}
    if bound is not None:
        at = bound + 0.5
        ends = {"x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper"}
        layout["shapes"] = [
            {"type": "line", "line": {"dash": "dash", "width": 1, "color": SOFT}, **ends}
        ]
        layout["annotations"] = [
            {"x": at, "y": 1, "yref": "paper", "text": f"bound {bound}", "showarrow": False}
        ]
    return figure(
        title,
        [bars],
        x_label="staleness (policy versions between the oldest token in the loss and its training)",
        y_label="samples",
        hovermode="closest",
        xaxis_range=[-0.6, max(*counts, bound or 0) + 0.75],
        **layout,
    )


def length_chart(run: RunData) -> str:
    """Response lengths, of samples that were interrupted and of those that were not (log scale)."""
    title = "Response length of the trained samples"
    lengths: dict[bool, list[int]] = {False: [], True: []}
    for row in run.samples:
        lengths[row["num_interruptions"] > 0].append(int(row["num_tokens"]))
    longest = max((max(values, default=0) for values in lengths.values()), default=0)
    if not longest:
        return empty(title, "no sample was trained")
    size = max(1, math.ceil((longest + 1) / _NUM_LENGTH_BINS))
    traces = []
    names = {False: "never interrupted", True: "interrupted and resumed"}
    for color, (was_cut, values) in zip(SERIES, lengths.items(), strict=False):
        bins = Counter(length // size for length in values)
        where = sorted(bins)
        bar = go.Bar(
            x=[(i + 0.5) * size for i in where],
            y=[bins[i] for i in where],
            name=f"{names[was_cut]} ({len(values):,})",
            marker={"color": color},
            customdata=[f"{i * size} to {i * size + size - 1} tokens" for i in where],
            hovertemplate="%{customdata}: %{y} samples",
        )
        traces.append(bar)
    return figure(
        title,
        traces,
        x_label="response length (tokens)",
        y_label="samples (log scale)",
        yaxis_type="log",
        yaxis_dtick=1,
        hovermode="closest",
        showlegend=True,
    )


def step_time_chart(run: RunData) -> str:
    """What a step's time was spent on."""
    title = "Where a step's time goes"
    if not run.steps:
        return empty(title, "no step was recorded")
    traces = [
        go.Scatter(
            x=_steps(run),
            y=[max(0.0, v) if math.isfinite(v) else 0.0 for v in _column(run, key)],
            name=what,
            mode="lines",
            line={"width": 0, "shape": "hvh"},
            fillcolor=color,
            stackgroup="parts",
            hovertemplate="%{y:.2f} s",
        )
        for key, (what, color) in STEP_PARTS.items()
    ]
    return figure(title, traces, x_label=_STEP, y_label="time (s)")


def queue_chart(run: RunData) -> str:
    """Samples in the engines, held interrupted, and waiting in the buffer, at the end of a step."""
    names = {"inflight": "in flight", "held": "interrupted, held", "buffered": "in the buffer"}
    traces = _lines(run, names)
    return figure("Samples alive", traces, x_label=_STEP, y_label="samples") if traces else ""


_SMALL = {
    "loss": ("Loss", "loss"),
    "grad_norm": ("Gradient norm, before clipping", "L2 norm"),
    "kl_k3": ("Behavior against proximal policy", "KL, k3 (nats a token)"),
    "importance_weight_mean": ("Importance weight", "mean weight"),
    "response_tokens_mean": ("Response length", "mean (tokens)"),
    "reward_std": ("Spread of rewards", "standard deviation"),
}


def health_charts(run: RunData) -> str:
    """Small charts of what shows a run going wrong."""
    return _pairs(
        figure(title, traces, x_label=_STEP, y_label=y_label, height=_SMALL_PX)
        for key, (title, y_label) in _SMALL.items()
        if (traces := _lines(run, {key: title}))
    )


def reward_part_charts(run: RunData) -> str:
    """A small chart of each figure that rewards told: mean, least and greatest of a batch."""
    names = reward_parts(run)
    note = note_of_part(min(len(names), _MAX_PARTS), len(names), "charts", "metrics.jsonl")
    charts = _pairs(
        figure(name, traces, x_label=_STEP, y_label="of a batch", height=_SMALL_PX)
        for name in names[:_MAX_PARTS]
        if (traces := _lines(run, {f"reward/{name}_{w}": w for w in ("mean", "min", "max")}))
    )
    return f"<h2>Parts of the reward</h2>{note}{charts}" if charts else ""


def _steps(run: RunData) -> list[int]:
    return [row["step"] for row in run.steps]


def _column(run: RunData, key: str) -> list[float]:
    """A column of metrics.jsonl; NaN where a row has no number."""
    values = [row.get(key) for row in run.steps]
    return [float(v) if isinstance(v, int | float) else math.nan for v in values]


def _lines(run: RunData, names: dict[str, str]) -> list[go.Scatter]:
    """A line for each column (-> name) that has a finite number."""
    columns = [(esc(name), _column(run, key)) for key, name in names.items()]
    return [
        line(_steps(run), values, name, color)
        for color, (name, values) in zip(SERIES, columns, strict=False)
        if finite(values)
    ]


def _pairs(charts: Iterable[str]) -> str:
    text = "".join(charts)
    return f'<div class="pair">{text}</div>' if text else ""
