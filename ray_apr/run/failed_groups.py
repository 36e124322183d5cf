"""What a run lost, in words: groups of which a generation, a step or a reward failed, and
prompts that were set aside as engines died of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.run.new_rows import NewRows

DROPPED_FILE = "dropped.jsonl"
"""File of the run folder with a row a group that was dropped."""
POISON_FILE = "poison.jsonl"
"""File of the run folder with a row a prompt that was set aside."""
_TIMES = 10
"""A warning follows where groups that failed are so many times as many as at the last one."""


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row of `DROPPED_FILE` is of a group of which something failed."""
    return row.get("reason") == "failed"


def failed_groups(dropped: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last row of each group that failed, of rows of `DROPPED_FILE`: one whose prompt came
    again, as the run was gone on with from before that, may have failed twice."""
    last: dict[str, Mapping[str, Any]] = {}
    for row in filter(is_failed, dropped):
        last.pop(row["group_id"], None)
        last[row["group_id"]] = row
    return [*last.values()]


def failed_line(dropped: Iterable[Mapping[str, Any]], num_tokens: int | None = None) -> str | None:
    """What is to be said of failures in one line; None where there are none.

    Args:
        dropped: Rows of `DROPPED_FILE`.
        num_tokens: That were generated in all, if it is known.
    """
    failed = failed_groups(dropped)
    if not failed:
        return None
    groups, was = num_groups(failed), "was" if len(failed) == 1 else "were"
    last = failed[-1].get("error") or "not recorded"  # by an older version
    share = share_of_tokens(failed, num_tokens)
    return f"{groups} {was} dropped as something failed{share}; the last: {last}"


def poison_line(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What is to be said of prompts that were set aside in one line; None where there are none.

    Args:
        rows: Of `POISON_FILE`.
    """
    if not rows:
        return None
    prompts = "1 prompt was" if len(rows) == 1 else f"{len(rows):,} prompts were"
    last = f"row {rows[-1]['row']} of the dataset, {rows[-1]['error']}"
    return f"{prompts} set aside, as engines died of them; the last: {last}"


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
    time there are ten times as many as at the last warning; of prompts that are set aside, one each
    time.

    Args:
        folder: Of the run.
        tells_old: Tell failures until now, too.
    """

    def __init__(self, folder: Path, *, tells_old: bool = False) -> None:
        self._rows = NewRows(folder / DROPPED_FILE, None)
        self._poison = NewRows(folder / POISON_FILE, None)
        if not tells_old:
            self._rows.new()
            self._poison.new()
        self._failed: list[Mapping[str, Any]] = []
        self._aside: dict[int, Mapping[str, Any]] = {}
        self._next = 1

    def lines(self, num_tokens: int | None = None) -> list[str]:
        """What `failed_line` and `poison_line` say of them by now."""
        self._read()
        failed = failed_line(self._failed, num_tokens)
        return [line for line in (failed, poison_line([*self._aside.values()])) if line]

    def warnings(self) -> list[str]:
        """What is to be shown of the failures since the last call."""
        told, num_aside = [], len(self._aside)
        self._read()
        if len(self._failed) >= self._next:
            told = [f"warning: {failed_line(self._failed)} (each is in {DROPPED_FILE})"]
        while self._next <= len(self._failed):
            self._next *= _TIMES
        if len(self._aside) > num_aside:
            line = poison_line([*self._aside.values()])
            told.append(f"warning: {line} (each is in {POISON_FILE})")
        return told

    def _read(self) -> None:
        self._aside |= {row["row"]: row for row in self._poison.new()}
        self._failed = failed_groups([*self._failed, *self._rows.new()])
