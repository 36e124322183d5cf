"""The rollout side of the simulated machine: engines, placement, and the calls under way.

Invariants, kept by `Fleet`:
    * A call is on exactly one engine from `start` until its `Generation` is handed out.
    * Each token of a call counts under the version that the engines had when it was made.
    * An engine with requests has an event ahead of it, unless all engines are stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import SimulationError
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Segment
from ray_apr.scheduling.live import LiveSample
from ray_apr.scheduling.routing import AdaptiveLimit, Placement
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.engine import EngineModel, Request

Returned = tuple[LiveSample, Generation]
"""A sample whose call came back, and what it made."""
_OBSERVE_EVERY_S = 1.0
"""Time between two looks at an engine's figures, as in a real run."""


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for a run of tokens or log-probs of which only the number matters."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __add__(self, other: Blank) -> Blank:
        return Blank(self.length + other.length)


@dataclass(slots=True)
class _Call:
    """A generate call under way."""

    live: LiveSample
    engine: int
    request: Request
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens made until it was replaced)."""


@dataclass(slots=True)
class _Seen:
    """An engine's figures when it was looked at last."""

    at: float = 0.0
    preempted: int = 0
    ended: int = 0


class Fleet:
    """All engines of a run.

    Args:
        cluster: The machine; ``rollout_gpus`` must be set unless it is colocated.
        config: The scheduling settings.
        schedule: Called with time, engine and epoch: `on_event` is to be called then.

    Raises:
        SimulationError: If it is unknown how many engines there are.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        config: PartialRolloutConfig,
        schedule: Callable[[float, int, int], None],
    ) -> None:
        num_engines = cluster.gpus if cluster.is_colocated else cluster.rollout_gpus
        if num_engines is None:
            raise SimulationError("cluster.rollout_gpus is not set; see best_split")
        self._schedule_at = schedule
        self._is_adaptive = config.is_adaptive
        self._keeps_stopped = config.kv_cache == "keep" and not cluster.is_colocated
        self._recomputes = config.kv_cache == "recompute" or cluster.is_colocated
        self._engines = [EngineModel(cluster.engine) for _ in range(num_engines)]
        limit = wanted = config.max_inflight_samples(cluster.batch.size)
        if self._is_adaptive:
            limit = min(cluster.engine.max_sequences, -(-wanted // num_engines))
        self._placement = Placement([str(i) for i in range(num_engines)], limit=limit)
        self._max_inflight = None if self._is_adaptive else wanted
        self._adaptive = [AdaptiveLimit(limit) for _ in self._engines]
        self._seen = [_Seen() for _ in self._engines]
        self._calls: dict[str, _Call] = {}
        self._version = 0

    @property
    def max_inflight(self) -> int:
        """Most calls at once: the setting, or what the engines have room for."""
        return self._placement.capacity if self._max_inflight is None else self._max_inflight

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def batches(self) -> list[int]:
        """Sequences that each of the busy engines decodes."""
        return [model.num_running for model in self._engines if model.num_requests]

    def set_slowdown(self, factor: float, now: float) -> None:
        """From now on all engines take `factor` times as long as each on a host of its own."""
        for engine, model in enumerate(self._engines):
            model.set_slowdown(factor, now)
            self._schedule(engine, now)

    def start(self, live: LiveSample, num_left: int, now: float) -> None:
        """Generate the `num_left` tokens that a sample still needs.

        Raises:
            SimulationError: If every engine has its most.
        """
        sample = live.sample
        engine = int(self._placement.enter(sample.sample_id, sample.group_id))
        held = sample.num_tokens
        context = len(sample.prompt.token_ids) + held
        request = Request(sample.sample_id, context, num_left, held > 0)
        self._calls[sample.sample_id] = _Call(live, engine, request)
        self._engines[engine].submit(request, now)
        self._schedule(engine, now)

    def abort(self, samples: Iterable[LiveSample], now: float) -> list[Returned]:
        """Stop those of the samples that have a call, and return what they made."""
        calls = [self._calls[s.sample_id] for s in samples if s.sample_id in self._calls]
        stopped = [self._stop(call, now) for call in calls]
        for engine in sorted({call.engine for call in calls}):
            self._engines[engine].settle(now)
            self._schedule(engine, now)
        return stopped

    def abort_all(self, now: float) -> list[Returned]:
        """Stop all calls, and return what they made."""
        return [self._stop(call, now) for call in tuple(self._calls.values())]

    def freeze(self, now: float, until: float) -> None:
        """Nothing is generated until then; `resume` must follow."""
        for model in self._engines:
            model.delay(now, until)

    def set_version(self, policy_version: int) -> None:
        """The engines have new weights."""
        for call in self._calls.values():
            call.marks.append((self._version, self._engines[call.engine].made(call.request)))
        self._version = policy_version

    def resume(self, now: float) -> None:
        """Generate again; KV entries are computed again where the cluster or the mode lost them."""
        for engine, model in enumerate(self._engines):
            if self._recomputes:
                model.recompute(now)
            if model.num_requests:
                self._schedule(engine, now)

    def on_event(self, engine: int, epoch: int, now: float) -> list[Returned]:
        """An event of an engine is due; returns the responses that end with it."""
        model = self._engines[engine]
        if epoch != model.epoch:
            return []
        ended = model.on_event(now)
        self._schedule(engine, now)
        return [self._take(self._calls[r.sample_id], FinishReason.STOP) for r in ended]

    def observe(self, engine: int, now: float, *, is_starved: bool) -> bool:
        """Adapt an engine's limit to its figures; returns whether it was looked at."""
        seen, model = self._seen[engine], self._engines[engine]
        if not self._is_adaptive or now - seen.at < _OBSERVE_EVERY_S:
            return False
        limit = self._adaptive[engine].observe(
            num_running=model.num_running,
            num_queued=model.num_queued,
            kv_usage=model.kv_usage,
            num_preempted=model.num_preempted - seen.preempted,
            num_ended=model.num_ended - seen.ended,
            is_starved=is_starved,
        )
        self._seen[engine] = _Seen(now, model.num_preempted, model.num_ended)
        self._placement.set_limit(str(engine), limit)
        return True

    def close(self, now: float) -> tuple[float, int, int]:
        """End of the run.

        Returns:
            Busy share of the engines' time, tokens prefilled again, preemptions.
        """
        for model in self._engines:
            model.close(now)
        return (
            sum(model.busy_s for model in self._engines) / (len(self._engines) * now),
            sum(model.tokens_reprefilled for model in self._engines),
            sum(model.num_preempted for model in self._engines),
        )

    def _schedule(self, engine: int, now: float) -> None:
        model = self._engines[engine]
        time = model.next_event()
        if time is not None:
            self._schedule_at(max(time, now), engine, model.epoch)

    def _stop(self, call: _Call, now: float) -> Returned:
        self._engines[call.engine].stop(call.request, now, keep=self._keeps_stopped)
        return self._take(call, FinishReason.ABORT)

    def _take(self, call: _Call, reason: FinishReason) -> Returned:
        """A call comes back."""
        sample_id = call.request.sample_id
        del self._calls[sample_id]
        self._placement.leave(str(call.engine))
        call.marks.append((self._version, self._engines[call.engine].made(call.request)))
        segments, before = [], 0
        for version, until in call.marks:
            if until > before:
                run = Blank(until - before)
                segments.append(Segment(policy_version=version, token_ids=run, logprobs=run))  # type: ignore[arg-type]
                before = until
        made = Generation(request_id=sample_id, segments=tuple(segments), finish_reason=reason)
        return call.live, made
