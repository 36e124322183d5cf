"""The host of a run: a task on this node, outside of its caller's placement group.

Inside of a placement group, as in a trial of Ray Tune, all that a process starts goes into the
group, where there is no room for engines and train workers. What the host starts does not.

Invariants, kept by `HostedRun`:
    * The host ends with its caller: Ray ends a task whose owner is dead, the actors of the run with
      it, and the servers' lease (`serve.lease`) the servers.
    * What a run raises in its host is what it would raise here; so are its lines of progress.
    * The host has the caller's folder, and the variables that a run reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_apr.core.exceptions import APRError, ConfigError, StarvedError, Stopped, one_line
from ray_apr.run import controller
from ray_apr.run.causes import cause_of
from ray_apr.run.progress import unbroken
from ray_apr.run.stopping import StopSignals
from ray_apr.train.gate import Order, StepGate

if TYPE_CHECKING:
    import ray.data
    import ray.train

    from ray_apr.core.user import RunCallback
    from ray_apr.run.spec import RunSpec

logger = logging.getLogger(__name__)

_POLL_S = 20.0
_CALL_TIMEOUT_S = 60.0
_STOP_S = 300.0
"""Longest that a run takes to end by itself once it is told to: its parts have a minute each."""
_VARIABLES = (
    "RAY_TRAIN_", "RAY_APR_", "RAY_SERVE_", "VLLM_", "HF_", "WANDB_", "MLFLOW_",
)  # fmt: skip
"""How the variables begin that a run reads where it is started."""


def is_captured() -> bool:
    """Whether all that this process starts goes into its placement group, as in a trial of Tune."""
    if not ray.is_initialized() or ray.util.get_current_placement_group() is None:
        return False
    return bool(ray.get_runtime_context().should_capture_child_tasks_in_placement_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a run in its host ended."""

    result: ray.train.Result | None = None
    error: BaseException | None = None


