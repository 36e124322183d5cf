"""A run as a trace for Perfetto: engines, rewards, syncs, trainer, queues, profiles of steps.

The file is in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open. Times are
microseconds since the run began.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import ConfigError, one_line
from ray_apr.core.profiles import ENGINE_STEPS_FILE, PROFILE_MARK, PROFILES
from ray_apr.run.folder import read_rows
from ray_apr.tools.report.load import RunData, load_run

logger = logging.getLogger(__name__)

_INSIDE = ", inside"
_OF_SPANS = ("actor", "what", "start_s", "end_s")
TRACE_FILE = "trace.json.gz"
_RUN = 1
"""Process id of the run's own lanes; those of profiles follow."""
_QUEUES = {
    "inflight": "in flight", "held": "interrupted", "unscored": "wait for their reward",
    "stepping": "wait for their environment", "buffered": "in the buffer",
}  # fmt: skip


def write_trace(run_dir: Path, out: Path | None = None) -> Path:
    """Write the trace of a run, also of one that goes on.

    Args:
        run_dir: Its folder.
        out: Where it goes; None puts it into the run folder.

    Returns:
        The file.

    Raises:
        ConfigError: If it is no run folder, or has no span yet.
        RunFolderError: If its files are broken.
    """
    run, file = load_run(run_dir), out or run_dir / TRACE_FILE
    if not run.timeline:
        raise ConfigError("RUN_DIR", str(run_dir), "has no span in timeline.jsonl yet; wait")
    events = [*_lanes(run, _engine_steps(run_dir)), *_queues(run)]
    ids = itertools.count(_RUN + 1)
    for profile in sorted((run_dir / PROFILES).glob("*.json.gz")):
        events += _of_profile(profile, ids)
    with gzip.open(file, "wt", encoding="utf-8", compresslevel=3) as text:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, text)
    return file


def _engine_steps(run_dir: Path) -> list[dict[str, Any]]:
    """What engines did step by step in profiled steps, each in a lane beside its engine's."""
    rows = read_rows(run_dir / ENGINE_STEPS_FILE)
    return [{**row, "actor": f"{row['actor']}{_INSIDE}"} for row in rows]


def _outside(lane: str) -> str:
    return lane.removesuffix(_INSIDE)


def _lanes(run: RunData, steps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A lane for each engine, rewards, environment, the trainer, weights and checkpoints; below an
    engine's its steps."""
    yield _named("process_name", run.name, _RUN, 0)
    rows = [*run.timeline, *steps]
    names = dict.fromkeys(row["actor"] for row in rows)
    order = list(dict.fromkeys(map(_outside, names)))
    ordered = sorted(names, key=lambda name: (order.index(_outside(name)), name))
    lanes = {name: lane for lane, name in enumerate(ordered, start=1)}
    for actor, lane in lanes.items():
        yield _named("thread_name", actor, _RUN, lane)
    for row in rows:
        yield {
            "ph": "X", "pid": _RUN, "tid": lanes[row["actor"]], "name": row["what"],
            "ts": 1e6 * row["start_s"], "dur": 1e6 * (row["end_s"] - row["start_s"]),
            "args": {name: value for name, value in row.items() if name not in _OF_SPANS},
        }  # fmt: skip


def _queues(run: RunData) -> Iterator[dict[str, Any]]:
    """Samples by where they are, at the end of each step."""
    for row in run.steps:
        counts = {words: row[name] for name, words in _QUEUES.items() if name in row}
        yield {
            "ph": "C", "pid": _RUN, "name": "samples", "ts": 1e6 * row["time_s"], "args": counts
        }  # fmt: skip


def _of_profile(file: Path, ids: Iterator[int]) -> list[dict[str, Any]]:
    """Events of a profile by the run's clock, in processes of their own.

    Args:
        file: Of torch.profiler.
        ids: What its processes, threads and arrows are called, as others have the same numbers.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            events = json.load(text)["traceEvents"]
        begin = next(e for e in events if str(e.get("name")).startswith(PROFILE_MARK))
    except (OSError, EOFError, ValueError, KeyError, StopIteration) as error:
        logger.warning("%s is left out: %s", file, one_line(error) or "it has no begin")
        return []
    shift = 1e6 * float(begin["name"].removeprefix(PROFILE_MARK)) - begin["ts"]
    new: dict[Any, int] = defaultdict(lambda: next(ids))
    moved = []
    for event in events:
        process = event.get("pid")
        event |= {"pid": new["process", process], "tid": new["thread", process, event.get("tid")]}
        if event.get("ph") == "M":
            moved.append(_of_step(event, file))
        elif "ts" in event:
            event["ts"] += shift
            if "id" in event:
                event["id"] = new["arrow", event["id"]]
            moved.append(event)
    return moved


def _of_step(event: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The name of a process, with its step and train worker."""
    if event["name"] != "process_name":
        return dict(event)
    whose = file.name.removesuffix(".json.gz")
    return {**event, "args": {"name": f"{whose}: {event['args'].get('name', '')}"}}


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
