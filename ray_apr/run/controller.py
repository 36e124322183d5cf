"""Starts the parts of a run, and ends them: every actor, the Serve application, the trainer.

    prompts (Ray Data) ──► RolloutWorker ──generate/abort──► RolloutServer × R (Serve, vLLM)
                             │  ▲   │                             ▲
                     scored  │  │   └─ RewardWorker × W           │ weights, by a transport
                     groups  │  │ state, versions                 │
                             ▼  │                                 │
                          SampleBuffer ──rows──► Ray Data ──► TorchTrainer × N (FSDP2)
                             ▲                                    │
                             └────────── grant, ack ──────────────┘

Servers and train workers start at the same time; the trainer's first grant waits in the buffer.
Where they share GPUs, the model is loaded once the engines run. Whatever fails, on whichever side,
ends the run with its own error, whose traceback is in the run folder, and `_Parts.close` leaves
nothing behind; where it may, the run goes on by itself (`run.restarts`). If this process is killed,
Ray ends the actors and the trainer, and the servers' lease (`serve.lease`) the servers.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.exceptions import RayError

from ray_apr.compat.ray import init_beside_dashboard
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import APRError, Stopped, one_line
from ray_apr.core.imports import imported_meanwhile
from ray_apr.data.resumption import Begin, RolloutSummary
from ray_apr.run.actors import Actors
from ray_apr.run.autoscaling import make_autoscaler
from ray_apr.run.begun import note_begin
from ray_apr.run.callbacks import followed_by
from ray_apr.run.causes import cause_of, of_servers, write_error_log
from ray_apr.run.checks import check_resources
from ray_apr.run.draining import NodeWatch
from ray_apr.run.ending import with_counted_steps
from ray_apr.run.final import (
    ERROR_LOG,
    final_figures,
    write_end_of_start,
    write_final,
    write_json,
    write_outcome,
)
from ray_apr.run.folder import CONFIG_FILE
from ray_apr.run.model import check_engine, check_hub_model
from ray_apr.run.preflight import found_no_place, make_run_folder, not_placed, settings_of_ray_train
from ray_apr.run.progress import follow_progress, starts, unbroken
from ray_apr.run.ranks import choose_ranks, lost_nodes_excused, note_ranks, watched_ranks
from ray_apr.run.restarts import run_with_restarts
from ray_apr.run.resume import (
    find_begin,
    hold_folder,
    last_step,
    remove_end,
    resume_folder,
    resume_line,
)
from ray_apr.run.scaling import as_scaled, start_scaling
from ray_apr.run.side import RolloutSide
from ray_apr.run.spec import RunSpec
from ray_apr.run.stopping import StopSignals
from ray_apr.run.tidying import tidy_folder
from ray_apr.run.training import begin_train, make_torch_trainer
from ray_apr.scheduling.stock import BufferStats
from ray_apr.serve.builder import start_rollout_servers, wait_until_placed
from ray_apr.serve.spec import EngineSpec

if TYPE_CHECKING:
    import ray.data

    from ray_apr.core.user import RunCallback

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 60.0


def run(
    spec: RunSpec,
    prompts: ray.data.Dataset,
    held_out: ray.data.Dataset | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    gate: Any = None,
    callbacks: Sequence[RunCallback] = (),
) -> ray.train.Result:
    """Run it to its end.

    Args:
        spec: What to run.
        prompts: What to train on.
        held_out: What to evaluate on, where the run does so.
        progress: Gets the lines of progress.
        gate: Handle of the `StepGate` that lets it take steps; None: it takes all of them.
        callbacks: What follows the run.

    Raises:
        APRError: What the run failed of, once it may fail no more.
        Stopped: Somebody ended it, by Ctrl-C or SIGTERM; its final figures are written.
    """
    signals = StopSignals()
    with signals.listen(), imported_meanwhile():
        check_hub_model(spec.model)
        if not ray.is_initialized():
            init_beside_dashboard()
            check_resources(spec, ray.cluster_resources())
        spec = spec.on_devices(has_gpus=ray.cluster_resources().get("GPU", 0) >= 1)
        engine = spec.rollout.engine
        check_engine(spec.model, engine.factory, engine.device, engine.tensor_parallel_size)
        make_run_folder(spec)
        show, began_at = unbroken(progress or logger.info), unix_s()
        spec = asked = with_counted_steps(spec, prompts, show)

        def attempt() -> ray.train.Result:
            asked.check_owner()
            spec = choose_ranks(as_scaled(asked, since=began_at))
            begin, started_at = find_begin(spec), time.time()  # as processes read it from here on
            if begin.is_resumed:
                begin, started_at = resume_folder(spec.folder, begin, started_at)
            remove_end(spec.folder)
            note_begin(spec, begin)
            changed = note_ranks(spec, begin.step, started_at)
            write_json(spec.folder / CONFIG_FILE, spec.describe())
            if spec.command is not None:
                spec.command.write(spec.folder)
            if begin != Begin():
                show(resume_line(begin, spec.train.num_steps, changed))
            make = functools.partial(_Parts, spec, prompts, held_out, begin, started_at, gate, show)
            with lost_nodes_excused(spec):
                return _run_parts(make, spec, begin, started_at, signals, show)

        def pause(seconds: float) -> None:
            try:
                signals.check()
                time.sleep(seconds)
            except Stopped as stopped:
                write_outcome(spec.folder, asked.taken_over or stopped)
                raise

        with hold_folder(spec.folder, spec.fences), followed_by(callbacks, spec):
            tidy_folder(spec)
            return run_with_restarts(
                attempt,
                max_failures=spec.max_failures,
                num_steps=spec.train.num_steps,
                last_step=lambda: last_step(spec),
                show=show,
                sleep=pause,
            )


def _run_parts(
    make: Callable[[], _Parts],
    spec: RunSpec,
    begin: Begin,
    started_at: float,
    signals: StopSignals,
    show: Callable[[str], None],
) -> ray.train.Result:
    """Make the parts, train to the end, and take them away.

    Waits for: the train workers. Unblocked by: what unblocks `_Parts.fit`, or a signal.
    """
    try:
        with signals.listen():  # Ray raises a KeyboardInterrupt of its own, made `Stopped` here
            parts = make()
    except BaseException as caught:
        write_end_of_start(spec, begin, caught, unix_s() - started_at)
        raise
    error: BaseException | None = None
    with follow_progress(
        parts.recorder, spec.folder, spec.train.num_steps, show, begin.num_rows
    ) as stop_showing:
        try:
            with signals.listen():  # Ray Train leaves its own handler behind
                return parts.fit()
        except BaseException as caught:
            error = caught
            raise
        finally:
            with signals.put_off():  # which does not break off what says how it ended
                stop_showing()
                parts.close(error)


class _Parts:
    """The actors of one run and their lifetime.

    Args:
        spec: What to run.
        prompts: The dataset.
        held_out: The dataset of the evaluation.
        begin: Where the run begins.
        started_at: Unix time of the run's begin.
        gate: Handle of the gate of its steps; None: it has none.
        show: Takes a line for a person.
    """

    def __init__(
        self,
        spec: RunSpec,
        prompts: ray.data.Dataset,
        held_out: ray.data.Dataset | None,
        begin: Begin,
        started_at: float,
        gate: Any,
        show: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self._gate = gate
        self._show = show
        self._begin = begin
        self._started_at = started_at
        self._made_at = time.monotonic()
        self._start_error: APRError | None = None
        self._setup_s: float | None = None
        self._scaling: threading.Thread | None = None
        self._closing = threading.Event()
        self._side: RolloutSide | None = None
        self._made = threading.Event()
        """Set once all actors are there, or could not be made."""
        self._actors = Actors(spec)
        self.recorder = self._actors.make_recorder(started_at)
        imports = begin_train()
        # the engines take longest to start: everything else starts beside them
        self._servers = threading.Thread(target=self._start_servers, name="servers", daemon=True)
        self._servers.start()
        try:
            self._side = RolloutSide(
                spec, self._actors, prompts, begin, self.recorder, started_at, show
            )
            self._evaluator = (
                None if held_out is None else self._actors.make_evaluator(held_out, self.recorder)
            )
        except BaseException:
            self._closing.set()
            raise
        finally:
            self._made.set()
            if self._closing.is_set():
                self._servers.join(timeout=_CALL_TIMEOUT_S)
                imports.join(timeout=_CALL_TIMEOUT_S)  # a process that ends in the midst crashes
                self._take_away()

    def fit(self) -> ray.train.Result:
        """Train, while the servers may still be starting; where they share the trainer's GPUs,
        once they have their shares of these.

        Waits for: the train workers. Unblocked by: their end, or the failure of any part, which the
        buffer tells them.
        """
        try:
            rollout, limit_s = self.spec.rollout, self.spec.rollout.engine.start_timeout_s
            if rollout.is_colocated:
                wait_until_placed(self.spec.name, rollout.num_replicas, limit_s, self._servers)
                if self._start_error is not None:
                    raise self._start_error
            watched = watched_ranks(self.spec, self.side.fail)
            own = self._actors.name_of("recorder")
            drained = NodeWatch(self.spec, self.side, own, self._started_at, self._show)
            read, begun = settings_of_ray_train(limit_s), starts(self.recorder, "train workers")
            with watched, drained, read, begun:
                result = self._make_trainer().fit()
            self.side.finish_samples()
            return result
        except Exception as error:  # noqa: BLE001  (its cause is raised)
            raise self._reason(error) from None
        finally:
            self._closing.set()
            self._servers.join(timeout=_CALL_TIMEOUT_S)

    def _start_servers(self) -> None:
        """Start the rollout servers, then the rollout loops; an error reaches the trainer.

        Waits for: the servers, then the other actors. Unblocked by: the limits of both, `_closing`.
        """
        spec, train = self.spec, self.spec.train
        try:
            engine = EngineSpec.of_run(
                spec.model, spec.rollout, spec.partial_rollout,
                max_model_len=spec.max_model_len, evaluates=spec.evaluation is not None,
                most_requests=spec.most_requests, weight_check_every=train.weight_check_every,
                profile_steps=train.profile_steps,
            )  # fmt: skip
            with starts(self.recorder, "rollout servers"):
                start_rollout_servers(spec.name, engine, spec.rollout, cancelled=self._closing)
            self._made.wait(timeout=spec.rollout.engine.start_timeout_s)
            if self._closing.is_set():
                return
            self.side.start()
            if self._evaluator is not None:
                ray.get(self._evaluator.connect.remote(), timeout=_CALL_TIMEOUT_S)
                self._evaluator.start.remote(self._begin.policy_version)  # again if it dies
            self._setup_s = time.monotonic() - self._made_at
            self._scaling = start_scaling(
                spec, engine, self._clients, started_at=self._started_at, closing=self._closing,
                autoscaler=make_autoscaler(spec, self.recorder, self._begin, self._setup_s),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  (a thread: its error goes to the trainer)
            reason = cause_of(error) if isinstance(error, APRError) else of_servers(error)
            self._start_error = reason
            self._made.wait(timeout=spec.rollout.engine.start_timeout_s)
            if self._closing.is_set():
                return
            self.side.fail(reason)

    @property
    def side(self) -> RolloutSide:
        """Rollout worker and buffer, once they are made."""
        assert self._side is not None
        return self._side

    def _clients(self) -> list[Any]:
        """Actors that have a client of the servers."""
        return [actor for actor in (self.side.worker, self._evaluator) if actor is not None]

    def _make_trainer(self) -> Any:
        return make_torch_trainer(
            self.spec,
            buffer=self._actors.part("buffer"),
            worker=self._actors.part("rollout"),
            evaluator=self._evaluator,
            recorder=self.recorder,
            gate=self._gate,
            begin=dataclasses.replace(self._begin, samples=None, replayed=None),
            started_at=self._started_at,
        )

    def _reason(self, error: Exception) -> APRError:
        """The error of ours behind a failed run; it names the file with the tracebacks."""
        spec = self.spec
        reason = spec.taken_over or self._start_error or self.side.first_error()
        if reason is None and found_no_place(error):
            reason = not_placed(spec.worker_scaling, spec.rollout.engine.start_timeout_s)
        reason = reason or cause_of(error)
        log = spec.folder / ERROR_LOG
        if write_error_log(log, error, reason):
            reason.add_note(f"traceback: {log}")
        return reason

    def close(self, error: BaseException | None) -> None:
        """End everything: streams, loops, servers, actors; write the final figures."""
        spec, side = self.spec, self.side
        training_end = unix_s()
        side.stop_watching()  # what dies from here on does not begin again
        try:
            if isinstance(error, Stopped):  # the trainer may still be at it: it gets no further
                self._show(f"{error}: the run ends, which takes some seconds; its figures are kept")
                self._ask(side.buffer.close.remote(), "sample buffer")
            if self._evaluator is not None:
                self._ask(self._evaluator.stop.remote(), "evaluator")
            summary: RolloutSummary | None = self._ask(side.worker.stop.remote(), "rollout worker")
            stats: BufferStats | None = self._ask(side.buffer.stats.remote(), "sample buffer")
            steps: int | None = self._ask(self.recorder.num_steps.remote(), "recorder")
            final = final_figures(side.spec_now, summary, stats, steps, side.begin.before)
            if self._actors.prompts is not None:
                final["num_prompts_dropped"] = self._actors.prompts.num_dropped
            final["setup_s"] = self._setup_s
            final["wall_s"] = training_end - self._started_at
            write_final(spec.folder, final, spec.taken_over or error)
            self._ask(side.buffer.finish_samples.remote(), "sample buffer")
            self._ask(side.buffer.close.remote(), "sample buffer")
            self._ask(self.recorder.close.remote(), "recorder")
        finally:
            self._take_away()

    def _ask(self, answer: Any, whom: str) -> Any:
        """An actor's answer; None from one that is dead or does not answer in time."""
        try:
            return ray.get(answer, timeout=_CALL_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            logger.error("the %s does not answer: %s", whom, one_line(error))
            return None

    def _take_away(self) -> None:
        """End the servers and all actors.

        Waits for: the watch. Unblocked by: its end, or `_CALL_TIMEOUT_S` in `RolloutSide.join`.
        """
        if self._side is not None:
            self._side.stop_watching()
        try:
            if self._scaling is not None:
                self._scaling.join(timeout=_CALL_TIMEOUT_S)
        finally:
            self._actors.take_away()
            if self._side is not None:
                self._side.join()
