"""The timeline: a lane for each engine and for the trainer, with what it did and waited for.

The whole run is drawn in columns whose colours share the height as the states share the time; a
window in its middle is drawn span by span.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ray_apr.report.load import Row, RunData
from ray_apr.report.summary import engine_names, training_window
from ray_apr.report.svg import WIDTH, esc, figure, nice_ticks, tick_text

DETAIL_S = 20.0
"""Length of the detail, in seconds."""

STATES = {
    "generate": ("engine generates", "generate"),
    "paused": ("engine paused for a weight sync, or the trainer's turn", "paused"),
    "train": ("trainer trains", "train"),
    "sync": ("trainer syncs weights", "sync"),
    "checkpoint": ("trainer writes a checkpoint", "checkpoint"),
    "wait": ("trainer waits for a batch", "wait"),
    "switch": ("trainer takes its turn on shared GPUs", "other"),
    "idle": ("engine idle", "idle"),
    "start": ("engine starts", "start"),
    "load": ("trainer loads the model", "start"),
    "compile": ("trainer compiles", "start"),
}
"""State -> (legend, CSS class), in the order of stacking from the bottom."""

_LEFT, _RIGHT, _TOP, _LANE, _GAP, _BOTTOM = 88, 16, 20, 30, 12, 44
_NUM_COLUMNS = 360
_MAX_LANES = 17


def timeline_figures(run: RunData) -> str:
    """The whole run, and a detail of its middle."""
    lanes = _lanes(run)
    if not lanes:
        return '<p class="empty">no span was recorded in timeline.jsonl</p>'
    end = max(row["end_s"] for row in run.timeline)
    whole = _Lanes("The whole run: share of time in each state", lanes, 0.0, end)
    for index, name in enumerate(lanes):
        whole.add_shares(index, _of(run.timeline, name))
    window = training_window(run) or (0.0, end)
    middle = (window[0] + window[1]) / 2
    start = max(0.0, middle - DETAIL_S / 2)
    stop = min(end, start + DETAIL_S)
    whole.add_frame(start, stop)
    detail = _Lanes(
        f"{stop - start:.0f} s in the middle of the run, span by span", lanes, start, stop
    )
    for index, name in enumerate(lanes):
        detail.add_spans(index, _of(run.timeline, name))
    detail.add_steps(run.steps)
    return whole.render(_legend(run)) + detail.render(_legend(run))


def _lanes(run: RunData) -> list[str]:
    known = engine_names(run)
    others = {row["actor"] for row in run.timeline} - set(known) - {"trainer"}
    trainer = [row["actor"] for row in run.timeline if row["actor"] == "trainer"][:1]
    return ([*known, *sorted(others)])[: _MAX_LANES - 1] + trainer


def _legend(run: RunData) -> dict[str, str]:
    seen = {row["what"] for row in run.timeline}
    legend = {text: css for what, (text, css) in STATES.items() if what in seen}
    return legend | ({"other": "other"} if seen - STATES.keys() else {})


def _of(timeline: Iterable[Row], actor: str) -> list[Row]:
    return [row for row in timeline if row["actor"] == actor]


class _Lanes:
    """One drawing: lanes over an interval of time."""

    def __init__(self, title: str, lanes: Sequence[str], start: float, end: float) -> None:
        self._title = title
        self._lanes = lanes
        self._start, self._end = start, max(end, start + 1e-6)
        self._height = _TOP + len(lanes) * (_LANE + _GAP) + _BOTTOM
        self._marks: list[str] = []

    def _x(self, time_s: float) -> float:
        share = (time_s - self._start) / (self._end - self._start)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def _y(self, lane: int) -> int:
        return _TOP + lane * (_LANE + _GAP)

    def add_shares(self, lane: int, spans: Sequence[Row]) -> None:
        """Draw columns in which each state takes its share of the time; gaps stay empty."""
        width_s = (self._end - self._start) / _NUM_COLUMNS
        shares: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for row in spans:
            first = max(0, int((row["start_s"] - self._start) / width_s))
            last = min(_NUM_COLUMNS - 1, int((row["end_s"] - self._start) / width_s))
            for column in range(first, last + 1):
                left = self._start + column * width_s
                inside = min(row["end_s"], left + width_s) - max(row["start_s"], left)
                shares[row["what"]][column] += max(0.0, inside) / width_s
        total: dict[int, float] = defaultdict(float)
        for columns in shares.values():
            for column, share in columns.items():
                total[column] += share
        below: dict[int, float] = defaultdict(float)
        pixels = (WIDTH - _LEFT - _RIGHT) / _NUM_COLUMNS
        for what in [w for w in STATES if w in shares] + sorted(set(shares) - STATES.keys()):
            path = []
            for column, taken in sorted(shares[what].items()):
                share = taken / max(1.0, total[column])  # spans that overlap share the column
                bottom = self._y(lane) + _LANE * (1 - below[column])
                path.append(
                    f"M{_LEFT + column * pixels:.1f} {bottom:.1f}h{pixels + 0.2:.2f}"
                    f"v{-_LANE * share:.1f}h{-pixels - 0.2:.2f}z"
                )
                below[column] += share
            self._marks.append(f'<path class="bar {_css(what)}" d="{"".join(path)}"/>')

    def add_spans(self, lane: int, spans: Sequence[Row]) -> None:
        """Draw each span that reaches into the interval."""
        for row in sorted(spans, key=lambda row: row["start_s"]):
            left, right = max(row["start_s"], self._start), min(row["end_s"], self._end)
            if right <= left:
                continue
            width = max(0.6, self._x(right) - self._x(left))
            tip = f"{row['what']}: {row['start_s']:.2f} to {row['end_s']:.2f} s"
            self._marks.append(
                f'<rect class="bar {_css(row["what"])}" x="{self._x(left):.1f}" '
                f'y="{self._y(lane)}" width="{width:.1f}" height="{_LANE}">'
                f"<title>{esc(tip)}</title></rect>"
            )

    def add_frame(self, start: float, end: float) -> None:
        """Mark the interval that the detail shows."""
        left, right = self._x(start), self._x(end)
        self._marks.append(
            f'<rect class="frame" x="{left:.1f}" y="{_TOP - 6}" width="{right - left:.1f}" '
            f'height="{len(self._lanes) * (_LANE + _GAP)}" rx="2"/>'
            f'<text class="note" x="{(left + right) / 2:.1f}" y="{_TOP - 10}" '
            'text-anchor="middle">detail below</text>'
        )

    def add_steps(self, steps: Sequence[Row]) -> None:
        """Mark the ends of steps with the policy version that they made."""
        last_x = -1e9
        for row in steps:
            x = self._x(row["time_s"])
            if not self._start <= row["time_s"] <= self._end:
                continue
            bottom = self._height - _BOTTOM - _GAP + 6
            line = f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"/>'
            self._marks.append(line)
            if x - last_x > 34 and "policy_version" in row:
                self._marks.append(
                    f'<text class="note" x="{x:.1f}" y="{_TOP - 8}" text-anchor="middle">'
                    f"v{esc(row['policy_version'])}</text>"
                )
                last_x = x

    def render(self, legend: dict[str, str] | None) -> str:
        """Return the figure."""
        base = self._height - _BOTTOM
        parts = [
            f'<text class="lane" x="{_LEFT - 10}" y="{self._y(i) + _LANE / 2 + 4:.0f}" '
            f'text-anchor="end">{esc(_short(name))}</text>'
            f'<rect class="back" x="{_LEFT}" y="{self._y(i)}" '
            f'width="{WIDTH - _LEFT - _RIGHT}" height="{_LANE}"/>'
            for i, name in enumerate(self._lanes)
        ]
        parts += self._marks
        for tick in nice_ticks(self._start, self._end, 8):
            if self._start <= tick <= self._end:
                x = self._x(tick)
                parts.append(
                    f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{base - 4}" y2="{base}"/>'
                    f'<text x="{x:.1f}" y="{base + 13}" text-anchor="middle">'
                    f"{tick_text(tick)}</text>"
                )
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base - 4}" '
            f'y2="{base - 4}"/><text class="label" x="{(_LEFT + WIDTH - _RIGHT) / 2:.0f}" '
            f'y="{self._height - 8}" text-anchor="middle">time since the run began (s)</text>'
        )
        return figure(self._title, legend, WIDTH, self._height, "".join(parts))


def _css(what: str) -> str:
    return STATES[what][1] if what in STATES else "other"


def _short(name: str) -> str:
    return name if len(name) <= 11 else f"{name[:9]}…"
