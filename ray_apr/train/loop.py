"""The loop of a train worker.

    grant(k) ─► row k (Ray Data) ─► train_step ─► ack(k), grant(k+1) ─► weight sync ─► report ─┐
       ▲                               └ row k+1 is chosen and read                             │
       └────────────────────────────────────────────────────────────────────────────────────────┘

With ``overlap_sync`` the sync only gathers here; what it gathered travels during the next steps.
The report of a checkpoint only copies here; what it copied is written during the next steps.

Invariants:
    * The batch of step k was chosen for the policy version that trains it; every rank checks the
      tokens that it trains against the staleness bound again.
    * The policy version rises by one with each batch, whatever its mini-batches and epochs, on all
      ranks together.
    * An order in a rank's stream (`scheduling.orders`) is in those of all others, before the same
      step: all of them send the weights again, under the same version, or write a checkpoint.
    * An error of one rank ends its process, and Ray Train ends the others.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from ray_apr.core.exceptions import StarvedError
from ray_apr.core.heap import freeze_heap
from ray_apr.core.staleness import next_version
from ray_apr.data.datasource import order_of, rows_of
from ray_apr.data.parts import Part
from ray_apr.scheduling.batch import RankBatch
from ray_apr.scheduling.orders import Order, OrderKind
from ray_apr.train.answers import failure_of
from ray_apr.train.checkpoint import Progress
from ray_apr.train.control import RunControl, sync_limit_s
from ray_apr.train.gate import GateClient
from ray_apr.train.learner import Learner, compile_ahead, prepare_process
from ray_apr.train.offload import Offload
from ray_apr.train.profiling import profiled
from ray_apr.train.publish import NO_SYNC, WeightPublisher
from ray_apr.train.residency import Alternating, AlwaysThere, Residency
from ray_apr.train.saving import CheckpointWriter
from ray_apr.train.span import Span
from ray_apr.train.spec import WorkerSpec
from ray_apr.train.step import check_batch
from ray_apr.train.tensors import compute_device
from ray_apr.train.weight_check import WeightCheck
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.transports import make_sender

logger = logging.getLogger(__name__)

_DRAIN_LIMIT_S = 7 * 24 * 3600.0
"""Longer than any response takes."""
_LAST_CHECKPOINT = "write the last checkpoint"
_LONG_S = 5.0
"""A step of more is told while it goes on: half of the time after which lines tell of waits."""


def train_loop_per_worker(spec: WorkerSpec) -> None:
    """Train to the last step; runs in every worker of a ``ray.train.torch.TorchTrainer``.

    Consumes: the rank's stream ``rank<r>``, one row a step. Waits for: its row, the other ranks,
    and on rank 0 the buffer and the rollout worker. Unblocked by: the buffer, at the latest by its
    time limit; the collectives' limit; the limits of `RunControl`. Produces: new weights, figures,
    checkpoints.

    Raises:
        APRError: What stopped the training.
    """
    prepare_process(spec, ray.train.get_context().get_local_world_size())
    _TrainLoop(spec).run()


class _TrainLoop:
    """State of one train worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._train = spec.train
        self._rank = ray.train.get_context().get_world_rank()
        self._started_at = spec.started_at
        self._gate = None if spec.gate is None else GateClient(spec.gate, self._rank)
        self._row: Mapping[str, Any] = {}
        """Of the last step."""
        self._is_told = True
        """Whether the step says what it does: the first one here, and those after a long one."""
        self._control = _make_control(spec) if self._rank == 0 else None
        self._rows = rows_of(ray.train.get_dataset_shard(f"rank{self._rank}"))
        # in it ranks wait for the engines: not on the GPU, which these may have, and for longer
        limit = datetime.timedelta(seconds=_wait_limit_s(spec))
        self._ranks = dist.new_group(backend="gloo", timeout=limit)
        device = ray.train.torch.get_device()
        # an engine measures what is free when it starts
        is_compiled = spec.shares_device and self._prepare_beside_engines(device)
        self._learner = Learner(spec, device, self._starting, is_compiled=is_compiled)
        self._residency = self._make_residency()
        self._publisher = self._make_publisher()
        self._writer = CheckpointWriter(
            self._learner.model, self._learner.optimizer, self._control,
            source=spec.model, step=spec.begin.step, fence=spec.fence,
            exports=spec.train.export_checkpoints, stays=not self._residency.takes_turns,
        )  # fmt: skip
        self._progress = self._learner.restore(spec.begin.checkpoint)

    def _prepare_beside_engines(self, device: torch.device) -> bool:
        """Return once the engines run, on all ranks. Where they leave room for what is trained, it
        is compiled while they start; whether it was."""
        compiles = not self._spec.takes_turns
        if compiles:
            compile_ahead(self._spec, device, self._starting)
        if self._control is not None:
            self._say("wait for the rollout servers")
            self._control.wait_for_engines()
        dist.barrier(self._ranks)
        return compiles

    def _make_residency(self) -> Residency:
        if not self._spec.takes_turns:
            return AlwaysThere()
        learner = self._learner
        models = [model for model in (learner.model, learner.reference) if model is not None]
        return Alternating(Offload(models, learner.optimizer), self._control, self._ranks)

    def _make_publisher(self) -> WeightPublisher:
        partial_rollout, train = self._spec.partial_rollout, self._train
        model = self._learner.model
        weights = GatheredWeights(
            model,
            bucket_mb=train.weight_bucket_mb,
            wire_dtype=self._spec.wire_dtype,
            device=compute_device(model),
            ranks=self._ranks,
        )
        placed = {"shares_device": self._spec.shares_device, "takes_turns": self._spec.takes_turns}
        return WeightPublisher(
            make_sender(train.weight_transport, weights, **placed),
            self._control,
            sync_every=partial_rollout.sync_every,
            overlaps=partial_rollout.overlap_sync,
            timeout_s=train.weight_sync_timeout_s,
            wait_limit_s=_wait_limit_s(self._spec),
            after_gather=self._residency.leave,
            meet=(lambda: dist.barrier(self._ranks)) if partial_rollout.drain else None,
            check=WeightCheck(model, train) if train.weight_check_every else None,
        )

    def run(self) -> None:
        """Train all steps that are left, if any, and evaluate the last version."""
        self._say("")
        is_trained = self._progress.step >= self._train.num_steps
        if is_trained and self._spec.evaluation is None:
            return
        if self._progress.policy_version > 0 or self._residency.takes_turns:
            # the servers start with the base model or asleep, and perhaps they are not there yet
            limit_s = self._spec.start_timeout_s
            self._publisher.publish(self._progress.policy_version, timeout_s=limit_s)
        if not is_trained:
            self._train_steps()
        self._evaluate_last(is_sent=is_trained)
        self._publisher.close()
        with self._span("checkpoint"):
            self._writer.close()
        self._say("end")  # for which Ray Train may take a minute

    def _train_steps(self) -> None:
        if self._control is not None:
            self._control.grant(self._progress.step, self._progress.policy_version)
        freeze_heap()  # a checkpoint makes so many objects that a full collection follows
        while self._progress.step < self._train.num_steps:
            self._follow_orders()
            self._step()

    def _follow_orders(self) -> None:
        """Write the checkpoints that are ordered, until a step is; without a gate, go on."""
        while self._gate is not None:
            if self._control is not None:
                self._control.wait_until_recorded()
            name = self._gate.next()
            if name is None:
                return
            self._residency.enter()
            self._checkpoint(self._row, name=name)
            if self._residency.takes_turns:
                limit_s = self._train.weight_sync_timeout_s
                self._publisher.publish(self._progress.policy_version, timeout_s=limit_s)

    def _evaluate_last(self, *, is_sent: bool) -> None:
        """Send the last weights, which no rollout needs, and have them evaluated.

        Args:
            is_sent: Whether the engines have them: a run goes on that was ended in this evaluation.
        """
        if self._spec.evaluation is None:
            return
        version = self._progress.policy_version
        if not is_sent:
            self._publisher.publish(version, timeout_s=self._train.weight_sync_timeout_s)
        self._say("wait for the last evaluation")
        if self._control is not None:
            self._control.evaluate_last(version)
        self._say(_LAST_CHECKPOINT)  # which a large model may still have on its way

    def _step(self) -> None:
        """One turn of the loop."""
        with Span() as step:
            if self._is_told:
                self._say("wait for a batch")
            batch, wait_s = self._next_batch()
            if self._is_told:
                self._say(f"train step {self._progress.step + 1}")
            with profiled(self._progress.step, self._spec, self._rank):
                self._train_batch(batch, wait_s)
        was_told, self._is_told = self._is_told, step.duration_s > _LONG_S
        if was_told and not self._is_told and self._progress.step < self._train.num_steps:
            self._say("")

    def _train_batch(self, batch: RankBatch, wait_s: float) -> None:
        """Train a batch, and send the weights where they are due."""
        self._residency.enter()
        with self._span("train") as trained:
            figures = self._learner.train(batch)
        done = self._progress
        version = next_version(done.policy_version)
        self._progress = Progress(step=done.step + 1, policy_version=version)
        is_last = self._progress.step == self._train.num_steps
        rewards: Mapping[str, float] = {}
        if self._control is not None:
            # before the sync: where the next batch was not there yet, it is read behind that
            rewards = self._control.end_step(done.step, None if is_last else version)
        row: dict[str, Any] = {
            "step": done.step,
            "policy_version": self._progress.policy_version,
            "time_s": trained.end_s - self._started_at,
            **figures,
            **rewards,
            "trainer_wait_s": wait_s,
            "trainer_step_s": trained.duration_s,
            **NO_SYNC,
        }
        if self._residency.takes_turns:  # after the sync there is nothing here to save
            self._report(row, is_last=is_last)
        try:
            row |= self._publisher.after_step(self._progress.step, version, is_last=is_last)
        finally:  # it was trained, whatever becomes of its weights
            if self._control is not None:
                self._control.record_step(row)
        if not self._residency.takes_turns:
            self._report(row, is_last=is_last)
        self._row = row

    def _next_batch(self) -> tuple[RankBatch, float]:
        """Wait for this rank's row of the step, and do what is ordered before it; returns the row
        and the seconds waited."""
        wait_s = 0.0
        while True:
            with self._span("wait") as waited:
                row = next(self._rows, None)
            wait_s += waited.duration_s
            if row is None:
                raise StarvedError(
                    f"the stream of rank {self._rank} ended before step {self._progress.step}: "
                    "the run ends, or the process that read it has died"
                )
            order = order_of(row)
            if order is None:
                break
            self._obey(order)
        batch = RankBatch.from_row(row)
        check_batch(batch, self._progress, self._spec.partial_rollout.max_staleness)
        return batch, wait_s

    def _obey(self, order: Order) -> None:
        """Do what all ranks are told to do before the next step."""
        if order.kind is OrderKind.SEND_WEIGHTS:
            with self._span("sync"):
                self._publisher.send_again(order.lost_version, self._progress.policy_version)
        elif self._writer.step != self._progress.step:  # else it is there, or being written
            self._checkpoint(self._row)

    def _report(self, row: Mapping[str, Any], *, is_last: bool) -> None:
        """Report a step to Ray Train where one is due, with a checkpoint where one is due."""
        every = self._train.checkpoint_every
        if is_last:
            self._say(_LAST_CHECKPOINT)
        if is_last or (every and self._progress.step % every == 0):
            self._checkpoint(row, is_last=is_last)
        elif self._progress.step % self._train.report_every == 0:
            self._writer.report(row)

    def _checkpoint(
        self, row: Mapping[str, Any], *, is_last: bool = False, name: str | None = None
    ) -> None:
        """Report a checkpoint of where the run stands; the span is what training waits for it."""
        with self._span("checkpoint"):
            self._writer.save(row, self._progress, name=name, is_last=is_last)

    @contextmanager
    def _span(self, what: str) -> Iterator[Span]:
        """Time a part of the loop, and show it on the run's timeline."""
        with Span() as span:
            yield span
        if self._control is not None:
            self._control.record_span(what, span.start_s, span.end_s)

    @contextmanager
    def _starting(self, what: str) -> Iterator[None]:
        """Time a part of the start, and say that it has begun."""
        self._say({"load": "load the model"}.get(what, what))
        with self._span(what):
            yield

    def _say(self, doing: str) -> None:
        """Have the lines of a run that shows no step say what train workers do."""
        if self._control is not None:
            row = {"part": "train workers", "doing": doing}
            self._spec.recorder.record.remote("doing", row)


def _wait_limit_s(spec: WorkerSpec) -> float:
    """Longest that a rank may wait for rank 0, which waits for engines: their start, an evaluation,
    what a sync may take. Where a sync waits for responses to end, rank 0's own waits are the limit;
    a rank that dies ends the others' wait at once."""
    if spec.partial_rollout.drain:
        return _DRAIN_LIMIT_S
    limit_s = sync_limit_s(spec.train.weight_sync_timeout_s, spec.start_timeout_s)
    engines_s = spec.start_timeout_s + limit_s
    return 2 * engines_s + (0.0 if spec.evaluation is None else spec.evaluation.timeout_s)


def _make_control(spec: WorkerSpec) -> RunControl:
    buffer = Part(spec.buffer, "sample buffer")
    return RunControl(
        buffer=buffer,
        worker=Part(spec.worker, "rollout worker", lambda: failure_of(buffer)),
        recorder=spec.recorder,
        sync_timeout_s=spec.train.weight_sync_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        evaluator=spec.evaluator,
        evaluation=spec.evaluation,
        run=spec.run,
        seed=spec.train.seed,
        begin=spec.begin,
    )
