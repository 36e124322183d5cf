"""Samples that engines died under: how many of them run at once, until one is convicted.

A prompt that ends its engine ends one after the other, wherever it goes. When an engine dies, each
sample that ran there is a suspect. With each death in a row fewer suspects run beside each other,
so that the next one says more; the one that is alone at last is convicted.

    deaths in a row       1          2          3, 4    5
    suspects at once      any        16         1       convicted

Invariants, kept by `Suspects`:
    * No suspect runs beside more of them than the table allows for the one with the most deaths.
      Samples without a death run beside them as ever.
    * A suspect is cleared once its call has ended, or once it has run, with tokens, for twice as
      long as when its engine died: what kills does so again by then. Tokens before that turn more
      than two deaths back into two. So chance convicts only by five deaths in a row, of which each
      of the last two falls into the time of one short call (`TRIAL_S`).

Pure: no clock, no ray, no torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason
from ray_apr.scheduling.live import LiveSample

ON_TRIAL = 2
"""Deaths in a row from which on few suspects run at once, in short calls."""
CONVICTED = 5
"""Deaths in a row of a prompt that kills engines."""
TRIAL_S = 2.0
"""A call on trial is cut after this time, so that its tokens are told; twice that after a call
without any."""
_ROOM_ON_TRIAL = 16


def died(live: LiveSample, ran_s: float) -> None:
    """The engine of a sample's call died under it, after so many seconds."""
    live.note(num_deaths=live.sample.num_deaths + 1)
    live.trial_s = max(live.trial_s, 2 * ran_s + TRIAL_S)


def is_convicted(live: LiveSample) -> bool:
    """Whether nothing else than this sample can have killed its engines."""
    return live.sample.num_deaths >= CONVICTED


def came_back(live: LiveSample, generation: Generation, ran_s: float) -> None:
    """A suspect's call ended with its engine alive, after so many seconds."""
    is_cut = generation.finish_reason is FinishReason.ABORT
    if is_cut and not generation.num_tokens:
        live.cut_s = 2 * (live.cut_s or TRIAL_S)
        return
    live.trial_s -= ran_s
    live.cut_s = 0.0
    is_cleared = live.trial_s <= 0 or not is_cut
    live.note(num_deaths=0 if is_cleared else min(live.sample.num_deaths, ON_TRIAL))
    if is_cleared:
        live.trial_s = 0.0


class Suspects:
    """Live samples with a death that wait, and those that run."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, LiveSample]] = []
        """Heap, the most deaths first; an entry counts while its sample can run."""
        self._num_queued = 0
        self._running: dict[str, LiveSample] = {}
        self._deaths: dict[str, int] = {}
        """Of each one that runs, when it started."""
        self._num_with: Counter[int] = Counter()
        """Of those that run, by deaths."""
        self._stopped: set[str] = set()
        """Those of them that make room for others."""

    def queue(self, live: LiveSample) -> None:
        """A suspect can run."""
        self._num_queued += 1
        heapq.heappush(self._waiting, (-live.sample.num_deaths, self._num_queued, live))

    def pop(self, can_run: Callable[[LiveSample], bool]) -> LiveSample | None:
        """Take the suspect that runs next; None if there is none, or no room for it."""
        first = self._first(can_run)
        if first is None:
            return None
        most = max([first.sample.num_deaths, *self._num_with])
        room = _ROOM_ON_TRIAL if most == ON_TRIAL else 1
        if most >= ON_TRIAL and len(self._running) >= room:
            return None
        return heapq.heappop(self._waiting)[-1]

    def _first(self, can_run: Callable[[LiveSample], bool]) -> LiveSample | None:
        while self._waiting:
            live = self._waiting[0][-1]
            if live.sample.num_deaths and can_run(live):
                return live
            heapq.heappop(self._waiting)
        return None

    def started(self, live: LiveSample) -> None:
        """A sample is in flight."""
        if deaths := live.sample.num_deaths:
            self._running[live.sample_id], self._deaths[live.sample_id] = live, deaths
            self._num_with[deaths] += 1

    def left(self, live: LiveSample) -> None:
        """A sample is no longer in flight."""
        if self._running.pop(live.sample_id, None) is None:
            return
        self._stopped.discard(live.sample_id)
        deaths = self._deaths.pop(live.sample_id)
        self._num_with[deaths] -= 1
        if not self._num_with[deaths]:
            del self._num_with[deaths]

    def in_the_way(self, can_run: Callable[[LiveSample], bool]) -> Sequence[LiveSample]:
        """Suspects to be interrupted, each once, as one with more deaths waits: those not on trial,
        whose calls nothing cuts."""
        first = self._first(can_run)
        if first is None or first.sample.num_deaths < ON_TRIAL or not self._num_with[1]:
            return ()
        found = [
            live
            for name, live in self._running.items()
            if self._deaths[name] < ON_TRIAL and name not in self._stopped
        ]
        self._stopped.update(live.sample_id for live in found)
        return found