class HostedRun:
    """A run in its host, from its start on.

    Args:
        spec: What to run.
        prompts: What to train on.
        held_out: What to evaluate on, where the run does so.
        progress: Gets the lines of progress, in this process; None logs them.
        is_gated: Whether it trains only what `order` says.
        callbacks: What follows the run, in its host.
    """

    def __init__(
        self,
        spec: RunSpec,
        prompts: ray.data.Dataset,
        held_out: ray.data.Dataset | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        is_gated: bool = False,
        callbacks: Sequence[RunCallback] = (),
    ) -> None:
        self.spec = spec
        self._show = unbroken(progress or controller.logger.info)
        self._num_lines = 0
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if is_gated and spec.ranks.is_elastic:
            raise ConfigError(
                "scaling.num_workers",
                spec.scaling.num_workers,
                "must be one number where the caller says which steps are trained",
            )
        gate = ray.remote(StepGate).options(
            num_cpus=0,
            max_concurrency=10_000,
            enable_task_events=False,
            scheduling_strategy=here,
        )
        self._gate = gate.remote(spec.ranks.most)
        host = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(_host)  # its process ends with it
        self._ended = host.options(scheduling_strategy=here).remote(
            self.spec, prompts, held_out, self._gate, is_gated, callbacks, os.getcwd(), _variables()
        )

    @property
    def has_ended(self) -> bool:
        """Whether the run is over, in whatever way."""
        return bool(ray.wait([self._ended], timeout=0)[0])

    def order(self, orders: Sequence[Order]) -> int:
        """Give orders to a gated run; returns how many were given so far.

        Raises:
            APRError: If the gate is gone, and with it the run.
        """
        try:
            given = self._gate.order.remote(list(orders))
            number: int = ray.get(given, timeout=_CALL_TIMEOUT_S)
        except RayError as error:
            raise APRError(f"the gate of {self.spec.name} is gone: {one_line(error)}") from error
        return number

    def wait(self, num_orders: int | None = None) -> bool:
        """Wait until so many orders are done, or without a number until the run ends.

        Waits for: the run. Unblocked by: an order that is done, or the end of the host; the run has
        limits of its own.

        Returns:
            Whether the orders are done; False if the run has ended before.

        Raises:
            StarvedError: If the gate does not answer.
        """
        while not self.has_ended:
            news = self._gate.news.remote(self._num_lines, num_orders, _POLL_S)
            limit_s = _POLL_S + _CALL_TIMEOUT_S
            if not ray.wait([news, self._ended], num_returns=1, timeout=limit_s)[0]:
                raise StarvedError(f"the gate of {self.spec.name} did not answer for {limit_s:g} s")
            if ray.wait([news], timeout=0)[0] and self._tell(news):
                return True
        self._tell(self._gate.news.remote(self._num_lines, None, 0.0))
        return False

    def _tell(self, news: Any) -> bool:
        """Show lines of progress; whether the orders are done that were waited for."""
        try:
            lines, are_done = ray.get(news, timeout=_CALL_TIMEOUT_S)
        except RayError as error:  # a gated run ends by that, too
            logger.warning("the gate of %s is gone: %s", self.spec.name, one_line(error))
            ray.wait([self._ended], timeout=_POLL_S)
            return False
        self._num_lines += len(lines)
        for line in lines:
            self._show(line)
        return bool(are_done)

    def result(self) -> ray.train.Result:
        """Return what the run came to, once it has ended.

        Waits for: the run. Unblocked by: its end; it has limits of its own.

        Raises:
            APRError: What it failed of.
            Stopped: It was stopped.
        """
        self.wait()
        try:
            ended: _Ended = ray.get(self._ended, timeout=_CALL_TIMEOUT_S)
        except TaskCancelledError:  # before it began
            raise Stopped from None
        except RayError as error:
            raise APRError(f"the host of {self.spec.name} died: {one_line(error)}") from error
        if ended.error is not None:
            raise ended.error
        assert ended.result is not None
        return ended.result

    def fit(self) -> ray.train.Result:
        """As `result`; where this is interrupted, so is the run, and nothing of it stays behind.

        Waits for: the run. Unblocked by: its end, or a signal.
        """
        signals = StopSignals()
        with signals.listen():
            try:
                return self.result()
            finally:
                self.stop()

    def stop(self, *, after_s: float = 0.0) -> None:
        """End the run as Ctrl-C does, and take its host away; may be called again.

        Args:
            after_s: How long it may take to end without that.
        """
        if not ray.wait([self._ended], timeout=after_s)[0]:
            ray.cancel(self._ended, recursive=False)  # not the calls that its end needs
            if not ray.wait([self._ended], timeout=_STOP_S)[0]:
                logger.error("%s did not end within %g s; it is killed", self.spec.name, _STOP_S)
                ray.cancel(self._ended, force=True, recursive=False)
                ray.wait([self._ended], timeout=_CALL_TIMEOUT_S)
        ray.kill(self._gate)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _host(
    spec: RunSpec,
    prompts: ray.data.Dataset,
    held_out: ray.data.Dataset | None,
    gate: Any,
    is_gated: bool,
    callbacks: Sequence[RunCallback],
    folder: str,
    variables: Mapping[str, str],
) -> _Ended:
    """Run it; what it raises is returned, as Ray would put something around it."""

    def say(line: str) -> None:
        try:
            ray.get(gate.say.remote(line), timeout=_CALL_TIMEOUT_S)
        except RayError as error:
            logger.debug("nobody takes the progress of %s: %s", spec.name, one_line(error))

    Stopped.of_sigint = "stopped by its session or its trial"  # `HostedRun.stop` cancels this task
    try:
        os.chdir(folder)
        os.environ.update(variables)
        steps = gate if is_gated else None
        result = controller.run(
            spec, prompts, held_out, progress=say, gate=steps, callbacks=callbacks
        )
        return _Ended(result=result)
    except BaseException as error:  # noqa: BLE001  (raised by `HostedRun.result`)
        return _Ended(error=_as_value(error))


def _as_value(error: BaseException) -> BaseException:
    """The error, if it can be sent; else what is known of it."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001  (an error of the user's may raise anything here)
        return cause_of(Exception(one_line(error)))
    return error
