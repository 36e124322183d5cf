"""The charts of one run: what was learned, on how old data, and where the time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray_apr.report.load import Row, RunData
from ray_apr.report.summary import finite, reward_parts, trained_ages
from ray_apr.report.svg import Chart, esc, moving_average, nice_ticks, whole_ticks

_MAX_BARS = 150
_NUM_LENGTH_BINS = 24
_MAX_PARTS = 12
"""Figures of rewards that have a chart; metrics.jsonl has all."""

STEP_PARTS = {
    "trainer_wait_s": ("waits for data", "wait"),
    "trainer_step_s": ("trains", "train"),
    "weight_sync_s": ("syncs weights", "sync"),
}
"""Column of metrics.jsonl -> (what the trainer does, CSS class)."""


def reward_chart(run: RunData) -> str:
    """Mean reward of each step, with a moving average."""
    steps = [row["step"] for row in run.steps]
    rewards = [float(row["reward_mean"]) for row in run.steps]
    window = average_window(len(steps))
    chart = _step_chart(run, "Reward", "mean reward of a batch", rewards)
    if chart is None:
        return _empty("Reward", "no step was recorded")
    chart.height = 320
    chart.line(list(zip(steps, rewards, strict=True)), "s1 thin")
    chart.line(list(zip(steps, moving_average(rewards, window), strict=True)), "s1 bold")
    return chart.render({"each step": "s1 thin", f"mean of the last {window} steps": "s1"})


def average_window(num_steps: int) -> int:
    """Steps of the moving average: a tenth of the run, 2 to 20."""
    return max(2, min(20, num_steps // 10))


def _step_chart(
    run: RunData, title: str, y_label: str, values: Sequence[float], **more: Any
) -> Chart | None:
    shown = finite(values)
    if not run.steps or not shown:
        return None
    low, high = min(shown), max(shown)
    last = max(run.steps[-1]["step"], 1)
    return Chart(
        title=title,
        x_label="optimizer step",
        y_label=y_label,
        x_low=0,
        x_high=last,
        x_ticks=whole_ticks(0, last),
        y_ticks=nice_ticks(min(low, 0.0) if low >= 0 else low, high),
        **more,
    )


def staleness_chart(run: RunData, bound: int | None) -> str:
    """How many samples were trained at which staleness."""
    title = "Staleness of the trained samples"
    counts = Counter(trained_ages(run))
    if not counts:
        return _empty(title, "no sample was trained")
    total, highest = sum(counts.values()), max(*counts, bound or 0)
    stride = max(1, math.ceil((highest + 1) / 20))
    chart = Chart(
        title=title,
        x_label="staleness (optimizer steps between the oldest token in the loss and its training)",
        y_label="samples",
        x_low=-0.6,
        x_high=highest + 0.75,
        x_ticks=list(range(0, highest + 1, stride)),
        y_ticks=nice_ticks(0, max(counts.values()) * 1.06),
    )
    for age, count in sorted(counts.items()):
        over = bound is not None and age > bound
        tip = f"staleness {age}: {count} samples"
        chart.bar(age - 0.38, age + 0.38, 0, count, "bad" if over else "s1", tip)
        if stride == 1:
            chart.text(age, count, f"{count / total:.1%}", css="note")
    if bound is not None:
        chart.vertical(bound + 0.5, f"bound {bound}")
    return chart.render()


def length_chart(run: RunData) -> str:
    """Response lengths, of samples that were interrupted and of those that were not (log scale)."""
    title = "Response length of the trained samples"
    lengths = {
        cut: [row["num_tokens"] for row in run.samples if (row["num_interruptions"] > 0) is cut]
        for cut in (False, True)
    }
    longest = max((max(v, default=0) for v in lengths.values()), default=0)
    if not longest:
        return _empty(title, "no sample was trained")
    size = max(1, math.ceil((longest + 1) / _NUM_LENGTH_BINS))
    bins = {cut: Counter(int(n) // size for n in values) for cut, values in lengths.items()}
    most = max(max(b.values(), default=1) for b in bins.values())
    num_bins = longest // size + 1
    chart = Chart(
        title=title,
        x_label="response length (tokens)",
        y_label="samples (log scale)",
        x_low=0,
        x_high=num_bins * size,
        x_ticks=nice_ticks(0, num_bins * size, 8),
        y_ticks=[0.5, *(10.0**e for e in range(math.ceil(math.log10(most + 1)) + 1))],
        log_y=True,
        y_high=most * 1.5,
    )
    for cut, css in ((False, "s1"), (True, "s2")):
        word = "interrupted" if cut else "never interrupted"
        shift = size * (0.5 if cut else 0.06)
        for index, count in sorted(bins[cut].items()):
            left = index * size + shift
            tip = f"{index * size} to {index * size + size - 1} tokens, {word}: {count} samples"
            chart.bar(left, left + size * 0.44, chart.y_ticks[0], count, css, tip)
    never, cut_count = len(lengths[False]), len(lengths[True])
    return chart.render(
        {f"never interrupted ({never:,})": "s1", f"interrupted and resumed ({cut_count:,})": "s2"}
    )


def step_time_chart(run: RunData) -> str:
    """What a step's time was spent on; long runs show means of neighbouring steps."""
    title = "Where a step's time goes"
    if not run.steps:
        return _empty(title, "no step was recorded")
    size = math.ceil(len(run.steps) / _MAX_BARS)
    bars = [run.steps[i : i + size] for i in range(0, len(run.steps), size)]
    heights = [[_mean_of(rows, key) for key in STEP_PARTS] for rows in bars]
    chart = Chart(
        title=title if size == 1 else f"{title} (means of {size} steps)",
        x_label="optimizer step",
        y_label="time (s)",
        x_low=-0.5,
        x_high=len(run.steps) - 0.5 if size == 1 else len(bars) * size - 0.5,
        x_ticks=whole_ticks(0, len(run.steps)),
        y_ticks=nice_ticks(0, max(1e-3, *map(sum, heights))),
        height=280,
    )
    for i, parts in enumerate(heights):
        bottom, left = 0.0, i * size - 0.5 + 0.08 * size
        for height, (what, css) in zip(parts, STEP_PARTS.values(), strict=True):
            tip = f"step {bars[i][0]['step']}: {what} {height:.2f} s"
            chart.bar(left, left + 0.84 * size, bottom, bottom + height, css, tip)
            bottom += height
    return chart.render(dict(STEP_PARTS.values()))


