"""The client of the rollout servers where replicas die and come back (serve/client.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from ray_apr.config import PartialRolloutConfig, RolloutConfig, TrainConfig
from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
    SyncBrokenError,
)
from ray_apr.core.messages import Generation, ServerStatus, WeightGroup, WeightGroupState
from ray_apr.core.sample import FinishReason
from ray_apr.data.resumption import Begin
from ray_apr.serve import client as client_module
from ray_apr.serve import handle as handle_module
from ray_apr.serve.client import ServeRolloutClient
from ray_apr.serve.server import RolloutServer
from ray_apr.serve.spec import SCORE_LIMIT_S
from tests.fakes import ScriptedEngine, generate_request
from tests.run_specs import run_spec

CONFIG = RolloutConfig(num_replicas=3, engine={"tensor_parallel_size": 2})
GROUP = WeightGroup(timeout_s=200.0, endpoint=b"opaque")
LIMITS_S: list[float] = []
"""Of all calls."""


class Replies:
    def __init__(self, results) -> None:
        self._results = results

    async def results_async(self, *, timeout_s, return_exceptions=False):
        LIMITS_S.append(timeout_s)
        errors = [self._results] if isinstance(self._results, Exception) else []
        if not return_exceptions and not errors:
            errors = [result for result in self._results if isinstance(result, Exception)]
        if errors:
            raise errors[0]
        return self._results


class Deployments:
    """Three engines: a status of each replica, None for a dead one, or what its calls raise. One
    that is not named has no replica."""

    def __init__(self, statuses: dict[str, ServerStatus | Exception | None]) -> None:
        self.statuses = statuses
        self.called: list[tuple] = []
        self.error: Exception | None = None

    def handle(self, name: str, app_name: str) -> SimpleNamespace:
        replica = {"engine-0": "a", "engine-1": "b", "engine-2": "c"}[name]
        return SimpleNamespace(broadcast=lambda *call: Replies(self._answer(replica, *call)))

    def _answer(self, replica, verb, *args):
        self.called.append((verb, *args))
        if self.error is not None or replica not in self.statuses:
            return self.error or DeploymentUnavailableError(None)
        status = self.statuses[replica]
        if status is None or isinstance(status, Exception):
            return [status or ActorDiedError()]
        return [replica in args[1] if verb in ("join_weight_group", "receive_weights") else status]


@pytest.fixture
async def deployment(monkeypatch):
    (status,) = await ScriptedEngine(policy_version=3).status()
    found = Deployments({r: dataclasses.replace(status, replica_id=r) for r in ("a", "b")})
    monkeypatch.setattr(handle_module.serve, "get_deployment_handle", found.handle)
    return found, ServeRolloutClient("app", CONFIG)


async def test_the_weight_group_is_whole_while_its_members_are_those_that_run(deployment):
    handle, client = deployment
    ranks = {"a": 1, "b": 3}
    state = WeightGroupState(first_ranks=ranks, num_workers=4, is_whole=False)
    assert await client.weight_group_state() == state
    await client.join_weight_group(GROUP, ranks)
    assert handle.called[-1] == ("join_weight_group", GROUP, ranks)
    assert await client.weight_group_state() == dataclasses.replace(state, is_whole=True)
    handle.statuses["b"] = None
    alone = WeightGroupState(first_ranks={"a": 1}, num_workers=2, is_whole=False)
    assert await client.weight_group_state() == alone


async def test_replicas_are_told_in_the_order_of_their_engines(deployment):
    """known fault: in that of their ids, which Serve draws, so that engine-0 of a timeline could be
    engine-1 of Serve."""
    handle, client = deployment
    for replica, replica_id in (("a", "z9"), ("b", "c1")):
        status = dataclasses.replace(handle.statuses[replica], replica_id=replica_id)
        handle.statuses[replica] = status
    assert [status.replica_id for status in await client.status()] == ["z9", "c1"]
    assert (await client.weight_group_state()).first_ranks == {"z9": 1, "c1": 3}


async def test_a_replica_whose_node_is_drained_is_in_no_new_group(deployment):
    handle, client = deployment
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    handle.statuses["b"] = dataclasses.replace(handle.statuses["b"], is_leaving=True)
    alone = WeightGroupState(first_ranks={"a": 1}, num_workers=2, is_whole=False)
    assert await client.weight_group_state() == alone
    handle.statuses["a"] = dataclasses.replace(handle.statuses["a"], is_leaving=True)
    with pytest.raises(NoEngineError, match="the nodes of all rollout servers are drained"):
        await client.weight_group_state()


async def test_a_replica_that_comes_takes_no_part_before_the_next_group(deployment):
    handle, client = deployment
    state = await client.weight_group_state()
    handle.statuses["c"] = dataclasses.replace(handle.statuses["a"], replica_id="c")
    await client.join_weight_group(GROUP, state.first_ranks)
    await client.receive_weights(4)
    assert handle.called[-1] == ("receive_weights", 4, ["a", "b"], b"", False)
    state = await client.weight_group_state()
    assert (state.num_workers, state.is_whole) == (6, False)
    await client.join_weight_group(GROUP, state.first_ranks)
    await client.receive_weights(5, resume=True)
    assert handle.called[-1] == ("receive_weights", 5, ["a", "b", "c"], b"", True)


async def test_a_dead_replica_counts_only_where_weights_are_concerned(deployment):
    handle, client = deployment
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    handle.statuses["b"] = None
    await client.pause("abort")
    assert [status.replica_id for status in await client.status()] == ["a"]
    await client.receive_weights(4)
    assert not (await client.weight_group_state()).is_whole, "the next sync forms a new group"
    with pytest.raises(SyncBrokenError, match="join_weight_group: ActorDiedError"):
        await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    del handle.statuses["b"]  # Serve knows it, too
    with pytest.raises(SyncBrokenError, match="only 1 of 2 servers live"):
        await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    await client.join_weight_group(GROUP, {"a": 1})
    await client.receive_weights(4)
    handle.statuses["a"] = None
    with pytest.raises(SyncBrokenError, match="no rollout server runs"):
        await client.receive_weights(5)
    with pytest.raises(EngineUnavailableError, match="no rollout server runs"):
        await client.pause("abort")


def task_error(cause: Exception) -> RayTaskError:
    """How a replica's error comes."""
    return RayTaskError("call", "traceback", cause)


