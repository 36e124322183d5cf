"""The line to vLLM's engine core, which may die or hang.

Invariants, kept by `Core`:
    * A core that is dead stays so: every question raises `EngineDiedError`, also those that wait
      for an answer, and the gate is opened for the calls there, which are told the same.
    * A core that does not answer within a limit counts as dead; its calls end with what
      has left it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from ray_apr.config.engine_version import NEEDS_ATTESTATION
from ray_apr.core.exceptions import ConfigError, EngineDiedError, EngineUnavailableError
from ray_apr.core.protocols import PauseMode
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm.arguments import engine_arguments, has_worker_actors
from ray_apr.serve.vllm.calls import CORE_LIMIT_S, Call, Calls
from ray_apr.serve.vllm.core_process import begin_imports, use_fork_server
from ray_apr.serve.vllm.names import PARKING_SCHEDULER, SCHEDULER
from ray_apr.serve.vllm.plugin import BACKEND, FirstError, register, why_not_loaded
from ray_apr.serve.vllm.stall import StallWatch

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

ANSWER_LIMIT_S = 45.0
"""Longest wait for the core to pause, to wake or to go on, beside what is left of a weight sync
that it takes part in. It does so between two steps, the longest of which is a long prefill on a
slow machine. Shorter than the limit of the clients' control calls, so that they learn which it was.
"""
_FROZEN_LIMIT_S = 0.2
"""Longest wait for what the core has of aborted calls where calls are frozen and it has nothing of
theirs: it may be busy with weights. A vLLM that does not attest versions keeps pieces of theirs
(`serve.vllm.scheduler`)."""


class Core:
    """vLLM's ``AsyncLLM``, and whether its core lives.

    Args:
        spec: What the engine is built from.
        replica_id: Name in errors.
        calls: Those of the engine.

    Attributes:
        llm: None before the start and after the end.
        attests: Whether vLLM tells the version of each token.
        is_multimodal: Whether the model takes more than text.
        is_frozen: Whether calls stay inside while the engine is paused.
        busy_until: By when the workers have ended what they do in the weight group; 0 outside.
    """

    llm: Any = None
    attests = is_multimodal = is_frozen = False
    busy_until = 0.0

    def __init__(self, spec: EngineSpec, replica_id: str, calls: Calls) -> None:
        self._spec = spec
        self._replica_id = replica_id
        self._calls = calls
        self.is_hung = False
        """Whether the core has left a question unanswered for too long."""
        self._first_error: FirstError | None = None
        self.arguments = engine_arguments(spec)

    async def end_stalled(self, stall: StallWatch, said: Callable[[], str]) -> None:
        """End the calls of an engine that stalls, with the tokens that have come of them.

        Consumes: progress. Waits for: the limit without any. Unblocked by: the clock, or
        cancellation. Produces: aborted calls.

        Args:
            stall: Sees the progress.
            said: Gives what the log says.
        """
        while True:
            await stall.until_stalled()
            inside = list(self._calls.inside)
            logger.error("%s, with %d calls inside", said(), len(inside))
            try:
                # the core does not answer: vLLM ends them with what has left it
                await self.llm.abort(inside)
            except self.dead_error as error:
                logger.error("%s is dead: %s", self._replica_id, error)
            except Exception:  # the next stall is watched for all the same
                logger.exception("%s: calls that stalled are not ended", self._replica_id)

    async def start(
        self, make_logger: Callable[[], Any], make_exporting: Callable[[], Any]
    ) -> None:
        """Load the model; returns when vLLM answers.

        Args:
            make_logger: Gives what vLLM takes as a stat logger.
            make_exporting: Gives another one, unless the arguments turn statistics off.

        Raises:
            ConfigError: If vLLM does not take the arguments, does not compute on the device, or
                does not tell versions that are needed.
            EngineUnavailableError: If the engine cannot start for another reason.
        """
        if missing := why_not_loaded():
            raise EngineUnavailableError(f"{self._replica_id} cannot start: {missing}")
        is_forked = not has_worker_actors(self._spec)
        if is_forked:
            begin_imports()
        register()
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig

        from ray_apr.serve.vllm.private import AsyncLLM

        self.attests = hasattr(AsyncLLM, "update_weight_version")
        if self._spec.needs_attestation and not self.attests:
            raise ConfigError("partial_rollout.interrupt", "never", NEEDS_ATTESTATION)
        self._check_build()
        if is_forked:
            use_fork_server()
        try:
            args = AsyncEngineArgs(
                model=self._spec.model,
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                **self.arguments,
            )
            self._first_error = FirstError()
            with self._first_error.of_processes():
                loggers = [make_logger()]
                if not args.disable_log_stats:
                    loggers.append(make_exporting())
                self.llm = AsyncLLM.from_engine_args(args, stat_loggers=loggers)
        except (TypeError, ValueError) as error:
            given = dict(self._spec.engine_kwargs)
            raise ConfigError("rollout.engine.kwargs", given, str(error)) from error
        except Exception as error:
            raise EngineUnavailableError(
                f"{self._replica_id} cannot start: {self._why(error)}"
            ) from error
        self.is_multimodal = bool(self.llm.model_config.is_multimodal_model)

    def _check_build(self) -> None:
        """Refuse a device that vLLM's build, which chooses its own, does not compute on."""
        from ray_apr.serve.vllm.private import current_platform

        device, found = self._spec.device, str(current_platform.device_type)
        extra = {"cpu": "cpu", "cuda": "gpu"}.get(device)
        if extra is None or found == device:
            return
        remedy = (
            f"the vLLM that is installed here computes on {found or 'no device that it finds'}: "
            f"install its build for {extra.upper()}s (the extra `{extra}` of ray-apr)"
            + (f', or set rollout.engine.device to "{found}"' if found else "")
        )
        raise ConfigError("rollout.engine.device", device, remedy)

    @property
    def dead_error(self) -> type[Exception]:
        """vLLM's own."""
        from ray_apr.serve.vllm.private import EngineDeadError

        return EngineDeadError

    def check_alive(self) -> None:
        """Raise what says that the core is dead."""
        with self.dead_is_unavailable():
            if self.llm.errored:
                raise self.llm.dead_error
            self.check_answers()

    def check_takes_calls(self) -> None:
        """Raise if the core is dead, for a call that has not begun and cannot be the cause."""
        try:
            self.check_alive()
        except EngineDiedError as error:
            raise EngineUnavailableError(str(error)) from error

    def check_answers(self) -> None:
        """Raise if the core hangs."""
        if self.is_hung:
            raise EngineDiedError(self._hung())

    @contextlib.contextmanager
    def dead_is_unavailable(self) -> Iterator[None]:
        """Callers get an error that they can unpickle without vLLM."""
        try:
            yield
        except self.dead_error as error:
            self._calls.gate.set()  # the calls there are told the same
            raise EngineDiedError(f"{self._replica_id} is dead: {self._why(error)}") from error

    def _why(self, error: Exception) -> str:
        """What the core has said before it ended, which vLLM's own error leaves to the log."""
        return (self._first_error.read() if self._first_error else "") or str(error)

    async def ask(
        self, call: Coroutine[Any, Any, _Answer], *, limit_s: float | None = None
    ) -> _Answer:
        """Wait for an answer of the engine core; vLLM never ends this wait when the core dies.

        Waits for: the answer. Unblocked by: that, the core's death, or `limit_s`.

        Args:
            call: What the core is asked.
            limit_s: How long it may take, beside a weight sync under way; None is for calls that
                end by themselves.

        Raises:
            EngineDiedError: If it is dead, dies meanwhile, or hangs.
        """
        if limit_s is not None:
            limit_s += max(0.0, self.busy_until - time.monotonic())
        with self.dead_is_unavailable():
            asked = asyncio.ensure_future(call)
            try:
                self.check_alive()
                ends = {asked, self.llm.output_handler}
                await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
                if self.llm.output_handler.done():
                    raise self.llm.dead_error
                await self._give_up()
                raise EngineDiedError(self._hung())
            finally:
                asked.cancel()

    async def _give_up(self) -> None:
        """Have done with a core that hangs; calls end with what has left it."""
        self.is_hung = True
        logger.error("%s, with %d calls inside", self._hung(), len(self._calls.inside))
        self._calls.gate.set()  # the calls there are told
        await self.llm.abort(list(self._calls.inside))

    def _hung(self) -> str:
        return f"{self._replica_id}: its engine core did not answer within {ANSWER_LIMIT_S:g} s"

    async def freeze(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """vLLM's pause, without the 20 ms that it sleeps afterwards to look more orderly.

        Aborted calls may come out after it: their ends are on their way.

        Waits for: the core. Unblocked by: its answer, or what unblocks `ask`, in which this is
        called.
        """
        # what goes in afterwards would run under other weights
        await self._calls.until_entered(self._calls.inside.values())
        core: Any = getattr(self.llm, "engine_core", None)
        if hasattr(core, "pause_scheduler_async") and not self.is_multimodal:
            await core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        else:
            await self.llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def end(self, calls: dict[str, Call]) -> None:
        """Abort these calls; returns once they have come out with what the core has of them.

        Waits for: the ends of these calls. Unblocked by: the core, or `CORE_LIMIT_S`.

        Args:
            calls: By their request ids.
        """
        if not calls or self.llm.errored or self.is_hung:  # those of a dead engine end so
            return
        with self.dead_is_unavailable():
            await self._calls.until_entered(calls.values())
            has_pieces = self.arguments.get("scheduler_cls") in (SCHEDULER, PARKING_SCHEDULER)
            if has_pieces:  # of tokens that are not here yet
                ids = [call.core_id for call in calls.values() if call.core_id]
                await self.llm.engine_core.abort_requests_async(ids)
            else:
                await self.llm.abort(list(calls))
            has_nothing = self.is_frozen and self.attests
            try:
                async with asyncio.timeout(_FROZEN_LIMIT_S if has_nothing else CORE_LIMIT_S):
                    for call in calls.values():
                        if not call.is_parked:  # else a pause ends it, and the core has weights
                            await call.ended.wait()
            except TimeoutError:
                left = [i for i, call in calls.items() if not call.ended.is_set()]
                if not self.is_frozen:
                    logger.warning("%d calls end without what the core has of them", len(left))
                await self.llm.abort(left)

    def shutdown(self) -> None:
        """End vLLM's processes."""
        if self.llm is not None:
            self.llm.shutdown()
            self.llm = None
        if self._first_error is not None:
            self._first_error.close()
            self._first_error = None