def _mean_of(rows: Sequence[Row], key: str) -> float:
    values = finite(row.get(key) for row in rows)
    return max(0.0, sum(values) / len(values)) if values else 0.0


def queue_chart(run: RunData) -> str:
    """Samples in the engines, held interrupted, and waiting in the buffer, at the end of a step."""
    lines = {"inflight": "in flight", "held": "interrupted, held", "buffered": "in the buffer"}
    known = {key: text for key, text in lines.items() if any(key in row for row in run.steps)}
    values = [row.get(key, math.nan) for key in known for row in run.steps]
    chart = _step_chart(run, "Samples alive", "samples", values)
    if chart is None:
        return ""
    legend = {}
    for number, (key, text) in enumerate(known.items(), start=1):
        points = [(row["step"], float(row.get(key, math.nan))) for row in run.steps]
        chart.line(points, f"s{number}")
        legend[text] = f"s{number}"
    return chart.render(legend)


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
    charts = []
    for key, (title, y_label) in _SMALL.items():
        values = [row.get(key) for row in run.steps]
        numbers = [float(v) if isinstance(v, int | float) else math.nan for v in values]
        chart = _step_chart(run, title, y_label, numbers, width=440, height=210)
        if chart is not None:
            chart.y_ticks = nice_ticks(chart.y_ticks[0], max(finite(numbers)), 4)
            chart.x_ticks = whole_ticks(0, chart.x_high, 5)
            steps = [row["step"] for row in run.steps]
            chart.line(list(zip(steps, numbers, strict=True)), "s1")
            charts.append(chart.render())
    return f'<div class="pair">{"".join(charts)}</div>' if charts else ""


def reward_part_charts(run: RunData) -> str:
    """A small chart of each figure that rewards told: mean, least and greatest of a batch."""
    charts = []
    for name in reward_parts(run)[:_MAX_PARTS]:
        columns = {what: f"reward/{name}_{what}" for what in ("mean", "min", "max")}
        values = finite(row.get(key) for key in columns.values() for row in run.steps)
        chart = _step_chart(run, name, "of a batch", values, width=440, height=210)
        if chart is None:
            continue
        chart.y_ticks = nice_ticks(chart.y_ticks[0], max(values), 4)
        chart.x_ticks = whole_ticks(0, chart.x_high, 5)
        legend: dict[str, str] = {}
        for number, (what, key) in enumerate(columns.items(), start=1):
            points = [(row["step"], float(row.get(key, math.nan))) for row in run.steps]
            chart.line(points, legend.setdefault(what, f"s{number}"))
        charts.append(chart.render(legend))
    return (
        f'<h2>Parts of the reward</h2><div class="pair">{"".join(charts)}</div>' if charts else ""
    )


def _empty(title: str, why: str) -> str:
    return (
        f'<figure><figcaption><span class="title">{esc(title)}</span></figcaption>'
        f'<p class="empty">{esc(why)}</p></figure>'
    )
