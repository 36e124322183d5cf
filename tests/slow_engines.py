"""The real server, exchange and client around a vLLM that makes so many tokens a second.

Serve is a stand-in: it routes, asks for health, and replaces nothing. No Ray, no vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import EngineUnavailableError
from ray_apr.serve import handle as handle_module
from ray_apr.serve.client import ServeRolloutClient
from ray_apr.serve.mailbox import Mailboxes
from ray_apr.serve.server import RolloutServer
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm import core as core_module
from ray_apr.serve.vllm import engine as engine_module
from ray_apr.serve.vllm.engine import VLLMEngine
from ray_apr.serve.vllm.weights import Weights
from tests.fakes import FIRST_TOKEN, unless_dead

TICK_S = 10.0
HEALTH_S = 5.0
MAX_UNHEALTHY = 3


class _Dead(Exception):
    pass


class SlowLLM:
    """What an engine needs of vLLM. All of its requests decode at one speed; while `is_hung`,
    nothing comes out of its core, and calls of the core are not answered."""

    def __init__(self, load, *, tokens_per_s: float, lengths) -> None:
        self.engine_core = self
        self.is_hung = self._is_paused = self.errored = False
        self._load, self._lengths = load, lengths
        self._per_tick = int(tokens_per_s * TICK_S)
        self._made: dict[str, list[int]] = {}
        self._ends: dict[str, int] = {}
        self._begins: dict[str, int] = {}
        self._done: dict[str, asyncio.Future] = {}
        self.ticks = self.output_handler = asyncio.create_task(self._decode())

    async def add_request(self, request_id, prompt, params, **_):
        sent = [t for t in prompt["prompt_token_ids"] if t >= FIRST_TOKEN]
        assert sent == list(range(FIRST_TOKEN, FIRST_TOKEN + len(sent))), "kept tokens resume"
        length = self._lengths(request_id.partition("#")[0])
        self._begins[request_id] = len(sent)
        self._ends[request_id] = min(length - len(sent), params.max_tokens)
        self._made[request_id] = []
        future = self._done[request_id] = asyncio.get_running_loop().create_future()

        async def get():
            return await future

        return SimpleNamespace(request_id=request_id, get=get)

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.is_hung or self._is_paused:
                continue
            num_new = 0
            for request_id, made in list(self._made.items()):
                here = self._begins[request_id] + len(made)
                count = min(self._per_tick, self._ends[request_id] - len(made))
                made.extend(range(FIRST_TOKEN + here, FIRST_TOKEN + here + count))
                num_new += count
                if len(made) == self._ends[request_id]:
                    self._end(request_id, "stop")
            stats = SimpleNamespace(num_generation_tokens=num_new, num_preempted_reqs=0)
            self._load.take(SimpleNamespace(num_waiting_reqs=0, kv_cache_usage=0.5), stats)

    def _end(self, request_id: str, reason: str) -> None:
        made = self._made.pop(request_id, None)
        if made is not None:
            logprobs = SimpleNamespace(logprobs=[-0.5] * len(made))
            output = SimpleNamespace(finish_reason=reason, token_ids=made, logprobs=logprobs)
            self._done.pop(request_id).set_result(SimpleNamespace(outputs=[output]))

    async def abort(self, request_ids) -> None:
        for request_id in list(request_ids):
            self._end(request_id, "abort")

    async def pause_scheduler_async(self, *, mode, clear_cache) -> None:
        if self.is_hung:
            await asyncio.Event().wait()
        self._is_paused = True
        if mode == "abort":
            await self.abort(list(self._made))

    async def resume_generation(self) -> None:
        self._is_paused = False

    def shutdown(self) -> None:
        self.ticks.cancel()


class _Weights(Weights):
    """They are there at once."""

    async def _receive(self, policy_version, notice) -> None:
        self.policy_version, self.are_valid = policy_version, True


class Replica:
    """A rollout server in this process."""

    def __init__(self, name: str, config: RolloutConfig, *, tokens_per_s: float, lengths) -> None:
        self.name = name
        self.died = asyncio.Event()
        self.unhealthy_at: list[float] = []
        self.server = RolloutServer.__new__(RolloutServer)
        spec = EngineSpec(
            model="none",
            device="cpu",
            stall_timeout_s=config.engine.stall_timeout_s,
            engine_kwargs={"scheduler_cls": None},
        )
        engine = self.server._engine = VLLMEngine(spec, name)
        engine._weights = _Weights(engine._core, name)
        self.llm = engine._core.llm = SlowLLM(
            engine._load, tokens_per_s=tokens_per_s, lengths=lengths
        )
        engine._vocabulary = 200_000
        engine._activity.start()
        engine._watch()
        self.server._mailboxes, self.server._calls = Mailboxes(), set()
        self.server._num_pauses = 0
        self.server._is_leaving = False
        self.server._watch = None

    async def call(self, verb: str, *args):
        """A call, which the replica's death ends."""
        return await unless_dead(getattr(self.server, verb)(*args), self.died, ActorDiedError)

    async def stream(self, *args):
        pieces = self.server.outcomes(*args)
        while True:
            try:
                item = asyncio.ensure_future(anext(pieces))
                death = asyncio.ensure_future(self.died.wait())
                await asyncio.wait({item, death}, return_when=asyncio.FIRST_COMPLETED)
                death.cancel()
                if self.died.is_set():
                    item.cancel()
                    raise ActorDiedError()
                yield item.result()
            except StopAsyncIteration:
                return