async def test_a_replica_whose_engine_is_dead_is_dead_though_its_process_lives(deployment):
    """known fault: it counted as running until its health check, and broke each sync until then."""
    handle, client = deployment
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    handle.statuses["b"] = task_error(EngineDiedError("b is dead"))
    assert [status.replica_id for status in await client.status()] == ["a"]
    await client.pause("abort")
    await client.receive_weights(4)
    await client.resume()
    state = await client.weight_group_state()
    assert (state.first_ranks, state.is_whole) == ({"a": 1}, False)
    with pytest.raises(SyncBrokenError, match="b is dead"):
        await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    handle.statuses["a"] = handle.statuses["b"]
    with pytest.raises(EngineUnavailableError, match="no rollout server runs"):
        await client.status()


@pytest.mark.parametrize("verb", ["pause", "receive_weights"])
async def test_the_failure_of_a_replica_that_lives_is_an_error(deployment, verb):
    handle, client = deployment
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    handle.statuses["b"] = task_error(SyncBrokenError("b: connection reset"))
    arguments = {"pause": ("abort",), "receive_weights": (4,)}
    with pytest.raises(SyncBrokenError, match="b: connection reset"):
        await getattr(client, verb)(*arguments[verb])


async def test_a_replica_that_cannot_be_reached_for_a_moment_is_not_dead(deployment):
    """known fault: it counted as dead, and left the run's weight group."""
    handle, client = deployment
    handle.statuses["b"] = ActorUnavailableError("connection reset", None)
    with pytest.raises(EngineUnavailableError, match=r"status on 1 of 2.*ActorUnavailableError"):
        await client.weight_group_state()


async def test_resuming_engines_may_take_as_long_as_their_scores(deployment):
    """known fault: waking, resuming and scoring shared the limit of a single verb."""
    _, client = deployment
    await client.pause("abort")
    limit_s = LIMITS_S[-1]
    await client.resume()
    assert LIMITS_S[-1] == limit_s + SCORE_LIMIT_S


