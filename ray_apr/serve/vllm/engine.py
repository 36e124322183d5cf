"""The vLLM adapter: the one place that knows vLLM's calls and how its versions differ.

Invariants, kept by `Engine`:
    * Nothing enters vLLM while the engine is paused: calls wait at a gate and go in after `resume`.
    * A call that is stopped returns what it has; awaiting tasks are never cancelled to stop one,
      which would lose the tokens.
    * Each token carries the version that vLLM attests (spans, since 0.32); where it attests none,
      the version between whose two syncs the call ran. A run whose syncs leave calls inside, for
      which that would be wrong, is refused there.
    * After a broken weight sync nothing is generated until the next one that succeeds; what was
      frozen during it comes back with the tokens from before.
    * A call ends by itself, or because the engine has made no progress for a stated time, however
      long it takes: its tokens come back then, too, and the engine is no longer healthy.
    * Once the engine core is dead, every verb and the status raise `EngineDiedError`, also those
      that wait for it, and no call stays at the gate. A core that does not pause, wake or go on
      within a limit counts as dead, and stays so; its calls end with what has left it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ray_apr.config.engine_version import NEEDS_ATTESTATION
from ray_apr.core.messages import GenerateRequest, WeightGroup
from ray_apr.exceptions import (
    SYNC_BROKEN,
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    RolloutError,
    SyncBrokenError,
    WeightSyncError,
)
from ray_apr.protocols import PauseMode
from ray_apr.serve.activity import Activity
from ray_apr.serve.load import EngineLoad, exporting_logger
from ray_apr.serve.names import PROBE, SCHEDULER
from ray_apr.serve.outputs import (
    REASONS,
    end_of_straddling_stop,
    segments_of,
    up_to,
    vllm_params,
)
from ray_apr.serve.plugin import BACKEND, register, start_error, why_not_loaded
from ray_apr.serve.scores import WeightScorer
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.stall import StallWatch
from ray_apr.serve.vllm.arguments import engine_arguments
from ray_apr.types import (
    FinishReason,
    Generation,
    Origin,
    Segment,
    ServerStatus,
    WeightScores,
)

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_FIRST = -1
"""Priority of an evaluation's request; those of rollouts have 0."""
_KEEPS_WEIGHTS = 1
"""Level of vLLM's sleep that copies weights to the host. The other one loses what no sender knows
of: parameters that only the engine has, and the padding that loading fills once."""
_CORE_LIMIT_S = 20.0
"""Longest wait for the engine core to take calls in, and for what it has of those that are aborted;
it takes much less than a second, unless it is busy with a long prefill."""
_ANSWER_LIMIT_S = 45.0
"""Longest wait for the core to pause, to wake or to go on, beside what is left of a weight sync
that it takes part in. It does so between two steps, the longest of which is a long prefill on a
slow machine. Shorter than the limit of the clients' control calls, so that they learn which it was.
"""
_FROZEN_LIMIT_S = 0.2
"""The same where calls are frozen and the core has nothing of theirs: it may be busy with weights.
A vLLM that does not attest versions keeps pieces of theirs (`serve.scheduler`)."""


class _Call:
    """A call inside of vLLM."""

    def __init__(self) -> None:
        self.core_id = ""
        """Its id in the engine core; none before it has entered, or if it was refused."""
        self.entered = asyncio.Event()
        """Set once the core has been sent it."""
        self.ended = asyncio.Event()


