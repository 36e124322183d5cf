"""What rank 0 says to the other actors of a run, each wait with a limit and a name.

`RunControl.connect`, `broadcast`, `record_span`, `checkpoint_written` and what `capture` returns
may be called from other threads than the rest, where syncs overlap and checkpoints are written:
handles of actors may be used by several threads.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import ray.cloudpickle
import ray.util
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from ray_apr.config import EvaluationConfig
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import APRError, StarvedError, SyncBrokenError, one_line
from ray_apr.core.messages import WeightGroup
from ray_apr.core.metrics import Metrics
from ray_apr.data.parts import DEATHS, Living, Part
from ray_apr.data.resumption import Begin, RolloutProgress
from ray_apr.train.answers import (
    CALL_TIMEOUT_S,
    answer_of,
    captured_of,
    failure_of,
    group_state_of,
    has_failed,
    until_engines_run,
)
from ray_apr.train.once import once
from ray_apr.train.shown import show_step

if TYPE_CHECKING:
    import pyarrow as pa

    from ray_apr.core.messages import WeightScores
    from ray_apr.weights.check import Probes
    from ray_apr.weights.transports.base import WeightSender

logger = logging.getLogger(__name__)

_SERVERS_TIMEOUT_S = CALL_TIMEOUT_S + 15.0
"""Where the rollout worker asks the servers: its own limit says more than this one."""
_PAUSE_S = 0.5
_LOOK_S = 2.0
"""How often who waits for an evaluation looks whether the run has failed."""


def sync_limit_s(sync_timeout_s: float, start_timeout_s: float) -> float:
    """Longest that a weight sync of this limit may take until it fails by itself, in seconds: what
    it may try again in, and the three waits of its last try; and in either the start of engines
    that are all gone."""
    return 4 * (sync_timeout_s + CALL_TIMEOUT_S) + 2 * start_timeout_s


class RunControl:
    """Rank 0's side of the run.

    Args:
        buffer: The sample buffer.
        worker: The rollout worker.
        recorder: Handle of the recorder.
        sync_timeout_s: Limit of one weight sync.
        start_timeout_s: Limit of the start of engines, which a sync waits for where none runs.
        evaluator: Handle of the evaluator; None evaluates nothing.
        evaluation: When it evaluates.
        run: Name of the run, which its metrics carry.
        seed: Of the prompts' order, for checkpoints.
        begin: Where the run began.
    """

    def __init__(
        self,
        *,
        buffer: Part,
        worker: Part,
        recorder: Any,
        sync_timeout_s: float,
        start_timeout_s: float = 0.0,
        evaluator: Any = None,
        evaluation: EvaluationConfig | None = None,
        run: str = "",
        seed: int = 0,
        begin: Begin | None = None,
    ) -> None:
        self._buffer = buffer
        self._worker = worker
        self._recorder = recorder
        self._sync_timeout_s = sync_timeout_s
        self._start_timeout_s = start_timeout_s
        self._evaluator = evaluator
        self._evaluation = evaluation
        self._evaluating: Any = None
        self._recorded: Any = None
        """Answer to the last `record_step`."""
        self._captured: Callable[[], Any] | None = None
        """What waits for a `capture` that may still be under way."""
        self.is_draining = False
        """Whether a sync waits for requests to end, which takes as long as they do."""
        self.members: frozenset[str] = frozenset()
        """Replicas of the weight group, as `connect` has formed it."""
        self._seed = seed
        begin = begin or Begin()
        self._last_version = begin.last_version if begin.policy_version else 0
        """Version that the servers have; of a run that goes on, the last one that was evaluated."""
        self._metrics = Metrics(run)

    @property
    def sync_limit_s(self) -> float:
        """Longest that a sync takes, with all its tries, before it fails by itself."""
        return sync_limit_s(self._sync_timeout_s, self._start_timeout_s)

    @property
    def retry_limit_s(self) -> float:
        """How long after its begin a sync that broke off may be tried again: also one whose first
        try ended by the limit, and one that had to wait for engines."""
        return self._sync_timeout_s + CALL_TIMEOUT_S + self._start_timeout_s

    def wait_for_engines(self) -> None:
        """Return once the engines run; see `until_engines_run`."""
        until_engines_run(self._worker, self._buffer, self._start_timeout_s)

    def grant(self, step: int, policy_version: int) -> None:
        """Let the buffer choose the batch of `step`."""
        what = f", to take the grant of step {step}"
        self._buffer.ask("grant", step, policy_version, limit_s=CALL_TIMEOUT_S, what=what)

    def end_step(self, step: int, next_policy_version: int | None) -> Mapping[str, float]:
        """Tell the buffer that `step` is trained, and let it choose the next batch.

        Waits for: the step's groups, which come again where buffer and rollout worker have begun
        again. Unblocked by: these; a failure of the run, such as that of the worker's start.

        Args:
            step: The step that was trained.
            next_policy_version: Version that the next batch is chosen against; None after the last.

        Returns:
            Figures of the batch's rewards and turns, for the step's row.
        """
        if self._captured is not None:  # it would count this step's samples as trained
            self._captured()
            self._captured = None
        # one call: the order in which an async actor runs two of them is not certain
        told, what = ("ack", step, next_policy_version), f", to end step {step}"
        figures: Mapping[str, float] | None
        while (figures := self._buffer.ask(*told, limit_s=CALL_TIMEOUT_S, what=what)) is None:
            time.sleep(_PAUSE_S)
        return figures

    def capture(self) -> Callable[[], tuple[RolloutProgress, pa.Table]]:
        """Have the rollout side look at itself, between the end of a step and that of the next,
        which waits for it.

        Returns:
            What waits for it, in any thread: where the rollout side stands, and the table of its
            samples.
        """
        worker = self._worker.living()
        asked = worker.call("capture")

        @once
        def captured() -> tuple[RolloutProgress, pa.Table]:
            taken, samples = captured_of(self._worker, worker, asked)
            progress = RolloutProgress.of(
                taken.summary,
                taken.stats,
                state=taken.state,
                seed=self._seed,
                before=taken.before,
                epoch=taken.epoch,
            )
            return progress, samples

        self._captured = captured
        return captured

    def is_group_whole(self) -> bool:
        """Whether the engine workers that run are those that have joined the weight group."""
        return group_state_of(self._worker, self._buffer, _SERVERS_TIMEOUT_S).is_whole

    def connect(self, sender: WeightSender, *, timeout_s: float) -> None:
        """Form a weight group of the sender and all engine workers that run.

        Args:
            sender: The trainer's end.
            timeout_s: Limit for the servers to be there, for the members to meet, and later for one
                collective call.
        """
        state = group_state_of(self._worker, self._buffer, timeout_s)
        host = ray.util.get_node_ip_address()
        endpoint = sender.open(state.num_workers, host=host, timeout_s=timeout_s)
        pickled = ray.cloudpickle.dumps(endpoint)  # by value where it is of a file of the user's
        group = WeightGroup(timeout_s=timeout_s, endpoint=pickled)
        worker = self._worker.living()
        joined = worker.call("join_weight_group", group, state.first_ranks)
        whom = "rollout servers, to join the weight group"
        try:
            sender.connect(endpoint, is_hopeless=lambda: has_failed(joined))
        except SyncBrokenError:
            self._of_sync(worker, joined, whom, CALL_TIMEOUT_S)  # their error says more than ours
            raise
        self._of_sync(worker, joined, whom, timeout_s)
        self.members = frozenset(state.first_ranks)

    def broadcast(self, sender: WeightSender, policy_version: int) -> Mapping[str, float]:
        """Move gathered weights to the servers; returns the times of `weights.sync.SyncTimes`.

        The rollout worker resumes its engines by itself if this process dies in between. One that
        dies breaks the sync off, unless the engines have the weights.
        """
        limit = self._sync_timeout_s + CALL_TIMEOUT_S
        worker = self._worker.living()  # the one that follows knows nothing of this sync
        notice = ray.cloudpickle.dumps(sender.prepare())
        self._until_drained(
            worker,
            lambda: worker.call(
                "begin_sync", policy_version, notice, holds_device=sender.holds_device
            ),
            f"rollout servers, to pause for the weights of version {policy_version}",
            limit,
        )
        try:
            sender.deliver()
        except SyncBrokenError as error:
            # the servers decide: one that has died breaks our end, and those that live may have
            # all; their error says more than ours
            logger.warning("%s", error)
        whom = f"rollout servers, to receive the weights of version {policy_version}"
        received = functools.partial(worker.call, "wait_until_received")
        self._of_sync(worker, received(), whom, limit, again=received)
        sender.release()
        # the next worker goes on under this version: the engines run again by themselves
        what = f", to resume the rollout servers with version {policy_version}"
        times = self._worker.ask("finish_sync", policy_version, limit_s=limit, what=what)
        last_version, self._last_version = self._last_version, policy_version
        evaluation = self._evaluation if policy_version else None  # 0 is evaluated at the start
        if evaluation is not None and evaluation.is_due(policy_version, last_version):
            self._evaluating = self._evaluator.evaluate.remote(policy_version)
        return dict(times)

    def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Have the engines score sequences once they have the weights of a version."""
        what = f", whose servers are to expect the check of version {policy_version}"
        given = (policy_version, sequences)
        self._worker.ask("expect_scores", *given, limit_s=_SERVERS_TIMEOUT_S, what=what)

    def weight_scores(self) -> list[WeightScores]:
        """What the engines have scored since `expect_scores`."""
        what = ", whose servers are to say what they scored"
        scores: list[WeightScores] = self._worker.ask(
            "weight_scores", limit_s=_SERVERS_TIMEOUT_S, what=what
        )
        return scores

    def probe_weights(self, replica_id: str, token_ids: Sequence[int]) -> Probes:
        """What each module of one engine's model computes; nothing if it does not say."""
        asked = self._worker.call("probe_weights", replica_id, token_ids)
        try:
            probes: Probes = answer_of(asked, f"probes of {replica_id}", _SERVERS_TIMEOUT_S)
        except (APRError, RayError) as error:
            logger.warning("%s cannot be probed: %s", replica_id, error)
            return {}
        return probes

    def sleep_engines(self) -> None:
        """Have the engines leave their devices to the train workers, once nothing is evaluated.

        An evaluation that exceeds its limit is interrupted, and goes on under the next weights.

        Waits for: the evaluation under way. Unblocked by: its end, `evaluation.timeout_s`, or a
        failure of the run: one that has lost its engines evaluates nothing any more.
        """
        if self._evaluation is not None:
            limit_s = self._evaluation.timeout_s
            calls = [self._evaluator.wait_until_idle.remote(), *filter(None, [self._evaluating])]
            deadline = time.monotonic() + limit_s
            while calls and (left_s := deadline - time.monotonic()) > 0:
                wait_s = min(left_s, _LOOK_S)
                _, calls = ray.wait(calls, num_returns=len(calls), timeout=wait_s)
                if calls and (failure := failure_of(self._buffer)) is not None:
                    raise failure
            if calls:
                logger.warning("an evaluation exceeds %g s; it is interrupted", limit_s)
        whom, limit_s = "rollout servers, to sleep", self._sync_timeout_s + CALL_TIMEOUT_S
        worker = self._worker.living()
        self._until_drained(worker, lambda: worker.call("sleep"), whom, limit_s)

    def _until_drained(
        self, worker: Living, call: Callable[[], Any], whom: str, limit_s: float
    ) -> None:
        """Call the rollout worker, and again while it answers that requests have to end first.

        Waits for: those requests. Unblocked by: their end, or the limit of an engine that makes no
        progress; `limit_s` of each call.
        """
        try:
            while self._of_sync(worker, call(), whom, limit_s, again=call) is False:
                self.is_draining = True
        finally:
            self.is_draining = False

    def _of_sync(
        self,
        worker: Living,
        ref: Any,
        whom: str,
        limit_s: float,
        again: Callable[[], Any] | None = None,
    ) -> Any:
        """An answer of a sync; a worker that dies breaks it off, and another one may do it.

        Waits for: the answer. Unblocked by: `limit_s`, in which a worker that cannot be reached for
        a moment is asked `again`.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return answer_of(ref, whom, limit_s)
            except DEATHS as error:
                self._worker.follow(error, worker)
                may_live = isinstance(error, ActorUnavailableError)
                if again is None or not may_live or time.monotonic() > deadline:
                    raise SyncBrokenError(
                        f"the rollout worker died in a sync: {one_line(error)}"
                    ) from error
                ref = again()

    def evaluate_last(self, policy_version: int) -> None:
        """Evaluate the weights that the run ends with, and wait for it.

        What breaks it is logged, as is that it makes no progress: the training has succeeded.

        Waits for: the evaluation. Unblocked by: its end, or `evaluation.timeout_s` without
        progress.
        """
        if self._evaluation is None:
            return
        limit_s = self._evaluation.timeout_s
        under_way = self._evaluator.evaluate.remote(policy_version, is_last=True)
        try:
            before = None
            while not ray.wait([under_way], timeout=limit_s)[0]:
                now = ray.get(self._evaluator.progress.remote(), timeout=CALL_TIMEOUT_S)
                if now == before:
                    raise StarvedError(
                        f"it made no progress for {limit_s:g} s (evaluation.timeout_s)"
                    )
                before = now
            ray.get(under_way, timeout=CALL_TIMEOUT_S)
        except (GetTimeoutError, RayError, StarvedError) as error:
            logger.error("the last evaluation did not end: %s", one_line(error))

    def record_step(self, row: Mapping[str, Any]) -> None:
        """Write the row of a step, and set its metrics."""
        self._recorded = self._recorder.record.remote("step", dict(row))
        show_step(self._metrics, row)

    def wait_until_recorded(self) -> None:
        """Wait until the row of the last step is in the run folder."""
        if self._recorded is not None:
            answer_of(self._recorded, "recorder, to write a step's row", CALL_TIMEOUT_S)
            self._recorded = None

    def checkpoint_written(self, step: int, taken_at: float, oldest_epoch: int | None) -> None:
        """Note that the checkpoint of a step is durable: Ray Train's list has it, so that a run
        that goes on begins with it or with a later one.

        Called once for each checkpoint, in order, in a thread beside the loop's.

        Args:
            step: Steps that it has trained.
            taken_at: Unix time of its moment, in seconds.
            oldest_epoch: Of the journal, that a checkpoint which is kept goes on with; None: those
                before it stay, too.
        """
        if oldest_epoch is not None:
            self._worker.call("drop_journal_before", oldest_epoch)
        logger.info("the checkpoint of step %d is written", step)
        self.record_span("write", taken_at, unix_s(), actor="checkpoint")

    def record_span(
        self, what: str, start_s: float, end_s: float, *, actor: str = "trainer"
    ) -> None:
        """Write a span of the timeline, in Unix seconds."""
        if actor == "trainer":
            self._metrics.add("apr_trainer_activity_seconds", end_s - start_s, activity=what)
        span = {"actor": actor, "what": what, "start_s": start_s, "end_s": end_s}
        self._recorder.record.remote("timeline", span)
