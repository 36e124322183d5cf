"""Two rollout servers in Ray Serve: stickiness, control verbs, HTTP, failures, no leftovers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections import Counter

import psutil
import pytest
import ray
from ray import serve

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import APRError, ResourceError
from ray_apr.core.messages import SamplingParams
from ray_apr.core.sample import FinishReason
from ray_apr.serve.builder import start_rollout_servers, stop_rollout_servers
from ray_apr.serve.client import ServeRolloutClient
from ray_apr.serve.spec import EngineSpec
from ray_apr.train.control import RunControl
from ray_apr.train.publish import WeightPublisher
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.sync import WeightSync
from ray_apr.weights.transports.gloo import GlooSender
from tests.fakes import generate_request
from tests.marked_ray import marked_ray
from tests.processes import MARK, processes_of
from tests.tiny_model import make_tiny_model
from tests.whole_runs import free_port

pytestmark = [
    pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip

APP = "test-rollout"
TOKEN = "secret"
SYNC_TIMEOUT_S = 30.0
logger = logging.getLogger(__name__)
SAMPLING = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def mark():
    """A cluster whose processes all carry a mark; none of them outlives the module."""
    with marked_ray(num_cpus=4, namespace="ray_apr_test") as mark:
        yield mark


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def servers(mark, model):
    """(run, client, config) of two replicas behind HTTP."""
    config = RolloutConfig(
        num_replicas=2,
        max_response_tokens=256,
        engine={"device": "cpu", "kwargs": {"max_num_seqs": 64}, "start_timeout_s": 200},
        http={"port": free_port(), "control_token": TOKEN},
    )
    spec = EngineSpec.of_run(model, config, max_model_len=512)
    start_rollout_servers(APP, spec, config)
    with asyncio.Runner() as runner:

        async def make():
            return ServeRolloutClient(APP, config)

        yield runner.run, runner.run(make()), config
    stop_rollout_servers(APP)
    left = wait_for_engines(mark)
    assert not left, f"engines left behind: {left}"


def wait_for_engines(mark: str) -> dict[int, str]:
    """Engine processes that are still there after ten seconds."""
    for _ in range(50):
        left = {pid: c for pid, c in processes_of(mark).items() if "EngineCore" in c}
        if not left:
            break
        time.sleep(0.2)
    return left


def request(client, name, session, max_tokens=32):
    return client.generate(generate_request(
        request_id=name, session_id=session, token_ids=(5, 6, 7), sampling=SAMPLING,
        max_tokens=max_tokens,
    ))  # fmt: skip


def test_groups_stick_to_a_replica_and_the_load_is_balanced(servers):
    run, client, _ = servers

    async def body():
        calls = [request(client, f"a{g}-{i}", f"g{g}") for g in range(8) for i in range(4)]
        generations = await asyncio.gather(*calls)
        replicas = [g.replica_id for g in generations]
        groups = [set(replicas[4 * g : 4 * g + 4]) for g in range(8)]
        assert all(len(group) == 1 for group in groups)
        assert Counter(r for group in groups for r in group).most_common()[-1][1] == 4
        assert all(g.num_tokens == 32 for g in generations)

    run(body())


def test_control_verbs_reach_every_replica(servers):
    run, client, _ = servers

    async def body():
        assert len(await client.status()) == 2
        await client.pause("abort")
        assert [s.is_paused for s in await client.status()] == [True, True]
        waiting = asyncio.gather(*(request(client, f"b{i}", f"p{i}") for i in range(4)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await client.resume()
        assert [g.num_tokens for g in await waiting] == [32] * 4
        assert not await client.is_paused()

    run(body())


def test_a_request_whose_caller_has_gone_leaves_its_engine(servers):
    run, client, _ = servers

    async def body():
        names = [f"gone{i}" for i in range(4)]
        tasks = [asyncio.create_task(request(client, n, n, max_tokens=480)) for n in names]
        await asyncio.sleep(0)
        tasks[0].cancel()  # before it was sent
        await asyncio.sleep(0.1)
        tasks[1].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(e, asyncio.CancelledError) for e in ended] == [True, True, False, False]
        assert [g.num_tokens for g in ended[2:]] == [480, 480]
        statuses = await client.status()
        assert sum(s.num_running for s in statuses) == 0
        assert sum(s.num_aborted for s in statuses) >= 1

    run(body())


def test_abort_by_id_ends_these_and_no_others(servers):
    """miles#2589: one label aborted everything in flight."""
    run, client, config = servers

    async def body():
        names = [f"c{i}" for i in range(6)]
        tasks = {n: asyncio.create_task(request(client, n, n, max_tokens=480)) for n in names}
        await asyncio.sleep(0.1)
        await client.pause("keep")  # frozen, or still at the gate
        assert await client.abort(["c0", "c1", "unknown"]) == 2
        other = ServeRolloutClient(APP, config)  # knows of no request
        assert await other.abort_anywhere(["c2", "unknown"]) == 1
        stopped = await asyncio.gather(*(tasks[n] for n in names[:3]))
        assert {g.finish_reason for g in stopped} == {FinishReason.ABORT}
        assert not any(tasks[n].done() for n in names[3:])
        await client.resume()
        rest = await asyncio.gather(*(tasks[n] for n in names[3:]))
        assert {(g.finish_reason, g.num_tokens) for g in rest} == {(FinishReason.LENGTH, 480)}
        assert [s.num_running for s in await client.status()] == [0, 0]

    run(body())