async def test_an_abort_passes_over_a_replica_that_is_dead(deployment):
    handle, client = deployment
    handle.statuses |= {"a": 1, "b": task_error(EngineDiedError("b is dead")), "c": None}
    client._placed = {f"{i}#0": f"engine-{i}" for i in range(3)}
    assert await client.abort(["0#0", "1#0", "2#0"]) == 1
    del handle.statuses["c"]
    assert await client.abort(["1#0", "2#0", "unknown"]) == 0


async def test_replicas_that_say_nothing_in_time_are_an_error_of_the_sync(deployment):
    handle, _ = deployment
    client = ServeRolloutClient("app", CONFIG, weight_sync_timeout_s=300.0)
    handle.error = TimeoutError("Timed out waiting for broadcast results.")
    with pytest.raises(SyncBrokenError, match="join_weight_group: no answer within"):
        await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    assert LIMITS_S[-1] > GROUP.timeout_s, "members wait that long for each other"
    with pytest.raises(SyncBrokenError, match=r"receive_weights on 3 of 3 .*no answer within"):
        await client.receive_weights(4)
    assert LIMITS_S[-1] == 300.0


async def test_a_deployment_without_replicas_is_named(deployment):
    handle, client = deployment
    handle.error = DeploymentUnavailableError(None)
    with pytest.raises(EngineUnavailableError, match="no rollout server runs: they start, or"):
        await client.status()


@pytest.mark.parametrize(
    "error", [ActorUnavailableError("connection reset", None), TimeoutError("no answer")]
)
async def test_a_replica_that_does_not_answer_holds_up_no_request_of_the_others(deployment, error):
    """known fault: no engine got any, as long as one could not be reached."""
    handle, client = deployment
    await client._learn()
    status, handle.statuses["b"] = handle.statuses["b"], error
    client._learned_at = -math.inf  # a call of "b" has failed
    await client._find_ready()
    assert client._ready == {"engine-0": "a"}
    assert LIMITS_S[-1] < client_module._CONTROL_TIMEOUT_S, "all requests wait for it"
    handle.statuses["b"] = status
    await client._learn(again=True)
    assert client._ready == {"engine-0": "a", "engine-1": "b"}


async def test_a_replica_that_has_begun_anew_gets_no_request_before_its_weights(deployment):
    _, client = deployment
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    await client.receive_weights(4)  # neither of them says that it has them
    with pytest.raises(EngineUnavailableError, match=r"no rollout server has .* version 4"):
        await client.generate(
            generate_request(
                request_id="s#0", session_id="s", token_ids=[1], sampling=None, max_tokens=1
            )
        )


async def test_requests_that_find_no_engine_ask_together(deployment):
    """A thousand of them asked all engines one after the other, each second."""
    handle, client = deployment
    client._policy_version = 4
    call = {"session_id": "s", "token_ids": [1], "sampling": None, "max_tokens": 1}
    requests = [generate_request(request_id=f"s#{i}", **call) for i in range(50)]
    found = await asyncio.gather(*map(client.generate, requests), return_exceptions=True)
    assert {str(error) for error in found} == {"no rollout server has the weights of version 4"}
    assert len(handle.called) == 3


async def test_a_replica_that_gets_its_weights_later_than_another_gets_requests(deployment):
    handle, client = deployment
    client._policy_version = 4  # a response of "a" says so, and "b" has version 3 yet
    statuses = handle.statuses
    statuses["a"] = dataclasses.replace(statuses["a"], policy_version=4)
    statuses["b"] = dataclasses.replace(statuses["b"], is_paused=True)
    await client._learn()
    assert client._ready == {"engine-0": "a", "engine-1": "b"}


async def test_an_engine_that_comes_back_gets_requests_and_the_others_keep_theirs(
    deployment, monkeypatch
):
    handle, client = deployment
    await client._learn()
    placement = client._placement
    monkeypatch.setattr(client_module, "_LEARN_AGAIN_S", -1.0)

    async def find() -> int:
        before = len(handle.called)
        await client._find_ready()
        await (client._asking or asyncio.sleep(0))
        return len(handle.called) - before

    assert await find() == 3
    assert client._placement is placement, "sessions stay where they are"
    handle.error = TimeoutError("Timed out waiting for broadcast results.")
    assert await find() == 3
    assert client._ready == {"engine-0": "a", "engine-1": "b"}, "nobody is told"
    handle.error = None
    handle.statuses["c"] = dataclasses.replace(handle.statuses["a"], replica_id="c")
    await find()
    assert client._ready == {"engine-0": "a", "engine-1": "b", "engine-2": "c"}
    assert await find() == 0, "all of them are known"


