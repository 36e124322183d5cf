"""Rollout worker and buffer of a run, which begin again together beside the trainer.

If one of them dies, the other one is ended, too: what the buffer holds belongs to the worker's
process. The next ones begin with the last checkpoint and the journal, under the next names
(`data.parts`), while the trainer waits for them, and engines for requests.

Invariants, kept by `RolloutSide`:
    * Both are dead before the journal is read.
    * A death while they begin again, and a checkpoint that is removed while it is read, is one more
      death: within the limit they begin once more.
    * Where they cannot begin again, the trainer hears at once why.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import (
    APRError,
    ResourceError,
    RolloutError,
    StarvedError,
    one_line,
)
from ray_apr.data.parts import DEATHS
from ray_apr.data.resumption import Begin
from ray_apr.run.causes import cause_of, death_of
from ray_apr.run.folder import add_row
from ray_apr.run.resume import find_side_begin
from ray_apr.run.scaling import as_scaled

if TYPE_CHECKING:
    import ray.data

    from ray_apr.run.actors import Actors
    from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

RESTARTS_FILE = "restarts.jsonl"
_CALL_TIMEOUT_S = 60.0
_SAMPLES_S = 300.0
"""Longest that the texts of the last step may take into the run folder."""
_ASK_AGAIN_S = 1.0
_LOOK_S = 5.0
_MOST_IN_A_ROW = 5
"""Restarts without a step between them, after which the run fails."""
_FIRST_PAUSE_S = 0.5


class RolloutSide:
    """Rollout worker and buffer.

    Args:
        spec: What runs.
        actors: Makes them.
        prompts: The dataset.
        begin: Where they begin.
        recorder: Handle of the recorder.
        started_at: Unix time of the run's begin.
        show: Takes a line for a person.
    """

    def __init__(
        self,
        spec: RunSpec,
        actors: Actors,
        prompts: ray.data.Dataset,
        begin: Begin,
        recorder: Any,
        started_at: float,
        show: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._actors = actors
        self._prompts = prompts
        self._began = begin
        """Where the trainer began."""
        self.begin = begin
        """Where the present ones began."""
        self._recorder = recorder
        self._started_at = started_at
        self._show = show
        self._made_at = unix_s()
        self._generation = 0
        self._in_a_row, self._last_step = 0, -1
        self._is_open = False
        """Whether the engines run, so that a worker may start."""
        self.failure: APRError | None = None
        """What the run ends with, as `fail` was told."""
        self._closing = threading.Event()
        self._changing = threading.Lock()
        self.buffer, self.worker = actors.make_pipeline(prompts, begin, recorder)
        self._record_missing()
        self._watch = threading.Thread(target=self._follow, name="watch-rollout", daemon=True)
        self._watch.start()

    @property
    def spec_now(self) -> RunSpec:
        """The spec with the engines that there are now."""
        return as_scaled(self._spec, self._made_at)

    def start(self) -> None:
        """Start the rollout loops: the engines run.

        Waits for: the worker. Unblocked by: ``rollout.engine.start_timeout_s``.

        Raises:
            APRError: What the worker cannot start with.
        """
        with self._changing:
            self._is_open = True
        died = self._start()
        if died is not None:  # the watch sees to it
            logger.warning("the %s", died)

    def _start(self) -> str | None:
        """Start the worker; how it died of that, None if it runs."""
        limit_s = self._spec.rollout.engine.start_timeout_s  # it may have many samples to read
        try:
            _ask(self.worker.start.remote, limit_s)
        except DEATHS as error:
            return f"rollout worker died at its start: {death_of(error)}"
        return None

    def _record_missing(self) -> None:
        """Have the run folder note what the last ones did and could not tell."""
        replayed = self.begin.replayed
        if replayed is not None:
            for kind, rows in (("ended", replayed.ended), ("dropped", replayed.dropped)):
                self._recorder.record_missing.remote(kind, rows)

    # -- deaths ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """See to it that there are a worker and a buffer.

        Consumes: nothing. Waits for: the end of either. Unblocked by: `RolloutWorker.stop` or
        `SampleBuffer.close`, or a death, at the latest by `close`. Produces: the next ones, or a
        failure in the buffer.
        """
        died = self._death()
        while died is not None and not self._is_over:
            try:
                reason = self._may_begin_again()
                if reason is not None:
                    self.fail(RolloutError(f"the {died}; {reason}"))
                    return
                died = self._begin_again(died) or self._death()
            except Exception as error:
                if not self._is_over:
                    logger.exception("the rollout side cannot begin again")
                    self.fail(cause_of(error))
                return

    @property
    def _is_over(self) -> bool:
        """Whether nothing begins again any more."""
        return self._closing.is_set() or self.failure is not None

    def _death(self) -> str | None:
        """Wait for the end of worker or buffer; how one of them died, None where it was ended.

        Waits for: the end of either. Unblocked by: that, or `stop_watching`.
        """
        parts = {"rollout worker": self.worker, "sample buffer": self.buffer}
        waits = {actor.wait_until_stopped.remote(): name for name, actor in parts.items()}
        while not self._closing.is_set():
            ended, _ = ray.wait(list(waits), num_returns=1, timeout=_LOOK_S)
            for ref in ended:
                name = waits.pop(ref)
                try:
                    ray.get(ref, timeout=_CALL_TIMEOUT_S)
                except ActorUnavailableError:  # the connection broke; it may live
                    self._closing.wait(_ASK_AGAIN_S)
                    waits[parts[name].wait_until_stopped.remote()] = name
                except DEATHS as error:
                    return f"{name} died: {death_of(error)}"
                except RayError as error:
                    logger.debug("the watch of the %s ends with Ray: %s", name, one_line(error))
                    return None
                else:
                    return None
        return None

    def _may_begin_again(self) -> str | None:
        """Why they may not; None if they may."""
        spec = self._spec
        if not spec.rollout.journal.enabled:
            return "without a journal (rollout.journal.enabled) it cannot begin again by itself"
        if spec.rollout.takes_turns:
            return (
                "with engines that sleep while a batch is trained it cannot begin again by itself"
            )
        step: int = ray.get(self._recorder.num_steps.remote(), timeout=_CALL_TIMEOUT_S)
        self._in_a_row = self._in_a_row + 1 if step == self._last_step else 1
        self._last_step = step
        if self._in_a_row > _MOST_IN_A_ROW:
            return f"it has died {self._in_a_row} times without a step between"
        return None

    def _begin_again(self, died: str) -> str | None:
        """Start the next ones, where the last ones stood.

        Waits for: a pause, then `_changing`. Unblocked by: `stop_watching`; who holds it, which has
        limits.

        Returns:
            How that came to nothing, which is one more death; None if they are there.
        """
        begun = time.monotonic()
        self._show(f"the {died}; it begins again")
        logger.warning("the %s; it begins again", died)
        self._closing.wait(_FIRST_PAUSE_S * (2 ** (self._in_a_row - 1) - 1))
        _end(self.worker, self.buffer)
        self._spec.check_owner()
        try:
            begin = find_side_begin(self._spec, self._began)
        except ResourceError as error:  # Ray Train writes its list or removes a checkpoint just now
            if self._in_a_row == _MOST_IN_A_ROW:
                raise
            return f"rollout side does not find where it stood: {one_line(error)}"
        before, num_lost = begin.before.lose(0, begin.num_kept)
        with self._changing:
            if self._is_over:
                return None
            self._generation += 1
            self._actors.num_replicas = self.spec_now.rollout.num_replicas
            self.begin = dataclasses.replace(begin, before=before)
            self.buffer, self.worker = self._actors.make_pipeline(
                self._prompts, self.begin, self._recorder, generation=self._generation
            )
            is_open = self._is_open
        self._record_missing()
        died_again = self._start() if is_open else None
        seconds = time.monotonic() - begun
        add_row(
            self._spec.folder / RESTARTS_FILE,
            {
                "time_s": round(unix_s() - self._started_at, 4),
                "died": died,
                "seconds": round(seconds, 3),
                "step": self._last_step,
                "samples_kept": begin.num_samples,
                "tokens_kept": begin.num_kept,
                "tokens_lost": num_lost,
            },
        )
        if died_again is None:
            self._show(
                f"rollouts go on after {seconds:.1f} s with {begin.num_kept:,} tokens of "
                f"{begin.num_samples} samples"
            )
        return died_again

    def fail(self, reason: APRError) -> None:
        """Have the run end with a reason, which the trainer hears from the buffer, if need be from
        a new one; any thread may call this.

        Waits for: `_changing`. Unblocked by: who holds it, which has limits.
        """
        with self._changing:
            if self._is_over:
                return
            try:
                _ask(lambda: self.buffer.fail.remote(reason), _CALL_TIMEOUT_S)
            except DEATHS:
                self._generation += 1
                self.buffer = self._actors.make_buffer(self._recorder, generation=self._generation)
                _ask(lambda: self.buffer.fail.remote(reason), _CALL_TIMEOUT_S)
            self.failure = reason

    def first_error(self) -> APRError | None:
        """What failed before the train workers did, if anything.

        Waits for: the buffer. Unblocked by: its answer, its death, or `_CALL_TIMEOUT_S`.
        """
        try:
            failure: APRError | None = ray.get(
                self.buffer.failure.remote(), timeout=_CALL_TIMEOUT_S
            )
        except RayActorError as error:
            return self.failure or APRError(f"the sample buffer died: {death_of(error)}")
        except (RayError, TimeoutError) as error:
            logger.error("the sample buffer does not answer: %s", one_line(error))
            return None
        return failure

    def finish_samples(self) -> None:
        """Wait until the texts of the last step are in the run folder.

        Waits for: the buffer. Unblocked by: its answer, its death, or `_SAMPLES_S`.

        Raises:
            ResourceError: If they cannot be written.
        """
        try:
            ray.get(self.buffer.finish_samples.remote(), timeout=_SAMPLES_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.error("the texts of the last step may be missing: %s", one_line(error))

    # -- end -------------------------------------------------------------------------------------

    def stop_watching(self) -> None:
        """From now on a death is none of this one's business.

        Waits for: `_changing`. Unblocked by: who holds it, which has limits.
        """
        self._closing.set()
        with self._changing:
            pass  # what began before has its actors in the list of those that are ended

    def join(self) -> None:
        """Wait for the watch: a call to Ray after its shutdown ends the process."""
        self._watch.join(timeout=_CALL_TIMEOUT_S)


def _ask(call: Callable[[], Any], limit_s: float) -> Any:
    """The answer of a call, which is made again where the connection broke.

    Waits for: the answer. Unblocked by: `limit_s`, or the actor's death.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return ray.get(call(), timeout=limit_s)
        except ActorUnavailableError as error:
            if time.monotonic() > deadline:
                raise StarvedError(
                    f"not reached within {limit_s:g} s: {one_line(error)}"
                ) from error
            logger.warning("once more: %s", one_line(error))
            time.sleep(_ASK_AGAIN_S)


def _end(*actors: Any) -> None:
    """Kill actors, and wait until they are dead.

    Waits for: Ray. Unblocked by: `_CALL_TIMEOUT_S`.

    Raises:
        ResourceError: If one does not die.
    """
    for actor in actors:
        ray.kill(actor)
    for actor in actors:
        try:
            _ask(actor.wait_until_stopped.remote, _CALL_TIMEOUT_S)
        except DEATHS:
            continue
        except TimeoutError as error:
            raise ResourceError("a part that died cannot be ended: Ray does not say so") from error
