"""The evaluations of a run folder, as they come and in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_apr.run.final import FINAL_FILE
from ray_apr.run.folder import last_row, read_object
from ray_apr.run.new_rows import NewRows


def evaluations_of(folder: Path) -> NewRows:
    """New rows of the evaluations of a run folder."""
    return NewRows(folder / "evaluations.jsonl", "policy_version", -1)


def lacks_last_evaluation(folder: Path, policy_version: int) -> bool:
    """Whether a run with evaluations that has trained its last step was ended before that was
    evaluated.

    Args:
        folder: Of the run.
        policy_version: Of its last step.
    """
    final, rows = folder / FINAL_FILE, folder / "evaluations.jsonl"
    has_ended = final.is_file() and read_object(final).get("status") == "ok"
    is_there = last_row(rows).get("policy_version") == policy_version
    return not has_ended and not is_there


def evaluation_line(row: Mapping[str, Any]) -> str:
    """One evaluation in one line: its version, and the figures of all prompts and of each suite.

    Args:
        row: Of ``evaluations.jsonl``.
    """
    suites = (row.get("suites") or {}).items()
    parts = [evaluated(row), *(f"{name} {evaluated(of_suite)}" for name, of_suite in suites)]
    failed = f" │ {row['num_failed']} failed" if row.get("num_failed") else ""
    failed += f"; the last: {row['error']}" if "error" in row else ""
    num = row.get("num_left_out", 0)
    left = f" │ {num} due since the last one left out: one was under way" if num else ""
    return f"held-out prompts, version {row['policy_version']} │ {' │ '.join(parts)}{failed}{left}"


def evaluated(figures: Mapping[str, Any]) -> str:
    """Mean reward and pass@k of an evaluation, or of a suite of it, e.g. 0.750, pass@1 0.500."""
    reward = figures.get("reward_mean")
    passed = (figures.get("pass_at_k") or {}).items()
    of_reward = "no reward" if reward is None else f"{reward:.3f}"
    return ", ".join([of_reward, *(f"pass@{k} {share:.3f}" for k, share in passed)])