class Serve:
    """Deployments of one replica, killed if it is not healthy three times in a row, or dead."""

    def __init__(self, config: RolloutConfig, **engines) -> None:
        self._config, self._engines = config, engines
        self.replicas: list[Replica] = []
        self.add(config.num_replicas)
        self._health = asyncio.create_task(self._check_health())

    def add(self, num: int) -> None:
        """So many engines come."""
        names = [f"engine-{len(self.replicas) + i}" for i in range(num)]
        self.replicas += [Replica(name, self._config, **self._engines) for name in names]

    def close(self) -> None:
        self._health.cancel()
        for replica in self.replicas:
            replica.server._engine.shutdown()

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            for replica in self.living:
                try:
                    await replica.server.check_health()
                    replica.unhealthy_at.clear()
                except EngineUnavailableError:
                    replica.unhealthy_at.append(asyncio.get_running_loop().time())
                except RayActorError:
                    replica.died.set()
                if len(replica.unhealthy_at) == MAX_UNHEALTHY:
                    replica.died.set()

    @property
    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.died.is_set()]

    def handle(self, name: str, app_name: str) -> _Handle:
        (replica,) = [replica for replica in self.replicas if replica.name == name]
        return _Handle(replica)


class _Handle:
    """What leads to one engine."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def broadcast(self, verb, *args):
        async def results_async(*, timeout_s):
            if self._replica.died.is_set():
                raise DeploymentUnavailableError(None)
            async with asyncio.timeout(timeout_s):
                return [await self._replica.call(verb, *args)]

        return SimpleNamespace(results_async=results_async)

    def options(self, *, stream: bool):
        assert stream
        return SimpleNamespace(outcomes=SimpleNamespace(remote=self._replica.stream))


@contextlib.contextmanager
def slow_engines(monkeypatch, config: RolloutConfig, *, tokens_per_s: float, lengths):
    """Servers and a client of theirs, inside of a running loop.

    Args:
        monkeypatch: Of the test.
        config: Replicas and limits.
        tokens_per_s: Of each request.
        lengths: Gives the length of a sample's response.
    """
    serve = Serve(config, tokens_per_s=tokens_per_s, lengths=lengths)
    monkeypatch.setattr(handle_module.serve, "get_deployment_handle", serve.handle)
    monkeypatch.setattr(core_module.Core, "dead_error", _Dead)
    monkeypatch.setattr(
        engine_module,
        "vllm_params",
        lambda sampling, max_tokens, vocabulary: SimpleNamespace(max_tokens=max_tokens),
    )
    client = ServeRolloutClient("app", config)
    client._members = frozenset(replica.name for replica in serve.replicas)
    try:
        yield serve, client
    finally:
        serve.close()
