"""Admission: how many groups may start now, and which limit binds.

The limits of the settings always hold: no more groups start than `Load.room`, whatever a rule says.
So any rule keeps supplementation and the staleness bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Room(NamedTuple):
    """How many whole groups may start now."""

    num_groups: int
    limit: str = ""
    """Which limit binds, in words that follow "no group may start": for the diagnosis of a run
    that waits."""


NONE = Room(0)


@dataclass(slots=True, kw_only=True)
class Load:
    """What is alive when groups may be admitted."""

    policy_version: int
    """Of the engines."""
    batch_size: int
    """Samples of one step."""
    group_size: int
    num_unfinished: int
    """Samples that have not ended."""
    num_ended: int
    """Samples that have ended and are not yet in the buffer."""
    num_untrained: int
    """Samples in the buffer, those of the step in training included."""
    num_owed: int
    """Groups that were dropped and not yet replaced."""
    room: Room = NONE
    """What the settings allow."""


class Admission(Protocol):
    """Says how many groups start; a function of one argument is an admission rule, too.

    It is asked after each event, so that it should be quick.

    Example:
        >>> class AtMostUnfinished:
        ...     def __call__(self, load):
        ...         left = (64 - load.num_unfinished) // load.group_size
        ...         return min(load.room, Room(max(0, left), "64 samples generate"))
    """

    def __call__(self, load: Load) -> Room:
        """How many groups may start; what is above ``load.room`` is not taken."""
        ...


def stream(load: Load) -> Room:
    """A group starts whenever there is room."""
    return load.room


def batch(load: Load) -> Room:
    """Groups start a batch at a time, once nothing generates; what was dropped is replaced."""
    if load.num_unfinished and load.num_owed < load.room.num_groups:
        return Room(load.num_owed, "the batch before it still generates")
    return load.room


ADMISSIONS: Mapping[str, Callable[[Load], Room]] = {"stream": stream, "batch": batch}
"""Built-in rules by name."""
