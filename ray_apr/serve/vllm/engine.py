"""`VLLMEngine`: vLLM behind the verbs of `serve.engine.Engine`.

Invariants, beside those of every engine:
    * Nothing enters vLLM while the engine is paused: calls wait at a gate and go in after `resume`.
    * A call that is stopped returns what it has; awaiting tasks are never cancelled to stop one,
      which would lose the tokens.
    * Each token carries the version that vLLM attests (spans, since 0.32). Where it attests none,
      or the call ends and its request stays (`serve.vllm.parking`), the version between whose two
      syncs the call ran. A run whose syncs leave calls inside, for which that would be wrong, is
      refused where vLLM attests none.
    * After a broken weight sync nothing is generated until the next one that succeeds; what was
      frozen during it comes back with the tokens from before.
    * A call ends by itself, or because the engine has made no progress for a stated time, however
      long it takes: its tokens come back then, too, and the engine is no longer healthy.
    * Once the engine core is dead, every verb and the status raise `EngineDiedError` (`Core`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    RolloutError,
    SyncBrokenError,
)
from ray_apr.core.messages import (
    GenerateRequest,
    Generation,
    Origin,
    ServerStatus,
    WeightGroup,
    WeightScores,
)
from ray_apr.core.protocols import PauseMode
from ray_apr.core.sample import FinishReason, Segment
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm.activity import Activity
from ray_apr.serve.vllm.calls import Calls
from ray_apr.serve.vllm.core import ANSWER_LIMIT_S, Core
from ray_apr.serve.vllm.names import PROBE
from ray_apr.serve.vllm.outputs import (
    REASONS,
    end_of_straddling_stop,
    segments_of,
    up_to,
    vllm_params,
)
from ray_apr.serve.vllm.scores import WeightScorer
from ray_apr.serve.vllm.stall import StallWatch
from ray_apr.serve.vllm.stats import EngineLoad, exporting_logger
from ray_apr.serve.vllm.steps import EngineSteps
from ray_apr.serve.vllm.weights import Weights

_FIRST = -1
"""Priority of an evaluation's request; those of rollouts have 0."""
_KEEPS_WEIGHTS = 1
"""Level of vLLM's sleep that copies weights to the host. The other one loses what no sender knows
of: parameters that only the engine has, and the padding that loading fills once."""