async def test_servers_that_do_not_say_who_they_are_in_time_are_no_failure_of_a_sample(deployment):
    handle, client = deployment
    handle.error = TimeoutError("Timed out waiting for broadcast results.")
    with pytest.raises(EngineUnavailableError, match="no answer within the time limit"):
        await client.generate(
            generate_request(
                request_id="s#0", session_id="s", token_ids=[1], sampling=None, max_tokens=1
            )
        )


@pytest.mark.parametrize("why", ["is_stalled", "is_leaving"])
async def test_an_engine_that_has_stalled_or_leaves_gets_no_request(deployment, why):
    handle, client = deployment
    stalled = dataclasses.replace(handle.statuses["a"], **{why: True})
    handle.statuses["a"] = stalled
    await client._learn()
    assert client._ready == {"engine-1": "b"}
    client._learned_at, handle.statuses["b"] = (
        -math.inf,
        dataclasses.replace(stalled, replica_id="b"),
    )
    with pytest.raises(EngineUnavailableError, match="no rollout server makes any token"):
        await client._learn()


async def test_a_pause_that_lets_requests_end_has_no_limit_of_its_own(deployment):
    _, client = deployment
    for mode, limit_s in (("wait", None), ("abort", client_module._CONTROL_TIMEOUT_S)):
        await client.pause(mode)
        assert LIMITS_S[-1] == limit_s


async def test_an_engine_that_comes_gets_requests_once_it_has_the_newest_weights(
    deployment, monkeypatch
):
    handle, _ = deployment
    client = ServeRolloutClient("app", dataclasses.replace(CONFIG, num_replicas=2))
    monkeypatch.setattr(client_module, "_LEARN_AGAIN_S", -1.0)
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    assert (await client.weight_group_state()).is_whole
    handle.statuses["c"] = dataclasses.replace(
        handle.statuses["a"], replica_id="c", policy_version=0
    )
    assert await client.scale(3) == []
    assert await client.scale(3) == [], "nothing changes"
    await client._learn()
    assert client._ready == {"engine-0": "a", "engine-1": "b"}, (
        "though this client knows no version"
    )
    state = await client.weight_group_state()
    assert (len(state.first_ranks), state.is_whole) == (3, False), "the next sync takes it along"
    handle.statuses["c"] = dataclasses.replace(handle.statuses["c"], policy_version=3)
    await client._learn(again=True)
    assert client._ready == {"engine-0": "a", "engine-1": "b", "engine-2": "c"}


async def test_engines_that_have_come_get_requests_with_their_weights_and_nobody_waits(deployment):
    """known fault: all requests of a sync waited until each engine had told its status."""
    handle, client = deployment
    await client._learn()
    handle.statuses["c"] = dataclasses.replace(handle.statuses["a"], replica_id="c")
    state = await client.weight_group_state()
    await client.join_weight_group(GROUP, state.first_ranks)
    before = [call for call in handle.called if call[0] == "status"]
    await client.receive_weights(4)
    await client._find_ready()
    assert client._ready == {"engine-0": "a", "engine-1": "b", "engine-2": "c"}
    assert [call for call in handle.called if call[0] == "status"] == before
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    await client.receive_weights(5)
    assert client._ready == {"engine-0": "a", "engine-1": "b"}
    handle.statuses["b"] = dataclasses.replace(handle.statuses["b"], replica_id="another")
    await client.status()
    await client.join_weight_group(GROUP, {"a": 1, "c": 3, "b": 5})
    await client.receive_weights(6)
    assert client._learned_at == -math.inf, "who is there has to be asked"


async def test_engines_that_leave_are_forgotten_and_come_again(deployment):
    handle, client = deployment
    handle.statuses["c"] = dataclasses.replace(handle.statuses["a"], replica_id="c")
    await client.join_weight_group(GROUP, {"a": 1, "b": 3, "c": 5})
    await client._learn()
    assert [status.replica_id for status in await client.scale(1)] == ["b", "c"]
    assert client._ready == {"engine-0": "a"}
    assert [status.replica_id for status in await client.status()] == ["a"]
    assert not (await client.weight_group_state()).is_whole
    await client.scale(3)
    await client._learn(again=True)
    assert client._ready == {"engine-0": "a", "engine-1": "b", "engine-2": "c"}


