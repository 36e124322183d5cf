"""Read a run folder, whatever state the run left it in.

A last line that is cut off, as a crash leaves it, is skipped with a warning. Any other garbage is a
`RunFolderError` that names file and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import APRError, ConfigError
from ray_apr.run.failed_groups import DROPPED_FILE, POISON_FILE
from ray_apr.run.folder import CONFIG_FILE, is_held

Row = Mapping[str, Any]

_NUMBERS: Mapping[str, Sequence[str]] = {
    "metrics.jsonl": ("step", "time_s", "reward_mean"),
    "samples.jsonl": ("step", "reward", "staleness", "num_tokens", "num_interruptions"),
    "timeline.jsonl": ("start_s", "end_s"),
    "evaluations.jsonl": ("policy_version", "num_samples", "num_failed"),
    "engines.jsonl": ("time_s", "before", "after"),
    "resumes.jsonl": ("time_s", "step"),
    "ranks.jsonl": ("time_s", "step"),
}
"""What every row must have, as a number, for a report to make sense."""
_MAY_BE_NULL = ("staleness",)
"""A sample of which no token entered the loss has none."""
_TEXTS: Mapping[str, Sequence[str]] = {
    "timeline.jsonl": ("actor", "what"),
    DROPPED_FILE: ("group_id", "reason"),
}
_FILES = (*_NUMBERS, "final.json", CONFIG_FILE)


class RunFolderError(APRError, ValueError):
    """A file of a run folder holds what no run writes; the message names file and line."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run recorded. Times are seconds since the run began."""

    path: Path
    config: Row
    steps: Sequence[Row]
    """One row a step, in order."""
    samples: Sequence[Row]
    """One row a trained sample."""
    timeline: Sequence[Row]
    """Spans: actor, what, start_s, end_s."""
    evaluations: Sequence[Row]
    """One row an evaluation; none without held-out prompts."""
    scalings: Sequence[Row] = ()
    """One row a request for another number of engines; none in most runs."""
    dropped: Sequence[Row] = ()
    """One row a group that was dropped."""
    poison: Sequence[Row] = ()
    """One row a prompt that was set aside; none in most runs."""
    resumes: Sequence[Row] = ()
    """One row each time that the run was gone on with; none in most runs."""
    ranks: Sequence[Row] = ()
    """One row each time that train workers and engines were started."""
    final: Row | None
    """Last counters; None if the run ended before it could write them."""
    warnings: Sequence[str] = field(default_factory=tuple)
    """What is missing or cut off."""

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.name


def load_run(path: str | Path) -> RunData:
    """Read the run folder at `path`.

    Raises:
        ConfigError: If it is no run folder.
        RunFolderError: If one of its files is broken beyond a cut-off last line.
    """
    folder = Path(path).expanduser().resolve()
    if not any((folder / name).is_file() for name in _FILES):
        known = ", ".join(_FILES)
        raise ConfigError("RUN_DIR", str(path), f"is no run folder: it holds none of {known}")
    warnings: list[str] = []
    steps = _read_rows(folder / "metrics.jsonl", warnings)
    samples = _read_rows(folder / "samples.jsonl", warnings)
    timeline = _read_rows(folder / "timeline.jsonl", warnings)
    final = _read_object(folder / "final.json", warnings)
    return RunData(
        path=folder,
        config=_read_object(folder / CONFIG_FILE, warnings) or {},
        steps=sorted(steps, key=lambda row: row["step"]),
        samples=samples,
        timeline=timeline,
        evaluations=_read_rows(folder / "evaluations.jsonl", warnings, is_optional=True),
        scalings=_read_rows(folder / "engines.jsonl", warnings, is_optional=True),
        dropped=_read_rows(folder / DROPPED_FILE, warnings, is_optional=True),
        poison=_read_rows(folder / POISON_FILE, warnings, is_optional=True),
        resumes=_read_rows(folder / "resumes.jsonl", warnings, is_optional=True),
        ranks=_read_rows(folder / "ranks.jsonl", warnings, is_optional=True),
        final=final,
        warnings=tuple(warnings),
    )


def set_at(ranks: Sequence[Row], step: float, name: str, last: Any) -> Any:
    """Value of a setting by which a step was trained; parts of a run may differ in it.

    Args:
        ranks: Rows of ``ranks.jsonl``.
        step: As in ``metrics.jsonl``.
        name: Of the setting, as there.
        last: Value at the end of the run, for rows of an older version, which lack it.
    """
    told = (row[name] for row in reversed(ranks) if row["step"] <= step and name in row)
    return next(told, last)


def train_workers_at(run: RunData, step: float) -> Any:
    """Train workers that a step had; the most that its settings say where the run does not tell."""
    said = run.config.get("scaling", {}).get("num_workers")
    most = said[-1] if isinstance(said, Sequence) else said
    return set_at(run.ranks, step, "num_train_workers", most)


def _read_rows(
    file: Path, warnings: list[str], *, is_optional: bool = False
) -> list[dict[str, Any]]:
    if not file.is_file():
        if is_optional:
            return []
        warnings.append(f"{file.name} is missing")
        return []
    lines = file.read_bytes().split(b"\n")
    while lines and not lines[-1].strip(b"\0 \r\t"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:  # no JSON, or no UTF-8
            if number == len(lines):
                warnings.append(f"{file.name}: the last line ({number}) is cut off; it was skipped")
                break
            raise RunFolderError(f"{file}, line {number}: no JSON ({error})") from error
        _check_row(file, number, row)
        rows.append(row)
    return rows


def _check_row(file: Path, number: int, row: Any) -> None:
    if not isinstance(row, dict):
        raise RunFolderError(f"{file}, line {number}: a {type(row).__name__} instead of an object")
    for key in _NUMBERS.get(file.name, ()):
        value = row.get(key)
        if value is None and key in row and key in _MAY_BE_NULL:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RunFolderError(f"{file}, line {number}: {key} = {value!r} is no number")
    for key in _TEXTS.get(file.name, ()):
        if not isinstance(row.get(key), str):
            raise RunFolderError(f"{file}, line {number}: {key} = {row.get(key)!r} is no text")


def _read_object(file: Path, warnings: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        why = "goes on" if is_held(file.parent) else "ended before it was written"
        warnings.append(f"{file.name} is missing: the run {why}")
        return None
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        warnings.append(f"{file.name} is cut off or no JSON ({error}); it was left out")
        return None
    if not isinstance(value, dict):
        raise RunFolderError(f"{file}, line 1: a {type(value).__name__} instead of an object")
    return value