class VLLMEngine:
    """One vLLM engine, tokens in and tokens out; see `Engine` for its verbs.

    Waits for: the verb before, then the core. Unblocked by: its end; the core's answer or death,
    `ANSWER_LIMIT_S`, or the client's limit.

    Args:
        spec: What it is built from.
        replica_id: Name in statuses and replies.
    """

    def __init__(self, spec: EngineSpec, replica_id: str) -> None:
        self.replica_id = replica_id
        self._spec = spec
        self._keeps_kv = spec.kv_cache == "keep"
        self._activity = Activity()
        self._stall = StallWatch(spec.stall_timeout_s)
        self._stall_task: asyncio.Task[None] | None = None
        self._steps = EngineSteps(spec.profile_steps, lambda: self.policy_version, self._activity)
        on_step = self._steps.take if spec.profile_steps else None
        self._load = EngineLoad(self._stall.move, on_step)
        self._calls = Calls(replica_id, self._count_inside)
        self._core = Core(spec, replica_id, self._calls)
        self._weights = Weights(self._core, replica_id)
        self._scorer = WeightScorer(replica_id)
        self._control = asyncio.Lock()
        self._vocabulary = 0
        self._tokens = dict.fromkeys(Origin, 0)
        """Tokens handed out, by where their requests came from."""
        self._num_aborted = 0
        self._num_ended = 0

    async def start(self) -> None:
        """Load the model; returns when the engine answers. Raises what `Core.start` raises."""
        await self._core.start(self._load.make_logger, exporting_logger)
        llm = self._core.llm
        self._vocabulary = int(llm.model_config.get_vocab_size())
        if self._core.attests:
            told = llm.update_weight_version(str(self.policy_version))
            await self._core.ask(told, limit_s=ANSWER_LIMIT_S)
        self._activity.start()
        self._watch()
        if self._spec.takes_turns:
            await self.sleep("abort")

    # -- generation ------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights that new requests run under."""
        return self._weights.policy_version

    @property
    def is_paused(self) -> bool:
        """Whether calls wait."""
        return not self._calls.gate.is_set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt.

        Raises:
            RolloutError: If the request is malformed, its id is in use, or more ids could be drawn
                at a token than vLLM tells.
            EngineUnavailableError: If the engine is dead, or its weights are undefined or older.
            EngineDiedError: If it died, or hung and made none of its tokens, while the call ran.
        """
        request_id = request.request_id
        self._check(request)
        with self._calls.under_way(request_id) as aborted:
            if not await self._calls.enter(aborted):
                return self._generation(request_id, (), FinishReason.ABORT)
            self._core.check_takes_calls()
            if self._stall.is_stalled:
                raise EngineUnavailableError(self._stalled())
            if not self._weights.are_valid:
                raise EngineUnavailableError(
                    f"the weights of {self.replica_id} are undefined after a broken weight sync"
                )
            if self.policy_version < request.min_policy_version:
                raise EngineUnavailableError(
                    f"{self.replica_id} does not have version {request.min_policy_version} yet"
                )
            generation = await self._run(request)
            self._tokens[request.sampling.origin] += generation.num_tokens
            return generation

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what is malformed: vLLM may take ids that its tokenizer has and the model has no
        row for, and an index out of range ends the engine."""
        request_id, token_ids = request.request_id, request.prompt.token_ids
        if not token_ids or request.max_tokens < 1:
            raise RolloutError(
                f"request {request_id} has {len(token_ids)} tokens and a budget of "
                f"{request.max_tokens}; both must be at least 1"
            )
        if request.sampling.origin is not Origin.OUTSIDE:
            return
        ids = (*token_ids, *request.sampling.stop_token_ids)
        if max(ids) >= self._vocabulary or min(ids) < 0:
            raise RolloutError(
                f"request {request_id} has token ids outside of the model's vocabulary of "
                f"{self._vocabulary}"
            )

    async def _run(self, request: GenerateRequest) -> Generation:
        """Waits for: the response. Unblocked by: its end, an abort, the core's death, or
        `StallWatch`, which aborts."""
        request_id, sampling = request.request_id, request.sampling
        params = vllm_params(sampling, request.max_tokens, self._vocabulary)
        version = self.policy_version
        is_sample = sampling.origin is not Origin.OUTSIDE  # of which a session may be reused
        salt = request.session_id if self._keeps_kv and is_sample else f"v{version}"
        given = list(request.prompt.token_ids)
        prompt = {"prompt_token_ids": given, "cache_salt": salt or request_id}
        priority = {"priority": _FIRST} if sampling.origin is Origin.EVALUATION else {}
        llm = self._core.llm
        with self._calls.going_in(request_id) as call, self._core.dead_is_unavailable():
            call.may_stay = self._spec.parks and is_sample and not sampling.stop_strings
            try:
                queue = await llm.add_request(request_id, prompt, params, **priority)
                call.core_id = queue.request_id
                call.entered.set()
                last = await queue.get()  # the only one: `vllm_params` asks for no other
            except self._core.dead_error:
                raise
            except Exception as error:
                raise RolloutError(f"vLLM refused request {request_id}: {error}") from error
            except asyncio.CancelledError:
                await llm.abort(request_id)
                raise
        output = last.outputs[0]
        reason = REASONS.get(output.finish_reason or "abort")
        if reason is None:
            raise RolloutError(f"request {request_id} ended with {output.finish_reason!r}")
        if not output.token_ids and (self._stall.is_stalled or self._core.is_hung):
            raise EngineDiedError(f"{self.replica_id} hung while request {request_id} ran")
        segments = segments_of(
            output, version, with_support=sampling.reports_support, is_of_one=call.is_parked
        )
        if sampling.num_carried:
            end = end_of_straddling_stop(llm.tokenizer, sampling, given, output.token_ids)
            if end is not None:
                segments, reason = up_to(segments, end), FinishReason.STOP
        return self._generation(request_id, segments, reason)

    def _generation(
        self, request_id: str, segments: tuple[Segment, ...], reason: FinishReason
    ) -> Generation:
        self._num_aborted += reason is FinishReason.ABORT
        self._num_ended += reason is not FinishReason.ABORT
        return Generation(
            request_id=request_id,
            segments=segments,
            finish_reason=reason,
            replica_id=self.replica_id,
        )

    def _count_inside(self, num_inside: int) -> None:
        self._activity.set_running(num_inside)
        self._stall.set_running(num_inside)

    # -- control ---------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Stop these calls (None: all), which return what they have; how many there were."""
        running, inside = self._calls.running, self._calls.inside
        ids = list(running) if request_ids is None else request_ids
        known = [i for i in ids if i in running]
        for request_id in known:
            running[request_id].set()
        await self._core.end({i: inside[i] for i in known if i in inside})
        return len(known)

    async def pause(self, mode: PauseMode) -> None:
        """Close the gate and freeze the engine: "abort" ends what runs, "keep" freezes it, "wait"
        lets it end. Where requests stay (`serve.vllm.parking`), "abort" ends their calls alone.

        Raises:
            EngineUnavailableError: If the engine is dead.
        """
        self._core.check_alive()  # first: the gate of a dead one stays open
        gate = self._calls.gate
        gate.clear()
        if mode == "wait":  # vLLM's own wait does not see requests that are on their way in
            await self._calls.drain()
        async with self._control:
            if mode == "wait" and not self.is_paused:
                return  # resumed meanwhile: whoever paused has given up
            self._core.check_alive()
            gate.clear()
            self._activity.set_paused(True)
            parks = mode == "abort" and self._spec.parks
            self._activity.num_kept = self._calls.park() if parks else 0
            how: PauseMode = "wait" if parks else "keep" if mode == "keep" else "abort"
            freeze = self._core.freeze(how, clear_cache=not self._keeps_kv)
            await self._core.ask(freeze, limit_s=ANSWER_LIMIT_S)
            self._stall.set_paused(True)  # not before: a core that does not answer has stalled
            self._core.is_frozen = mode == "keep"

    async def resume(self) -> None:
        """Let the engine and the waiting calls go on; harmless when it is not paused."""
        async with self._control:
            core, weights = self._core, self._weights
            try:
                scores = self._spec.parks and self._scorer.is_expected(self.policy_version)
                # what is frozen inside would go on with half a model, or in the places of scores
                if scores or not weights.are_valid:
                    await core.end(dict(self._calls.inside))
                    self._activity.num_kept = 0
                    if weights.are_away:
                        return  # without memory; the gate's calls are refused
                if weights.are_away:
                    await core.ask(core.llm.wake_up(["kv_cache"]), limit_s=ANSWER_LIMIT_S)
                    weights.are_away = False
                core.is_frozen = False
                await core.ask(core.llm.resume_generation(), limit_s=ANSWER_LIMIT_S)
                if weights.are_valid:  # before the gate's calls go in
                    await core.ask(self._score())
            finally:
                self._activity.set_paused(False)
                self._stall.set_paused(False)
                self._calls.gate.set()

    async def _score(self) -> None:
        has_priorities = self._core.arguments.get("scheduling_policy") == "priority"
        llm = self._core.llm
        await self._scorer.score(llm, self.policy_version, has_priorities=has_priorities)

    async def sleep(self, mode: PauseMode) -> None:
        """Pause, and give the device's memory free: that of the weights until the next ones arrive,
        that of the KV cache until `resume`.

        On CPU, where vLLM has no sleep, it is a pause.

        Raises:
            EngineUnavailableError: If the engine is dead, or was resumed meanwhile.
        """
        await self.pause(mode)
        await self.abort(list(self._calls.inside))  # waits for the ends that are on their way
        async with self._control:
            if not self.is_paused:
                raise EngineUnavailableError(f"{self.replica_id} was resumed before it slept")
            if self._core.arguments.get("enable_sleep_mode") and not self._weights.are_away:
                self._weights.are_away, self._weights.are_valid = True, False
                asleep = self._core.llm.sleep(level=_KEEPS_WEIGHTS)
                await self._core.ask(asleep, limit_s=ANSWER_LIMIT_S)

    # -- weights ---------------------------------------------------------------------------------

    async def join_weight_group(self, group: WeightGroup, first_rank: int) -> None:
        """Let the workers join the group that weights arrive by.

        Raises:
            SyncBrokenError: If the members do not meet in time.
            WeightSyncError: If this engine cannot be trained.
        """
        with self._stall.excused(group.timeout_s):  # its core waits for the other members
            await self._weights.join_group(group, first_rank)

    async def receive_weights(self, policy_version: int, notice: bytes = b"") -> None:
        """Take all weights of a version; the engine is paused meanwhile.

        If it slept, the weights' memory comes back first.

        Raises:
            SyncBrokenError: If the weights did not arrive whole, or it was resumed meanwhile.
            WeightSyncError: If the weights do not fit.
        """
        self._core.check_alive()  # first: a dead one is not paused
        if not self.is_paused:
            raise SyncBrokenError(f"{self.replica_id} must be paused to receive weights")
        await self._weights.receive(policy_version, notice)

    def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Score sequences once the weights of a version are there; see `WeightScorer`."""
        self._scorer.expect(policy_version, sequences)

    @property
    def scores(self) -> WeightScores | None:
        """What was scored last; None if nothing was since `expect_scores`."""
        return self._scorer.result

    async def probe_weights(self, token_ids: Sequence[int]) -> Mapping[str, list[list[float]]]:
        """What each module of the model computes; see `serve.vllm.probe`."""
        answer = self._core.llm.collective_rpc(PROBE, args=(list(token_ids),))
        return dict((await self._core.ask(answer))[0])

    # -- state -----------------------------------------------------------------------------------

    def status(self, *, drain: bool = True) -> ServerStatus:
        """Figures of this moment, with the spans since the last call that drained them."""
        self._core.check_alive()
        activity, load = self._activity, self._load
        spans, steps = (activity.drain(), self._steps.drain()) if drain else ((), ())
        return ServerStatus(
            replica_id=self.replica_id,
            policy_version=self.policy_version,
            is_paused=self.is_paused,
            weights_valid=self._weights.are_valid,
            is_stalled=self._stall.is_stalled,
            num_running=max(len(self._calls.running), activity.num_inside),
            tokens_generated=self._tokens[Origin.ROLLOUT],
            tokens_made=load.num_tokens,
            num_aborted=self._num_aborted,
            spans=spans,
            steps=steps,
            uptime_s=activity.uptime_s,
            busy_s=activity.seconds["generate"],
            request_s=activity.request_s,
            paused_s=activity.seconds["paused"],
            num_queued=load.num_queued,
            kv_usage=load.kv_usage,
            num_preempted=load.num_preempted,
            num_ended=self._num_ended,
            tokens_evaluated=self._tokens[Origin.EVALUATION],
            tokens_outside=self._tokens[Origin.OUTSIDE],
        )

    async def check_health(self) -> None:
        """Raise if the engine is dead, or has stalled."""
        self._core.check_alive()
        if self._stall.is_stalled:
            raise EngineUnavailableError(self._stalled())

    def _stalled(self) -> str:
        limit_s = self._stall.limit_s
        return f"{self.replica_id} made no token for {limit_s:g} s (rollout.engine.stall_timeout_s)"

    def _watch(self) -> None:
        watch = self._core.end_stalled(self._stall, self._stalled)
        self._stall_task = asyncio.create_task(watch, name="stall-watch")

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self._stall_task is not None and not self._stall_task.get_loop().is_closed():
            self._stall_task.cancel()
        self._core.shutdown()