async def test_an_engine_that_has_left_while_it_was_asked_gets_no_request(deployment, monkeypatch):
    """known fault: it got some, which were never sent and waited for ever."""
    _, client = deployment
    await client._learn()
    client._placed["s#0"] = "engine-1"
    monkeypatch.setattr(client, "abort", lambda ids: asyncio.sleep(0))
    leaving = asyncio.create_task(client.scale(1))
    await asyncio.sleep(0.01)
    ask, may_answer = client._ask, asyncio.Event()

    async def ask_slowly(*args, **given):
        results = await ask(*args, **given)
        await may_answer.wait()
        return results

    monkeypatch.setattr(client, "_ask", ask_slowly)
    asking = asyncio.create_task(client._learn(again=True))
    await asyncio.sleep(0.01)
    del client._placed["s#0"]  # it has come back
    client._departure.on_end()
    assert [status.replica_id for status in await asyncio.wait_for(leaving, 5)] == ["b"]
    may_answer.set()
    await asking
    assert client._ready == {"engine-0": "a"}


async def test_an_engine_that_leaves_and_is_dead_says_nothing_last(deployment):
    handle, client = deployment
    await client._learn()
    handle.statuses["b"] = task_error(EngineDiedError("b is dead"))
    assert await client.scale(1) == []
    assert list(client._engines) == ["engine-0"]


async def test_the_last_engine_that_takes_requests_does_not_leave(deployment):
    handle, client = deployment
    handle.statuses["a"] = dataclasses.replace(handle.statuses["a"], policy_version=0)
    await client._learn()
    assert client._ready == {"engine-1": "b"}
    with pytest.raises(EngineUnavailableError, match="none of the 1 engines that would stay"):
        await client.scale(1)
    assert (len(client._engines), client._ready) == (3, {"engine-1": "b"}), "nothing has changed"


def test_collectives_outlast_a_sync_of_rank_0(monkeypatch):
    from ray_apr.run import training
    from ray_apr.train.control import sync_limit_s

    made = run_spec(train=TrainConfig(weight_sync_timeout_s=1000.0))
    monkeypatch.setattr(training, "sample_stream", lambda *_, **__: None)
    monkeypatch.setattr("ray.train.torch.TorchTrainer", lambda loop, **given: (loop, given))
    loop, given = training.make_torch_trainer(
        made, buffer=None, worker=None, recorder=None, started_at=0.0
    )
    assert given["torch_config"].timeout_s > sync_limit_s(1000.0, 600.0) > 1800
    (spec,) = loop.args
    assert spec.train is made.train and spec.wire_dtype == "float32"


async def test_a_request_that_has_not_left_is_aborted_here_and_its_id_is_taken(deployment):
    _, client = deployment
    await client._learn()

    def generate():
        return client.generate(
            generate_request(
                request_id="s#0", session_id="s", token_ids=[1], sampling=None, max_tokens=1
            )
        )

    first = asyncio.create_task(generate())
    await asyncio.sleep(0)
    with pytest.raises(RolloutError, match="s#0 is under way already"):
        await generate()
    assert await client.abort(["s#0", "unknown"]) == 1
    generation = await asyncio.wait_for(first, 5)
    assert (generation.finish_reason, generation.num_tokens) == (FinishReason.ABORT, 0)


@pytest.mark.parametrize("is_paused_anew", [False, True])
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("members", [["a", "b"], ["b"]])
async def test_a_server_goes_on_with_the_others_unless_the_next_sync_has_begun(
    members, resume, is_paused_anew
):
    done = []

    class Engine:
        replica_id = "a"

        async def receive_weights(self, policy_version, notice):
            done.append(policy_version)
            if is_paused_anew:
                await server.pause("abort")

        async def pause(self, mode):
            pass

        async def resume(self):
            done.append("resume")

        def shutdown(self):
            pass

    server = RolloutServer.__new__(RolloutServer)
    server._engine, server._num_pauses = Engine(), 3
    is_member = "a" in members
    assert await server.receive_weights(7, members, resume=resume) == is_member
    goes_on = resume and not (is_member and is_paused_anew)
    assert done == [7] * is_member + ["resume"] * goes_on


