"""A run that goes on, in a terminal: how far it is, what it learns, who waits for whom.

All of it is read from the run folder, so that any machine that sees it can watch.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_apr.core.exceptions import ConfigError
from ray_apr.run.evaluations import evaluation_line, evaluations_of
from ray_apr.run.failed_groups import FailedGroups
from ray_apr.run.folder import (
    CONFIG_FILE,
    RESUMES_FILE,
    holds_run,
    is_held,
    last_lines,
    object_of,
    read_object,
)
from ray_apr.run.new_rows import NewRows
from ray_apr.run.progress import step_line

_LOOK_S = 1.0
_NUM_SHOWN = 60
"""Steps of the sparkline."""
_RECENT_S = 30.0
"""Time over which shares are told."""
_END_OF_FILE = 1 << 18
_BARS = "▁▂▃▄▅▆▇█"
_COLORS = {
    "generate": "blue", "train": "green", "sync": "yellow", "paused": "red", "write": "magenta",
}  # fmt: skip


class Watched:
    """What the folder of a run says now.

    Args:
        folder: Of the run.

    Raises:
        ConfigError: If it is none of a run that has begun.
    """

    def __init__(self, folder: Path) -> None:
        self._config = folder / CONFIG_FILE
        if not self._config.is_file():
            raise ConfigError("RUN_DIR", str(folder), "is no run folder: it has no config.json")
        self.folder = folder
        self._steps = NewRows(folder / "metrics.jsonl", "step", -1)
        self.shown: deque[dict[str, Any]] = deque(maxlen=_NUM_SHOWN)
        """The last steps."""
        self._resumes = NewRows(folder / RESUMES_FILE, None)
        self._resumed_at: list[int] = []
        self._firsts: dict[int, Mapping[str, Any]] = {}
        self._evaluations = evaluations_of(folder)
        self.evaluation: dict[str, Any] | None = None
        """The last one; None: none has ended."""
        self.failed = FailedGroups(folder, tells_old=True)

    @property
    def before_steps(self) -> str:
        """What is told until the first step has ended."""
        return f"{self.folder.name}: no step yet; engines and train workers start"

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        number: int = read_object(self._config)["train"]["steps"]
        return number

    def new_steps(self) -> Sequence[dict[str, Any]]:
        """Rows of steps since the last call."""
        if not holds_run(self.folder):
            return ()
        rows = self._steps.new()
        self._resumed_at += [row["step"] for row in self._resumes.new()]
        self.shown.extend(rows)
        for row in rows:
            self.first_of(row)
        return rows

    def first_of(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Row of the first step beside this one, between which the run was not gone on with."""
        part = sum(step <= row["step"] for step in self._resumed_at)
        return self._firsts.setdefault(part, row)

    def new_evaluations(self) -> Sequence[dict[str, Any]]:
        """Rows of evaluations since the last call."""
        rows = self._evaluations.new() if holds_run(self.folder) else ()
        self.evaluation = rows[-1] if rows else self.evaluation
        return rows

    def shares(self) -> dict[str, dict[str, float]]:
        """What each engine and the trainer did lately, as shares of that time. What the trainer is
        at, which is recorded as it ends, is told as under way."""
        file = self.folder / "timeline.jsonl"
        spans = [object_of(line.encode(), file) for line in last_lines(file, _END_OF_FILE)]
        end = max((span["end_s"] for span in spans), default=0.0)
        ended = max((span["end_s"] for span in spans if span["actor"] == "trainer"), default=0.0)
        now = {"actor": "trainer", "what": "under way", "start_s": ended, "end_s": end}
        found: dict[str, Counter[str]] = {}
        for span in (*spans, now):
            begin = max(span["start_s"], end - _RECENT_S)
            if span["end_s"] > begin and span["actor"].startswith(("engine", "trainer")):
                found.setdefault(span["actor"], Counter())[span["what"]] += span["end_s"] - begin
        return {
            actor: {what: s / sum(of.values()) for what, s in of.most_common()}
            for actor, of in sorted(found.items())
        }

    def final(self) -> Mapping[str, Any] | None:
        """How the run ended; None while it goes on, or if it could not say."""
        file = self.folder / "final.json"
        if is_held(self.folder) or not file.is_file():
            return None
        return read_object(file)


