"""The simulated run: real dispatcher, store, ledger, shelf and placement; modelled hardware.

    prompts of a trace ──► RolloutState ──► Placement ──► EngineModel × k
                             ▲    │ ended                     │ tokens
                    versions │    ▼                           │
                             │  rewards (workers, in order) ◄─┘
                             │    ▼
                          trainer ◄── Shelf.select

Invariants, kept by `Simulation`:
    * Everything that decides is the code that decides in a real run; this module only says when
      things happen.
    * The same trace, cluster, settings and seed give the same result.
    * At the end, the ledgers of both sides account for every generated token.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ray_apr.config import PartialRolloutConfig
from ray_apr.data.selection import Shelf
from ray_apr.exceptions import SimulationError
from ray_apr.placement import AdaptiveLimit, Placement
from ray_apr.rollout.dispatcher import Dispatcher
from ray_apr.rollout.ledger import LedgerSnapshot, TokenLedger
from ray_apr.rollout.state import RolloutState
from ray_apr.simulator.cluster import ClusterConfig
from ray_apr.simulator.engine import EngineModel, Request
from ray_apr.simulator.trace import Trace, TraceGroup, TraceSample
from ray_apr.staleness import next_version, oldest_trainable, staleness
from ray_apr.types import (
    FinishReason,
    Generation,
    GroupMeta,
    Prompt,
    RewardResult,
    Sample,
    SampleMeta,
    Segment,
)

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

    engine: int
    request: Request
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens made until it was replaced)."""


@dataclass(slots=True)
class Outcome:
    """What a simulated run came to; times are seconds, idle ratios shares of the wall time."""

    wall_s: float = 0.0
    ledger: LedgerSnapshot = field(default_factory=LedgerSnapshot)
    tokens_reprefilled: int = 0
    staleness_max: int = 0
    staleness_sum: int = 0
    samples_trained: int = 0
    interrupted: int = 0
    resumed: int = 0
    preempted: int = 0
    generation_idle_ratio: float = 0.0
    trainer_idle_ratio: float = 0.0
    started_by_decile: Counter[int] = field(default_factory=Counter)
    trained_by_decile: Counter[int] = field(default_factory=Counter)
    alive_by_decile: Counter[int] = field(default_factory=Counter)
    """Of those that were started, the prompts that are neither trained nor dropped at the end."""
    num_events: int = 0
    step_ends: list[float] = field(default_factory=list)


