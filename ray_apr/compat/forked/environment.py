"""The environment of a process that was forked, in place of the one that it was begun with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

THREADS = "OMP_NUM_THREADS"
"""Servers import with 1; Ray sets it by the CPUs of a worker, once that has begun."""


def have_environment(wanted: Mapping[str, str]) -> None:
    """Have these variables and no other ones.

    What is right already stays where it is in memory: a process finds the room for its title by
    the first variable that it was begun with.
    """
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    changed = wanted.items() - os.environ.items()
    os.environ.update(changed)


def have_threads() -> None:
    """Have torch use as many threads as Ray gives this worker, where a server has imported it."""
    torch, given = sys.modules.get("torch"), os.environ.get(THREADS, "")
    if torch is not None and given.isdigit() and torch.get_num_threads() == 1:
        torch.set_num_threads(int(given))