def sparkline(values: Sequence[float]) -> str:
    """Values as bars, the least one low and the greatest one high."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def clock(seconds: float) -> str:
    """Seconds as 4:05 or 2:03:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def view(watched: Watched) -> RenderableType:
    """What a terminal shows."""
    steps, num_steps = list(watched.shown), watched.num_steps
    last = steps[-1] if steps else {}
    failed = Text("\n".join(watched.failed.lines(last.get("tokens_generated"))), style="red")
    if not steps:
        begins = Text(watched.before_steps)
        return Group(begins, failed) if failed else begins
    done = last["step"] + 1
    top = Table.grid(padding=(0, 2))
    top.add_row(
        Text(watched.folder.name, style="bold"),
        ProgressBar(total=num_steps, completed=done, width=30),
        f"step {done}/{num_steps}",
        f"{clock(last['time_s'])} passed{_left(steps, num_steps)}",
    )
    rewards = [row["reward_mean"] for row in steps]
    learns = Text.assemble(
        ("reward  ", "bold"), (sparkline(rewards), "cyan"),
        f"  {rewards[0]:.3f} → {rewards[-1]:.3f}, of the last {len(rewards)} steps",
    )  # fmt: skip
    if watched.evaluation is not None:
        learns.append(f"\n{evaluation_line(watched.evaluation)}")
    parts = Table.grid(padding=(0, 2))
    for actor, shares in watched.shares().items():
        parts.add_row(actor, _shares(shares))
    buffer = (
        f"{last.get('buffered', 0)} samples wait for the trainer, {last.get('inflight', 0)} in "
        f"flight, {last.get('held', 0)} interrupted; staleness {last['staleness_mean']:.2f}, at "
        f"most {last['staleness_max']}"
    )
    parts.add_row("buffer", buffer)
    of_part = [row for row in steps if row["step"] >= watched.first_of(last)["step"]]
    if len(of_part) > 1:
        tokens, seconds = (
            last.get(n, 0) - of_part[0].get(n, 0) for n in ("tokens_generated", "time_s")
        )
        parts.add_row("speed", f"{tokens / max(seconds, 1e-9):,.0f} tokens generated a second")
    parts.add_row("waits for", last.get("waiting_for") or "nothing")
    if failed:
        parts.add_row("failures", failed)
    return Group(top, learns, parts)


def _left(steps: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    times = [row["time_s"] for row in steps]
    if len(times) < 2:
        return ""
    each = statistics.median(b - a for a, b in itertools.pairwise(times))
    return f", about {clock(each * (num_steps - steps[-1]['step'] - 1))} left"


def _shares(shares: Mapping[str, float]) -> Text:
    text = Text()
    for what, share in shares.items():
        text.append(f"{what} {share:.0%}  ", style=_COLORS.get(what, ""))
    return text


def watch(
    folder: Path, show: Callable[[str], None], console: Console | None = None
) -> tuple[str, bool]:
    """Show a run until it ends: in a terminal as a view, elsewhere a line for each
    new step and evaluation, and warnings of groups that failed.

    Args:
        folder: Of the run.
        show: Takes a line.
        console: Where the view is; None: standard output.

    Returns:
        How the run ended, or that nobody trains it; and whether it came to its end.

    Raises:
        ConfigError: If there is no run.
    """
    watched, console = Watched(folder), console or Console(file=sys.stdout)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for _ in _looks(watched):
                watched.new_evaluations()
                live.update(view(watched), refresh=True)
    else:
        is_told = False
        for rows in _looks(watched):
            if not (rows or is_told) and is_held(folder):
                show(watched.before_steps)
            is_told, num_steps = True, watched.num_steps
            for row in rows:
                show(step_line(row, num_steps, watched.first_of(row)))
            for row in watched.new_evaluations():
                show(evaluation_line(row))
            for warning in watched.failed.warnings():
                show(warning)
    final = watched.final()
    if final is None:
        return "no process trains it, and it has not said how it ended", False
    error = f"; {final['error']}" if final.get("error") else ""
    said = f"{final['status']}: {final.get('steps', 0)} steps{error}"
    return said, final["status"] == "ok"


def _looks(watched: Watched) -> Iterator[Sequence[dict[str, Any]]]:
    """New steps of a run at each look until it ends.

    Waits for: the run. Unblocked by: its end, whatever ends it; Ctrl-C.
    """
    is_last = False
    while not is_last:
        is_last = not is_held(watched.folder)  # before the look, which finds its last step
        yield watched.new_steps()
        if not is_last:
            time.sleep(_LOOK_S)
