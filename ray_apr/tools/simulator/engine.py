"""A model of one rollout engine: decode steps in closed form, KV capacity, queue, preemption.

Invariants, kept by `EngineModel`:
    * All running requests get one token in each decode step, which lasts
      ``base + per_sequence * n + per_context_token * context`` seconds.
    * The KV entries of running and cached requests never exceed the capacity, except where one
      request alone does.
    * A step counts once it is complete; requests join and leave between steps.

m steps of one set of n requests with C context tokens last
``m (base + per_sequence n) + per_context_token (m C + n m (m - 1) / 2)``, so that the model jumps
from event to event, and an event costs O(log n).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from ray_apr.tools.simulator.cluster import EngineConfig


@dataclass(slots=True, eq=False)
class Request:
    """One generate call inside of an engine."""

    sample_id: str
    num_context: int
    """Prompt and response tokens at the start of the call."""
    num_tokens: int
    """Response tokens that are left."""
    is_resumed: bool
    """Whether its context was in an engine before."""
    begin_step: int = 0
    """Step count of the engine when it began to run."""
    end_step: int = 0
    admitted: int = 0
    """Grows with each time that a request begins to run; unique in the engine."""
    is_running: bool = False
    num_made: int = 0
    """Tokens of this call that it had made when it last stopped running."""


class EngineModel:
    """One engine; `now` is in seconds.

    Args:
        config: Rates and capacities.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        resume = config.resume_overhead_s
        self._resume_overhead_s = config.request_overhead_s if resume is None else resume
        self._steps = 0
        self._at = 0.0
        """Time at which the last step was complete; later than now while a prefill runs."""
        self._context = 0
        self._running: dict[str, Request] = {}
        self._ends: list[tuple[int, int, Request]] = []
        self._order: list[tuple[int, Request]] = []
        self._queue: deque[Request] = deque()
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._num_cached = 0
        self._admissions = 0
        self._busy_from: float | None = None
        self._slowdown = 1.0
        self.busy_s = 0.0
        self.tokens_generated = 0
        self.tokens_reprefilled = 0
        self.num_preempted = 0
        self.num_ended = 0
        self.epoch = 0
        """Grows whenever the next event may have moved."""

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return len(self._running)

    @property
    def num_queued(self) -> int:
        """Requests that wait for KV entries or a place."""
        return len(self._queue)

    @property
    def num_requests(self) -> int:
        """Running and queued requests."""
        return len(self._running) + len(self._queue)

    @property
    def kv_usage(self) -> float:
        """Share of the KV capacity that running requests use."""
        return self._context / self._config.kv_capacity_tokens

    def submit(self, request: Request, now: float) -> None:
        """Take a request in; it runs at once if there is room."""
        self.advance(now)
        self._queue.append(request)
        self._admit()
        self._mark(now)

    def next_event(self) -> float | None:
        """Time of the next end of a request or of the KV entries; None when nothing runs."""
        steps = self._steps_to_event()
        return None if steps is None else self._at + self._duration(steps)

    def on_event(self, now: float) -> list[Request]:
        """The time of `next_event` has come: returns the requests that have ended."""
        steps = self._steps_to_event()
        if steps is not None:
            self._at += self._duration(steps)
            self._make(steps)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            request = heapq.heappop(self._ends)[-1]
            if request.is_running and request.end_step <= self._steps:
                self._leave(request)
                ended.append(request)
        self.num_ended += len(ended)
        if not ended:
            self._preempt()
        self._admit()
        self._mark(now)
        return ended

    def stop(self, request: Request, now: float, *, keep: bool) -> None:
        """Abort a request; `keep` leaves its KV entries in the prefix cache."""
        self.advance(now)
        if request.is_running:
            self._leave(request)
            if keep:
                self._cached[request.sample_id] = request.num_context + request.num_made
                self._num_cached += self._cached[request.sample_id]
        else:
            self._queue.remove(request)
        self._mark(now)

    def settle(self, now: float) -> None:
        """Let queued requests take the room of those that were stopped."""
        self.advance(now)
        if self._steps_to_event() != 0:  # else others end now: `on_event` admits after that
            self._admit()
        self._mark(now)

    def drop_cache(self) -> None:
        """Forget the KV entries of requests that do not run."""
        self._cached.clear()
        self._num_cached = 0

    def recompute(self, now: float) -> None:
        """Prefill all running requests again, e.g. after their KV entries were dropped."""
        self.advance(now)
        self.drop_cache()
        self.tokens_reprefilled += self._context
        self._at = max(self._at, now) + self._prefill_s(self._context)
        self._mark(now)

    def delay(self, now: float, until: float) -> None:
        """Nothing runs until then: the engine is paused, or the GPU does something else."""
        self.advance(now)
        self._at = max(self._at, until)
        if self._busy_from is not None:
            self.busy_s += now - self._busy_from
            self._busy_from = until
        self.epoch += 1

    def set_slowdown(self, factor: float, now: float) -> None:
        """From now on a step takes `factor` times as long as on a host of its own."""
        self.advance(now)
        self._slowdown = factor
        self.epoch += 1

    def made(self, request: Request) -> int:
        """Tokens that a request has made since it was submitted."""
        return request.num_made + (self._steps - request.begin_step if request.is_running else 0)

    def advance(self, now: float) -> None:
        """Complete the steps that end by `now`."""
        if not self._running:
            self._at = max(self._at, now)
            return
        config, n = self._config, len(self._running)
        left = now - self._at
        if left <= 0:
            return
        square = self._slowdown * config.decode_per_context_token_s * n / 2
        linear = self._step_s() - square
        if square > 0:
            steps = int((math.sqrt(linear * linear + 4 * square * left) - linear) / (2 * square))
        else:
            steps = int(left / linear)
        limit = self._steps_to_event()
        steps = min(steps, limit if limit is not None else steps)
        self._at += self._duration(steps)
        self._make(steps)

    def close(self, now: float) -> None:
        """Count the busy time up to `now`."""
        if self._busy_from is not None and now > self._busy_from:
            self.busy_s += now - self._busy_from
            self._busy_from = now

    def _step_s(self) -> float:
        """Duration of one step of the present set."""
        config = self._config
        return self._slowdown * (
            config.decode_base_s
            + config.decode_per_sequence_s * len(self._running)
            + config.decode_per_context_token_s * self._context
        )

    def _prefill_s(self, num_tokens: int) -> float:
        return self._slowdown * num_tokens / self._config.prefill_tokens_per_s

    def _duration(self, steps: int) -> float:
        grown = self._config.decode_per_context_token_s * len(self._running) * steps
        return steps * self._step_s() + self._slowdown * grown * (steps - 1) / 2

    def _make(self, steps: int) -> None:
        self._steps += steps
        self._context += steps * len(self._running)
        self.tokens_generated += steps * len(self._running)

    def _steps_to_event(self) -> int | None:
        """Steps until a request ends, or until the KV entries run out."""
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._running:
            return None
        steps = self._ends[0][0] - self._steps
        if len(self._running) > 1:
            room = self._config.kv_capacity_tokens - self._context
            steps = min(steps, max(0, room // len(self._running)))
        return steps

    def _is_current(self, entry: tuple[int, int, Request]) -> bool:
        return entry[-1].is_running and entry[-1].end_step == entry[0]

    def _leave(self, request: Request) -> None:
        """Take a request out of the running set."""
        request.num_made = self.made(request)
        request.is_running = False
        self._context -= request.num_context + request.num_made
        del self._running[request.sample_id]

    def _preempt(self) -> None:
        """Make room for the next step: cached entries go first, then the last one admitted."""
        capacity = self._config.kv_capacity_tokens
        while self._context + len(self._running) > capacity and len(self._running) > 1:
            while self._order:
                admitted, request = self._order.pop()
                if request.is_running and request.admitted == admitted:
                    break
            self._leave(request)
            request.is_resumed = True
            self._queue.appendleft(request)
            self.num_preempted += 1
        self._shrink_cache()

    def _shrink_cache(self) -> None:
        room = self._config.kv_capacity_tokens - self._context
        while self._cached and self._num_cached > room:
            self._num_cached -= self._cached.popitem(last=False)[1]

    def _admit(self) -> None:
        """Move requests from the queue into the running set while there is room, in order."""
        config = self._config
        while self._queue and len(self._running) < config.max_sequences:
            request = self._queue[0]
            context = request.num_context + request.num_made
            needed = self._context + len(self._running) + context
            if self._running and needed >= config.kv_capacity_tokens:
                break
            self._queue.popleft()
            cached = self._cached.pop(request.sample_id, 0)
            self._num_cached -= cached
            prefill = max(0, context - cached)
            if request.is_resumed:
                self.tokens_reprefilled += prefill
            overhead = self._resume_overhead_s if request.is_resumed else config.request_overhead_s
            self._at += self._prefill_s(prefill) + self._slowdown * overhead
            self._admissions += 1
            request.admitted = self._admissions
            request.is_running = True
            request.begin_step = self._steps
            request.end_step = self._steps + request.num_tokens - request.num_made
            self._running[request.sample_id] = request
            self._context += context
            heapq.heappush(self._ends, (request.end_step, request.admitted, request))
            self._order.append((request.admitted, request))
            if len(self._order) > 4 * len(self._running) + 64:
                self._order = [(a, r) for a, r in self._order if r.is_running and r.admitted == a]
        self._shrink_cache()

    def _mark(self, now: float) -> None:
        """Keep the busy time, and tell that the next event may have moved."""
        self.epoch += 1
        if self._running and self._busy_from is None:
            self._busy_from = now
        elif not self._running and self._busy_from is not None:
            self.busy_s += max(0.0, now - self._busy_from)
            self._busy_from = None
