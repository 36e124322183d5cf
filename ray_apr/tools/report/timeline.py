"""The timeline: a lane for each engine and for the trainer, with what it did and waited for.

One figure has the whole run in columns, which the states share as they share the time. The other
has each span of a run, or of a long run's middle, where it opens and a reader goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ray_apr.tools.report.figures import esc, figure, note_of_part
from ray_apr.tools.report.load import Row, RunData
from ray_apr.tools.report.parts import training_windows
from ray_apr.tools.report.summary import engine_names

DETAIL_S = 20.0
"""What the figure of spans shows at first, in seconds."""

STATES = {
    "generate": ("engine generates", "#3b78e7"),
    "paused": ("engine paused for a weight sync, or the trainer's turn", "#d93f49"),
    "train": ("trainer trains", "#2b9a66"),
    "sync": ("trainer syncs weights", "#e07b18"),
    "checkpoint": ("trainer waits for a checkpoint", "#8452cf"),
    "write": ("checkpoint is written", "#c3a5ec"),
    "wait": ("trainer waits for a batch", "#a9b3bf"),
    "switch": ("trainer takes its turn on shared GPUs", "#8f7f55"),
    "idle": ("engine idle", "#a9b3bf"),
    "score": ("rewards are computed", "#c98a2b"),
    "answer": ("environment answers", "#2b8f9a"),
    "start": ("engine starts", "#9a86b8"),
    "load": ("trainer loads the model", "#b79ad6"),
    "compile": ("trainer compiles", "#77629a"),
}
"""State -> (legend, colour), in the order of stacking from the bottom."""

_OTHER = "#8f7f55"
_LANE_PX, _FRAME_PX, _LANE = 42, 150, 0.76
_NUM_COLUMNS = 240
_MAX_LANES = 17
_MAX_SPANS = 20_000
"""Of a figure: with five times as many, a browser took three times as long to draw a page."""


def timeline_figures(run: RunData) -> str:
    """The whole run in shares, and its spans."""
    lanes, num_lanes = _lanes(run)
    if not lanes:
        return '<p class="empty">no span was recorded in timeline.jsonl</p>'
    spans = [row for row in run.timeline if row["actor"] in lanes]
    seen = {row["what"] for row in spans}
    states = [what for what in STATES if what in seen] + sorted(seen - STATES.keys())
    end = max(row["end_s"] for row in spans)
    shares = _shares(spans, end or 1.0)
    whole = [_columns(what, shares, lanes, (end or 1.0) / _NUM_COLUMNS) for what in states]
    windows = training_windows(run) or [(0.0, end)]
    first, last = max(windows, key=lambda window: window[1] - window[0])
    start = max(0.0, (first + last - DETAIL_S) / 2)
    near = sorted(spans, key=lambda row: abs(row["start_s"] - start))[:_MAX_SPANS]
    reach = min(row["start_s"] for row in near), max(row["end_s"] for row in near)
    detail = [_spans(what, near, lanes) for what in states]
    steps = [row for row in run.steps if reach[0] <= row["time_s"] <= reach[1]]
    layout: dict[str, Any] = {
        "x_label": "time since the run began (s)",
        "height": _FRAME_PX + len(lanes) * _LANE_PX,
        "hovermode": "closest",
        "showlegend": True,
        "yaxis": {
            "tickvals": list(range(len(lanes))),
            "ticktext": [esc(_short(name)) for name in lanes],
            "range": [len(lanes) - 0.5, -0.5],
            "fixedrange": True,
        },
    }
    shown: dict[str, Any] = {"xaxis_range": [start, min(end, start + DETAIL_S)]}
    note = note_of_part(len(lanes), num_lanes, "lanes", "timeline.jsonl")
    whole_run = figure(
        "The whole run: share of time in each state", whole, barmode="overlay", **layout
    )
    each_span = figure(
        f"Each span from {reach[0]:.0f} to {reach[1]:.0f} s: drag to zoom, double click for all",
        [*detail, _step_ends(steps, len(lanes))],
        **shown,
        **layout,
    )
    return note + whole_run + each_span


def _lanes(run: RunData) -> tuple[list[str], int]:
    """The lanes that are shown, and how many there are."""
    known = engine_names(run)
    others = {row["actor"] for row in run.timeline} - set(known) - {"trainer"}
    trainer = [row["actor"] for row in run.timeline if row["actor"] == "trainer"][:1]
    lanes = [*known, *sorted(others)]
    return lanes[: _MAX_LANES - 1] + trainer, len(lanes) + len(trainer)


def _named(what: str) -> tuple[str, str]:
    """Legend and colour of a state."""
    return STATES.get(what, (esc(what), _OTHER))


Shares = Mapping[tuple[str, int], Mapping[str, float]]
"""(lane, column) -> state -> its share of the column's time."""


