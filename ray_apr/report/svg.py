"""Charts as inline SVG: a frame with axes, and the marks that go into it.

Colours are CSS classes (``s1`` ... for series), so that the page decides what is light and dark.
Texts are escaped here; nothing else of a caller's text reaches the markup.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDTH = 900
_TICK_STEPS = (1, 2, 2.5, 5, 10)


def esc(value: object) -> str:
    """Escape text for markup and attributes."""
    return html.escape(str(value), quote=True)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover low..high in about `count` steps; the first is <= low."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(s * scale for s in _TICK_STEPS if s * scale >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """`nice_ticks` of whole numbers only."""
    return [t for t in nice_ticks(low, high, count) if float(t).is_integer()]


def tick_text(value: float) -> str:
    """A tick's label, short: 0.25, 12, 4.5k, 2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    return f"{value:.6g}"


@dataclass(kw_only=True)
class Chart:
    """A frame with axes. Marks are added in data coordinates; `render` gives the SVG.

    Args:
        x_ticks, y_ticks: Values of the grid; the frame reaches from the first to the last of y, and
            from `x_low` to `x_high`.
    """

    title: str
    x_label: str
    y_label: str
    x_low: float
    x_high: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_texts: Sequence[str] | None = None
    """Labels of `x_ticks`; None formats the numbers."""
    width: int = WIDTH
    height: int = 300
    log_y: bool = False
    y_high: float | None = None
    marks: list[str] = field(default_factory=list)

    left: int = 64
    right: int = 16
    top: int = 14
    bottom: int = 46

    def x(self, value: float) -> float:
        """Pixel of a value on the x axis."""
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Pixel of a value on the y axis."""
        low, high = self.y_ticks[0], self.y_high or self.y_ticks[-1]
        if self.log_y:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        share = (value - low) / ((high - low) or 1.0)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """Add a line; points that are not finite interrupt it."""
        pieces: list[list[str]] = [[]]
        for x, y in points:
            if math.isfinite(x) and math.isfinite(y):
                pieces[-1].append(f"{self.x(x):.1f},{self.y(y):.1f}")
            elif pieces[-1]:
                pieces.append([])
        for piece in pieces:
            if len(piece) == 1:
                cx, cy = piece[0].split(",")
                self.marks.append(f'<circle class="dot {css}" cx="{cx}" cy="{cy}" r="2.5"/>')
            elif piece:
                self.marks.append(f'<polyline class="line {css}" points="{" ".join(piece)}"/>')

    def bar(
        self, x_from: float, x_to: float, y_from: float, y_to: float, css: str, tip: str
    ) -> None:
        """Add a bar between two values of x and of y; `tip` shows under the mouse."""
        left, right = self.x(x_from), self.x(x_to)
        top, bottom = self.y(y_to), self.y(y_from)
        if bottom - top < 0.01:
            return
        self.marks.append(
            f'<rect class="bar {css}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{bottom - top:.1f}"><title>{esc(tip)}</title></rect>'
        )

    def text(self, x: float, y: float, text: str, *, css: str = "", anchor: str = "middle") -> None:
        """Add text at data coordinates."""
        self.marks.append(
            f'<text class="{css}" x="{self.x(x):.1f}" y="{self.y(y) - 5:.1f}" '
            f'text-anchor="{anchor}">{esc(text)}</text>'
        )

    def vertical(self, x: float, text: str, css: str = "limit") -> None:
        """Add a dashed vertical line with a label at its top."""
        at = self.x(x)
        on_right = at > self.width * 0.75
        self.marks.append(
            f'<line class="{css}" x1="{at:.1f}" x2="{at:.1f}" y1="{self.top}" '
            f'y2="{self.height - self.bottom}"/>'
            f'<text class="note" x="{at + (-6 if on_right else 6):.1f}" y="{self.top + 11}" '
            f'text-anchor="{"end" if on_right else "start"}">{esc(text)}</text>'
        )

    def render(self, legend: Mapping[str, str] | None = None) -> str:
        """Return a figure with title, legend (text -> CSS class) and the chart."""
        body = [self._grid(), *self.marks]
        return figure(self.title, legend, self.width, self.height, "".join(body))

    def _grid(self) -> str:
        parts = []
        base, right = self.height - self.bottom, self.width - self.right
        for tick in self.y_ticks:
            if self.y_high is not None and tick > self.y_high:
                continue
            y = self.y(tick)
            parts.append(
                f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{'' if self.log_y and tick < 1 else esc(tick_text(tick))}</text>"
            )
        texts = self.x_texts or [tick_text(t) for t in self.x_ticks]
        for tick, text in zip(self.x_ticks, texts, strict=True):
            if self.x_low <= tick <= self.x_high:
                parts.append(
                    f'<text x="{self.x(tick):.1f}" y="{base + 17}" text-anchor="middle">'
                    f"{esc(text)}</text>"
                )
        middle = (self.top + base) / 2
        parts.append(
            f'<line class="axis" x1="{self.left}" x2="{right}" y1="{base}" y2="{base}"/>'
            f'<text class="label" x="{(self.left + right) / 2:.0f}" y="{self.height - 8}" '
            f'text-anchor="middle">{esc(self.x_label)}</text>'
            f'<text class="label" transform="translate(14 {middle:.0f}) rotate(-90)" '
            f'text-anchor="middle">{esc(self.y_label)}</text>'
        )
        return "".join(parts)


def figure(title: str, legend: Mapping[str, str] | None, width: int, height: int, body: str) -> str:
    """Wrap marks into a titled figure with a legend (text -> CSS class of its swatch)."""
    items = "".join(
        f'<span class="key"><i class="swatch {css}"></i>{esc(text)}</span>'
        for text, css in (legend or {}).items()
    )
    keys = f'<span class="legend">{items}</span>' if items else ""
    return (
        f'<figure><figcaption><span class="title">{esc(title)}</span>{keys}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{esc(title)}">{body}</svg>'
        "</figure>"
    )


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` finite values up to each position; NaN while there is none."""
    averages = []
    for i in range(len(values)):
        part = [v for v in values[max(0, i + 1 - window) : i + 1] if math.isfinite(v)]
        averages.append(sum(part) / len(part) if part else math.nan)
    return averages