class Simulation:
    """One run.

    Args:
        trace: Prompts with the lengths of their responses; cycled.
        cluster: The machine; ``rollout_gpus`` must be set unless it is colocated.
        config: The scheduling settings.
        seed: Order of the prompts and the rewards.
    """

    def __init__(
        self, trace: Trace, cluster: ClusterConfig, config: PartialRolloutConfig, *, seed: int = 0
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._prompts = trace.cycle(seed)
        self._random = random.Random(seed)
        batch = cluster.batch
        num_engines = cluster.gpus if cluster.is_colocated else cluster.rollout_gpus
        if num_engines is None:
            raise SimulationError("cluster.rollout_gpus is not set; see best_split")
        self._train_gpus = cluster.gpus if cluster.is_colocated else cluster.gpus - num_engines
        self._engines = [EngineModel(cluster.engine) for _ in range(num_engines)]
        limit = wanted = config.max_inflight_samples(batch.size)
        if config.is_adaptive:
            limit = min(cluster.engine.max_sequences, -(-wanted // num_engines))
        self._placement = Placement([str(i) for i in range(num_engines)], limit=limit)
        self._adaptive = [AdaptiveLimit(limit) for _ in self._engines]
        self._observed = [(0.0, 0, 0)] * num_engines
        """(time, preemptions, ends) of each engine when it was looked at last."""
        dispatcher = Dispatcher(
            config,
            batch_size=batch.size,
            group_size=batch.group_size,
            max_inflight=self._placement.capacity if config.is_adaptive else wanted,
        )
        self._state = RolloutState(dispatcher, config)
        self._dispatcher = dispatcher
        self._shelf = Shelf(
            batch_size=batch.size, max_staleness=config.max_staleness, on_stale=config.on_stale
        )
        self._buffer_ledger = TokenLedger()
        self._calls: dict[str, _Call] = {}
        self._groups: dict[str, TraceGroup] = {}
        self._epoch = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = itertools.count()
        self._arrivals = itertools.count()
        self._now = 0.0
        self._free_reward_workers = cluster.reward_workers
        self._unscored: deque[Sample] = deque()
        self._version = 0
        self._synced = 0
        self._step = 0
        self._in_training = 0
        self._is_waiting = True
        self._trainer_busy_s = 0.0
        self._sync_due = False
        """Whether new weights wait to be moved: for the sync before, or for a drain."""
        self._is_syncing = False
        self._is_stopped = False
        """Whether the engines are away: a sync, or the GPUs train."""
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run to the last step.

        Raises:
            SimulationError: If nothing can happen any more before that.
        """
        self._pump()
        while self._step < self._cluster.steps:
            if not self._events:
                raise SimulationError(
                    f"nothing can happen any more at step {self._step}: "
                    f"{self._dispatcher.diagnosis()}"
                )
            self._now, _, happen, args = heapq.heappop(self._events)
            self.outcome.num_events += 1
            happen(*args)
            self._pump()
        self._finish()
        return self.outcome

    def _at(self, time: float, happen: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (time, next(self._sequence), happen, args))

    # -- scheduling ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Do what the dispatcher allows now."""
        self._abort(self._state.evict_stale())
        for _ in range(self._dispatcher.num_groups_to_start()):
            self._admit()
        is_draining = self._sync_due and self._config.drain
        if not self._is_stopped and not is_draining:
            while (sample := self._state.start_next()) is not None:
                self._start(sample)
            self._abort(self._dispatcher.to_interrupt())
        self._abort(self._state.take_surplus())
        if self._sync_due and not self._is_syncing and not (self._config.drain and self._calls):
            self._begin_sync()
        self._score_next()

    def _admit(self) -> None:
        prompt = self._state.next_retry()
        if prompt is None:
            group = next(self._prompts)
            prompt_id = f"{next(self._epoch)}"
            self._groups[prompt_id] = group
            prompt = Prompt(prompt_id=prompt_id, token_ids=Blank(group.prompt_tokens))  # type: ignore[arg-type]
            self.outcome.started_by_decile[group.decile] += 1
        group = self._groups[prompt.prompt_id.partition("~")[0]]
        longest = max(s.response_tokens for s in group.samples)
        self._state.admit(
            prompt, group_size=self._cluster.batch.group_size, max_response_tokens=longest + 1
        )

    def _start(self, sample: Sample) -> None:
        engine = int(self._placement.enter(sample.sample_id, sample.group_id))
        held = sample.num_tokens
        request = Request(
            sample.sample_id,
            len(sample.prompt.token_ids) + held,
            self._traced(sample.sample_id).response_tokens - held,
            held > 0,
        )
        self._calls[sample.sample_id] = _Call(engine, request)
        self._engines[engine].submit(request, self._now)
        self._schedule(engine)

    def _traced(self, sample_id: str) -> TraceSample:
        group_id, _, index = sample_id.rpartition("-")
        return self._groups[group_id.partition("~")[0]].sample(int(index))

    def _schedule(self, engine: int) -> None:
        model = self._engines[engine]
        time = model.next_event()
        if time is not None:
            self._at(max(time, self._now), self._on_engine, engine, model.epoch)

    def _on_engine(self, engine: int, epoch: int) -> None:
        """Something ends on an engine, or its KV entries run out."""
        model = self._engines[engine]
        if epoch != model.epoch:
            return
        for request in model.on_event(self._now):
            self._return(request.sample_id, FinishReason.STOP)
        self._schedule(engine)
        if self._config.is_adaptive:
            self._observe(engine)

    def _observe(self, engine: int) -> None:
        """Adapt the limit of an engine."""
        seen_at, preempted, ended = self._observed[engine]
        if self._now - seen_at < _OBSERVE_EVERY_S:
            return
        model = self._engines[engine]
        limit = self._adaptive[engine].observe(
            num_running=model.num_running,
            num_queued=model.num_queued,
            kv_usage=model.kv_usage,
            num_preempted=model.num_preempted - preempted,
            num_ended=model.num_ended - ended,
            is_starved=self._dispatcher.is_starved,
        )
        self._observed[engine] = (self._now, model.num_preempted, model.num_ended)
        self._placement.set_limit(str(engine), limit)
        self._dispatcher.max_inflight = self._placement.capacity

    def _abort(self, sample_ids: tuple[str, ...]) -> None:
        touched = set()
        for sample_id in sample_ids:
            call = self._calls.get(sample_id)
            if call is not None:
                self._stop(call)
                touched.add(call.engine)
        for engine in sorted(touched):
            self._schedule(engine)

    def _stop(self, call: _Call) -> None:
        keep = self._config.kv_cache == "keep" and not self._cluster.is_colocated
        self._engines[call.engine].stop(call.request, self._now, keep=keep)
        self._return(call.request.sample_id, FinishReason.ABORT)

    def _return(self, sample_id: str, reason: FinishReason) -> None:
        """A generate call came back."""
        call = self._calls.pop(sample_id)
        self._placement.leave(str(call.engine))
        made = self._engines[call.engine].made(call.request)
        marks = [*call.marks, (self._synced, made)]
        segments, before = [], 0
        for version, until in marks:
            if until > before:
                run = Blank(until - before)
                segments.append(Segment(policy_version=version, token_ids=run, logprobs=run))  # type: ignore[arg-type]
                before = until
        generation = Generation(
            request_id=sample_id, segments=tuple(segments), finish_reason=reason
        )
        sample = self._state.on_generation(sample_id, generation)
        if sample is not None and sample.finish_reason is not None:
            self._unscored.append(sample)

    # -- rewards ---------------------------------------------------------------------------------

    def _score_next(self) -> None:
        if not self._config.overlap_rewards and self._dispatcher.is_generating:
            return
        while self._unscored and self._free_reward_workers:
            sample = self._unscored.popleft()
            self._free_reward_workers -= 1
            reward_s = self._traced(sample.sample_id).reward_s
            self._at(self._now + reward_s, self._on_reward, sample.sample_id)

    def _on_reward(self, sample_id: str) -> None:
        self._free_reward_workers += 1
        reward = RewardResult(reward=float(self._random.random() < 0.5))
        group = self._state.on_reward(sample_id, reward)
        if group is None:
            return
        self._shelf.add(
            GroupMeta(
                group_id=group[0].group_id,
                sequence=next(self._arrivals),
                samples=tuple(SampleMeta.of(sample) for sample in group),
            )
        )
        self._buffer_ledger.take_over(sum(sample.num_tokens for sample in group))
        self._tell_buffered()
        self._choose()

    # -- trainer ---------------------------------------------------------------------------------

    def _tell_buffered(self) -> None:
        self._dispatcher.on_buffer_counts(
            num_buffered=self._shelf.num_samples + self._in_training,
            trainer_version=self._version,
        )

    def _choose(self) -> None:
        """Begin the next step if its batch is there."""
        if not self._is_waiting:
            return
        selection = self._shelf.select(self._version, self._dispatcher.num_by_version)
        for group in selection.evicted:
            self._buffer_ledger.discard(group.num_tokens, "buffered", "stale")
        if selection.chosen:
            self._is_waiting = False
            self._in_training = sum(len(group.samples) for group in selection.chosen)
            self._begin_step(selection.chosen)
        if selection.chosen or selection.evicted:
            self._tell_buffered()

    def _decile(self, group_id: str) -> int:
        return self._groups[group_id.partition("~")[0]].decile

    def _begin_step(self, groups: tuple[GroupMeta, ...]) -> None:
        trainer = self._cluster.trainer
        tokens = sum(group.num_tokens for group in groups)
        duration = tokens / (trainer.tokens_per_s_per_gpu * self._train_gpus)
        duration += trainer.step_overhead_s
        begin = self._now
        if self._cluster.is_colocated:
            begin += self._cluster.switch_s
            self._stop_engines(begin + duration)
        self._trainer_busy_s += duration
        self._at(begin + duration, self._end_step, groups)

    def _end_step(self, groups: tuple[GroupMeta, ...]) -> None:
        oldest = oldest_trainable(self._version, self._config.max_staleness)
        for group in groups:
            self._count_trained(group, oldest)
        self._step += 1
        self._version = next_version(self._version)
        self._in_training = 0
        self._tell_buffered()
        self.outcome.step_ends.append(self._now)
        if self._step == self._cluster.steps:
            return
        if self._step % self._config.sync_every:
            if self._cluster.is_colocated:
                until = self._now + self._cluster.switch_s
                self._stop_engines(until)
                self._at(until, self._start_engines)
            self._resume_trainer()
        else:
            self._sync_due = True  # begins in _pump

    def _count_trained(self, group: GroupMeta, oldest: int) -> None:
        out = self.outcome
        out.trained_by_decile[self._decile(group.group_id)] += 1
        trained = 0
        for sample in group.samples:
            trained += sample.trainable_tokens(oldest)
            version = sample.trained_version(oldest)
            if version is not None:
                age = staleness(self._version, version)
                out.staleness_max = max(out.staleness_max, age)
                out.staleness_sum += age
                out.samples_trained += 1
        self._buffer_ledger.move(trained, "buffered", "trained")
        self._buffer_ledger.discard(group.num_tokens - trained, "buffered", "masked")

    def _resume_trainer(self) -> None:
        self._is_waiting = True
        self._choose()

    # -- weight sync -----------------------------------------------------------------------------

    def _stop_engines(self, until: float) -> None:
        """The engines stop: calls end or freeze, as the mode says."""
        self._is_stopped = True
        if self._config.interrupt != "never":
            for call in tuple(self._calls.values()):
                self._stop(call)
        for model in self._engines:
            model.delay(self._now, until)

    def _begin_sync(self) -> None:
        self._sync_due = False
        self._is_syncing = True
        until = self._now + self._cluster.weight_sync_s
        if self._cluster.is_colocated:
            until += self._cluster.switch_s
        self._stop_engines(until)
        self._at(until, self._end_sync, self._version)
        if self._config.overlap_sync and not self._cluster.is_colocated:
            self._resume_trainer()
        else:
            self._trainer_busy_s += self._cluster.weight_sync_s

    def _end_sync(self, version: int) -> None:
        for call in self._calls.values():
            made = self._engines[call.engine].made(call.request)
            call.marks.append((self._synced, made))
        self._synced = version
        self._is_syncing = False
        self._start_engines()
        self._abort(self._state.on_version(version))
        if not self._config.overlap_sync or self._cluster.is_colocated:
            self._resume_trainer()

    def _start_engines(self) -> None:
        self._is_stopped = False
        for engine, model in enumerate(self._engines):
            if self._cluster.is_colocated or self._config.kv_cache == "recompute":
                model.recompute(self._now)
            if model.num_requests:
                self._schedule(engine)

    # -- the end ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        out = self.outcome
        out.wall_s = self._now
        counts = self._dispatcher.counts()
        out.interrupted, out.resumed = counts.interruptions_total, counts.resumptions_total
        for call in tuple(self._calls.values()):
            self._stop(call)
        alive = [*self._state.live_groups(), *(group.group_id for group in self._shelf)]
        out.alive_by_decile.update(self._decile(group_id) for group_id in alive)
        for model in self._engines:
            model.close(self._now)
        busy_s = sum(model.busy_s for model in self._engines)
        out.generation_idle_ratio = 1 - busy_s / (len(self._engines) * out.wall_s)
        out.trainer_idle_ratio = 1 - self._trainer_busy_s / out.wall_s
        out.tokens_reprefilled = sum(model.tokens_reprefilled for model in self._engines)
        out.preempted = sum(model.num_preempted for model in self._engines)
        out.ledger = self._state.ledger() + self._buffer_ledger.snapshot()
