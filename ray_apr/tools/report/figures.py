"""Figures by Plotly, as markup: their data is JSON, which the page draws where it is read.

Plotly takes texts for markup, so that what a run has named is escaped (`esc`) before it is a name,
a label or a text of a figure.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

SERIES = ("#3b78e7", "#e07b18", "#2b9a66", "#8452cf", "#8f7f55")
"""Colours of what has none of its own, in order; seen on light and on dark."""
_MOST_TICKS = 8
"""Of a narrow chart, one at each whole number."""
BAD = "#d93f49"
SOFT = "#7a8798"
_LINE = "rgba(128,140,155,0.25)"


def esc(value: object) -> str:
    """Escape text for markup and attributes."""
    return html.escape(str(value), quote=True)


def line(
    xs: Sequence[float], ys: Sequence[float], name: str, color: str, **more: Any
) -> go.Scatter:
    """A line; values that are not finite interrupt it, and few points are marked.

    Args:
        more: Further properties of Plotly's ``scatter``.
    """
    known = [y if math.isfinite(y) else None for y in ys]
    mode = "lines+markers" if len(known) <= 40 else "lines"
    style = {"color": color, "width": 1.8} | more.pop("line", {})
    return go.Scatter(x=list(xs), y=known, name=name, mode=mode, line=style, **more)


def figure(
    title: str,
    traces: Sequence[Any],
    *,
    x_label: str,
    y_label: str = "",
    height: int = 300,
    **layout: Any,
) -> str:
    """Return a figure of traces of Plotly, to be drawn by `page`.

    Args:
        title: A text; it is escaped here.
        height: In pixels.
        layout: Further properties of Plotly's layout, such as ``barmode``.
    """
    axis = {"gridcolor": _LINE, "linecolor": _LINE, "zerolinecolor": _LINE, "automargin": True}
    drawn = go.Figure(
        list(traces),
        layout={
            "template": go.layout.Template(),
            "height": height,
            "margin": {"l": 60, "r": 16, "t": 46, "b": 44},  # legend below the buttons
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": SOFT, "family": "system-ui, sans-serif"},
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
            "showlegend": len(traces) > 1,
            "hovermode": "x unified",
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _LINE, "activecolor": SOFT},
            "hoverlabel": {"bgcolor": "#1c2430", "font": {"color": "#e6eaf0"}},
            "xaxis": {**axis, "title": {"text": x_label}, **_whole(traces)},
            "yaxis": {**axis, "title": {"text": y_label}},
        },
    )
    drawn.update_layout(**layout)
    return (
        f'<figure><figcaption class="title">{esc(title)}</figcaption>'
        f'<div class="plot" style="height:{height}px"></div>'
        f'<script type="application/json">{drawn.to_json()}</script></figure>'
    )


def _whole(traces: Sequence[Any]) -> dict[str, Any]:
    """What keeps a short axis of whole numbers, such as steps, free of fractions."""
    xs = [x for trace in traces for x in trace.x or ()]
    if not xs or not all(isinstance(x, int) for x in xs) or max(xs) - min(xs) > _MOST_TICKS:
        return {}
    return {"dtick": 1, "range": [min(xs) - 0.5, max(xs) + 0.5]}


def empty(title: str, why: str) -> str:
    """What takes a figure's place where there is nothing to draw."""
    return (
        f'<figure><figcaption class="title">{esc(title)}</figcaption>'
        f'<p class="empty">{esc(why)}</p></figure>'
    )


def note_of_part(num_shown: int, number: int, what: str, file: str) -> str:
    """What says that not all is drawn; nothing if all is."""
    if num_shown == number:
        return ""
    return f'<p class="empty">{num_shown} of {number} {what} shown; {file} has all</p>'


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` finite values up to each position; NaN while there is none."""
    averages = []
    for i in range(len(values)):
        part = [v for v in values[max(0, i + 1 - window) : i + 1] if math.isfinite(v)]
        averages.append(sum(part) / len(part) if part else math.nan)
    return averages


def average_window(num_steps: int) -> int:
    """Steps of the moving average: a tenth of the run, 2 to 20."""
    return max(2, min(20, num_steps // 10))
