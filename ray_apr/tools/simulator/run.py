"""The simulated run: real scheduler, ledger, stock and placement; modelled hardware.

    prompts of a trace ──► Scheduler    ──► Fleet: Placement ──► EngineModel × k
                             ▲    │ ended                           │ tokens
                    versions │    ▼                                 │
                             │  rewards (workers, in order) ◄───────┘
                             │    ▼
                          trainer ◄── Stock.choose

Invariants, kept by `Simulation`:
    * Everything that decides is the code that decides in a real run; this module only says when
      things happen.
    * The same trace, cluster, settings and seed give the same result.
    * At the end, the ledgers of both sides account for every generated token.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import SimulationError
from ray_apr.core.group import SampleMeta
from ray_apr.core.messages import Generation
from ray_apr.core.sample import Prompt
from ray_apr.core.staleness import next_version
from ray_apr.core.user import RewardResult
from ray_apr.scheduling.grant import Grant
from ray_apr.scheduling.live import LiveSample
from ray_apr.scheduling.scheduler import Scheduler
from ray_apr.scheduling.stock import Stock
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.fleet import Blank, Fleet
from ray_apr.tools.simulator.outcome import Outcome
from ray_apr.tools.simulator.trace import Trace, TraceGroup, TraceSample


@dataclass(slots=True, eq=False)
class _Training:
    """A step under way."""

    grant: Grant
    begin: float
    work_s: float
    """What is left of it, at full speed, at `since`."""
    since: float
    num_timed: int = 0
    """How often its end was told; only the last time counts."""


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
        cluster = cluster.with_batches_per_step(config.batches_per_step)
        self._cluster = cluster
        self._config = config
        self._prompts = trace.cycle(seed)
        self._random = random.Random(seed)
        batch = cluster.batch
        self._fleet = Fleet(cluster, config, self._on_fleet)
        self._scheduler = Scheduler(
            config,
            batch_size=batch.size,
            group_size=batch.group_size,
            max_inflight=self._fleet.max_inflight,
            budgets=self._budgets,
        )
        self._stock = Stock(
            batch_size=batch.size,
            max_staleness=config.max_staleness,
            on_stale=config.on_stale,
            num_ranks=1,
            micro_batch_tokens=1,  # nobody asks for the plan of a batch
            num_steps=cluster.steps,
        )
        self._groups: dict[str, TraceGroup] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = itertools.count()
        self._now = 0.0
        self._free_reward_workers = cluster.reward_workers
        self._unscored: deque[LiveSample] = deque()
        self._num_handed = 0
        """Finished samples that use a core right now, to be handed over."""
        self._version = 0
        self._step = 0
        self._trainer_busy_s = 0.0
        self._slowdown = 1.0
        """What engines and trainer make of each other on a shared host."""
        self._training: _Training | None = None
        self._sync_due = False
        """Whether new weights wait to be moved: for the sync before, or for a drain."""
        self._is_syncing = False
        self._is_stopped = False
        """Whether the engines are away: a sync, or the GPUs train."""
        self._num_stops = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run to the last step.

        Raises:
            SimulationError: If nothing can happen any more before that.
        """
        self._grant()
        self._pump()
        self._share_host()
        while self._step < self._cluster.steps:
            if not self._events:
                raise SimulationError(
                    f"nothing can happen any more at step {self._step}: "
                    f"{self._scheduler.diagnosis()}"
                )
            self._now, _, happen, args = heapq.heappop(self._events)
            self.outcome.num_events += 1
            happen(*args)
            self._pump()
            self._share_host()
        self._finish()
        return self.outcome

    def _at(self, time: float, happen: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (time, next(self._sequence), happen, args))

    def _share_host(self) -> None:
        """Let everything run slower or faster, if others have begun or ended to use its cores."""
        if self._cluster.host_cores is None:
            return
        batches = [] if self._is_stopped else self._fleet.batches()
        slowdown = self._cluster.slowdown(
            batches, is_training=self._training is not None, num_handed=self._num_handed
        )
        if slowdown == self._slowdown:
            return
        step = self._training
        if step is not None and self._now > step.since:
            step.work_s -= (self._now - step.since) / self._slowdown
            step.since = self._now
        self._slowdown = slowdown
        self._fleet.set_slowdown(slowdown, self._now)
        self._time_step()

    # -- scheduling ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Do what the scheduler says now."""
        is_draining = self._sync_due and self._config.drain
        actions = self._scheduler.tick(
            self._next_prompt, starts=not self._is_stopped and not is_draining
        )
        self._abort(actions.abort)
        for live in actions.start:
            sample = live.sample
            num_left = self._traced(sample.sample_id).response_tokens - sample.num_tokens
            self._fleet.start(live, num_left, self._now)
        self._choose()  # what it waits for may have been dropped
        can_sync = self._sync_due and not self._is_syncing
        if can_sync and not (self._config.drain and self._fleet.num_calls):
            self._begin_sync()
        self._score_next()

    def _next_prompt(self) -> Prompt:
        group = next(self._prompts)
        prompt_id = str(len(self._groups))
        self._groups[prompt_id] = group
        self.outcome.started_by_decile[group.decile] += 1
        return Prompt(prompt_id=prompt_id, token_ids=Blank(group.prompt_tokens))  # type: ignore[arg-type]

    def _budgets(self, prompt: Prompt) -> tuple[int]:
        """More than any response of a prompt has: each ends by itself."""
        group = self._group(prompt.prompt_id)
        return (max(s.response_tokens for s in group.samples) + 1,)

    def _group(self, group_id: str) -> TraceGroup:
        """The prompt of a group in the trace, whatever try of it this is."""
        return self._groups[group_id.partition("~")[0]]

    def _traced(self, sample_id: str) -> TraceSample:
        group_id, _, index = sample_id.rpartition("-")
        return self._group(group_id).sample(int(index))

    def _on_fleet(self, time: float, engine: int, epoch: int) -> None:
        self._at(time, self._on_engine, engine, epoch)

    def _on_engine(self, engine: int, epoch: int) -> None:
        """Something ends on an engine, or its KV entries run out."""
        self._return(self._fleet.on_event(engine, epoch, self._now))
        if self._fleet.observe(engine, self._now, is_starved=self._scheduler.is_starved):
            self._scheduler.max_inflight = self._fleet.max_inflight

    def _abort(self, samples: Sequence[LiveSample]) -> None:
        if samples:
            self._return(self._fleet.abort(samples, self._now))

    def _return(self, calls: Iterable[tuple[LiveSample, Generation]]) -> None:
        """Generate calls came back."""
        for live, generation in calls:
            sample = self._scheduler.on_generation(live, generation)
            if sample is not None and sample.finish_reason is not None:
                self._unscored.append(live)

    # -- rewards ---------------------------------------------------------------------------------

    def _score_next(self) -> None:
        if not self._config.overlap_rewards and self._scheduler.live.num_unfinished:
            return
        while self._unscored and self._free_reward_workers:
            live = self._unscored.popleft()
            if live.is_live:
                self._free_reward_workers -= 1
                self._hand_over(live)

    def _hand_over(self, live: LiveSample) -> None:
        overhead_s = self._cluster.sample_overhead_s
        if not overhead_s:
            self._reward(live)
            return
        self._num_handed += 1
        self._at(self._now + overhead_s * self._slowdown, self._on_handed, live)

    def _on_handed(self, live: LiveSample) -> None:
        self._num_handed -= 1
        self._reward(live)

    def _reward(self, live: LiveSample) -> None:
        self._at(self._now + self._traced(live.sample_id).reward_s, self._on_reward, live)

    def _on_reward(self, live: LiveSample) -> None:
        self._free_reward_workers += 1
        reward = RewardResult(reward=float(self._random.random() < 0.5))
        group = self._scheduler.on_reward(live, reward)
        if group is None:
            return
        self._stock.put([SampleMeta.of(sample) for sample in group], None)
        self._tell_buffered()
        self._choose()

    # -- trainer ---------------------------------------------------------------------------------

    def _tell_buffered(self) -> None:
        self._scheduler.on_buffer_counts(
            num_buffered=self._stock.num_buffered,
            num_received=self._stock.num_received,
            trainer_version=self._version,
        )

    @property
    def _is_waiting(self) -> bool:
        """Whether the trainer waits for a batch."""
        grant = self._stock.granted
        return grant is not None and not grant.groups

    def _grant(self) -> None:
        self._stock.grant(self._step, self._version, self._now)

    def _choose(self) -> None:
        """Choose batches that are there, and begin the next step if it has its own."""
        if self._config.on_stale == "wait":
            self._stock.set_unfinished(self._scheduler.live.num_by_version)
        evicted = self._stock.choose(self._now)
        grant = self._stock.granted if self._training is None else None
        if grant is not None and grant.groups:
            self._begin_step(grant)
            self._tell_buffered()
        elif evicted:
            self._tell_buffered()

    def _begin_step(self, grant: Grant) -> None:
        cluster, trainer = self._cluster, self._cluster.trainer
        tokens = sum(group.num_tokens for group in grant.groups)
        rate = trainer.tokens_per_s_per_gpu * cluster.num_train_gpus()
        duration = trainer.step_overhead_s + tokens / rate
        begin = self._now
        if cluster.is_colocated:
            begin += 0 if self._is_stopped else cluster.switch_s
            self._stop_engines(begin + duration)
        self._training = _Training(grant, begin, duration, begin)
        if (due_s := self._stock.next_in_s(self._now)) < math.inf:
            self._at(self._now + due_s, self._choose)
        self._time_step()

    def _time_step(self) -> None:
        """Tell when the step under way ends, as fast as it goes now."""
        step = self._training
        if step is not None:
            step.num_timed += 1
            end = step.since + step.work_s * self._slowdown
            self._at(end, self._end_step, step, step.num_timed)

    def _end_step(self, step: _Training, num_timed: int) -> None:
        if num_timed != step.num_timed:
            return  # it was timed anew
        self._training = None
        self._trainer_busy_s += self._now - step.begin
        for group in self._stock.end_step(self._step, self._now).groups:
            self.outcome.count_trained(group, step.grant.policy_version, step.grant.oldest_version)
            self.outcome.trained_by_decile[self._group(group.group_id).decile] += 1
        self._step += 1
        self._version = next_version(self._version)
        self._tell_buffered()
        self.outcome.step_ends.append(self._now)
        if self._step == self._cluster.steps:
            return
        if self._step % self._config.sync_every:
            self._resume_trainer()
        else:
            self._sync_due = True  # begins in _pump
        drains = self._sync_due and self._config.drain and self._fleet.num_calls
        if self._cluster.is_colocated and (self._is_waiting or drains):
            until = self._now + self._cluster.switch_s
            self._stop_engines(until)
            self._at(until, self._start_engines, self._num_stops)

    def _resume_trainer(self) -> None:
        self._grant()
        self._choose()

    # -- weight sync -----------------------------------------------------------------------------

    def _stop_engines(self, until: float) -> None:
        """The engines stop: calls end or freeze, as the mode says."""
        self._is_stopped = True
        self._num_stops += 1
        if self._config.interrupt != "never":
            self._return(self._fleet.abort_all(self._now))
        self._fleet.freeze(self._now, until)

    def _begin_sync(self) -> None:
        self._sync_due = False
        self._is_syncing = True
        until = self._now + self._cluster.weight_sync_s
        if self._cluster.is_colocated and self._is_stopped:
            until += self._cluster.switch_s
        self._stop_engines(until)
        self._at(until, self._end_sync, self._version)
        if self._config.overlap_sync and not self._cluster.is_colocated:
            self._resume_trainer()
        else:
            self._trainer_busy_s += self._cluster.weight_sync_s

    def _end_sync(self, version: int) -> None:
        self._fleet.set_version(version)
        self._is_syncing = False
        self._scheduler.on_version(version)
        self._abort(self._scheduler.take_aborts())
        if not self._config.overlap_sync or self._cluster.is_colocated:
            self._resume_trainer()
        if self._is_waiting or not self._cluster.is_colocated:
            self._start_engines(self._num_stops)

    def _start_engines(self, num_stops: int) -> None:
        """The engines go on, unless they were stopped again meanwhile."""
        if num_stops == self._num_stops:
            self._is_stopped = False
            self._fleet.resume(self._now)

    # -- the end ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        out = self.outcome
        out.wall_s = self._now
        counts = self._scheduler.counts()
        out.interrupted, out.resumed = counts.interruptions_total, counts.resumptions_total
        self._return(self._fleet.abort_all(self._now))
        stats = self._stock.stats()
        alive = [*(group.group_id for group in self._scheduler.live.groups), *stats.held_groups]
        out.alive_by_decile.update(self._group(group_id).decile for group_id in alive)
        busy, out.tokens_reprefilled, out.preempted = self._fleet.close(self._now)
        out.generation_idle_ratio = 1 - busy
        out.trainer_idle_ratio = 1 - self._trainer_busy_s / out.wall_s
        out.ledger = self._scheduler.live.ledger.snapshot() + stats.ledger
