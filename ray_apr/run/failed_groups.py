"""Groups that a run dropped because a generation, a step or a reward failed, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ray_apr.run.new_rows import NewRows

DROPPED_FILE = "dropped.jsonl"
"""File of the run folder with a row a group that was dropped."""
_TIMES = 10
"""A warning follows where groups that failed are so many times as many as at the last one."""


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row of `DROPPED_FILE` is of a group of which something failed."""
    return row.get("reason") == "failed"


def failed_line(dropped: Iterable[Mapping[str, Any]], num_tokens: int | None = None) -> str | None:
    """What is to be said of failures in one line; None where there are none.

    Args:
        dropped: Rows of `DROPPED_FILE`.
        num_tokens: That were generated in all, if it is known.
    """
    failed = [row for row in dropped if is_failed(row)]
    if not failed:
        return None
    groups, was = num_groups(failed), "was" if len(failed) == 1 else "were"
    last = failed[-1].get("error") or "not recorded"  # by an older version
    share = share_of_tokens(failed, num_tokens)
    return f"{groups} {was} dropped as something failed{share}; the last: {last}"


def num_groups(failed: Collection[Any]) -> str:
    """How many these are, e.g. 1 group."""
    return "1 group" if len(failed) == 1 else f"{len(failed):,} groups"


def share_of_tokens(failed: Iterable[Mapping[str, Any]], num_tokens: int | None) -> str:
    """Share of the generated tokens, in brackets; nothing where their number is not known."""
    if not num_tokens:
        return ""
    share = sum(row.get("num_generated", 0) for row in failed) / num_tokens
    told = "less than 1%" if 0 < share < 0.01 else f"{share:.0%}"
    return f" ({told} of the generated tokens)"


class FailedGroups:
    """Failures while a run goes on. Of warnings there is one at the first failure, and one each
    time there are ten times as many as at the last warning.

    Args:
        folder: Of the run.
        tells_old: Tell failures until now, too.
    """

    def __init__(self, folder: Path, *, tells_old: bool = False) -> None:
        self._rows = NewRows(folder / DROPPED_FILE, None)
        if not tells_old:
            self._rows.new()
        self._failed: dict[str, Mapping[str, Any]] = {}
        self._next = 1

    def line(self, num_tokens: int | None = None) -> str | None:
        """What `failed_line` says of them by now."""
        self._read()
        return failed_line(self._failed.values(), num_tokens)

    def warnings(self) -> list[str]:
        """What is to be shown of the failures since the last call."""
        self._read()
        if len(self._failed) < self._next:
            return []
        while self._next <= len(self._failed):
            self._next *= _TIMES
        line = failed_line(self._failed.values())
        return [f"warning: {line} (each is in {DROPPED_FILE})"]

    def _read(self) -> None:
        self._failed |= {row["group_id"]: row for row in self._rows.new() if is_failed(row)}
