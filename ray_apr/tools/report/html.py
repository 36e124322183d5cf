"""report.html: what a run did, on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_apr.core.names import dotted
from ray_apr.tools.report import plots
from ray_apr.tools.report.browser import SCRIPT, STYLE, sample_browser
from ray_apr.tools.report.figures import BAD, SERIES, esc
from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.report.page import cards, page, table, warning_list
from ray_apr.tools.report.summary import check_run, num_end_steps, summarize, write_summary
from ray_apr.tools.report.timeline import timeline_figures

_UNKNOWN = "–"
_HELD = "; samples that were in flight where it was gone on with are resumed, too"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written, and what to tell at once."""

    summary_path: Path
    html_path: Path
    headline: Sequence[tuple[str, str]]
    """(name, value) of the figures that matter most."""
    warnings: Sequence[str]


def write_report(run_dir: str | Path, html_path: Path | None = None) -> Report:
    """Write summary.json and report.html of a run folder, whatever state it is in.

    Args:
        run_dir: The run folder.
        html_path: Where the page goes; None puts it into the run folder.

    Raises:
        ConfigError: If there is no run folder.
        RunFolderError: If one of its files is broken.
    """
    run = load_run(run_dir)
    summary = summarize(run)
    warnings = check_run(run, summary)
    summary_path, html_path = run.path / "summary.json", html_path or run.path / "report.html"
    write_summary(summary, summary_path)
    html_path.parent.mkdir(parents=True, exist_ok=True)
    samples = sample_browser(run.path, html_path)
    html_path.write_text(render(run, summary, warnings, samples), encoding="utf-8")
    headline = [(name, f"{value}  ({remark})") for name, value, remark, _ in _cards(summary)]
    return Report(
        summary_path=summary_path, html_path=html_path, headline=headline, warnings=warnings
    )


def render(
    run: RunData, summary: Mapping[str, Any], warnings: Sequence[str], samples: str = ""
) -> str:
    """Return the page of one run.

    Args:
        run: What it recorded.
        summary: Of it.
        warnings: For its reader.
        samples: Section of `sample_browser`.
    """
    body = [
        cards(_cards(summary)),
        warning_list(warnings),
        "<h2>Learning</h2>",
        plots.reward_chart(run),
        _evaluations(run),
        plots.reward_part_charts(run),
        "<h2>Samples</h2>",
        plots.staleness_chart(run, summary["max_staleness"]),
        plots.length_chart(run),
        plots.queue_chart(run),
        samples,
        "<h2>Time</h2>",
        timeline_figures(run),
        plots.step_time_chart(run),
        "<h2>Tokens</h2>",
        _token_table(summary),
        "<h2>Health of the training</h2>",
        plots.health_charts(run),
        "<h2>Settings</h2>",
        _settings(run.config),
    ]
    model = run.config.get("model") or "unknown model"
    title, subtitle = f"ray_apr run {run.name}", f"{model} · {run.path}"
    return page(title, subtitle, "".join(body), style=STYLE, scripts=[SCRIPT] if samples else [])


def number(value: Any, form: str = ",.0f", unit: str = "") -> str:
    """Format a number; a dash for what is not known."""
    return _UNKNOWN if value is None else f"{value:{form}}{unit}"


def _counted(count: int | None, what: str) -> str:
    """Some of a kind: 1 engine, 2 engines."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Format seconds: 8.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds is None:
        return _UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _cards(summary: Mapping[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(name, value, remark, is it bad)."""
    s, error, bound = summary, summary["ledger_error"], summary["max_staleness"]
    sync = s["weight_sync_s"]
    too_old = None not in (s["staleness_max"], bound) and s["staleness_max"] > bound
    reward, of_steps = _reward(s)
    balanced = {None: _UNKNOWN, 0: "balanced"}.get(error, f"off by {error}")
    return [
        ("Mode", str(s["mode"] or _UNKNOWN), f"{_counted(s['num_replicas'], 'engine')}, "
         f"{_counted(s['num_train_workers'], 'train worker')}", False),
        ("Steps", number(s["steps"]), f"policy version {number(s['policy_version'])}", False),
        ("Reward", reward, of_steps, False),
        *_held_out(s["held_out"]),
        ("Wall time", duration(s["wall_s"]), f"of it {duration(s['setup_s'])} until the engines "
         "generate; without the start and end of Ray", False),
        ("Responses interrupted", number(s["samples_interrupted"]),
         f"resumed {number(s['samples_resumed'])}{_HELD if s['parts'] > 1 else ''}", False),
        ("Staleness, max", number(s["staleness_max"]),
         f"mean {number(s['staleness_mean'], '.2f')}, bound {number(bound)}", too_old),
        ("Token ledger", balanced, f"{number(s['tokens_generated'])} tokens generated",
         bool(error)),
        ("Generation", number(s["rollout_tokens_per_s"], ",.0f", " tok/s"),
         f"engines idle or paused {number(s['generation_idle_ratio'], '.1%')} of the time", False),
        ("Trainer idle", number(s["trainer_idle_ratio"], ".1%"), "waiting for a batch", False),
        ("Weight sync, median", number(sync["p50"], ".2f", " s"),
         f"longest {number(sync['max'], '.2f', ' s')}", False),
    ]  # fmt: skip