def _shares(spans: Sequence[Row], end: float) -> Shares:
    width_s = end / _NUM_COLUMNS
    shares: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in spans:
        first = max(0, int(row["start_s"] / width_s))
        last = min(_NUM_COLUMNS - 1, int(row["end_s"] / width_s))
        for column in range(first, last + 1):
            left = column * width_s
            inside = min(row["end_s"], left + width_s) - max(row["start_s"], left)
            shares[row["actor"], column][row["what"]] += max(0.0, inside) / width_s
    return shares


def _columns(what: str, shares: Shares, lanes: Sequence[str], width_s: float) -> go.Bar:
    """One state's part of all columns; the states before it are below."""
    order = [*STATES, *sorted({w for column in shares.values() for w in column} - STATES.keys())]
    below = order[: order.index(what)]
    xs, heights, bases, tips = [], [], [], []
    for (lane, column), taken in shares.items():
        share = taken.get(what, 0.0)
        if share <= 0:
            continue
        scale = _LANE / max(1.0, sum(taken.values()))  # spans that overlap share the column
        xs.append((column + 0.5) * width_s)
        heights.append(-share * scale)  # lanes are numbered downwards
        start = lanes.index(lane) + _LANE / 2
        bases.append(start - scale * sum(taken.get(w, 0.0) for w in below))
        tips.append(f"{esc(lane)}: {share:.0%}")
    name, color = _named(what)
    return go.Bar(
        x=xs,
        y=heights,
        base=bases,
        width=width_s,
        name=name,
        marker={"color": color, "line": {"width": 0}},
        customdata=tips,
        hovertemplate="%{customdata}",
    )


def _spans(what: str, spans: Sequence[Row], lanes: Sequence[str]) -> go.Scatter:
    """All spans of a state as one interrupted line."""
    xs: list[float | None] = []
    ys: list[int | None] = []
    tips: list[float | None] = []
    for row in sorted(spans, key=lambda row: row["start_s"]):
        if row["what"] != what:
            continue
        start, end, lane = row["start_s"], row["end_s"], lanes.index(row["actor"])
        xs += [round(start, 3), round(end, 3), None]
        ys += [lane, lane, None]
        tips += [round(end - start, 3)] * 2 + [None]
    name, color = _named(what)
    return go.Scatter(
        x=xs,
        y=ys,
        name=name,
        mode="lines",
        line={"color": color, "width": _LANE_PX * 0.7, "simplify": False},
        customdata=tips,
        hovertemplate="%{x:.2f} s, of %{customdata} s",
    )


def _step_ends(steps: Sequence[Row], num_lanes: int) -> go.Scatter:
    """Where steps ended, with the policy version that each made."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    tips: list[str] = []
    for row in steps:
        xs += [row["time_s"], row["time_s"], None]
        ys += [-0.5, num_lanes - 0.5, None]
        tips += [f"version {esc(row.get('policy_version', '?'))}"] * 2 + [""]
    return go.Scatter(
        x=xs,
        y=ys,
        name="end of a step",
        mode="lines",
        line={"color": "#9aa4b2", "width": 1, "dash": "dot"},
        customdata=tips,
        hovertemplate="%{customdata}",
    )


def _short(name: str) -> str:
    return name if len(name) <= 11 else f"{name[:9]}…"
