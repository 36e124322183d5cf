"""The environment of a process that was forked, in place of the one that it was begun with."""

from __future__ import annotations

import os
from collections.abc import Mapping


def have_environment(wanted: Mapping[str, str]) -> None:
    """Have these variables and no other ones.

    What is right already stays where it is in memory: a process finds the room for its title by
    the first variable that it was begun with.
    """
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    changed = wanted.items() - os.environ.items()
    os.environ.update(changed)