def _reward(s: Mapping[str, Any]) -> tuple[str, str]:
    """Reward at the begin and at the end, and of which steps."""
    first, last = number(s["reward_first"], ".3f"), number(s["reward_last"], ".3f")
    if s["steps"] <= 1:
        return last, "of the only step" if s["steps"] else "no step"
    ends = num_end_steps(s["steps"])
    of_steps = "first and last step" if ends == 1 else f"mean of the first and last {ends} steps"
    return f"{first} → {last}", of_steps


def _held_out(held: Mapping[str, Any] | None) -> list[tuple[str, str, str, bool]]:
    """The card of the evaluations; none without them."""
    if held is None:
        return []
    first, last = held["first_version"], held["last_version"]
    if first == last:
        return [("Held-out reward", number(held["last"], ".3f"), f"of version {last}", False)]
    value = f"{held['first']:.3f} → {held['last']:.3f}"
    best = f"best {held['best']:.3f}, of version {held['best_version']}"
    return [("Held-out reward", value, f"of versions {first} and {last}; {best}", False)]


def _evaluations(run: RunData) -> str:
    """What the held-out prompts said of each evaluated version; nothing without them."""
    if not run.evaluations:
        return ""
    rows = [
        (
            name,
            number(of.get("reward_mean"), ".3f"),
            ", ".join(f"{k}: {v:.3f}" for k, v in (of.get("pass_at_k") or {}).items()),
            number(of.get("response_tokens_mean"), ",.1f"),
            number(of["num_samples"]),
            number(of["num_failed"]),
            duration(of.get("seconds")),
        )
        for row in run.evaluations
        for name, of in _with_suites(row)
    ]
    head = ("evaluated", "mean reward", "pass@k", "mean tokens", "samples", "failed", "took")
    return "<h2>Evaluation on held-out prompts</h2>" + table(head, rows)


def _with_suites(row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and figures of an evaluation, then of each of its suites."""
    version = f"version {row['policy_version']}"
    yield version, row
    for suite, of_suite in (row.get("suites") or {}).items():
        yield f"{version}, {suite}", of_suite


def _token_table(summary: Mapping[str, Any]) -> str:
    """Where every generated token went (invariant 1)."""
    generated = summary["tokens_generated"]
    places = [
        ("trained", summary["tokens_trained"], SERIES[2]),
        ("in the buffer at the end", summary["tokens_buffered"], SERIES[0]),
        ("held by interrupted samples", summary["tokens_interrupted"], SERIES[1]),
    ]
    discarded = summary["tokens_discarded"]
    places += [(f"discarded: {why}", count, BAD) for why, count in sorted(discarded.items())]
    rows = [f'<tr><td>generated</td><td class="n">{number(generated)}</td><td></td><td></td></tr>']
    for name, count, color in places:
        share = count / generated if generated and count is not None else None
        width = 0.0 if share is None else min(max(share, 0.0), 1.0)
        rows.append(
            f'<tr><td>{esc(name)}</td><td class="n">{number(count)}</td>'
            f'<td class="n">{number(share, ".1%")}</td>'
            f'<td class="meter"><i style="width:{width:.2%};background:{color}"></i></td></tr>'
        )
    error = number(summary["ledger_error"])
    rows.append(f'<tr><td>ledger error</td><td class="n">{error}</td><td></td><td></td></tr>')
    return (
        '<div class="panel"><table><tr><th>place</th><th class="n">tokens</th>'
        f'<th class="n">share</th><th></th></tr>{"".join(rows)}</table></div>'
    )


def _settings(config: Mapping[str, Any]) -> str:
    if not config:
        return '<p class="empty">config.json is missing</p>'
    rows = "".join(
        f"<tr><td><code>{esc(name)}</code></td>"
        f"<td>{esc('none' if value is None else value)}</td></tr>"
        for name, value in dotted(config)
    )
    return f'<details class="panel"><summary>config.json</summary><table>{rows}</table></details>'