async def test_a_runs_worker_and_its_client_have_the_limit_of_its_weight_syncs(
    deployment, monkeypatch
):
    from ray_apr.run import actors
    from ray_apr.run.actors import Actors

    monkeypatch.setattr(actors, "load_tokenizer", lambda *_: None)
    spec = run_spec(
        rollout=RolloutConfig(num_replicas=2),
        partial_rollout=PartialRolloutConfig.preset("async"),  # a sync waits for requests
        train=TrainConfig(weight_sync_timeout_s=77.0),
    )
    monkeypatch.setattr(Actors, "make", lambda self, *_, **settings: settings)
    settings = Actors(spec)._make_worker([], Begin(), None, None)
    assert settings["sync_timeout_s"] == 77.0, "beside the requests"
    client = settings["make_client"]()
    await client.join_weight_group(GROUP, {"a": 1, "b": 3})
    await client.receive_weights(1)
    assert LIMITS_S[-1] == 77.0


def test_an_actor_imports_what_its_client_takes_as_it_is_made():
    """known fault: the rollout worker began with it once the engines were there."""
    from ray_apr.run.actors import Actors

    arrives = "import pickle, sys; pickle.load(sys.stdin.buffer); print(*sys.modules)"
    maker = cloudpickle.dumps(Actors(run_spec())._client_maker())
    command = [sys.executable, "-c", arrives]
    said = subprocess.run(command, input=maker, capture_output=True, check=True, timeout=60).stdout
    assert b"ray_apr.serve.client" in said.split()


async def test_a_new_client_begins_at_the_version_that_engines_have(deployment):
    """known fault: at version 0, so that an engine which Serve had just started again answered the
    first requests with the base model."""
    handle, client = deployment
    handle.statuses["b"] = dataclasses.replace(handle.statuses["b"], policy_version=0)
    sent = []

    async def outcome(engine, request):
        sent.append((engine, request.min_policy_version))
        raise EngineUnavailableError("enough is known")

    client._outcome = outcome
    for number in range(4):
        with pytest.raises(EngineUnavailableError, match="enough"):
            await client.generate(generate_request(request_id=f"s{number}#0"))
    assert sent == [("engine-0", 3)] * 4


async def test_a_request_that_needs_a_newer_version_than_its_client_knows_of_says_so(deployment):
    _, client = deployment
    sent = []

    async def outcome(engine, request):
        sent.append(request.min_policy_version)
        raise EngineUnavailableError("enough is known")

    client._outcome = outcome
    for version in (0, 5):
        with pytest.raises(EngineUnavailableError, match="enough"):
            await client.generate(generate_request("s#0", min_policy_version=version))
    assert sent == [3, 5], "the engines have 3"


async def test_a_dead_engine_is_no_error_of_all_as_long_as_one_lives(deployment):
    """What ``GET /healthz`` asks."""
    handle, client = deployment
    handle.statuses["b"] = None
    await client.is_paused()
    handle.statuses["a"] = None
    with pytest.raises(NoEngineError):
        await client.is_paused()


async def test_what_comes_late_is_told_to_who_counts_it(deployment):
    _, client = deployment
    late = Generation(request_id="s#0", segments=(), finish_reason=FinishReason.ABORT)
    client._exchange._end("s#0", late)  # of an evaluation, say: nobody counts it
    told: list[Generation] = []
    client.on_late = told.append
    client._exchange._end("s#0", late)
    assert told == [late]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_request_that_an_engine_kept_as_it_left_can_be_aborted(deployment, is_cancelled):
    """known fault: KeyError, which ended the run."""
    _, client = deployment
    await client._learn()
    future = asyncio.get_running_loop().create_future()
    client._exchange.post = lambda engine, request: future
    running = asyncio.create_task(client.generate(generate_request(request_id="s#0")))
    await asyncio.sleep(0)
    engine = client._placed["s#0"]
    del client._engines[engine]
    assert await client.abort(["s#0"]) == 0
    if is_cancelled:
        running.cancel()
    else:
        future.set_exception(EngineDiedError(f"{engine} is gone"))
    with pytest.raises(asyncio.CancelledError if is_cancelled else EngineDiedError):
        await running
    assert not client._placed
