"""Prompts whose group was dropped and that are tried again, and the version that belongs to them.

A group that a full batch stopped twice is long. Beside shorter ones it would be stopped again and
again; so it waits until it fills a batch together with others of its kind, which then have a
version to themselves: the catch-up round, without supplementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ray_apr.core.sample import Prompt
from ray_apr.scheduling.order import retried


class Retries:
    """Prompts to be tried again, in the order in which they were dropped.

    Args:
        groups_per_batch: Groups that fill a batch.
    """

    def __init__(self, groups_per_batch: int) -> None:
        self._groups_per_batch = groups_per_batch
        self._now: deque[Prompt] = deque()
        self._long: deque[Prompt] = deque()
        self.is_catching_up = False
        """Whether this version belongs to the prompts that full batches stopped twice."""

    def __iter__(self) -> Iterator[Prompt]:
        yield from self._now
        yield from self._long

    @property
    def num_long(self) -> int:
        """How many of them, the last ones, full batches stopped twice."""
        return len(self._long)

    def restore(self, prompts: Sequence[Prompt], num_long: int) -> None:
        """Take in what another one held."""
        first_long = len(prompts) - num_long
        self._now.extend(prompts[:first_long])
        self._long.extend(prompts[first_long:])

    def forget(self, is_forgotten: Callable[[Prompt], bool]) -> list[Prompt]:
        """Try some prompts not again; returns them."""
        forgotten: list[Prompt] = []
        for queue in (self._now, self._long):
            prompts = tuple(queue)
            queue.clear()
            for prompt in prompts:
                (forgotten if is_forgotten(prompt) else queue).append(prompt)
        return forgotten

    def put_off(self, prompt: Prompt) -> None:
        """Try a prompt later, whose group has not begun."""
        self._now.append(prompt)

    def after_filter(self, prompt: Prompt) -> None:
        """Try a prompt again at once whose group was filtered."""
        filtered, stops = prompt.num_filtered + 1, prompt.num_stops
        self._now.append(retried(prompt, num_filtered=filtered, num_stops=stops))

    def after_stop(self, prompt: Prompt) -> None:
        """Try a prompt again that a full batch stopped; a second time it waits for its round."""
        filtered, stops = prompt.num_filtered, prompt.num_stops + 1
        queue = self._long if stops > 1 else self._now
        queue.append(retried(prompt, num_filtered=filtered, num_stops=stops))

    def begin_version(self) -> None:
        """Decide whether the version that begins is a catch-up round."""
        self.is_catching_up = len(self._long) >= self._groups_per_batch

    def next(self) -> Prompt | None:
        """The prompt to be admitted now; None: a new one."""
        if self._long and self.is_catching_up:
            return self._long.popleft()
        return self._now.popleft() if self._now else None
