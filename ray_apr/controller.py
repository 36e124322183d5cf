"""Starts the parts of a run, and ends them: every actor, the Serve application, the trainer.

    prompts (Ray Data) ──► RolloutWorker ──generate/abort──► RolloutServer × R (Serve, vLLM)
                             │  ▲   │                             ▲
                     scored  │  │   └─ RewardWorker × W           │ weights: collective broadcast
                     groups  │  │ capacity, versions              │
                             ▼  │                                 │
                          SampleBuffer ──rows──► Ray Data ──► TorchTrainer × N (FSDP2)
                             ▲                                    │
                             └────────── grant, ack ──────────────┘

Servers and train workers start at the same time; the trainer's first grant simply waits in the
buffer. Whatever fails, on whichever side, ends the run with its own error, whose traceback is in
the run folder, and `_Parts.close` leaves nothing behind. If this process is killed, Ray ends the
actors and the trainer, and the servers' lease (`serve.lease`) the servers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_apr.causes import cause_of, death_of, write_error_log
from ray_apr.data.buffer import SampleBuffer
from ray_apr.data.datasource import sample_stream
from ray_apr.data.prompts import PromptSource, encode_dataset, held_out_prompts
from ray_apr.data.resumption import Begin
from ray_apr.data.stock import BufferStats
from ray_apr.exceptions import APRError, ResourceError, RolloutError, Stopped, one_line
from ray_apr.final import final_figures
from ray_apr.preflight import found_no_place, make_run_folder, not_placed, placement_limit
from ray_apr.progress import follow_progress
from ray_apr.recorder import RunRecorder
from ray_apr.resume import find_begin, hold_folder, resume_folder, resume_line
from ray_apr.rollout.evaluation import Evaluator
from ray_apr.rollout.scoring import Scorer
from ray_apr.rollout.turns import turn_rules
from ray_apr.rollout.worker import RolloutSummary, RolloutWorker
from ray_apr.run_plan import RunPlan
from ray_apr.serve.builder import start_rollout_servers, stop_rollout_servers
from ray_apr.serve.lease import start_lease, wait_for_lease
from ray_apr.serve.spec import EngineSpec
from ray_apr.stopping import StopSignals
from ray_apr.train.control import sync_limit_s
from ray_apr.train.loop import train_loop_per_worker
from ray_apr.train.spec import WorkerSpec

if TYPE_CHECKING:
    import ray.data

logger = logging.getLogger(__name__)

ERROR_LOG = "error.log"
"""File of the run folder with the tracebacks of a run that failed."""
_CALL_TIMEOUT_S = 60.0
_ASK_AGAIN_S = 1.0
_COLLECTIVE_TIMEOUT_S = 600
"""Limit of a collective of the train workers, beside what a weight sync of rank 0 may take. No rank
is in one while it waits for its batch: all get theirs together, however long that takes."""


def run(
    plan: RunPlan,
    prompts: ray.data.Dataset,
    held_out: ray.data.Dataset | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    gate: Any = None,
) -> ray.train.Result:
    """Run a plan to its end.

    Args:
        plan: What to run.
        prompts: What to train on.
        held_out: What to evaluate on, where the plan says so.
        progress: Gets the lines of progress.
        gate: Handle of the `StepGate` that lets it take steps; None: it takes all of them.

    Raises:
        APRError: What the run failed of.
        Stopped: Somebody ended it, by Ctrl-C or SIGTERM; its final figures are written.
    """
    signals = StopSignals()
    with signals.listen():
        plan.check_model()
        plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=plan.name))
        make_run_folder(plan)
        with hold_folder(plan.folder):
            begin, started_at = find_begin(plan), time.time()
            if begin.is_resumed:
                begin, started_at = resume_folder(plan.folder, begin, started_at)
            _write_json(plan.folder / "config.json", plan.describe())
            show = progress or logger.info
            if begin != Begin():
                show(resume_line(begin, plan.train.steps))
            make = functools.partial(_Parts, plan, prompts, held_out, begin, started_at, gate)
            return _run_parts(make, plan, begin, started_at, signals, show)


def _run_parts(
    make: Callable[[], _Parts],
    plan: RunPlan,
    begin: Begin,
    started_at: float,
    signals: StopSignals,
    show: Callable[[str], None],
) -> ray.train.Result:
    try:
        with signals.listen():  # Ray raises a KeyboardInterrupt of its own, made `Stopped` here
            parts = make()
    except BaseException as caught:
        _write_end_of_start(plan, begin, caught, time.time() - started_at)
        raise
    error: BaseException | None = None
    with follow_progress(parts.recorder, plan.train.steps, show) as stop_showing:
        try:
            with signals.listen():  # Ray Train leaves its own handler behind
                return parts.fit()
        except BaseException as caught:
            error = caught
            raise
        finally:
            stop_showing()
            parts.close(error)


class _Parts:
    """The actors of one run and their lifetime.

    Args:
        plan: What to run.
        prompts: The dataset.
        held_out: The dataset of the evaluation.
        begin: Where the run begins.
        started_at: Unix time of the run's begin.
        gate: Handle of the gate of its steps; None: it has none.
    """

    def __init__(
        self,
        plan: RunPlan,
        prompts: ray.data.Dataset,
        held_out: ray.data.Dataset | None,
        begin: Begin,
        started_at: float,
        gate: Any,
    ) -> None:
        self.plan = plan
        self._gate = gate
        self._begin = begin
        self._started_at = started_at
        self._made_at = time.monotonic()
        self._start_error: APRError | None = None
        self._setup_s: float | None = None
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_worker, name="watch-worker", daemon=True)
        self._made = threading.Event()
        """Set once all actors are there, or could not be made."""
        self._actors: list[Any] = []
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._run_id = uuid.uuid4().hex[:8]
        wait_for_lease(plan.name)
        self.recorder = self._actor(
            RunRecorder,
            str(plan.folder),
            started_at,
            begin.num_rows,
            begin.before.status,
            part="recorder",
            scheduling_strategy=here,
        )
        self._actors.append(start_lease(plan.name, self._name_of("recorder")))
        # the engines take longest to start: everything else starts beside them
        self._servers = threading.Thread(
            target=self._start_servers, name="start-servers", daemon=True
        )
        self._servers.start()
        try:
            progress = begin.rollout
            self._tables = self._encode(
                prompts, "prompts", None if progress is None else progress.num_prompts
            )
            self._buffer = self._make_buffer()
            self._worker = self._make_worker()
            self._watch.start()
            self._evaluator = None if held_out is None else self._make_evaluator(held_out)
        except BaseException:
            self._closing.set()
            raise
        finally:
            self._made.set()
            if self._closing.is_set():
                self._servers.join(timeout=_CALL_TIMEOUT_S)
                self._take_away()

    def _encode(
        self, prompts: ray.data.Dataset, what: str, num_prompts: int | None = None
    ) -> list[ray.ObjectRef]:
        plan = self.plan
        return encode_dataset(
            prompts,
            name=f"{plan.name}-{what}",
            model=plan.model,
            column=plan.rollout.prompt_column,
            max_prompt_tokens=plan.max_prompt_tokens(),
            num_prompts=num_prompts,
        )

    def _name_of(self, part: str) -> str:
        """Name of an actor, in Ray's tables; no two runs share one."""
        return f"{self.plan.name}-{part}-{self._run_id}"

    def _actor(
        self,
        cls: type,
        *args: Any,
        part: str,
        scheduling_strategy: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Start an actor that ends with this run."""
        remote = ray.remote(cls).options(
            name=self._name_of(part),
            num_cpus=0,
            max_concurrency=10_000,
            scheduling_strategy=scheduling_strategy,
        )
        handle = remote.remote(*args, **kwargs)
        self._actors.append(handle)
        return handle

    def _make_buffer(self) -> Any:
        plan = self.plan
        return self._actor(
            SampleBuffer,
            part="buffer",
            batch_size=plan.step_size,
            max_staleness=plan.partial_rollout.max_staleness,
            on_stale=plan.partial_rollout.on_stale,
            num_ranks=plan.scaling.num_workers,
            micro_batch_tokens=plan.train.micro_batch_tokens,
            mini_batches=plan.train.mini_batches,
            packed=plan.train.packs("cuda" if plan.scaling.use_gpu else "cpu"),
            config=plan.buffer,
            recorder=self.recorder,
            run=plan.name,
        )

    def _make_worker(self) -> Any:
        plan, tables = self.plan, self._tables
        rollout, seed, progress = plan.rollout, plan.train.seed, self._begin.rollout
        position, pending = (progress.position, progress.pending) if progress else (0, ())
        reward, environment = plan.reward, plan.environment
        max_inflight = plan.partial_rollout.max_inflight_samples(plan.step_size)
        return self._actor(
            RolloutWorker,
            part="rollout",
            rollout=rollout,
            partial_rollout=plan.partial_rollout,
            batch_size=plan.step_size,
            model=plan.model,
            make_prompts=lambda: PromptSource(
                ray.get(tables), seed=seed, position=position, pending=pending
            ),
            make_client=self._client_maker(
                max_inflight=max_inflight, weight_sync_timeout_s=plan.train.weight_sync_timeout_s
            ),
            make_scorer=lambda: Scorer(reward, rollout, environment),
            buffer=self._buffer,
            recorder=self.recorder,
            sync_timeout_s=plan.train.weight_sync_timeout_s,
            policy_version=self._begin.policy_version,
            turns=turn_rules(environment, rollout.max_turns),
            group_filter=plan.group_filter,
            run=plan.name,
        )

    def _client_maker(self, **limits: Any) -> Callable[[], Any]:
        """What makes a client of the servers inside an actor; it carries nothing else there."""
        name, rollout = self.plan.name, self.plan.rollout

        def make_client() -> Any:
            from ray_apr.serve.client import ServeRolloutClient

            return ServeRolloutClient(name, rollout, **limits)

        return make_client

    def _make_evaluator(self, held_out: ray.data.Dataset) -> Any:
        plan, tables = self.plan, self._encode(held_out, "held_out")
        rollout, reward, environment = plan.rollout, plan.reward, plan.environment
        return self._actor(
            Evaluator,
            part="evaluator",
            rollout=rollout,
            config=plan.evaluation,
            model=plan.model,
            make_prompts=lambda: held_out_prompts(ray.get(tables)),
            make_client=self._client_maker(),
            make_scorer=lambda: Scorer(reward, rollout, environment),
            recorder=self.recorder,
            turns=turn_rules(environment, rollout.max_turns),
            run=plan.name,
        )

    def fit(self) -> ray.train.Result:
        """Train, while the servers may still be starting, unless they share the trainer's GPUs:
        an engine measures what is free when it starts."""
        try:
            if self.plan.rollout.is_colocated:
                limit_s = 2 * self.plan.rollout.start_timeout_s + 3 * _CALL_TIMEOUT_S
                self._servers.join(timeout=limit_s)
                if self._servers.is_alive():
                    raise ResourceError(f"the rollout servers did not start within {limit_s:g} s")
                if self._start_error is not None:
                    raise self._start_error
            with placement_limit(self.plan.rollout.start_timeout_s):
                return self._make_trainer().fit()
        except Exception as error:  # noqa: BLE001  (its cause is raised)
            raise self._reason(error) from None
        finally:
            self._closing.set()
            self._servers.join(timeout=_CALL_TIMEOUT_S)

    def _start_servers(self) -> None:
        """Start the rollout servers, then the rollout loops; an error reaches the trainer.

        Waits for: the servers, then the other actors. Unblocked by: the limits of both, `_closing`.
        """
        plan = self.plan
        try:
            spec = EngineSpec.of_run(
                plan.model,
                plan.rollout,
                plan.partial_rollout,
                max_model_len=plan.max_model_len,
                evaluates=plan.evaluation is not None,
                weight_check_every=plan.train.weight_check_every,
            )
            start_rollout_servers(plan.name, spec, plan.rollout, cancelled=self._closing)
            self._made.wait(timeout=plan.rollout.start_timeout_s)
            if self._closing.is_set():
                return
            ray.get(self._worker.start.remote(), timeout=_CALL_TIMEOUT_S)
            if self._evaluator is not None:
                started = self._evaluator.start.remote(self._begin.policy_version)
                ray.get(started, timeout=_CALL_TIMEOUT_S)
            self._setup_s = time.monotonic() - self._made_at
        except Exception as error:  # noqa: BLE001  (a thread: its error goes to the trainer)
            reason = cause_of(error) if isinstance(error, APRError) else _of_servers(error)
            self._start_error = reason
            self._made.wait(timeout=plan.rollout.start_timeout_s)
            if self._closing.is_set():
                return
            ray.get(self._buffer.fail.remote(reason), timeout=_CALL_TIMEOUT_S)

    def _make_trainer(self) -> Any:
        from ray.train.torch import TorchConfig, TorchTrainer

        plan = self.plan
        ranks = range(plan.scaling.num_workers)
        poll_s = plan.buffer.poll_timeout_s
        spec = WorkerSpec(
            model=plan.model,
            algorithm=plan.algorithm,
            sampling=plan.rollout.sampling,
            max_response_tokens=plan.rollout.max_response_tokens,
            train=plan.train,
            partial_rollout=plan.partial_rollout,
            evaluation=plan.evaluation,
            evaluator=self._evaluator,
            buffer=self._buffer,
            worker=self._worker,
            recorder=self.recorder,
            num_replicas=plan.rollout.num_replicas,
            start_timeout_s=plan.rollout.start_timeout_s,
            takes_turns=plan.rollout.is_colocated,
            begin=self._begin,
            gate=self._gate,
            started_at=self._started_at,
            wire_dtype=plan.rollout.dtype,
            run=plan.name,
        )
        return TorchTrainer(
            functools.partial(train_loop_per_worker, spec),
            torch_config=TorchConfig(
                backend=plan.torch_backend,
                timeout_s=_COLLECTIVE_TIMEOUT_S
                + math.ceil(sync_limit_s(plan.train.weight_sync_timeout_s)),
            ),
            scaling_config=plan.worker_scaling,
            run_config=plan.run_config,
            datasets={
                f"rank{r}": sample_stream(
                    self._buffer, rank=r, poll_timeout_s=poll_s, name=f"{plan.name}-rank{r}"
                )
                for r in ranks
            },
            dataset_config=ray.train.DataConfig(datasets_to_split=[]),
        )

    def _watch_worker(self) -> None:
        """Tell the trainer that the rollout worker died, at once.

        Consumes: nothing. Waits for: the worker's end. Unblocked by: `RolloutWorker.stop`, or its
        death, at the latest in `close`. Produces: a failure in the buffer.
        """
        while not self._closing.is_set():
            try:
                ray.get(self._worker.wait_until_stopped.remote())
            except ActorUnavailableError:  # the connection broke; it may live
                self._closing.wait(_ASK_AGAIN_S)
                continue
            except RayActorError as error:
                if not self._closing.is_set():
                    died = RolloutError(f"the rollout worker died: {death_of(error)}")
                    self._ask(self._buffer.fail.remote(died), "sample buffer")
            except RayError as error:
                logger.debug("the watch of the rollout worker ends with Ray: %s", one_line(error))
            return

    def _reason(self, error: Exception) -> APRError:
        """The error of ours behind a failed run; it names the file with the tracebacks."""
        plan = self.plan
        reason = self._first_error()
        if reason is None and found_no_place(error):
            reason = not_placed(plan.worker_scaling, plan.rollout.start_timeout_s)
        reason = reason or cause_of(error)
        log = plan.folder / ERROR_LOG
        write_error_log(log, error, reason)
        reason.add_note(f"traceback: {log}")
        return reason

    def _first_error(self) -> APRError | None:
        """What failed before the train workers did, if anything."""
        if self._start_error is not None:
            return self._start_error
        try:
            failure: APRError | None = ray.get(
                self._buffer.failure.remote(), timeout=_CALL_TIMEOUT_S
            )
        except RayActorError as error:
            return APRError(f"the sample buffer died: {death_of(error)}")
        except (RayError, TimeoutError) as error:
            logger.error("the sample buffer does not answer: %s", one_line(error))
            return None
        return failure

    def close(self, error: BaseException | None) -> None:
        """End everything: streams, loops, servers, actors; write the final figures."""
        plan = self.plan
        training_end = time.time()
        try:
            if isinstance(error, Stopped):  # the trainer may still be at it: it gets no further
                self._ask(self._buffer.close.remote(), "sample buffer")
            if self._evaluator is not None:
                self._ask(self._evaluator.stop.remote(), "evaluator")
            summary: RolloutSummary | None = self._ask(self._worker.stop.remote(), "rollout worker")
            stats: BufferStats | None = self._ask(self._buffer.stats.remote(), "sample buffer")
            steps: int | None = self._ask(self.recorder.num_steps.remote(), "recorder")
            final = final_figures(plan, summary, stats, steps, self._begin.before)
            final["setup_s"] = self._setup_s
            final["wall_s"] = training_end - self._started_at
            final |= _outcome(error)
            _write_json(plan.folder / "final.json", final)
            self._ask(self._buffer.close.remote(), "sample buffer")
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
        """End the servers, and all actors whatever becomes of the servers."""
        try:
            stop_rollout_servers(self.plan.name)
        finally:
            for actor in reversed(self._actors):  # the lease before the recorder, which holds it
                ray.kill(actor)
            if self._watch.ident is not None:  # a call to Ray after its shutdown ends the process
                self._watch.join(timeout=_CALL_TIMEOUT_S)


def _of_servers(error: Exception) -> APRError:
    """An error of the servers' start that is none of ours, as one of ours."""
    return APRError(f"servers: {error!r}").with_traceback(error.__traceback__)


def _outcome(error: BaseException | None) -> dict[str, str | None]:
    """How the run ended."""
    if error is None:
        return {"status": "ok", "error": None}
    if isinstance(error, Stopped):
        return {"status": "stopped", "error": str(error)}
    return {"status": "failed", "error": f"{type(error).__name__}: {one_line(error)}"}


def _write_end_of_start(plan: RunPlan, begin: Begin, error: BaseException, wall_s: float) -> None:
    """Write how a run ended that came to nothing: its parts could not be made."""
    if not isinstance(error, Stopped):
        log = plan.folder / ERROR_LOG
        write_error_log(log, error, cause_of(error))
        error.add_note(f"traceback: {log}")
    final = final_figures(plan, None, None, begin.num_rows, begin.before)
    final |= {"setup_s": None, "wall_s": wall_s, **_outcome(error)}
    _write_json(plan.folder / "final.json", final)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