class VLLMEngine:
    """One vLLM engine, tokens in and tokens out.

    Args:
        spec: What it is built from.
        replica_id: Name in statuses and replies.
    """

    def __init__(self, spec: EngineSpec, replica_id: str) -> None:
        self._spec = spec
        self._arguments = engine_arguments(spec)
        self._keeps_kv = spec.kv_cache == "keep"
        self._is_asleep = False
        self._is_frozen = False
        """Whether calls stay inside while the engine is paused."""
        self._is_hung = False
        """Whether the core has left a call unanswered for too long."""
        self._group_timeout_s = 0.0
        self._busy_until = 0.0
        """By when the workers have ended what they do in the weight group; 0 outside of it."""
        self._stall = StallWatch(spec.stall_timeout_s)
        self._load = EngineLoad(self._stall.move)
        self._stall_task: asyncio.Task[None] | None = None
        self.replica_id = replica_id
        self._llm: Any = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._control = asyncio.Lock()
        self._receiving = asyncio.Lock()
        self._running: dict[str, asyncio.Event] = {}
        """Calls under way; the event is set when one is aborted, wherever it is."""
        self._inside: dict[str, _Call] = {}
        """Calls that vLLM holds, or that are on their way into it."""
        self._policy_version = 0
        self._weights_valid = True
        self._tokens = dict.fromkeys(Origin, 0)
        """Tokens handed out, by where their requests came from."""
        self._num_aborted = 0
        self._num_ended = 0
        self._activity = Activity()
        self._scorer = WeightScorer(replica_id)

    async def start(self) -> None:
        """Load the model; returns when the engine answers.

        Raises:
            ConfigError: If vLLM does not take the arguments, or does not tell versions that are
                needed.
            EngineUnavailableError: If the engine cannot start for another reason.
        """
        if missing := why_not_loaded():
            raise EngineUnavailableError(f"{self.replica_id} cannot start: {missing}")
        register()
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig

        from ray_apr.serve.vllm_private import AsyncLLM

        self._attests = hasattr(AsyncLLM, "update_weight_version")
        if self._spec.needs_attestation and not self._attests:
            raise ConfigError("partial_rollout.interrupt", "never", NEEDS_ATTESTATION)
        try:
            args = AsyncEngineArgs(
                model=self._spec.model,
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                **self._arguments,
            )
            with start_error() as reason:
                loggers = [self._load.make_logger()]
                if not args.disable_log_stats:
                    loggers.append(exporting_logger())
                self._llm = AsyncLLM.from_engine_args(args, stat_loggers=loggers)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "rollout.engine_kwargs", dict(self._spec.engine_kwargs), str(error)
            ) from error
        except Exception as error:
            raise EngineUnavailableError(
                f"{self.replica_id} cannot start: {reason() or error}"
            ) from error
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._is_multimodal = bool(self._llm.model_config.is_multimodal_model)
        if self._attests:
            await self._llm.update_weight_version(str(self._policy_version))
        self._activity.start()
        self._watch()
        if self._spec.takes_turns:
            await self.sleep("abort")

    # -- generation ------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights that new requests run under."""
        return self._policy_version

    @property
    def is_paused(self) -> bool:
        """Whether calls wait."""
        return not self._gate.is_set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt.

        Raises:
            RolloutError: If the request is malformed, its id is in use, or more ids could be drawn
                at a token than vLLM tells.
            EngineUnavailableError: If the engine is dead, or its weights are undefined or older.
        """
        request_id, token_ids = request.request_id, request.prompt.token_ids
        if request_id in self._running:
            raise RolloutError(f"request {request_id} is under way already")
        if not token_ids or request.max_tokens < 1:
            raise RolloutError(
                f"request {request_id} has {len(token_ids)} tokens and a budget of "
                f"{request.max_tokens}; both must be at least 1"
            )
        if request.sampling.origin is Origin.OUTSIDE:
            self._check_ids(request_id, (*token_ids, *request.sampling.stop_token_ids))
        aborted = self._running[request_id] = asyncio.Event()
        try:
            if not await self._enter(aborted):
                return self._generation(request_id, (), FinishReason.ABORT)
            with self._dead_is_unavailable():
                self._check_alive()
            if self._stall.is_stalled:
                raise EngineUnavailableError(self._stalled())
            if not self._weights_valid:
                raise EngineUnavailableError(
                    f"the weights of {self.replica_id} are undefined after a broken weight sync"
                )
            if self._policy_version < request.min_policy_version:
                raise EngineUnavailableError(
                    f"{self.replica_id} does not have version {request.min_policy_version} yet"
                )
            generation = await self._run(request)
            self._tokens[request.sampling.origin] += generation.num_tokens
            return generation
        finally:
            del self._running[request_id]

    def _check_ids(self, request_id: str, ids: Sequence[int]) -> None:
        """Refuse ids that the model has no row for: vLLM may take those that its tokenizer has, and
        an index out of range ends the engine."""
        if max(ids) >= self._vocabulary or min(ids) < 0:
            raise RolloutError(
                f"request {request_id} has token ids outside of the model's vocabulary of "
                f"{self._vocabulary}"
            )

    async def _enter(self, aborted: asyncio.Event) -> bool:
        """Wait at the gate; False if the call was aborted there."""
        while not self._gate.is_set() and not aborted.is_set():
            waits = [asyncio.ensure_future(e.wait()) for e in (self._gate, aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not aborted.is_set()

    async def _run(self, request: GenerateRequest) -> Generation:
        request_id, sampling = request.request_id, request.sampling
        params = vllm_params(sampling, request.max_tokens, self._vocabulary)
        salt = request.session_id if self._keeps_kv else f"v{self._policy_version}"
        given = list(request.prompt.token_ids)
        prompt = {"prompt_token_ids": given, "cache_salt": salt or request_id}
        priority = {"priority": _FIRST} if sampling.origin is Origin.EVALUATION else {}
        version = self._policy_version
        with self._inside_engine(request_id) as call, self._dead_is_unavailable():
            try:
                queue = await self._llm.add_request(request_id, prompt, params, **priority)
                call.core_id = queue.request_id
                call.entered.set()
                last = await queue.get()  # the only one: `vllm_params` asks for no other
            except self._dead_error:
                raise
            except Exception as error:
                raise RolloutError(f"vLLM refused request {request_id}: {error}") from error
            except asyncio.CancelledError:
                await self._llm.abort(request_id)
                raise
        output = last.outputs[0]
        reason = REASONS.get(output.finish_reason or "abort")
        if reason is None:
            raise RolloutError(f"request {request_id} ended with {output.finish_reason!r}")
        segments = segments_of(output, version, with_support=sampling.reports_support)
        if sampling.num_carried:
            tokenizer, made = self._llm.tokenizer, output.token_ids
            end = end_of_straddling_stop(tokenizer, sampling, given, made)
            if end is not None:
                segments, reason = up_to(segments, end), FinishReason.STOP
        return self._generation(request_id, segments, reason)

    @contextlib.contextmanager
    def _inside_engine(self, request_id: str) -> Iterator[_Call]:
        call = self._inside[request_id] = _Call()
        self._count_inside()
        try:
            yield call
        finally:
            del self._inside[request_id]
            call.entered.set()
            call.ended.set()
            self._count_inside()

    def _count_inside(self) -> None:
        self._activity.set_running(len(self._inside))
        self._stall.set_running(len(self._inside))

    @property
    def _dead_error(self) -> type[Exception]:
        from ray_apr.serve.vllm_private import EngineDeadError

        return EngineDeadError

    @contextlib.contextmanager
    def _dead_is_unavailable(self) -> Iterator[None]:
        """Callers get an error that they can unpickle without vLLM."""
        try:
            yield
        except self._dead_error as error:
            self._gate.set()  # the calls there are told the same
            raise EngineDiedError(f"{self.replica_id} is dead: {error}") from error

    async def _of_core(
        self, call: Coroutine[Any, Any, _Answer], *, limit_s: float | None = None
    ) -> _Answer:
        """Wait for an answer of the engine core; vLLM never ends this wait when the core dies.

        Args:
            call: What the core is asked.
            limit_s: How long it may take, beside a weight sync under way; None is for calls that
                end by themselves.

        Raises:
            EngineDiedError: If it is dead, dies meanwhile, or hangs.
        """
        if limit_s is not None:
            limit_s += max(0.0, self._busy_until - time.monotonic())
        with self._dead_is_unavailable():
            asked = asyncio.ensure_future(call)
            try:
                self._check_alive()
                ends = {asked, self._llm.output_handler}
                await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
                if self._llm.output_handler.done():
                    raise self._llm.dead_error
                await self._give_up()
                raise EngineDiedError(self._hung())
            finally:
                asked.cancel()

    async def _give_up(self) -> None:
        """Have done with a core that hangs; calls end with what has left it."""
        self._is_hung = True
        logger.error("%s, with %d calls inside", self._hung(), len(self._inside))
        self._gate.set()  # the calls there are told
        await self._llm.abort(list(self._inside))

    def _hung(self) -> str:
        return f"{self.replica_id}: its engine core did not answer within {_ANSWER_LIMIT_S:g} s"

    def _generation(
        self, request_id: str, segments: tuple[Segment, ...], reason: FinishReason
    ) -> Generation:
        generation = Generation(
            request_id=request_id,
            segments=segments,
            finish_reason=reason,
            replica_id=self.replica_id,
        )
        self._num_aborted += reason is FinishReason.ABORT
        self._num_ended += reason is not FinishReason.ABORT
        return generation

    # -- control ---------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Stop these calls (None: all); they return what they have.

        Returns:
            How many of them were under way.
        """
        ids = list(self._running) if request_ids is None else request_ids
        known = [i for i in ids if i in self._running]
        for request_id in known:
            self._running[request_id].set()
        calls = {i: self._inside[i] for i in known if i in self._inside}
        if not calls or self._llm.errored or self._is_hung:  # those of a dead engine end so
            return len(known)
        with self._dead_is_unavailable():
            await self._until_entered(calls.values())
            if self._arguments.get("scheduler_cls") == SCHEDULER:
                # the core has tokens that are not here, and ends these calls with them
                ids = [call.core_id for call in calls.values() if call.core_id]
                await self._llm.engine_core.abort_requests_async(ids)
            else:
                await self._llm.abort(list(calls))
            try:
                has_nothing = self._is_frozen and self._attests
                async with asyncio.timeout(_FROZEN_LIMIT_S if has_nothing else _CORE_LIMIT_S):
                    for call in calls.values():
                        await call.ended.wait()
            except TimeoutError:
                left = [i for i, call in calls.items() if not call.ended.is_set()]
                if not self._is_frozen:
                    logger.warning("%d calls end without what the core has of them", len(left))
                await self._llm.abort(left)
        return len(known)

    async def _until_entered(self, calls: Iterable[_Call]) -> None:
        """Wait until the core has been sent these calls.

        Raises:
            EngineUnavailableError: If vLLM does not take one.
        """
        try:
            async with asyncio.timeout(_CORE_LIMIT_S):
                for call in list(calls):
                    await call.entered.wait()
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"{self.replica_id}: a call did not get into vLLM within {_CORE_LIMIT_S:g} s"
            ) from error

    async def pause(self, mode: PauseMode) -> None:
        """Close the gate and freeze the engine: "abort" ends what runs, "keep" freezes it, "wait"
        lets it end.

        Raises:
            EngineUnavailableError: If the engine is dead.
        """
        with self._dead_is_unavailable():
            self._check_alive()  # first: the gate of a dead one stays open
        self._gate.clear()
        if mode == "wait":  # vLLM's own wait does not see requests that are on their way in
            await self._drain()
        async with self._control:
            if mode == "wait" and not self.is_paused:
                return  # resumed meanwhile: whoever paused has given up
            with self._dead_is_unavailable():
                self._check_alive()
            self._gate.clear()
            self._activity.set_paused(True)
            freeze = self._freeze("keep" if mode == "keep" else "abort")
            await self._of_core(freeze, limit_s=_ANSWER_LIMIT_S)
            self._stall.set_paused(True)  # not before: a core that does not answer has stalled
            self._is_frozen = mode == "keep"

    async def _freeze(self, mode: PauseMode) -> None:
        """vLLM's pause, without the 20 ms that it sleeps afterwards to look more orderly.

        Aborted calls may come out after it: their ends are on their way.
        """
        # what goes in afterwards would run under other weights
        await self._until_entered(self._inside.values())
        clear_cache = not self._keeps_kv
        core: Any = getattr(self._llm, "engine_core", None)
        if hasattr(core, "pause_scheduler_async") and not self._is_multimodal:
            await core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        else:
            await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def _drain(self) -> None:
        """Wait until all calls have come out of vLLM, or the engine is resumed."""
        while self._inside and self.is_paused:
            ends = [asyncio.create_task(call.ended.wait()) for call in self._inside.values()]
            resumed = asyncio.create_task(self._gate.wait())
            try:
                await asyncio.wait({*ends, resumed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*ends, resumed):
                    task.cancel()

    async def resume(self) -> None:
        """Let the engine and the waiting calls go on; harmless when it is not paused."""
        async with self._control:
            try:
                if not self._weights_valid:  # what is frozen inside would go on with half a model
                    await self.abort(list(self._inside))
                    if self._is_asleep:
                        return  # without memory; the gate's calls are refused
                if self._is_asleep:
                    waking = self._llm.wake_up(["kv_cache"])
                    await self._of_core(waking, limit_s=_ANSWER_LIMIT_S)
                    self._is_asleep = False
                self._is_frozen = False
                going_on = self._llm.resume_generation()
                await self._of_core(going_on, limit_s=_ANSWER_LIMIT_S)
                if self._weights_valid:  # before the gate's calls go in
                    await self._of_core(self._score())
            finally:
                self._activity.set_paused(False)
                self._stall.set_paused(False)
                self._gate.set()

    async def _score(self) -> None:
        has_priorities = self._arguments.get("scheduling_policy") == "priority"
        await self._scorer.score(self._llm, self._policy_version, has_priorities=has_priorities)

    async def sleep(self, mode: PauseMode) -> None:
        """Pause, and give the device's memory free: that of the weights until the next ones arrive,
        that of the KV cache until `resume`.

        On CPU, where vLLM has no sleep, it is a pause.

        Raises:
            EngineUnavailableError: If the engine is dead, or was resumed meanwhile.
        """
        await self.pause(mode)
        await self.abort(list(self._inside))  # waits for the ends that are on their way
        async with self._control:
            if not self.is_paused:
                raise EngineUnavailableError(f"{self.replica_id} was resumed before it slept")
            if self._arguments.get("enable_sleep_mode") and not self._is_asleep:
                self._is_asleep = True
                self._weights_valid = False
                await self._of_core(self._llm.sleep(level=_KEEPS_WEIGHTS))

    # -- weights ---------------------------------------------------------------------------------

    async def join_weight_group(self, group: WeightGroup, first_rank: int) -> None:
        """Let the workers join the group that weights arrive by.

        Raises:
            SyncBrokenError: If the members do not meet in time.
            WeightSyncError: If this engine cannot be trained.
            EngineDiedError: If the engine is dead, or dies meanwhile.
        """
        from ray_apr.serve.vllm_private import WeightTransferInitRequest

        told = {**dataclasses.asdict(group), "first_rank": first_rank}  # of plain values
        request = WeightTransferInitRequest(told)
        self._group_timeout_s = group.timeout_s
        self._busy_until = time.monotonic() + self._group_timeout_s
        try:
            await self._of_core(self._llm.init_weight_transfer_engine(request))
        except EngineDiedError:
            raise
        except Exception as error:
            raise _sync_error(f"{self.replica_id} could not join: {error}") from error
        finally:
            self._busy_until = 0.0

    async def receive_weights(self, policy_version: int, notice: bytes = b"") -> None:
        """Take all weights of a version; the engine is paused meanwhile.

        If it slept, the weights' memory comes back first.

        Args:
            policy_version: Version of the weights.
            notice: What the sender says of them, for the workers' `WeightInbox`.

        Raises:
            SyncBrokenError: If the weights did not arrive whole.
            WeightSyncError: If it is not paused, or the weights do not fit.
            EngineDiedError: If the engine is dead, or dies meanwhile.
        """
        with self._dead_is_unavailable():
            self._check_alive()  # first: a dead one is not paused
        if not self.is_paused:
            raise WeightSyncError(f"{self.replica_id} must be paused to receive weights")
        self._weights_valid = False
        # a caller that gives up must not leave vLLM's update half done: no later one could begin
        await asyncio.shield(asyncio.create_task(self._receive(policy_version, notice)))

    async def _receive(self, policy_version: int, notice: bytes) -> None:
        async with self._receiving:
            self._weights_valid = False
            self._busy_until = time.monotonic() + self._group_timeout_s
            try:
                await self._of_core(self._update(policy_version, notice))
            except EngineDiedError:
                raise
            except Exception as error:
                raise _sync_error(f"{self.replica_id}: {error}") from error
            finally:
                self._busy_until = 0.0
            self._policy_version = policy_version
            self._weights_valid = True

    def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Score sequences once the weights of a version are there; see `WeightScorer`."""
        self._scorer.expect(policy_version, sequences)

    @property
    def scores(self) -> WeightScores | None:
        """What was scored last; None if nothing was since `expect_scores`."""
        return self._scorer.result

    async def probe_weights(self, token_ids: Sequence[int]) -> Mapping[str, list[list[float]]]:
        """What each module of the model computes; see `serve.probe`."""
        answer = self._llm.collective_rpc(PROBE, args=(list(token_ids),))
        (found, *_) = await self._of_core(answer)
        return dict(found)

    async def _update(self, policy_version: int, notice: bytes) -> None:
        from ray_apr.serve.vllm_private import WeightTransferUpdateRequest

        if self._is_asleep:
            await self._llm.wake_up(["weights"])
        await self._llm.start_weight_update()
        update = {"policy_version": policy_version, "notice": notice}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        if self._attests:
            await self._llm.finish_weight_update(weight_version=str(policy_version))
        else:
            await self._llm.finish_weight_update()

    # -- state -----------------------------------------------------------------------------------

    def status(self, *, drain: bool = True) -> ServerStatus:
        """Figures of this moment, with the spans since the last call that drained them.

        Raises:
            EngineDiedError: If the engine is dead.
        """
        with self._dead_is_unavailable():
            self._check_alive()
        activity = self._activity
        spans = activity.drain() if drain else ()
        return ServerStatus(
            replica_id=self.replica_id,
            policy_version=self._policy_version,
            is_paused=self.is_paused,
            weights_valid=self._weights_valid,
            is_stalled=self._stall.is_stalled,
            num_running=len(self._running),
            tokens_generated=self._tokens[Origin.ROLLOUT],
            tokens_made=self._load.num_tokens,
            num_aborted=self._num_aborted,
            spans=spans,
            uptime_s=activity.uptime_s,
            busy_s=activity.seconds["generate"],
            paused_s=activity.seconds["paused"],
            num_queued=self._load.num_queued,
            kv_usage=self._load.kv_usage,
            num_preempted=self._load.num_preempted,
            num_ended=self._num_ended,
            tokens_evaluated=self._tokens[Origin.EVALUATION],
            tokens_outside=self._tokens[Origin.OUTSIDE],
        )

    def _check_alive(self) -> None:
        if self._llm.errored:
            raise self._llm.dead_error
        if self._is_hung:
            raise EngineDiedError(self._hung())

    async def check_health(self) -> None:
        """Raise if the engine is dead, or has stalled."""
        if self._is_hung:
            raise EngineDiedError(self._hung())
        if self._stall.is_stalled:
            raise EngineUnavailableError(self._stalled())
        await self._llm.check_health()

    def _stalled(self) -> str:
        limit_s = self._stall.limit_s
        return f"{self.replica_id} made no token for {limit_s:g} s (rollout.stall_timeout_s)"

    def _watch(self) -> None:
        self._stall_task = asyncio.create_task(self._end_stalled(), name="stall-watch")

    async def _end_stalled(self) -> None:
        """End the calls of an engine that stalls, with the tokens that have come of them.

        Consumes: progress. Waits for: the limit without any. Unblocked by: the clock, or
        `shutdown`. Produces: aborted calls.
        """
        while True:
            await self._stall.until_stalled()
            logger.error("%s, with %d calls inside", self._stalled(), len(self._inside))
            try:
                # the core does not answer: vLLM ends them with what has left it
                await self._llm.abort(list(self._inside))
            except self._dead_error as error:
                logger.error("%s is dead: %s", self.replica_id, error)
            except Exception:  # the next stall is watched for all the same
                logger.exception("%s: calls that stalled are not ended", self.replica_id)

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self._stall_task is not None and not self._stall_task.get_loop().is_closed():
            self._stall_task.cancel()
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None


def _sync_error(message: str) -> WeightSyncError:
    """What an error in vLLM's workers means for the sync; see `SYNC_BROKEN`."""
    return (SyncBrokenError if SYNC_BROKEN in message else WeightSyncError)(message)