def test_abort_of_all_reaches_every_replica(servers):
    run, client, _ = servers

    async def body():
        tasks = [
            asyncio.create_task(request(client, f"e{i}", f"e{i}", max_tokens=500)) for i in range(4)
        ]
        await asyncio.sleep(0.1)
        await client.abort(None)
        generations = await asyncio.gather(*tasks)
        assert {g.finish_reason for g in generations} == {FinishReason.ABORT}
        assert len({g.replica_id for g in generations}) == 2

    run(body())


def test_the_servers_count_the_tokens_that_the_client_got(servers):
    run, client, _ = servers

    async def body():
        before = sum(s.tokens_generated for s in await client.status())
        begin = time.monotonic()
        generations = await asyncio.gather(
            *(request(client, f"n{i}", f"n{i % 64}", max_tokens=1) for i in range(512))
        )
        rate = len(generations) / (time.monotonic() - begin)
        logger.info("%.0f calls/s of one token, 512 at a time, 2 replicas", rate)
        after = sum(s.tokens_generated for s in await client.status())
        assert after - before == sum(g.num_tokens for g in generations) == 512
        assert rate > 20, "a call costs milliseconds; this is slow even on a busy machine"

    run(body())


def http(config, method, path, body=None, token=None):
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    call = urllib.request.Request(
        f"http://127.0.0.1:{config.http.port}{path}", method=method, headers=headers,
        data=None if body is None else json.dumps(body).encode(),
    )  # fmt: skip
    try:
        with urllib.request.urlopen(call, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def test_http_verbs(servers):
    _, _, config = servers
    assert http(config, "GET", "/healthz") == (200, {"status": "ok"})
    before = http(config, "GET", "/status", token=TOKEN)[1]
    code, generation = http(
        config, "POST", "/v1/rollouts/generate",
        {"request_id": "h1", "token_ids": [5, 6], "max_tokens": 4, "ignore_eos": True}, TOKEN,
    )  # fmt: skip
    assert (code, generation["finish_reason"]) == (200, "length")
    segment = generation["segments"][0]
    assert len(segment["token_ids"]) == len(segment["logprobs"]) == 4
    assert segment["policy_version"] == 0
    code, status = http(config, "GET", "/status", token=TOKEN)
    assert (code, len(status)) == (200, 2)
    made = {
        key: sum(s[key] for s in status) - sum(s[key] for s in before)
        for key in ("tokens_generated", "tokens_outside")
    }
    assert made == {"tokens_generated": 0, "tokens_outside": 4}, "the run's ledger has no part"


def test_http_verbs_need_the_token(servers):
    _, _, config = servers
    for verb, body in (("pause", {"mode": "abort"}), ("resume", {}), ("abort", {})):
        for token in (None, "wrong"):
            code, _ = http(config, "POST", f"/v1/rollouts/{verb}", body, token)
            assert code == 401, verb
    assert http(config, "GET", "/status")[0] == 401
    assert not http(config, "GET", "/status", token=TOKEN)[1][0]["is_paused"]
    assert http(config, "POST", "/v1/rollouts/pause", {"mode": "keep"}, TOKEN)[0] == 200
    assert all(s["is_paused"] for s in http(config, "GET", "/status", token=TOKEN)[1])
    assert http(config, "POST", "/v1/rollouts/resume", {}, TOKEN)[0] == 200
    assert http(config, "POST", "/v1/rollouts/abort", {}, TOKEN) == (200, {"num_aborted": 0})


def test_bad_http_bodies_are_refused(servers):
    _, _, config = servers
    good = {"request_id": "h2", "token_ids": [5], "max_tokens": 4}
    for change in ({"token_ids": []}, {"max_tokens": 0}, {"temperature": -1}, {"token_ids": "x"},
                   {"token_ids": [5] * 600}):  # fmt: skip
        code, _ = http(config, "POST", "/v1/rollouts/generate", {**good, **change}, TOKEN)
        assert code == 422, change
    for change in ({"token_ids": [10**6]}, {"stop_token_ids": [10**6]}):
        code, reply = http(config, "POST", "/v1/rollouts/generate", {**good, **change}, TOKEN)
        assert code == 400 and "vocabulary" in reply["detail"], reply
    assert http(config, "POST", "/v1/rollouts/generate", good, TOKEN)[0] == 200, "all engines live"


class Syncs:
    """The rollout worker's part in weight syncs."""

    def __init__(self, config):
        self._client = ServeRolloutClient(APP, config, weight_sync_timeout_s=SYNC_TIMEOUT_S)
        self._sync = WeightSync(self._client, pause_mode="keep", timeout_s=SYNC_TIMEOUT_S)

    async def weight_group_state(self):
        return await self._client.weight_group_state()

    async def join_weight_group(self, group, first_ranks):
        await self._client.join_weight_group(group, first_ranks)

    async def begin_sync(self, policy_version, notice, *, holds_device):
        await self._sync.begin(policy_version, notice, holds_device=holds_device)

    async def wait_until_received(self):
        await self._sync.wait_until_received()

    async def finish_sync(self, policy_version):
        return dataclasses.asdict(await self._sync.finish())

    async def versions(self):
        return {s.replica_id: s.policy_version for s in await self._client.status(drain=False)}


class Trainer:
    """A train worker that does nothing but sync, one after the other."""

    def __init__(self, model, syncs):
        from transformers import AutoModelForCausalLM

        from tests.fakes import FixedPart

        self._syncs = syncs
        weights = GatheredWeights(AutoModelForCausalLM.from_pretrained(model), bucket_mb=0.01)
        sender = GlooSender(weights)
        control = RunControl(
            buffer=None, worker=FixedPart(syncs), recorder=None, sync_timeout_s=SYNC_TIMEOUT_S
        )
        self._publisher = WeightPublisher(
            sender, control, sync_every=1, overlaps=False, timeout_s=SYNC_TIMEOUT_S,
            wait_limit_s=SYNC_TIMEOUT_S,
        )  # fmt: skip

    def sync_until_replaced(self, replicas, timeout_s):
        """Sync until one of these has been replaced, and both have the newest weights; returns
        them and the seconds of the longest sync."""
        longest_s, deadline = 0.0, time.monotonic() + timeout_s
        for policy_version in itertools.count(1):
            began = time.monotonic()
            assert began < deadline, f"no new replica within {timeout_s} s"
            self._publisher.publish(policy_version, timeout_s=SYNC_TIMEOUT_S)
            longest_s = max(longest_s, time.monotonic() - began)
            versions = ray.get(self._syncs.versions.remote(), timeout=30)
            if set(versions) != replicas and [*versions.values()] == [policy_version] * 2:
                return set(versions), longest_s


def test_a_killed_replica_takes_its_engine_along_and_the_other_goes_on(servers, model):
    """While weights are synced without a pause: its death and the new one fall into syncs."""
    run, client, config = servers
    before = {status.replica_id for status in run(client.status())}
    syncs = ray.remote(Syncs).options(max_concurrency=100).remote(config)
    trainer = ray.remote(Trainer).remote(model, syncs)
    syncing = trainer.sync_until_replaced.remote(before, 150)
    while max(ray.get(syncs.versions.remote(), timeout=30).values()) < 3:
        time.sleep(0.1)
    replicas = [
        p for p in (
            psutil.Process(pid) for pid, name in processes_of(os.environ[MARK]).items()
            if "ServeReplica" in name
        )
        if any("Engine" in c.name() for c in p.children(recursive=True))
    ]  # fmt: skip
    assert len(replicas) == 2
    engine = next(c for c in replicas[0].children(recursive=True) if "Engine" in c.name())
    replicas[0].kill()
    assert engine.wait(timeout=20) is not None or not engine.is_running()

    async def body():
        async with asyncio.timeout(60):
            for i in itertools.count():
                try:
                    return await request(client, f"d{i}", "survivor")
                except APRError:
                    await asyncio.sleep(0.5)

    assert run(body()).num_tokens == 32
    after, longest_s = ray.get(syncing, timeout=200)
    assert len(before & after) == 1
    assert longest_s < SYNC_TIMEOUT_S, "nobody waits for a dead peer until the limit"
    ray.kill(trainer)
    ray.kill(syncs)


def test_a_start_that_fails_says_why_and_leaves_no_application(mark, model):
    too_few = {"max_num_batched_tokens": 8}
    config = RolloutConfig(engine={"device": "cpu", "start_timeout_s": 150, "kwargs": too_few})
    with pytest.raises(ResourceError, match="max_num_batched_tokens"):
        start_rollout_servers("broken", EngineSpec.of_run(model, config), config)
    assert "broken" not in serve.status().applications
