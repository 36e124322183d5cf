"""Stand-ins with real behaviour, for tests without Ray, torch or vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_args
from unittest.mock import MagicMock

from ray.exceptions import RayActorError

from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
)
from ray_apr.core.messages import (
    GenerateRequest,
    Generation,
    PromptInput,
    SamplingParams,
    ServerStatus,
    WeightGroup,
    WeightGroupState,
    WeightScores,
)
from ray_apr.core.protocols import PauseMode
from ray_apr.core.sample import FinishReason, Segment
from ray_apr.data.parts import Living, Part, PartName
from ray_apr.data.resumption import PROGRESS_FILE, ROLLOUT_FILE, Counters, RolloutProgress

FIRST_TOKEN = 1000
"""Response token at position i is FIRST_TOKEN + i, so that a lost or repeated token shows."""
FIRST_OBSERVED = 5000
"""So it is with FIRST_OBSERVED + i for what an environment says."""


async def unless_dead(
    call: Awaitable[Any], died: asyncio.Event, error: type[Exception] = RayActorError
) -> Any:
    """Answer of a process that ends when `died` is set, which the call then raises."""
    answer, death = asyncio.ensure_future(call), asyncio.ensure_future(died.wait())
    try:
        await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
        if died.is_set():
            raise error()
        return answer.result()
    finally:
        answer.cancel()
        death.cancel()


def generate_request(
    request_id: str,
    *,
    token_ids: Sequence[int] = (1, 2),
    sampling: SamplingParams | None = None,
    max_tokens: int = 8,
    **ids: Any,
) -> GenerateRequest:
    """A request, of which a test says what matters to it."""
    return GenerateRequest(
        request_id=request_id,
        prompt=PromptInput(token_ids=tuple(token_ids)),
        sampling=sampling or SamplingParams(),
        max_tokens=max_tokens,
        **ids,
    )


class FakeClock:
    """A clock that moves when it is told to.

    Example:
        >>> clock = FakeClock()
        >>> clock.advance(1.5)
        >>> clock()
        1.5
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward."""
        self.now += seconds


@dataclass
class _Call:
    session_id: str
    position: int
    """Response tokens made by earlier calls."""
    end: int
    """Response position at which this call ends."""
    reason: FinishReason
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, token id)"""
    done: asyncio.Future[FinishReason] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ScriptedEngine:
    """In-memory `RolloutClient`: what it generates is known beforehand.

    A sample is known by its request id up to the first ``#``. Its response has `lengths[sample]`
    tokens (or `default_length`): ``FIRST_TOKEN + i`` at position i, log-prob ``-(i + 1) / 100``,
    whatever interrupts it. The position is counted from the first call's prompt, so that a resumed
    call that sends the wrong ids is an error here.

    Args:
        lengths: Response length by sample, in tokens.
        default_length: Of samples that are not named.
        turn_length: Tokens of a turn, which ends by STOP before the response has its length.
        auto: Tokens that every running request makes at each turn of the event loop; 0 waits for
            `advance`.
        turn_s: How long such a turn takes at least.
        policy_version: Version of the weights at the start.
        num_replicas: Replicas that `status` shows; a session stays on one of them.
        clock: Seconds, for the status.

    Attributes:
        calls: (request id, token ids sent, max_tokens) of every generate call.
        fail: Errors by sample, raised by its next calls in turn.
        num_queued: What the status of each replica says of its queue.
        limits: What `set_limits` said last.
        leaving: Replicas whose nodes are drained, as their statuses say.
        score: Log-probs that a replica says of a sequence.
    """

    def __init__(
        self,
        lengths: Mapping[str, int] | None = None,
        *,
        default_length: int = 4,
        turn_length: int | None = None,
        auto: int = 0,
        turn_s: float = 0.0,
        policy_version: int = 0,
        num_replicas: int = 1,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.lengths = dict(lengths or {})
        self.default_length = default_length
        self.turn_length = turn_length
        self.policy_version = policy_version
        self.is_paused = False
        self.weights_valid = True
        self.calls: list[tuple[str, tuple[int, ...], int]] = []
        self.groups: list[WeightGroup] = []
        self.fail: dict[str, list[BaseException]] = {}
        self.fail_next_sync: BaseException | None = None
        self.tokens_generated = 0
        self.num_aborted = 0
        self.num_queued = 0
        self.limits: dict[str, int] = {}
        self.leaving: set[str] = set()
        self.score: Callable[[str, Sequence[int]], tuple[float, ...]] = _minus_one_each
        self._expected: tuple[int, Sequence[Sequence[int]]] = (-1, ())
        self._scores: list[WeightScores] = []
        self._auto, self._turn_s = auto, turn_s
        self._num_replicas = num_replicas
        self._clock = clock or FakeClock()
        self._running: dict[str, _Call] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def running(self) -> tuple[str, ...]:
        """Request ids inside the engine, in order of arrival."""
        return tuple(self._running)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; see `RolloutClient`."""
        request_id, max_tokens = request.request_id, request.max_tokens
        ids, sample = tuple(request.prompt.token_ids), request.sample_id
        self.calls.append((request_id, ids, max_tokens))
        if self.fail.get(sample):
            raise self.fail[sample].pop(0)
        if not self.weights_valid:
            raise EngineUnavailableError("weights are undefined after a broken weight sync")
        if request_id in self._running or max_tokens < 1:
            raise RolloutError(f"request {request_id} runs already, or has no budget")
        call = self._call(sample, request.session_id, ids, max_tokens)
        self._running[request_id] = call
        try:
            while self._auto and not call.done.done():
                await self._resumed.wait()
                await asyncio.sleep(self._turn_s)
                self._decode(request_id, self._auto)
            reason = await call.done
        finally:
            self._running.pop(request_id, None)
        self.tokens_generated += len(call.tokens)
        return Generation(
            request_id=request_id,
            segments=_segments(call),
            finish_reason=reason,
            replica_id=self._replica(request.session_id),
        )

    def advance(self, num_tokens: int = 1, request_ids: Sequence[str] | None = None) -> None:
        """Let requests (None: all) make up to this many tokens each; nothing while paused."""
        for request_id in list(self._running) if request_ids is None else request_ids:
            self._decode(request_id, num_tokens)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests with what they have; unknown ones do not count."""
        ids = self.running if request_ids is None else request_ids
        return sum(self._end(i, FinishReason.ABORT) for i in ids)

    async def pause(self, mode: PauseMode) -> None:
        """Freeze; with "abort", end what runs; with "wait", let it end first."""
        self._resumed.clear()
        if mode == "wait":
            await asyncio.gather(*(call.done for call in self._running.values()))
        self.is_paused = True
        if mode == "abort":
            await self.abort(None)

    async def resume(self) -> None:
        """Unfreeze, and score what is expected of these weights."""
        version, sequences = self._expected
        if self.weights_valid and self.policy_version == version:
            self._expected = (-1, ())
            self._scores = [
                WeightScores(
                    replica_id=f"engine-{i}",
                    policy_version=version,
                    dtype="float32",
                    logprobs=tuple(self.score(f"engine-{i}", ids) for ids in sequences),
                    duration_s=0.01,
                )
                for i in range(self._num_replicas)
            ]
        self.is_paused = False
        self._resumed.set()

    async def status(self, *, drain: bool = True) -> list[ServerStatus]:
        """One status for each replica; the first one carries the totals."""
        del drain  # there are no spans
        return [
            ServerStatus(
                replica_id=f"engine-{i}",
                policy_version=self.policy_version,
                is_paused=self.is_paused,
                weights_valid=self.weights_valid,
                is_leaving=f"engine-{i}" in self.leaving,
                num_running=sum(
                    self._replica(r.session_id) == f"engine-{i}" for r in self._running.values()
                ),
                num_queued=self.num_queued,
                tokens_generated=self.tokens_generated if i == 0 else 0,
                tokens_made=self._num_made() if i == 0 else 0,
                num_aborted=self.num_aborted if i == 0 else 0,
                uptime_s=self._clock(),
                busy_s=0.0,
                paused_s=0.0,
            )
            for i in range(self._num_replicas)
        ]

    def _num_made(self) -> int:
        return self.tokens_generated + sum(len(r.tokens) for r in self._running.values())

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Remember the limits."""
        self.limits = dict(limits)

    async def scale(self, num_engines: int) -> list[ServerStatus]:
        """Have so many replicas; those that leave end what runs there, and say so last."""
        before, statuses = self._num_replicas, await self.status()
        leaving = [f"engine-{i}" for i in range(num_engines, before)]
        ids = [i for i, r in self._running.items() if self._replica(r.session_id) in leaving]
        await self.abort(ids)
        self._num_replicas = num_engines
        return [status for status in statuses if status.replica_id in leaving]

    async def weight_group_state(self) -> WeightGroupState:
        """All replicas, one worker each; in the group once there is one."""
        return WeightGroupState(
            first_ranks={f"engine-{i}": 1 + i for i in range(self._num_replicas)},
            num_workers=self._num_replicas,
            is_whole=bool(self.groups),
        )

    async def join_weight_group(self, group: WeightGroup, first_ranks: Mapping[str, int]) -> None:
        """Remember the group."""
        del first_ranks
        self.groups.append(group)

    async def receive_weights(
        self,
        policy_version: int,
        notice: bytes = b"",
        *,
        resume: bool = False,
    ) -> None:
        """Take a new version at once, or break as `fail_next_sync` says."""
        error, self.fail_next_sync = self.fail_next_sync, None
        self.weights_valid = error is None
        if error is not None:
            raise error
        self.policy_version = policy_version
        if resume:
            await self.resume()

    async def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Score at the first `resume` under this version."""
        self._expected, self._scores = (policy_version, sequences), []

    async def weight_scores(self) -> list[WeightScores]:
        """What was scored since `expect_scores`."""
        return list(self._scores)

    async def probe_weights(
        self, replica_id: str, token_ids: Sequence[int]
    ) -> Mapping[str, list[list[float]]]:
        """Nothing: there are no modules."""
        del replica_id, token_ids
        return {}

    def _call(self, sample: str, session_id: str, ids: tuple[int, ...], max_tokens: int) -> _Call:
        response = tuple(itertools.dropwhile(lambda token: token < FIRST_TOKEN, ids))
        prompt = ids[: len(ids) - len(response)]
        position, is_observed = len(response), [token >= FIRST_OBSERVED for token in response]
        expected = tuple(
            i + (FIRST_OBSERVED if observed else FIRST_TOKEN)
            for i, observed in enumerate(is_observed)
        )
        if self._prompts.setdefault(sample, prompt) != prompt or response != expected:
            raise RolloutError(f"{sample}: {ids} sent, {expected} was generated and observed")
        length = self.lengths.get(sample, self.default_length)
        if self.turn_length is not None:
            in_turn = len(list(itertools.takewhile(lambda seen: not seen, reversed(is_observed))))
            length = min(length, position + self.turn_length - in_turn)
        end = min(length, position + max_tokens)
        reason = FinishReason.STOP if end == length else FinishReason.LENGTH
        return _Call(session_id, position, end, reason)

    def _decode(self, request_id: str, num_tokens: int) -> None:
        call = self._running[request_id]
        if self.is_paused or call.done.done():
            return
        here = call.position + len(call.tokens)
        upto = min(here + num_tokens, call.end)
        call.tokens += [(self.policy_version, FIRST_TOKEN + i) for i in range(here, upto)]
        if upto == call.end:
            self._end(request_id, call.reason)

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        call = self._running.get(request_id)
        if call is None or call.done.done():
            return False
        self.num_aborted += reason is FinishReason.ABORT
        call.done.set_result(reason)
        return True

    def _replica(self, session_id: str) -> str:
        return f"engine-{sum(session_id.encode()) % self._num_replicas}"


PREFILL_S = 0.002


class MortalEngines(ScriptedEngine):
    """Engines that die with all that runs there, and are back after a while.

    Args:
        num_engines: How many there are.
        poison: Prompts, as token ids, that kill their engine once they have more response tokens
            than this.
        restart_s: How long an engine is gone.
        forgets: Whether it has the base model then, until the next weights arrive.

    Attributes:
        living: Engines that take requests.
        num_deaths: Of engines.
        num_lost: Calls that ended with their engine.
        most_dead: Most engines that were gone at once.
    """

    def __init__(
        self,
        num_engines: int,
        *,
        poison: Mapping[tuple[int, ...], int] | None = None,
        restart_s: float = 0.02,
        forgets: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(auto=1, num_replicas=num_engines, **given)
        self.living = [f"engine-{i}" for i in range(num_engines)]
        self.num_deaths = self.num_lost = self.most_dead = 0
        self._poison = dict(poison or {})
        self._restart_s = restart_s
        self._forgets = forgets
        self._has_base: set[str] = set()
        self._calls_of: dict[str, dict[str, asyncio.Future[Generation]]] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt on a living engine; a session is on one."""
        self._check()
        ready = [engine for engine in self.living if engine not in self._has_base]
        if not ready:
            raise EngineUnavailableError("no rollout server has the weights")
        engine = ready[sum(request.session_id.encode()) % len(ready)]
        call = asyncio.ensure_future(self._generate(request))
        self._calls_of.setdefault(engine, {})[request.request_id] = call
        try:
            return dataclasses.replace(await call, replica_id=engine)
        except asyncio.CancelledError:
            if request.request_id in self._calls_of.get(engine, {}):
                raise
            self.num_lost += 1
            raise EngineDiedError(f"{engine} is dead") from None
        finally:
            self._calls_of.get(engine, {}).pop(request.request_id, None)

    async def _generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(PREFILL_S)
        return await super().generate(request)

    def kill(self, engine: str) -> None:
        """End an engine."""
        self.living.remove(engine)
        self.num_deaths += 1
        if self._forgets and self.policy_version:
            self._has_base.add(engine)
        self.most_dead = max(self.most_dead, self._num_replicas - len(self.living))
        for call in self._calls_of.pop(engine, {}).values():
            call.cancel()
        loop = asyncio.get_running_loop()
        loop.call_later(self._restart_s, self.living.append, engine)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests with what they have."""
        self._check()
        return await super().abort(request_ids)

    async def status(self, *, drain: bool = True) -> list[ServerStatus]:
        """One status for each engine that lives."""
        self._check()
        return [
            dataclasses.replace(s, policy_version=0) if s.replica_id in self._has_base else s
            for s in await super().status(drain=drain)
            if s.replica_id in self.living
        ]

    async def weight_group_state(self) -> WeightGroupState:
        """All engines; none in the group where none lives."""
        self._check()
        return await super().weight_group_state()

    async def receive_weights(
        self, policy_version: int, notice: bytes = b"", *, resume: bool = False
    ) -> None:
        """Take a new version on those that live."""
        self._check()
        self._has_base -= set(self.living)
        await super().receive_weights(policy_version, notice, resume=resume)

    def _check(self) -> None:
        if not self.living:
            raise NoEngineError("no rollout server runs")

    def _decode(self, request_id: str, num_tokens: int) -> None:
        super()._decode(request_id, num_tokens)
        call = self._running[request_id]
        after = self._poison.get(self._prompts[request_id.partition("#")[0]])
        if after is not None and call.tokens and call.position + len(call.tokens) > after:
            for engine, calls in tuple(self._calls_of.items()):
                if request_id in calls:
                    self.kill(engine)


class OutsideClient:
    """What the HTTP ingress calls: engines that are as strict with numbers as vLLM's arrays.

    Attributes:
        asked: Sampling of every generate call.
        error: Raised by every verb from now on.
    """

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []
        self.error: Exception | None = None
        self._engines = ScriptedEngine()

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error

    async def generate(self, request: GenerateRequest) -> Generation:
        """Make the first token again and again, at most four times."""
        self._answer()
        sampling, token_ids = request.sampling, request.prompt.token_ids
        array("i", [*token_ids, *sampling.stop_token_ids, sampling.top_k, request.max_tokens])
        array("q", [sampling.seed or 0])
        f"{request.request_id} {request.session_id}".encode()
        self.asked.append(sampling)
        ids = (token_ids[0],) * min(4, request.max_tokens)
        segment = Segment(policy_version=0, token_ids=ids, logprobs=(-1.0,) * len(ids))
        return Generation(
            request_id=request.request_id, segments=(segment,), finish_reason=FinishReason.LENGTH
        )

    async def abort_anywhere(self, request_ids: Sequence[str] | None) -> int:
        """Nothing runs."""
        self._answer()
        return 0

    async def pause(self, mode: PauseMode) -> None:
        """Nothing to freeze."""
        self._answer()
        assert mode in get_args(PauseMode)

    async def resume(self) -> None:
        """Nothing to unfreeze."""
        self._answer()

    async def status(self, *, drain: bool) -> list[ServerStatus]:
        """Of one replica."""
        self._answer()
        assert not drain
        return await self._engines.status()

    async def is_paused(self) -> bool:
        """Never."""
        self._answer()
        return False


def _minus_one_each(replica_id: str, sequence: Sequence[int]) -> tuple[float, ...]:
    del replica_id
    return (-1.0,) * (len(sequence) - 1)


def _segments(call: _Call) -> tuple[Segment, ...]:
    """One segment for each version."""
    versions = sorted({version for version, _ in call.tokens})
    made = [
        (version, tuple(token for v, token in call.tokens if v == version)) for version in versions
    ]
    return tuple(
        Segment(
            policy_version=version,
            token_ids=tokens,
            logprobs=tuple(-(t - FIRST_TOKEN + 1) / 100 for t in tokens),
        )
        for version, tokens in made
    )


def fake_cupy() -> tuple[dict[str, Any], list[tuple[int, bytes, int]], list[int]]:
    """A CuPy whose NCCL notes down which communicators are made; for a process of its own.

    Returns:
        Its modules by name; (members, id, rank) of each communicator; ranks of those that were
        aborted.
    """
    made: list[tuple[int, bytes, int]] = []
    aborted: list[int] = []

    class Communicator:
        def __init__(self, num_members: int, nccl_id: bytes, rank: int) -> None:
            if not isinstance(nccl_id, bytes):
                raise TypeError(f"expected bytes, got {type(nccl_id).__name__}")
            made.append((num_members, nccl_id, rank))
            self._rank = rank

        def abort(self) -> None:
            aborted.append(self._rank)

    nccl = MagicMock()
    nccl.NcclCommunicator = Communicator
    nccl.get_unique_id = lambda: bytes(range(128, 256))
    nccl.get_build_version = nccl.get_version = lambda: 22_800
    cuda = MagicMock(nccl=nccl)
    modules = {"cupy": MagicMock(cuda=cuda), "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}
    return modules, made, aborted


class RayMetrics:
    """Stands in for ``ray.util.metrics``: keeps each value under its name and tags.

    As Ray does, it refuses a value without one of the tags, and a counter that does not rise.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], list[float]] = {}
        self.made: dict[str, str] = {}
        """Kind of each metric, "Counter", "Gauge" or "Histogram"."""

    def install(self, monkeypatch: Any) -> RayMetrics:
        """Take the place of Ray's metrics, and return itself."""
        from ray.util import metrics

        kept, made = self.values, self.made

        class Metric:
            def __init__(self, name: str, description: str, tag_keys: tuple = (), boundaries=None):
                self._name, self._tag_keys, self._tags = name, tag_keys, {}
                made[name] = type(self).__name__

            def set_default_tags(self, tags: dict[str, str]) -> Metric:
                self._tags = tags
                return self

            def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
                found = {**self._tags, **(tags or {})}
                assert found.keys() == set(self._tag_keys), f"{self._name}: {found}"
                kept.setdefault((self._name, frozenset(found.items())), []).append(value)

            set = observe

            def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
                assert value > 0, f"{self._name}: {value}"
                self.observe(value, tags)

        for kind in ("Counter", "Gauge", "Histogram"):
            monkeypatch.setattr(metrics, kind, type(kind, (Metric,), {}))
        return self

    def of(self, name: str, **tags: str) -> list[float]:
        """All values of a metric in the order in which they came."""
        return self.values.get((name, frozenset(tags.items())), [])


class FakeHostedRun:
    """A `HostedRun` that trains what is ordered at once, and writes the rows of it.

    Attributes:
        interrupts: Whether the next wait is interrupted, as by Ctrl-C.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.interrupts = self.is_over = False
        self.num_stops = self.num_saved = 0
        self._step = self._num_orders = 0
        self._error: BaseException | None = None
        spec.folder.mkdir(parents=True)

    def start(self, *, is_gated: bool) -> FakeHostedRun:
        """As `APRTrainer.start_in_host`."""
        assert is_gated
        return self

    def order(self, orders: Sequence[str | None]) -> int:
        """Do them."""
        for name in orders if self._error is None else ():
            if name is not None:
                self._save(name)
            elif self._step < self.spec.train.num_steps:
                self._write("metrics.jsonl", {"step": self._step})
                self._step += 1
        if self._step == self.spec.train.num_steps and not self.is_over:
            self.evaluate(self._step)
            self._save("last")
            self._end("ok")
        self._num_orders += len(orders)
        return self._num_orders

    def wait(self, num_orders: int | None = None) -> bool:
        """Whether the orders are done."""
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        assert num_orders is None or num_orders <= self._num_orders
        return not self.is_over

    def result(self) -> Any:
        """Raises what the run failed of."""
        assert self.is_over, "a wait without an end"
        if self._error is not None:
            raise self._error
        result = MagicMock()
        result.checkpoint.to_directory = lambda folder: shutil.copytree(
            self.spec.folder / "last", folder
        )
        return result

    def stop(self, *, after_s: float) -> None:
        """End it."""
        self.num_stops += 1
        if not self.is_over:
            self._end("stopped")

    def evaluate(self, policy_version: int) -> None:
        """An evaluation ends."""
        self._write("evaluations.jsonl", {"policy_version": policy_version})

    def fail(self, error: BaseException) -> None:
        """The run fails."""
        self._error = error
        self._end("failed")

    def _end(self, status: str) -> None:
        self.is_over = True
        (self.spec.folder / "final.json").write_text(json.dumps({"status": status}))

    def _save(self, name: str) -> None:
        folder = self.spec.folder / name
        folder.mkdir()
        (folder / "progress.json").write_text(json.dumps({"step": self._step}))
        self.num_saved += 1

    def _write(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.spec.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def step_row(step: int, **figures: Any) -> dict[str, Any]:
    """A row of ``metrics.jsonl``, as a run of quickstart.yaml writes it."""
    return {
        "step": step, "policy_version": step + 1, "time_s": 36.0 + step,
        "reward_mean": 0.5, "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0,
        "num_samples": 4, "num_turns": 4, "num_tokens": 100, "num_masked_tokens": 0,
        "response_tokens_mean": 25.0, "response_tokens_max": 32, "truncated_fraction": 0.0,
        "staleness_mean": 1.0, "staleness_max": 1, "loss": 0.002, "grad_norm": 0.4,
        "ratio_mean": 1.0, "clip_fraction": 0.0, "importance_weight_mean": 1.0, "entropy": 0.1,
        "kl_k3": 0.002, "ratio_quantiles": [1.0, 1.0, 1.0], "tokens_by_staleness": [0.0, 100.0],
        "learning_rate": 1e-4, "reward/form_mean": 0.25, "reward/form_min": 0.0,
        "trainer_wait_s": 0.5, "trainer_step_s": 1.5, "weight_sync_s": 0.25, "weight_wait_s": 0.0,
        "inflight": 4, "held": 0, "buffered": 92, "tokens_generated": 1607,
        "tokens_discarded": 0, "waiting_for": "0 of 4 groups wait for reward", **figures,
    }  # fmt: skip


def evaluation_row(policy_version: int, **figures: Any) -> dict[str, Any]:
    """A row of ``evaluations.jsonl``."""
    return {
        "num_samples": 8, "num_failed": 1, "reward_mean": 0.75, "reward_min": 0.0,
        "reward_max": 1.0, "num_turns": 16, "pass_at_k": {"1": 0.5},
        "response_tokens_mean": 12.0, "num_tokens": 96, "oldest_version": policy_version,
        "newest_version": policy_version, "policy_version": policy_version, "seconds": 2.0,
        **figures,
    }  # fmt: skip


@dataclass
class FakeProgressed:
    """What a session has done in a call."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


class FakeSession:
    """A `TrainingSession` that trains nothing: a step is a row, an evaluation is there at once.

    Attributes:
        living: Sessions that were not stopped.
        fail: Raised by the next `train`.
    """

    living: ClassVar[list[FakeSession]] = []

    def __init__(self, trainer: Any) -> None:
        self.spec = trainer.spec
        self.step = 0
        self.fail: BaseException | None = None
        if self.spec.checkpoint is not None:
            with self.spec.checkpoint.as_directory() as folder:
                self.step = json.loads((Path(folder) / PROGRESS_FILE).read_text())["step"]
        self.living.append(self)

    def train(self, num_steps: int) -> FakeProgressed:
        """Fewer steps at the run's end."""
        assert self in self.living
        if self.fail is not None:
            raise self.fail
        steps = range(self.step, min(self.step + num_steps, self.num_steps))
        rate = self.spec.train.learning_rate
        rows = [step_row(s, learning_rate=rate, reward_mean=s / 100 + rate) for s in steps]
        self.step += len(rows)
        evaluation = self.spec.evaluation
        due = [s + 1 for s in steps if evaluation is not None and evaluation.is_due(s + 1)]
        return FakeProgressed(rows, [evaluation_row(version) for version in due])

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.spec.train.num_steps

    def save(self, folder: str | Path) -> None:
        """What `resume.find_begin` reads of a checkpoint."""
        progress = {"step": self.step, "policy_version": self.step}
        rollout = RolloutProgress(
            seed=self.spec.train.seed, num_prompts=8, position=0, pending=(), counters=Counters()
        )
        (Path(folder) / PROGRESS_FILE).write_text(json.dumps(progress))
        (Path(folder) / ROLLOUT_FILE).write_text(rollout.to_json())

    def stop(self) -> dict[str, Any]:
        """May be called again."""
        if self in self.living:
            self.living.remove(self)
        return {}


class FixedPart(Part):
    """A part of a run whose handle is known, and that never begins again."""

    def __init__(self, handle) -> None:
        super().__init__(PartName("a-part", "a-namespace"), "part")
        self._living = Living(0, handle)


class ArrowDataset:
    """A Ray Dataset of Arrow tables that are here; references to them are the tables."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self.context = MagicMock()
        self._tables = list(tables)

    def map_batches(self, function: Callable[[Any], Any], **_: Any) -> ArrowDataset:
        """Change each table."""
        return ArrowDataset([function(table) for table in self._tables])

    def set_name(self, name: str | None) -> None:
        """Nobody reads it."""

    def materialize(self) -> ArrowDataset:
        """All of it is here."""
        return self

    def to_arrow_refs(self) -> list[Any]:
        """The tables, which `ray.get` and `ray.put` return as they are."""
        return list(self._tables)

    def count(self) -> int:
        """Rows."""
        return sum(table.num_rows for table in self._tables)
